import java.io.FileReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutionException;
import java.util.function.Predicate;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.KafkaFuture;
import org.apache.kafka.common.Node;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.acl.AclBindingFilter;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Runs scripts with Kafka's clients. Arguments: a file with the clients' settings, a prefix for names, brokers, a time in
 * ms, then the scripts' names. Prints, for each, "=== NAME" and the output that a user gets.
 */
public final class ScriptedClients {
    private static final Duration WAIT = Duration.ofSeconds(90);
    private static final int LARGE = 900_000;
    private static final int TOO_LARGE = 1_500_000;

    private final String prefix;
    private final short brokers;
    private final long at;
    private final Properties settings = new Properties();
    private final List<String> seen = new ArrayList<>();

    private ScriptedClients(String[] args) throws Exception {
        try (FileReader file = new FileReader(args[0])) {
            settings.load(file);
        }
        prefix = args[1];
        brokers = Short.parseShort(args[2]);
        at = Long.parseLong(args[3]);
    }

    public static void main(String[] args) throws Exception {
        ScriptedClients clients = new ScriptedClients(args);
        for (int index = 4; index < args.length; index++) {
            clients.seen.clear();
            switch (args[index]) {
                case "produce" -> clients.produce();
                case "transactions" -> clients.idempotentLargeAndTransactions();
                case "classic" -> clients.group("classic");
                case "consumer" -> clients.group("consumer");
                case "seek" -> clients.seekAndTimes();
                case "admin" -> clients.admin();
                default -> throw new IllegalArgumentException(args[index]);
            }
            System.out.println("=== " + args[index]);
            clients.seen.forEach(System.out::println);
        }
        System.out.flush();
        System.exit(0);
    }

    private void say(Object what) {
        seen.add(String.valueOf(what));
    }

    /** Prints the result, or the exception's class. */
    private void outcome(Callable<?> action) throws Exception {
        try {
            say(action.call());
        } catch (ExecutionException failure) {
            say(failure.getCause().getClass().getSimpleName());
        }
    }

    // ---- shared by scripts

    private Properties with(String... more) {
        Properties all = new Properties();
        all.putAll(settings);
        for (int index = 0; index < more.length; index += 2) {
            all.put(more[index], more[index + 1]);
        }
        return all;
    }

    private KafkaProducer<byte[], byte[]> producer(String... more) {
        return new KafkaProducer<>(with(more), new ByteArraySerializer(), new ByteArraySerializer());
    }

