import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.HexFormat;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.internals.BuiltInPartitioner;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Producers controlled by lines on standard input, whose fields are separated by tabs. Each response line begins with the
 * first field of its command, a number that the caller chose:
 *
 *   N open NAME KEY=VALUE ...                          a KafkaProducer with these settings
 *   N send NAME TOPIC PARTITION EXPECTED WRITE-ID VALUE [KEY COUNT]   "-" for none; COUNT "count": with the partition
 *                                                      count that the producer knows
 *   N init NAME | begin NAME | commit NAME | abort NAME   transactions
 *   N close NAME
 *   N place - HEX-KEY COUNT                            the partition of this key
 *
 * Responses: "N ok OFFSET PARTITION" (of a send), "N ok PARTITION" (of a place), "N ok", or "N error CLASS MESSAGE"; only the first one counts, since a producer
 * that fails during a send throws, and also completes the record. The response to a send follows its outcome.
 * Other commands of one producer run in their order, concurrently with those of others. Ends with its input.
 */
public final class ScriptedProducer {
    private final Map<String, KafkaProducer<String, String>> producers = new ConcurrentHashMap<>();
    private final Map<String, ExecutorService> threads = new ConcurrentHashMap<>();

    public static void main(String[] args) throws Exception {
        ScriptedProducer all = new ScriptedProducer();
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = orders.readLine(); line != null; line = orders.readLine()) {
            String[] words = line.split("\t");
            all.threads.computeIfAbsent(words[2], name -> Executors.newSingleThreadExecutor()).execute(() -> all.obey(words));
        }
        Runtime.getRuntime().halt(0);
    }

    private void obey(String[] words) {
        try {
            KafkaProducer<String, String> producer = producers.get(words[2]);
            switch (words[1]) {
                case "open" -> producers.put(words[2], open(words));
                case "send" -> {
                    send(producer, words);
                    return;
                }
                case "init" -> producer.initTransactions();
                case "begin" -> producer.beginTransaction();
                case "commit" -> producer.commitTransaction();
                case "abort" -> producer.abortTransaction();
                case "close" -> {
                    producers.remove(words[2]);
                    producer.close(Duration.ofSeconds(1));
                }
                case "place" -> {
                    int partition = BuiltInPartitioner.partitionForKey(
                        HexFormat.of().parseHex(words[3]), Integer.parseInt(words[4]));
                    answer(words[0] + "\tok\t" + partition);
                    return;
                }
                default -> throw new IllegalArgumentException(words[1]);
            }
            answer(words[0] + "\tok");
        } catch (Exception error) {
            fail(words[0], error);
        }
    }

    private static KafkaProducer<String, String> open(String[] words) {
        Properties settings = new Properties();
        settings.put("key.serializer", StringSerializer.class.getName());
        settings.put("value.serializer", StringSerializer.class.getName());
        for (int i = 3; i < words.length; i++) {
            String[] setting = words[i].split("=", 2);
            settings.put(setting[0], setting[1]);
        }
        return new KafkaProducer<>(settings);
    }

    private void send(KafkaProducer<String, String> producer, String[] words) {
        Integer partition = words[4].equals("-") ? null : Integer.valueOf(words[4]);
        ProducerRecord<String, String> record =
            new ProducerRecord<>(words[3], partition, words.length > 8 ? words[8] : null, words[7]);
        if (words.length > 9 && words[9].equals("count")) {
            String count = String.valueOf(producer.partitionsFor(words[3]).size());
            record.headers().add("fencepost-partition-count", count.getBytes(StandardCharsets.US_ASCII));
        }
        if (!words[5].equals("-")) {
            record.headers().add("fencepost-expected-offset", words[5].getBytes(StandardCharsets.US_ASCII));
        }
        if (!words[6].equals("-")) {
            record.headers().add("fencepost-write-id", words[6].getBytes(StandardCharsets.US_ASCII));
        }
        producer.send(record, (metadata, error) -> {
            if (error == null) {
                answer(words[0] + "\tok\t" + metadata.offset() + "\t" + metadata.partition());
            } else {
                fail(words[0], error);
            }
        });
    }

    private static void fail(String number, Exception thrown) {
        // By a race in the producer, a fatal error is thrown, thrown wrapped, or set as the record's error.
        boolean wraps = thrown.getClass() == KafkaException.class && thrown.getCause() instanceof KafkaException;
        Throwable error = wraps ? thrown.getCause() : thrown;
        String message = String.valueOf(error.getMessage()).replace('\n', ' ').replace('\t', ' ');
        answer(number + "\terror\t" + error.getClass().getSimpleName() + "\t" + message);
    }

    private static void answer(String line) {
        synchronized (System.out) {
            System.out.println(line);
            System.out.flush();
        }
    }
}
