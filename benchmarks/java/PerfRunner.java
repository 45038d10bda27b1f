import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import org.apache.kafka.common.utils.Exit;

/**
 * Runs Kafka's load tools in sequence in one JVM: a new JVM for each would spend much of a short run on compilation, on
 * the cores that proxy and broker need. Each line of standard input is a tool: main class and arguments, separated by
 * tabs. Prints the tool's output, then a line "=== CODE". Ends at the end of input.
 */
public final class PerfRunner {
    private static final class Ended extends RuntimeException {
        Ended(int code) {
            super("ended with " + code);
        }
    }

    /** Exit code of the current tool. The first counts, because some tools catch it and exit again. */
    private static Integer exitCode;

    private static void end(int code) {
        if (exitCode == null) exitCode = code;
        throw new Ended(code);
    }

    public static void main(String[] args) throws Exception {
        Exit.setExitProcedure((code, message) -> end(code));
        Exit.setHaltProcedure((code, message) -> end(code));
        PrintStream out = System.out;
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = orders.readLine(); line != null; line = orders.readLine()) {
            String[] fields = line.split("\t", -1);
            ByteArrayOutputStream printed = new ByteArrayOutputStream();
            PrintStream capture = new PrintStream(printed, true, StandardCharsets.UTF_8);
            System.setOut(capture);
            exitCode = null;
            try {
                Class.forName(fields[0]).getMethod("main", String[].class)
                        .invoke(null, (Object) Arrays.copyOfRange(fields, 1, fields.length));
            } catch (InvocationTargetException failure) {
                if (!(failure.getCause() instanceof Ended)) {
                    exitCode = -1;
                    failure.getCause().printStackTrace(capture);
                }
            } finally {
                System.setOut(out);
            }
            capture.flush();
            out.println(printed.toString(StandardCharsets.UTF_8));
            out.println("=== " + (exitCode == null ? 0 : exitCode));
            out.flush();
            // Collect garbage now, not while the next tool is measured.
            System.gc();
        }
        Runtime.getRuntime().halt(0);
    }
}
