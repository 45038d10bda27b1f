import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import org.apache.kafka.common.utils.Exit;

/**
 * Runs several of Kafka's command line tools in one JVM, because each JVM start takes seconds.
 * Argument: a file with one tool per line, fields separated by tabs: main class, standard input, arguments.
 * Prints, per tool, a line "=== n code" and what the tool printed.
 */
public final class ToolRunner {
    private static final class Ended extends RuntimeException {
        Ended(int code) {
            super("ended with " + code);
        }
    }

    /** A pause instead of a tool: this word, then milliseconds. */
    private static final String PAUSE = "pause";

    /** The current tool's first exit code: some tools catch Ended and exit again. */
    private static Integer exitCode;

    private static void end(int code) {
        if (exitCode == null) exitCode = code;
        throw new Ended(code);
    }

    public static void main(String[] args) throws Exception {
        Exit.setExitProcedure((code, message) -> end(code));
        Exit.setHaltProcedure((code, message) -> end(code));
        PrintStream out = System.out;
        PrintStream err = System.err;
        int number = 0;
        for (String line : Files.readAllLines(Path.of(args[0]))) {
            String[] fields = line.split("\t", -1);
            if (fields[0].equals(PAUSE)) {
                Thread.sleep(Long.parseLong(fields[1]));
                continue;
            }
            ByteArrayOutputStream printed = new ByteArrayOutputStream();
            PrintStream capture = new PrintStream(printed, true, StandardCharsets.UTF_8);
            System.setOut(capture);
            System.setErr(new PrintStream(new ByteArrayOutputStream()));
            System.setIn(new ByteArrayInputStream(fields[1].replace("\\n", "\n").getBytes(StandardCharsets.UTF_8)));
            exitCode = null;
            try {
                Class.forName(fields[0]).getMethod("main", String[].class)
                        .invoke(null, (Object) Arrays.copyOfRange(fields, 2, fields.length));
            } catch (InvocationTargetException failure) {
                if (!(failure.getCause() instanceof Ended)) {
                    exitCode = -1;
                    capture.println(failure.getCause());
                }
            } finally {
                System.setOut(out);
                System.setErr(err);
            }
            capture.flush();
            out.println("=== " + number++ + " " + (exitCode == null ? 0 : exitCode));
            out.println(printed.toString(StandardCharsets.UTF_8));
        }
        out.flush();
        Runtime.getRuntime().halt(0);
    }
}