    private KafkaConsumer<byte[], byte[]> consumer(String... more) {
        Properties all = with(more);
        all.putIfAbsent("enable.auto.commit", "false");
        all.putIfAbsent("auto.offset.reset", "earliest");
        return new KafkaConsumer<>(all, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    /** Creates a topic of two partitions, and waits for their leaders. */
    private String topic(String what) throws Exception {
        String name = prefix + "-" + what;
        try (Admin admin = Admin.create(with())) {
            admin.createTopics(List.of(new NewTopic(name, 2, brokers))).all().get();
        }
        try (KafkaConsumer<byte[], byte[]> consumer = consumer()) {
            await(() -> consumer.partitionsFor(name, WAIT), found -> found.size() == 2);
            consumer.endOffsets(both(name), WAIT);
        }
        return name;
    }

    private static List<TopicPartition> both(String topic) {
        return List.of(new TopicPartition(topic, 0), new TopicPartition(topic, 1));
    }

    private static <T> T await(Callable<T> look, Predicate<T> there) throws Exception {
        long deadline = System.nanoTime() + WAIT.toNanos();
        while (true) {
            T found = look.call();
            if (there.test(found)) {
                return found;
            }
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException("waited for too long; last seen: " + found);
            }
            Thread.sleep(100);
        }
    }

    private String send(KafkaProducer<byte[], byte[]> producer, String topic, int number, byte[] value)
            throws Exception {
        byte[] key = "k".getBytes(StandardCharsets.UTF_8);
        List<Header> headers = List.of(new RecordHeader("a", new byte[] {'1'}), new RecordHeader("null", (byte[]) null));
        RecordMetadata met =
                producer.send(new ProducerRecord<>(topic, number % 2, at + number, key, value, headers)).get();
        return met.partition() + "@" + met.offset();
    }

    private void fill(String topic, int count) throws Exception {
        try (KafkaProducer<byte[], byte[]> producer = producer("batch.size", "0")) {
            for (int number = 0; number < count; number++) {
                send(producer, topic, number, String.format("%03d", number).getBytes(StandardCharsets.UTF_8));
            }
        }
    }

    private static String text(ConsumerRecord<byte[], byte[]> record) {
        StringBuilder headers = new StringBuilder();
        record.headers().forEach(each -> headers.append(each.key())
                .append('=').append(each.value() == null ? null : new String(each.value())).append(' '));
        String value = record.value().length > 100
                ? record.value().length + " bytes" : new String(record.value(), StandardCharsets.UTF_8);
        return record.partition() + "@" + record.offset() + " " + record.timestamp() + " "
                + record.timestampType() + " " + headers + value;
    }

    /** Reads a whole topic. Until a commit's markers appear, the last stable offset lags. */
    private void read(String topic, int count, String level) throws Exception {
        try (KafkaConsumer<byte[], byte[]> consumer = consumer("isolation.level", level)) {
            consumer.assign(both(topic));
            consumer.seekToBeginning(both(topic));
            TreeSet<String> found = new TreeSet<>();
            await(() -> {
                consumer.poll(Duration.ofMillis(200)).forEach(record -> found.add(text(record)));
                return found;
            }, records -> records.size() >= count);
            found.forEach(this::say);
        }
    }

    // ---- scripts

    private void produce() throws Exception {
        String topic = topic("produce");
        for (String acks : List.of("1", "all")) {
            for (String compression : List.of("none", "gzip", "snappy", "lz4", "zstd")) {
                try (KafkaProducer<byte[], byte[]> producer =
                        producer("acks", acks, "compression.type", compression, "enable.idempotence", "false")) {
                    for (int number = 0; number < 3; number++) {
                        say(send(producer, topic, number, (acks + " " + compression + " " + number).getBytes()));
                    }
                }
            }
        }
        read(topic, 30, "read_uncommitted");
    }

    private void idempotentLargeAndTransactions() throws Exception {
        String topic = topic("transactions");
        try (KafkaProducer<byte[], byte[]> producer = producer("max.request.size", "6000000")) {
            for (int size : List.of(1, LARGE, TOO_LARGE)) {
                outcome(() -> send(producer, topic, 0, new byte[size]));
            }
        }
        try (KafkaProducer<byte[], byte[]> producer = producer("transactional.id", prefix + "-txn")) {
            producer.initTransactions();
            for (String end : List.of("commit", "abort", "commit")) {
                producer.beginTransaction();
                for (int partition = 0; partition < 2; partition++) {
                    send(producer, topic, partition, end.getBytes());
                }
                if (end.equals("commit")) {
                    producer.commitTransaction();
                } else {
                    producer.abortTransaction();
                }
            }
        }
        read(topic, 6, "read_committed");
        read(topic, 8, "read_uncommitted");
    }

    private void group(String protocol) throws Exception {
        String topic = topic(protocol);
        String group = prefix + "-group-" + protocol;
        fill(topic, 20);
        TreeSet<String> values = new TreeSet<>();
        for (int count : List.of(7, 13)) {
            try (KafkaConsumer<byte[], byte[]> consumer =
                    consumer("group.id", group, "group.protocol", protocol, "max.poll.records", "1")) {
                consumer.subscribe(List.of(topic));
                List<String> taken = new ArrayList<>();
                await(() -> {
                    consumer.poll(Duration.ofMillis(500)).forEach(each -> taken.add(new String(each.value())));
                    return taken;
                }, found -> found.size() >= count);
                consumer.commitSync();
                long committed = consumer.committed(Set.copyOf(both(topic)))
                        .values().stream().filter(each -> each != null).mapToLong(each -> each.offset()).sum();
                // The order of the two partitions depends on timing.
                say(taken.size() + " taken, " + committed + " committed");
                values.addAll(taken);
            }
        }
        say(values);
    }

    private void seekAndTimes() throws Exception {
        String topic = topic("seek");
        fill(topic, 20);
        TopicPartition first = both(topic).get(0);
        TopicPartition second = both(topic).get(1);
        try (KafkaConsumer<byte[], byte[]> consumer = consumer()) {
            consumer.assign(List.of(first));
            consumer.seek(first, 6);
            List<String> records = new ArrayList<>();
            await(() -> {
                consumer.poll(Duration.ofMillis(300)).forEach(each -> records.add(text(each)));
                return records;
            }, found -> !found.isEmpty());
            say(records.get(0));
            say(new TreeMap<>(Map.of("0", String.valueOf(consumer.offsetsForTimes(Map.of(first, at + 8), WAIT)),
                    "1", String.valueOf(consumer.offsetsForTimes(Map.of(second, at + 10_000), WAIT)))));
            for (TopicPartition each : both(topic)) {
                say(consumer.beginningOffsets(List.of(each), WAIT) + " " + consumer.endOffsets(List.of(each), WAIT));
            }
            consumer.seek(first, 10_000);
            records.clear();
            await(() -> { // out of range: from the beginning again
                consumer.poll(Duration.ofMillis(300)).forEach(each -> records.add(text(each)));
                return records;
            }, found -> !found.isEmpty());
            say(records.get(0));
        }
    }

    private void admin() throws Exception {
        String topic = topic("admin");
        String group = prefix + "-admin";
        fill(topic, 6);
        TopicPartition first = both(topic).get(0);
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        try (KafkaConsumer<byte[], byte[]> consumer = consumer("group.id", group)) {
            consumer.commitSync(Map.of(first, new OffsetAndMetadata(2, "m")), WAIT);
        }
        try (Admin admin = Admin.create(with())) {
            outcome(() -> done(admin.createTopics(List.of(new NewTopic(topic, 1, (short) 1))).all()));
            outcome(() -> done(admin.createTopics(List.of(new NewTopic(prefix + "-wide", 1, (short) 77))).all()));
            outcome(() -> done(admin.createTopics(List.of(new NewTopic("not a name", 1, (short) 1))).all()));
            outcome(() -> done(admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(4))).all()));
            outcome(() -> done(admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(1))).all()));
            AlterConfigOp change =
                    new AlterConfigOp(new ConfigEntry("retention.ms", "9876543210"), AlterConfigOp.OpType.SET);
            outcome(() -> done(admin.incrementalAlterConfigs(Map.of(resource, List.of(change))).all()));
            // The queried broker gets the change shortly after the broker that made it.
            say(await(() -> admin.describeConfigs(List.of(resource)).all().get().get(resource).get("retention.ms").value(),
                    "9876543210"::equals));
            outcome(() -> admin.listOffsets(Map.of(first, OffsetSpec.latest())).partitionResult(first).get().offset());
            outcome(() -> admin.deleteRecords(Map.of(first, RecordsToDelete.beforeOffset(2)))
                    .lowWatermarks().get(first).get().lowWatermark());
            outcome(() -> admin.describeConsumerGroups(List.of(group)).all().get().get(group).state());
            outcome(() -> admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata().get());
            outcome(() -> done(admin.deleteConsumerGroups(List.of(group)).all()));
            outcome(() -> done(admin.describeAcls(AclBindingFilter.ANY).values()));
            // Kafka omits a broker with late heartbeats.
            outcome(() -> names(await(() -> admin.describeCluster().nodes().get(), found -> found.size() == brokers)));
            outcome(() -> admin.describeTopics(List.of(topic)).allTopicNames().get().get(topic).name());
            outcome(() -> done(admin.deleteTopics(List.of(topic)).all()));
            outcome(() -> done(admin.deleteTopics(List.of(prefix + "-nowhere")).all()));
        }
    }

    private static Collection<String> names(Collection<Node> nodes) {
        TreeSet<String> names = new TreeSet<>();
        nodes.forEach(each -> names.add(each.id() + " is " + each.host() + ":" + each.port()));
        return names;
    }

    private static String done(KafkaFuture<?> future) throws Exception {
        Object value = future.get();
        return value == null ? "done" : String.valueOf(value);
    }
}
