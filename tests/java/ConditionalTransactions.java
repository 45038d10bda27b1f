import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * One transactional producer that runs commands. Arguments: bootstrap, transactional id, then steps: "begin",
 * "commit", "abort", or "TOPIC=EXPECTED" for a record to partition 0 that expects an offset ("-": none). Prints a line
 * for each: "ok", "ok OFFSET", or the exception's class and its message.
 */
public final class ConditionalTransactions {
    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", args[0]);
        settings.put("transactional.id", args[1]);
        settings.put("key.serializer", StringSerializer.class.getName());
        settings.put("value.serializer", StringSerializer.class.getName());
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(settings)) {
            producer.initTransactions();
            for (String step : Arrays.copyOfRange(args, 2, args.length)) {
                System.out.println(done(producer, step));
            }
        }
    }

    private static String done(KafkaProducer<String, String> producer, String step) throws Exception {
        try {
            switch (step) {
                case "begin" -> producer.beginTransaction();
                case "commit" -> producer.commitTransaction();
                case "abort" -> producer.abortTransaction();
                default -> {
                    String[] said = step.split("=");
                    ProducerRecord<String, String> record = new ProducerRecord<>(said[0], 0, null, "expects " + said[1]);
                    if (!said[1].equals("-")) {
                        record.headers().add("fencepost-expected-offset", said[1].getBytes(StandardCharsets.US_ASCII));
                    }
                    return "ok " + producer.send(record).get(60, TimeUnit.SECONDS).offset();
                }
            }
            return "ok";
        } catch (ExecutionException failure) {
            return failure.getCause().getClass().getSimpleName() + " " + failure.getCause().getMessage();
        } catch (RuntimeException failure) {
            return failure.getClass().getSimpleName() + " " + failure.getMessage();
        }
    }
}
