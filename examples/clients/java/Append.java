import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.PolicyViolationException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Appends one record at the end of partition 0. Arguments: proxy, topic, value.
 *
 * <p>mvn -q compile exec:java -Dexec.args="127.0.0.1:19092 orders one"
 *
 * <p>Works with kafka-clients 2.8 or later.
 */
public final class Append {
    public static void main(String[] args) throws Exception {
        var partition = new TopicPartition(args[1], 0);
        var writeId = UUID.randomUUID().toString().getBytes(StandardCharsets.UTF_8);
        Map<String, Object> settings = Map.of("bootstrap.servers", args[0]);
        // Other tools copy headers with records: an expected offset with this suffix counts only where it was made for.
        String binding;
        try (var admin = Admin.create(settings)) {
            var resource = new ConfigResource(ConfigResource.Type.TOPIC, args[1]);
            var check = admin.describeConfigs(List.of(resource)).all().get().get(resource).get("fencepost.check.expected.offsets");
            if (check == null || check.value().equals("false")) {
                throw new IllegalStateException(args[1] + " does not check expected offsets: they would be ignored");
            }
            binding = "@" + args[1] + "/0@" + admin.describeCluster().clusterId().get();
        }
        var bytes = new ByteArrayDeserializer();
        try (var producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
                var consumer = new KafkaConsumer<>(settings, bytes, bytes)) {
            consumer.assign(List.of(partition));
            long expected = 0; // nothing is read yet
            while (true) {
                var record = new ProducerRecord<byte[], byte[]>(args[1], 0, null, args[2].getBytes(StandardCharsets.UTF_8));
                record.headers().add("fencepost-expected-offset", (expected + binding).getBytes(StandardCharsets.UTF_8));
                record.headers().add("fencepost-write-id", writeId);
                try {
                    System.out.println("appended at " + producer.send(record).get().offset());
                    return;
                } catch (ExecutionException failed) {
                    if (!(failed.getCause() instanceof PolicyViolationException)) {
                        throw failed; // the outcome is unknown, or a retry does not help
                    }
                    System.out.println("refused: " + failed.getCause().getMessage());
                }
                // Read what others have appended, then decide again. An earlier attempt may have succeeded.
                long end = consumer.endOffsets(List.of(partition)).get(partition);
                consumer.seek(partition, expected);
                while (consumer.position(partition) < end) {
                    for (ConsumerRecord<byte[], byte[]> each : consumer.poll(Duration.ofSeconds(1))) {
                        var id = each.headers().lastHeader("fencepost-write-id");
                        if (id != null && Arrays.equals(id.value(), writeId)) {
                            System.out.println("appended at " + each.offset());
                            return;
                        }
                    }
                }
                expected = consumer.position(partition);
            }
        }
    }
}
