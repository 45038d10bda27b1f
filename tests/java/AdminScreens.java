import java.io.FileReader;
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
import java.util.stream.Collectors;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.DescribeClusterOptions;
import org.apache.kafka.clients.admin.DescribeConfigsOptions;
import org.apache.kafka.clients.admin.DescribeTopicsOptions;
import org.apache.kafka.clients.admin.ListTopicsOptions;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.Node;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.acl.AclBindingFilter;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.quota.ClientQuotaFilter;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * The calls of admin tools with a user interface (Kafka UI, AKHQ, Redpanda Console), with Java's Admin client.
 * Arguments: a file with the client's settings, a prefix for names. Prints a line "CALL: result" for each.
 */
public final class AdminScreens {
    private static final long PATIENCE_NANOS = 90_000_000_000L;
    /** An hour ago: the broker may delete records that are older than the retention. */
    private static final long AT_MS = System.currentTimeMillis() - 3_600_000;

    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        try (FileReader file = new FileReader(args[0])) {
            settings.load(file);
        }
        try (Admin admin = Admin.create(settings)) {
            new AdminScreens(admin, settings, args[1]).run();
        }
        System.out.flush();
        System.exit(0);
    }

    private final Admin admin;
    private final Properties settings;
    private final String topic;
    private final String group;

    private AdminScreens(Admin admin, Properties settings, String prefix) {
        this.admin = admin;
        this.settings = settings;
        this.topic = prefix + "-topic";
        this.group = prefix + "-group";
    }

    private void run() throws Exception {
        TopicPartition first = new TopicPartition(topic, 0);
        ConfigResource ofTopic = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        prepare(first);
        cluster();
        topics(first, ofTopic);
        groups(first);
        others(first);
        say("DeleteRecords", () -> admin.deleteRecords(Map.of(first, RecordsToDelete.beforeOffset(2)))
                .lowWatermarks().get(first).get().lowWatermark());
        say("DeleteTopics", () -> admin.deleteTopics(List.of(topic)).all().get());
    }

    private void prepare(TopicPartition first) throws Exception {
        say("CreateTopics", () -> admin.createTopics(List.of(new NewTopic(topic, 2, (short) 1))).all().get());
        until(() -> admin.listOffsets(Map.of(first, OffsetSpec.latest())).all().get().get(first).offset(), found -> found == 0);
        try (KafkaProducer<String, String> producer =
                new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer())) {
            for (int number = 0; number < 5; number++) {
                producer.send(new ProducerRecord<>(topic, 0, AT_MS + number, "key", "value-" + number)).get();
            }
        }
        until(() -> {
            admin.alterConsumerGroupOffsets(group, Map.of(first, new OffsetAndMetadata(3, "set"))).all().get();
            return true;
        }, found -> found);
    }

    private void cluster() throws Exception {
        DescribeClusterOptions all = new DescribeClusterOptions().includeAuthorizedOperations(true);
        say("DescribeCluster: id", () -> admin.describeCluster(all).clusterId().get());
        // Kafka omits a broker with late heartbeats, and so a partition's leader.
        say("DescribeCluster: nodes",
                () -> nodes(until(() -> admin.describeCluster(all).nodes().get(), found -> !found.isEmpty())));
        say("DescribeCluster: controller",
                () -> until(() -> admin.describeCluster(all).controller().get(), found -> found != null).id());
        say("DescribeCluster: operations", () -> new TreeSet<>(admin.describeCluster(all).authorizedOperations().get()));
        ConfigResource broker = new ConfigResource(ConfigResource.Type.BROKER, "1");
        DescribeConfigsOptions options = new DescribeConfigsOptions().includeSynonyms(true).includeDocumentation(true);
        say("DescribeConfigs: broker", () -> new TreeSet<>(admin.describeConfigs(List.of(broker), options).all().get().get(broker)
                .entries().stream().map(each -> each.name() + (each.isReadOnly() ? " read-only" : "")).toList()));
        say("DescribeLogDirs", () -> admin.describeLogDirs(List.of(1)).allDescriptions().get().get(1).values().stream()
                .mapToLong(each -> each.replicaInfos().keySet().stream().filter(of -> of.topic().equals(topic)).count()).sum());
        say("DescribeFeatures", () -> new TreeMap<>(admin.describeFeatures().featureMetadata().get().finalizedFeatures()));
        say("DescribeQuorum", () -> admin.describeMetadataQuorum().quorumInfo().get().leaderId());
    }

    private void topics(TopicPartition first, ConfigResource ofTopic) throws Exception {
        ListTopicsOptions internal = new ListTopicsOptions().listInternal(true);
        until(() -> admin.listTopics(internal).names().get(), found -> found.contains(topic));
        say("ListTopics", () -> admin.listTopics(internal).listings().get().stream()
                .filter(each -> each.name().equals(topic) || each.name().equals("__consumer_offsets"))
                .map(each -> each.name() + " internal=" + each.isInternal()).sorted().toList());
        DescribeTopicsOptions all = new DescribeTopicsOptions().includeAuthorizedOperations(true);
        say("DescribeTopics", () -> until(
                () -> admin.describeTopics(List.of(topic), all).allTopicNames().get().get(topic).partitions(),
                found -> found.stream().allMatch(each -> each.leader() != null))
                .stream().map(each -> each.partition() + " at " + nodes(List.of(each.leader()))).toList());
        DescribeConfigsOptions options = new DescribeConfigsOptions().includeSynonyms(true).includeDocumentation(true);
        say("DescribeConfigs: topic", () -> admin.describeConfigs(List.of(ofTopic), options).all().get().get(ofTopic)
                .entries().stream().map(each -> each.name() + "=" + each.value()).sorted().collect(Collectors.joining("\n  ", "\n  ", "")));
        AlterConfigOp change = new AlterConfigOp(new ConfigEntry("retention.ms", "98765432"), AlterConfigOp.OpType.SET);
        say("IncrementalAlterConfigs", () -> admin.incrementalAlterConfigs(Map.of(ofTopic, List.of(change))).all().get());
        until(() -> admin.describeConfigs(List.of(ofTopic)).all().get().get(ofTopic).get("retention.ms").value(),
                "98765432"::equals);
        for (Map.Entry<String, OffsetSpec> spec : Map.of("earliest", OffsetSpec.earliest(), "latest", OffsetSpec.latest(),
                "max timestamp", OffsetSpec.maxTimestamp(), "for a time", OffsetSpec.forTimestamp(AT_MS + 2)).entrySet()
                .stream().sorted(Map.Entry.comparingByKey()).toList()) {
            say("ListOffsets: " + spec.getKey(),
                    () -> admin.listOffsets(Map.of(first, spec.getValue())).all().get().get(first).offset());
        }
        say("CreatePartitions", () -> admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(3))).all().get());
        until(() -> admin.describeTopics(List.of(topic)).allTopicNames().get().get(topic).partitions().size(),
                found -> found == 3);
    }

    private void groups(TopicPartition first) throws Exception {
        say("ListConsumerGroups", () -> admin.listConsumerGroups().all().get().stream()
                .filter(each -> each.groupId().equals(group)).map(each -> each.groupId()).toList());
        say("DescribeConsumerGroups", () -> admin.describeConsumerGroups(List.of(group)).all().get().values().stream()
                .map(each -> each.groupId() + " " + each.state() + " at " + nodes(List.of(each.coordinator()))
                        + " members " + each.members().size()).toList());
        say("ListConsumerGroupOffsets", () -> admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata().get());
        say("AlterConsumerGroupOffsets", () -> admin.alterConsumerGroupOffsets(group, Map.of(first, new OffsetAndMetadata(1)))
                .all().get());
        say("ListConsumerGroupOffsets, after", () -> admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata()
                .get().get(first).offset());
        say("DeleteConsumerGroupOffsets", () -> admin.deleteConsumerGroupOffsets(group, Set.of(first)).all().get());
        say("DeleteConsumerGroups", () -> admin.deleteConsumerGroups(List.of(group)).all().get());
        say("DescribeConsumerGroups, after", () -> admin.describeConsumerGroups(List.of(group)).all().get());
    }

    private void others(TopicPartition first) throws Exception {
        say("DescribeAcls", () -> admin.describeAcls(AclBindingFilter.ANY).values().get());
        say("DescribeClientQuotas", () -> admin.describeClientQuotas(ClientQuotaFilter.all()).entities().get());
        say("DescribeUserScramCredentials", () -> admin.describeUserScramCredentials().all().get());
        say("ListPartitionReassignments", () -> admin.listPartitionReassignments().reassignments().get());
        say("DescribeProducers", () -> admin.describeProducers(List.of(first)).all().get().get(first).activeProducers().size());
        say("ListTransactions", () -> admin.listTransactions().all().get().stream()
                .filter(each -> each.transactionalId().startsWith(topic)).toList());
        say("ListClientMetricsResources", () -> admin.listClientMetricsResources().all().get());
    }

    private static void say(String call, Callable<?> action) throws Exception {
        Object seen;
        try {
            seen = action.call();
        } catch (ExecutionException failure) {
            seen = failure.getCause().getClass().getSimpleName();
        }
        System.out.println(call + ": " + (seen == null ? "done" : seen));
    }

    private static <T> T until(Callable<T> look, Predicate<T> there) throws Exception {
        long deadline = System.nanoTime() + PATIENCE_NANOS;
        Exception last = null;
        while (System.nanoTime() < deadline) {
            try {
                T found = look.call();
                if (there.test(found)) {
                    return found;
                }
            } catch (ExecutionException failure) {
                last = failure;
            }
            Thread.sleep(50);
        }
        throw new IllegalStateException("it did not come", last);
    }

    private static Collection<String> nodes(Collection<Node> nodes) {
        List<String> names = new ArrayList<>();
        nodes.forEach(each -> names.add(each.id() + " " + each.host() + ":" + each.port()));
        return new TreeSet<>(names);
    }
}
