import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Producers controlled by lines on standard input. Each response line begins with the first word of its command, a number
 * that the caller chose:
 *
 *   N open NAME KEY=VALUE ...                          a KafkaProducer with these settings
 *   N send NAME TOPIC PARTITION EXPECTED WRITE-ID VALUE   "-" for no expectation, no write-id
 *   N init NAME | begin NAME | commit NAME | abort NAME   transactions
 *   N close NAME
 *
 * Responses: "N ok OFFSET" (of a send), "N ok", or "N error CLASS MESSAGE". The response to a send follows its outcome.
 * Other commands of one producer run in their order, concurrently with those of others. Ends with its input.
 */
public final class SoakProducer {
    private final Map<String, KafkaProducer<String, String>> producers = new ConcurrentHashMap<>();
    private final Map<String, ExecutorService> threads = new ConcurrentHashMap<>();

    public static void main(String[] args) throws Exception {
        SoakProducer all = new SoakProducer();
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = orders.readLine(); line != null; line = orders.readLine()) {
            String[] words = line.split(" ");
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
                default -> throw new IllegalArgumentException(words[1]);
            }
            answer(words[0] + " ok");
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
        ProducerRecord<String, String> record =
            new ProducerRecord<>(words[3], Integer.parseInt(words[4]), null, words[7]);
        if (!words[5].equals("-")) {
            record.headers().add("fencepost-expected-offset", words[5].getBytes(StandardCharsets.US_ASCII));
        }
        if (!words[6].equals("-")) {
            record.headers().add("fencepost-write-id", words[6].getBytes(StandardCharsets.US_ASCII));
        }
        producer.send(record, (metadata, error) -> {
            if (error == null) {
                answer(words[0] + " ok " + metadata.offset());
            } else {
                fail(words[0], error);
            }
        });
    }

    private static void fail(String number, Exception error) {
        String message = String.valueOf(error.getMessage()).replace('\n', ' ');
        answer(number + " error " + error.getClass().getSimpleName() + " " + message);
    }

    private static void answer(String line) {
        synchronized (System.out) {
            System.out.println(line);
            System.out.flush();
        }
    }
}
