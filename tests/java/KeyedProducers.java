import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.internals.BuiltInPartitioner;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Kafka's producer with its default partitioner, controlled by lines of text with tab-separated fields:
 *
 *   open NAME BOOTSTRAP KEY=VALUE...
 *   send NAME TAG TOPIC KEY VALUE SAYS      SAYS: "count" – a header with its number of partitions; or "-"
 *   place KEY_IN_HEX COUNT
 *   close NAME
 *
 * Prints the outcome of each send, in any order: "TAG ok PARTITION OFFSET", or "TAG failed CLASS MESSAGE". `place` prints
 * "PARTITION" immediately. The end of the input ends the program.
 */
public final class KeyedProducers {
    public static void main(String[] args) throws Exception {
        Map<String, KafkaProducer<String, String>> producers = new HashMap<>();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line; (line = lines.readLine()) != null; ) {
            String[] words = line.split("\t");
            switch (words[0]) {
                case "open" -> producers.put(words[1], open(words));
                case "send" -> send(producers.get(words[1]), words);
                case "place" -> say(String.valueOf(BuiltInPartitioner.partitionForKey(
                        HexFormat.of().parseHex(words[1]), Integer.parseInt(words[2]))));
                case "close" -> producers.remove(words[1]).close(Duration.ZERO);
                default -> throw new IllegalArgumentException(line);
            }
        }
        producers.values().forEach(producer -> producer.close(Duration.ZERO));
    }

    private static KafkaProducer<String, String> open(String[] words) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", words[2]);
        settings.put("key.serializer", StringSerializer.class.getName());
        settings.put("value.serializer", StringSerializer.class.getName());
        for (int i = 3; i < words.length; i++) {
            int equals = words[i].indexOf('=');
            settings.put(words[i].substring(0, equals), words[i].substring(equals + 1));
        }
        return new KafkaProducer<>(settings);
    }

    private static void send(KafkaProducer<String, String> producer, String[] words) {
        String tag = words[2];
        ProducerRecord<String, String> record = new ProducerRecord<>(words[3], words[4], words[5]);
        if (words[6].equals("count")) {
            String count = String.valueOf(producer.partitionsFor(words[3]).size());
            record.headers().add("fencepost-partition-count", count.getBytes(StandardCharsets.US_ASCII));
        }
        producer.send(record, (metadata, failure) -> {
            if (failure == null) {
                say(tag + "\tok\t" + metadata.partition() + "\t" + metadata.offset());
            } else {
                String message = String.valueOf(failure.getMessage()).replace('\n', ' ').replace('\t', ' ');
                say(tag + "\tfailed\t" + failure.getClass().getSimpleName() + "\t" + message);
            }
        });
    }

    private static synchronized void say(String line) {
        System.out.println(line);
        System.out.flush();
    }
}
