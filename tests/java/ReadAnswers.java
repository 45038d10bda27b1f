import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.errors.PolicyViolationException;
import org.apache.kafka.common.errors.TimeoutException;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * What examples/java/Fencepost.java reads: of each line of stdin, as the message of an exception; with arguments (proxy,
 * topic), of an append that expects offset 7.
 */
public final class ReadAnswers {
    public static void main(String[] args) throws Exception {
        if (args.length > 0) {
            show(refused(args[0], args[1]));
            return;
        }
        var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            show(new ExecutionException(new PolicyViolationException(line)));
        }
        show(new ExecutionException(new TimeoutException("Expiring 1 record(s) for orders-0: 120000 ms has passed")));
        show(new IllegalStateException("SASL authentication failed"));
    }

    private static Throwable refused(String proxy, String topic) throws InterruptedException {
        var bytes = new ByteArraySerializer();
        try (var producer = new KafkaProducer<>(Map.<String, Object>of("bootstrap.servers", proxy), bytes, bytes)) {
            var record = new ProducerRecord<byte[], byte[]>(topic, 0, null, new byte[] {'x'});
            record.headers().add("fencepost-expected-offset", "7".getBytes(StandardCharsets.UTF_8));
            producer.send(record).get();
            throw new AssertionError("appended");
        } catch (ExecutionException failed) {
            return failed;
        }
    }

    private static void show(Throwable error) {
        var answer = Fencepost.answerOf(error).orElse(null);
        if (answer == null) {
            System.out.println("null");
            return;
        }
        var json = "{\"kind\": \"" + answer.kind + "\", \"outcome\": \"" + answer.outcome.name().toLowerCase() + "\"";
        json += answer.predecessor ? ", \"predecessor\": true" : "";
        json += answer.possiblyYours ? ", \"possibly_yours\": true" : "";
        if (answer instanceof Fencepost.OffsetMismatchException) {
            var mismatch = (Fencepost.OffsetMismatchException) answer;
            json += ", \"expected\": \"" + mismatch.expected + "\", \"actual\": \"" + mismatch.actual + "\"";
            json += mismatch.record == 0 ? "" : ", \"record\": \"" + mismatch.record + "\"";
        } else if (answer instanceof Fencepost.OffsetViolationException) {
            var violation = (Fencepost.OffsetViolationException) answer;
            json += ", \"expected\": \"" + violation.expected + "\", \"appended_at\": \"" + violation.appendedAt + "\"";
        } else if (answer instanceof Fencepost.PartitionCountException) {
            var count = (Fencepost.PartitionCountException) answer;
            json += ", \"expected\": \"" + count.expected + "\", \"actual\": \"" + count.actual + "\"";
        }
        System.out.println(json + "}");
    }
}
