import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Kafka's producers, controlled by lines of text with tab-separated fields, "-" for none:
 *
 *   open NAME BOOTSTRAP KEY=VALUE...
 *   send NAME TAG TOPIC PARTITION EXPECTED WRITE_ID VALUE
 *   close NAME
 *
 * Prints the outcome of each send, in any order: "TAG ok OFFSET", or "TAG failed CLASS MESSAGE". Ends with its input.
 */
public final class ScriptedProducers {
    public static void main(String[] args) throws Exception {
        Map<String, KafkaProducer<String, String>> producers = new HashMap<>();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line; (line = lines.readLine()) != null; ) {
            String[] words = line.split("\t");
            switch (words[0]) {
                case "open" -> producers.put(words[1], open(words));
                case "send" -> send(producers.get(words[1]), words);
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
        // A producer that fails during a send throws, and also completes the record with the error.
        AtomicBoolean told = new AtomicBoolean();
        ProducerRecord<String, String> record =
                new ProducerRecord<>(words[3], Integer.parseInt(words[4]), null, words[7]);
        if (!words[5].equals("-")) {
            record.headers().add("fencepost-expected-offset", words[5].getBytes(StandardCharsets.US_ASCII));
        }
        if (!words[6].equals("-")) {
            record.headers().add("fencepost-write-id", words[6].getBytes(StandardCharsets.UTF_8));
        }
        try {
            producer.send(
                    record, (metadata, failure) -> tell(told, tag, failure, metadata == null ? -1 : metadata.offset()));
        } catch (KafkaException failure) {
            // By a race in the producer, a fatal error is thrown, thrown wrapped, or set as the record's error.
            boolean wraps = failure.getClass() == KafkaException.class && failure.getCause() instanceof KafkaException;
            tell(told, tag, wraps ? (KafkaException) failure.getCause() : failure, -1);
        } catch (RuntimeException failure) {
            tell(told, tag, failure, -1);
        }
    }

    private static synchronized void tell(AtomicBoolean told, String tag, Exception failure, long offset) {
        if (!told.compareAndSet(false, true)) {
            return;
        }
        if (failure == null) {
            System.out.println(tag + "\tok\t" + offset);
        } else {
            String message = String.valueOf(failure.getMessage()).replace('\n', ' ').replace('\t', ' ');
            System.out.println(tag + "\tfailed\t" + failure.getClass().getSimpleName() + "\t" + message);
        }
        System.out.flush();
    }
}
