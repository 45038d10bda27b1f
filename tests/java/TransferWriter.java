import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Random;
import java.util.TreeMap;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.InvalidProducerEpochException;
import org.apache.kafka.common.errors.ProducerFencedException;
import org.apache.kafka.common.errors.TimeoutException;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Compare-and-append over two partitions as in docs/other-clients.md. Arguments: bootstrap, topic, name, number of
 * transfers. Each moves 1 between the accounts; a record is "NAME-NUMBER BALANCE". Prints the number of decisions.
 */
public final class TransferWriter {
    private static final Comparator<TopicPartition> BY_TOPIC_AND_PARTITION =
            Comparator.comparing(TopicPartition::topic).thenComparing(TopicPartition::partition);

    public static void main(String[] args) throws Exception {
        List<TopicPartition> partitions = List.of(new TopicPartition(args[1], 0), new TopicPartition(args[1], 1));
        Properties settings = new Properties();
        settings.put("bootstrap.servers", args[0]);
        settings.put("key.deserializer", StringDeserializer.class.getName());
        settings.put("value.deserializer", StringDeserializer.class.getName());
        settings.put("isolation.level", "read_committed");
        settings.put("fetch.max.wait.ms", "10");
        Properties producing = new Properties();
        producing.put("bootstrap.servers", args[0]);
        producing.put("transactional.id", args[1] + "-" + args[2]);
        producing.put("key.serializer", StringSerializer.class.getName());
        producing.put("value.serializer", StringSerializer.class.getName());
        Map<Integer, Long> balances = new TreeMap<>(Map.of(0, 0L, 1, 0L));
        Random random = new Random();
        int decided = 0;
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(settings);
                KafkaProducer<String, String> producer = new KafkaProducer<>(producing)) {
            consumer.assign(partitions);
            consumer.seekToBeginning(partitions);
            producer.initTransactions();
            for (int number = 0; number < Integer.parseInt(args[3]); number++) {
                int source = random.nextInt(2);
                while (true) {
                    Map<TopicPartition, Long> expected = new TreeMap<>(BY_TOPIC_AND_PARTITION);
                    expected.putAll(consumer.endOffsets(partitions));
                    readUpTo(expected, consumer, balances);
                    decided++;
                    producer.beginTransaction();
                    try {
                        for (Map.Entry<TopicPartition, Long> each : expected.entrySet()) {
                            int account = each.getKey().partition();
                            long balance = balances.get(account) + (account == source ? -1 : 1);
                            String value = args[2] + "-" + number + " " + balance;
                            ProducerRecord<String, String> record = new ProducerRecord<>(args[1], account, null, value);
                            byte[] offset = Long.toString(each.getValue()).getBytes(StandardCharsets.US_ASCII);
                            record.headers().add("fencepost-expected-offset", offset);
                            producer.send(record).get();
                        }
                        producer.commitTransaction();
                        break;
                    } catch (ProducerFencedException | InvalidProducerEpochException fenced) {
                        throw fenced;
                    } catch (TimeoutException unanswered) {
                        producer.commitTransaction();
                        break;
                    } catch (ExecutionException | KafkaException refused) {
                        producer.abortTransaction();
                        Thread.sleep(random.nextLong(200));
                    }
                }
            }
        }
        System.out.println(decided);
    }

    private static void readUpTo(
            Map<TopicPartition, Long> ends, KafkaConsumer<String, String> consumer, Map<Integer, Long> balances) {
        List<TopicPartition> behind = new ArrayList<>(ends.keySet());
        while (!behind.isEmpty()) {
            for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(50))) {
                balances.put(record.partition(), Long.parseLong(record.value().split(" ")[1]));
            }
            behind.removeIf(partition -> consumer.position(partition) >= ends.get(partition));
        }
        // Records may have been read past the ends: expect the current position.
        ends.replaceAll((partition, end) -> consumer.position(partition));
    }
}
