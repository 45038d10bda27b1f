import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Collection;
import java.util.List;
import java.util.Properties;
import java.util.stream.Collectors;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;

/**
 * A member of a consumer group that prints each handled record. Arguments: TOPIC COMMIT-SECONDS KEY=VALUE ...
 *
 * Prints "S nanos partition offset key value" after each record, and "A nanos p,p,..." after each assignment, with
 * System.nanoTime() (the system's monotonic clock). "pace SECONDS BELOW" on standard input sets the duration of a record
 * of a partition below BELOW. Leaves the group when standard input ends.
 */
public final class OrderMember {
    private static volatile boolean ended = false;
    private static volatile double paceSeconds = 0;
    private static volatile int paceBelow = 0;

    public static void main(String[] args) throws Exception {
        PrintStream out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        Properties settings = new Properties();
        for (String arg : List.of(args).subList(2, args.length)) {
            String[] setting = arg.split("=", 2);
            settings.put(setting[0], setting[1]);
        }
        double commitSeconds = Double.parseDouble(args[1]);
        Thread orders = new Thread(OrderMember::obey);
        orders.setDaemon(true);
        orders.start();
        KafkaConsumer<String, String> consumer =
            new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer());
        consumer.subscribe(List.of(args[0]), new ConsumerRebalanceListener() {
            @Override
            public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
                try {
                    consumer.commitSync();
                } catch (RuntimeException late) {
                    System.err.println("commit while revoked: " + late);
                }
            }

            @Override
            public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
                String all = consumer.assignment().stream().map(tp -> "" + tp.partition()).sorted()
                    .collect(Collectors.joining(","));
                out.println("A " + System.nanoTime() + " " + all);
                out.flush();
            }
        });
        long committed = System.nanoTime();
        boolean dirty = false;
        while (!ended) {
            for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(100))) {
                if (record.partition() < paceBelow) Thread.sleep((long) (paceSeconds * 1000));
                out.println("S " + System.nanoTime() + " " + record.partition() + " " + record.offset() + " "
                    + record.key() + " " + record.value());
                out.flush();
                dirty = true;
            }
            if (dirty && System.nanoTime() - committed >= commitSeconds * 1e9) {
                try {
                    consumer.commitSync();
                    dirty = false;
                } catch (RuntimeException late) {
                    System.err.println("commit: " + late);
                }
                committed = System.nanoTime();
            }
        }
        try {
            consumer.commitSync();
        } catch (RuntimeException late) {
            System.err.println("commit: " + late);
        }
        consumer.close();
        Runtime.getRuntime().halt(0);
    }

    private static void obey() {
        try (BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8))) {
            for (String line = in.readLine(); line != null; line = in.readLine()) {
                String[] words = line.split(" ");
                paceSeconds = Double.parseDouble(words[1]);
                paceBelow = Integer.parseInt(words[2]);
            }
        } catch (java.io.IOException gone) {
            // The same as its end.
        }
        ended = true;
    }
}
