import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Collection;
import java.util.HashSet;
import java.util.List;
import java.util.Properties;
import java.util.Set;
import java.util.stream.Collectors;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;

/**
 * A member of a consumer group. Arguments: TOPIC COMMIT-SECONDS KEY=VALUE ...
 *
 * Its lines are those of tests/support/group_member.py, with System.nanoTime(), the system's monotonic clock.
 */
public final class GroupMember {
    private static final PrintStream OUT = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    private static volatile boolean ended = false;
    private static volatile boolean requested = false;
    private static volatile double paceSeconds = 0;
    private static volatile int paceBelow = 0;

    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        for (String arg : List.of(args).subList(2, args.length)) {
            String[] setting = arg.split("=", 2);
            settings.put(setting[0], setting[1]);
        }
        double commitSeconds = Double.parseDouble(args[1]);
        boolean commits = commitSeconds > 0;
        Thread orders = new Thread(GroupMember::obey);
        orders.setDaemon(true);
        orders.start();
        KafkaConsumer<String, String> consumer =
            new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer());
        consumer.subscribe(List.of(args[0]), new ConsumerRebalanceListener() {
            @Override
            public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
                if (commits) commit(consumer);
                onPartitionsLost(partitions);
            }

            @Override
            public void onPartitionsLost(Collection<TopicPartition> partitions) {
                Set<TopicPartition> left = new HashSet<>(consumer.assignment());
                left.removeAll(partitions);
                has("R", left);
            }

            @Override
            public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
                has("A", consumer.assignment());
            }
        });
        long committed = System.nanoTime();
        boolean dirty = false;
        while (!ended) {
            for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(100))) {
                if (record.partition() < paceBelow) Thread.sleep((long) (paceSeconds * 1000));
                say("S " + System.nanoTime() + " " + record.partition() + " " + record.offset() + " " + record.key()
                    + " " + record.value());
                dirty = true;
            }
            if (requested) {
                commit(consumer);
            } else if (commits && dirty && System.nanoTime() - committed >= commitSeconds * 1e9) {
                if (commit(consumer)) dirty = false;
                committed = System.nanoTime();
            }
        }
        if (commits) commit(consumer);
        consumer.close();
        Runtime.getRuntime().halt(0);
    }

    private static boolean commit(KafkaConsumer<String, String> consumer) {
        try {
            consumer.commitSync();
        } catch (RuntimeException late) {
            say("E commit: " + late);
            return false;
        }
        requested = false;
        say("C");
        return true;
    }

    private static void has(String event, Collection<TopicPartition> partitions) {
        say(event + " " + System.nanoTime() + " "
            + partitions.stream().map(tp -> "" + tp.partition()).sorted().collect(Collectors.joining(",")));
    }

    private static void say(String line) {
        OUT.println(line.replace('\n', ' '));
        OUT.flush();
    }

    private static void obey() {
        try (BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8))) {
            for (String line = in.readLine(); line != null; line = in.readLine()) {
                String[] words = line.split(" ");
                if (words[0].equals("commit")) {
                    requested = true;
                } else {
                    paceSeconds = Double.parseDouble(words[1]);
                    paceBelow = Integer.parseInt(words[2]);
                }
            }
        } catch (java.io.IOException gone) {
            // The same as its end.
        }
        ended = true;
    }
}
