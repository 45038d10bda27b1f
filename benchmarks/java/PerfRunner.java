import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import org.apache.kafka.common.utils.Exit;

/**
 * Runs Kafka's own load tools, one after the other, in one JVM that stays: a JVM of its own for each would spend a good part
 * of a short run on compiling, on the cores that proxy and broker need. Each line of standard input is a tool: its main
 * class and its arguments, separated by tabs. Prints what the tool printed, then a line "=== CODE". Ends with its input.
 */
public final class PerfRunner {
    private static final class Ended extends RuntimeException {
        Ended(int code) {
            super("ended with " + code);
        }
    }

    /** Of the tool at hand: the first counts, since some catch what ends them and exit again. */
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
            // So that one tool's garbage is not collected while the next one is measured.
            System.gc();
        }
        Runtime.getRuntime().halt(0);
    }
}
