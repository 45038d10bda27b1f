import java.time.Duration;
import java.util.Collection;
import java.util.List;
import java.util.Properties;
import java.util.TreeSet;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.WakeupException;
import org.apache.kafka.common.serialization.StringDeserializer;

/**
 * A member of a consumer group that prints its events. Arguments: topic, then consumer configs as name=value.
 *
 * <p>Lines: {@code assigned t-0,t-1}, {@code revoked t-0}, {@code lost t-0}, {@code record t 0 17 key value}. A line
 * {@code commit} on stdin commits the records read, and prints {@code committed}. It leaves the group when stdin ends.
 */
public final class GroupMember {
    private static synchronized void say(String line) {
        System.out.println(line);
        System.out.flush();
    }

    private static String names(Collection<TopicPartition> partitions) {
        TreeSet<String> names = new TreeSet<>();
        partitions.forEach(each -> names.add(each.toString()));
        return String.join(",", names);
    }

    public static void main(String[] args) throws Exception {
        Properties properties = new Properties();
        properties.put("key.deserializer", StringDeserializer.class.getName());
        properties.put("value.deserializer", StringDeserializer.class.getName());
        for (int index = 1; index < args.length; index++) {
            String[] pair = args[index].split("=", 2);
            properties.put(pair[0], pair[1]);
        }
        AtomicBoolean commit = new AtomicBoolean();
        AtomicBoolean end = new AtomicBoolean();
        Thread orders = new Thread(() -> {
            try (java.io.BufferedReader reader = new java.io.BufferedReader(new java.io.InputStreamReader(System.in))) {
                for (String line = reader.readLine(); line != null; line = reader.readLine()) {
                    if (line.equals("commit")) {
                        commit.set(true);
                    }
                }
            } catch (java.io.IOException error) {
                say("error " + error);
            }
            end.set(true);
        });
        orders.setDaemon(true);
        orders.start();
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(properties)) {
            consumer.subscribe(List.of(args[0]), new ConsumerRebalanceListener() {
                @Override
                public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
                    say("assigned " + names(partitions));
                }

                @Override
                public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
                    say("revoked " + names(partitions));
                }

                @Override
                public void onPartitionsLost(Collection<TopicPartition> partitions) {
                    say("lost " + names(partitions));
                }
            });
            while (!end.get()) {
                for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(100))) {
                    say("record " + record.topic() + " " + record.partition() + " " + record.offset() + " "
                            + record.key() + " " + record.value());
                }
                if (commit.getAndSet(false)) {
                    try {
                        consumer.commitSync();
                        say("committed");
                    } catch (org.apache.kafka.common.KafkaException error) {
                        say("error " + error);
                    }
                }
            }
        } catch (WakeupException error) {
            say("error " + error);
        }
        say("left");
        Runtime.getRuntime().halt(0);
    }
}
