import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Sends records sequentially to partition 0 of a topic, with one producer. Arguments: bootstrap, topic,
 * enable.idempotence, then the expected offset of each record, or "-" for none. Prints a line for each: "ok OFFSET", or
 * the exception's class and its message.
 */
public final class ConditionalSends {
    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", args[0]);
        settings.put("enable.idempotence", args[2]);
        settings.put("key.serializer", StringSerializer.class.getName());
        settings.put("value.serializer", StringSerializer.class.getName());
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(settings)) {
            for (String expected : Arrays.copyOfRange(args, 3, args.length)) {
                ProducerRecord<String, String> record = new ProducerRecord<>(args[1], 0, null, "expects " + expected);
                if (!expected.equals("-")) {
                    record.headers().add("fencepost-expected-offset", expected.getBytes(StandardCharsets.US_ASCII));
                }
                try {
                    System.out.println("ok " + producer.send(record).get(30, TimeUnit.SECONDS).offset());
                } catch (ExecutionException failure) {
                    System.out.println(failure.getCause().getClass().getSimpleName() + " " + failure.getCause().getMessage());
                }
            }
        }
    }
}
