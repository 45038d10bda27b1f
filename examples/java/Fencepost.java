import java.util.Optional;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.kafka.common.errors.TimeoutException;

/**
 * Reads the answers of a Fencepost proxy from the exceptions of a KafkaProducer. Copy this file.
 *
 * <pre>{@code
 * try {
 *     producer.send(record).get();
 * } catch (ExecutionException failed) {
 *     throw Fencepost.answerOf(failed).orElseThrow(() -> failed);
 * }
 * }</pre>
 *
 * <p>docs/contract.md lists all answers.
 */
public final class Fencepost {
    /** Of the attempt that was answered. */
    public enum Outcome {
        REFUSED,
        /** At another offset than expected. */
        APPENDED,
        /** It may be in the log, or may still be appended. */
        UNKNOWN
    }

    /** An answer other than success. {@code kind}: its first word, such as EXPECTATION_REQUIRED. */
    public static class AnswerException extends Exception {
        public final String kind;
        public final Outcome outcome;
        /** A batch sent before this one failed so, and the numbers are that batch's. */
        public final boolean predecessor;
        /** An earlier attempt may have succeeded: read the records at the expected offset. */
        public final boolean possiblyYours;

        AnswerException(String message, String kind, Outcome outcome, boolean predecessor, Throwable cause) {
            super(message, cause);
            this.kind = kind;
            this.outcome = outcome;
            this.predecessor = predecessor;
            this.possiblyYours = message != null && message.contains(" POSSIBLY_YOURS");
        }

        long number(String name) {
            Matcher found = Pattern.compile("\\b" + name + "=(-?\\d+)").matcher(getMessage());
            return found.find() ? Long.parseLong(found.group(1)) : 0;
        }
    }

    /** Nothing was appended, because the log ends at {@code actual}. Read to the log end, then decide again. */
    public static final class OffsetMismatchException extends AnswerException {
        public final long expected = number("expected");
        public final long actual = number("actual");
        /** If not 0, this record of the batch contradicts its place, and would have got the offset {@code actual}. */
        public final int record = (int) number("record");

        OffsetMismatchException(String message, String kind, boolean predecessor, Throwable cause) {
            super(message, kind, Outcome.REFUSED, predecessor, cause);
        }
    }

    /** The batch was appended, at another offset: a writer bypasses the proxy. */
    public static final class OffsetViolationException extends AnswerException {
        public final long expected = number("expected");
        public final long appendedAt = number("appended_at");

        OffsetViolationException(String message, String kind, boolean predecessor, Throwable cause) {
            super(message, kind, predecessor ? Outcome.REFUSED : Outcome.APPENDED, predecessor, cause);
        }
    }

    /** The keys were placed over {@code expected} partitions, and the topic has {@code actual}. Place them again. */
    public static final class PartitionCountException extends AnswerException {
        public final long expected = number("expected");
        public final long actual = number("actual");

        PartitionCountException(String message, String kind, boolean predecessor, Throwable cause) {
            super(message, kind, Outcome.REFUSED, predecessor, cause);
        }
    }

    private static final Pattern ANSWER = Pattern.compile(
            "(PREDECESSOR_FAILED )?([A-Z_]{4,}(?= topic=)|TRY_AGAIN|OUTCOME_UNKNOWN) .*", Pattern.DOTALL);

    private Fencepost() {}

    /** Of an exception of {@code send(record).get()}, or of a callback. Empty if neither proxy nor timeout caused it. */
    public static Optional<AnswerException> answerOf(Throwable error) {
        for (Throwable each = error; each != null; each = each.getCause()) {
            Matcher found = ANSWER.matcher(each.getMessage() == null ? "" : each.getMessage());
            if (found.matches()) {
                return Optional.of(read(each, found.group(2), found.group(1) != null));
            }
            if (each instanceof TimeoutException) {
                return Optional.of(new AnswerException(each.getMessage(), "", Outcome.UNKNOWN, false, each));
            }
        }
        return Optional.empty();
    }

    private static AnswerException read(Throwable cause, String kind, boolean predecessor) {
        String message = cause.getMessage();
        switch (kind) {
            case "OFFSET_MISMATCH":
                return new OffsetMismatchException(message, kind, predecessor, cause);
            case "OFFSET_VIOLATION":
                return new OffsetViolationException(message, kind, predecessor, cause);
            case "INVALID_PARTITION_COUNT":
                return new PartitionCountException(message, kind, predecessor, cause);
            default:
                boolean unknown = kind.equals("OUTCOME_UNKNOWN") && !predecessor;
                return new AnswerException(message, kind, unknown ? Outcome.UNKNOWN : Outcome.REFUSED, predecessor, cause);
        }
    }
}
