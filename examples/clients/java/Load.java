import static java.nio.charset.StandardCharsets.UTF_8;

import java.nio.file.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.regex.Pattern;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.PolicyViolationException;
import org.apache.kafka.common.serialization.*;
import org.apache.kafka.common.utils.Utils;

/**
 * Loads the lines KEY TAB VALUE of a file, each once and in order, as one of the loaders of docs/recipes/loader.md, which
 * has the format. A line is a unit, its number the position. Arguments: proxy, topic, name of the load (without JSON
 * escapes), file. After any error, run it again: it continues where the log ends.
 */
public final class Load {
    static final int BATCH_BYTES = 500_000, LINGER_MS = 60_000;
    static final Pattern MISMATCH = Pattern.compile("OFFSET_MISMATCH .*\\bactual=(\\d+)");
    record Progress(int unit, int complete, int partitions) {}
    final String topic, load, cluster, run = UUID.randomUUID().toString();
    final List<String> lines;
    final Producer<byte[], byte[]> producer;
    final Consumer<byte[], byte[]> consumer;
    final long[] ends; // of each partition: where it was read to
    boolean recordsWereDeleted;
    int complete; // so many units are in all partitions

    Load(String proxy, String topic, String load, Path file) throws Exception {
        this.topic = topic; this.load = load; lines = Files.readAllLines(file);
        try (var admin = Admin.create(Map.of("bootstrap.servers", proxy))) {
            var configs = admin.describeConfigs(List.of(new ConfigResource(ConfigResource.Type.TOPIC, topic))).all().get()
                    .values().iterator().next();
            must(configs.get("fencepost.check.expected.offsets").value().equals("required"), "offsets are not required");
            must(Integer.parseInt(configs.get("max.message.bytes").value()) > 2 * BATCH_BYTES, "batches would be divided");
            cluster = admin.describeCluster().clusterId().get();
        }
        Map<String, Object> settings = Map.of("bootstrap.servers", proxy, "batch.size", 2 * BATCH_BYTES, "linger.ms", LINGER_MS);
        producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
        settings = Map.of("bootstrap.servers", proxy, "auto.offset.reset", "none", "isolation.level", "read_committed");
        consumer = new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
        ends = new long[producer.partitionsFor(topic).size()];
    }

    void load() throws Exception {
        var there = new Progress[ends.length];
        for (int p = 0; p < ends.length; p++) there[p] = last(new TopicPartition(topic, p));
        var known = Arrays.stream(there).filter(Objects::nonNull).toList();
        must(!known.isEmpty() || !recordsWereDeleted, "records were deleted: nothing shows whether the load ran");
        must(known.stream().allMatch(each -> each.partitions == ends.length), "expanded topic: use the Python library");
        complete = known.stream().mapToInt(Progress::complete).max().orElse(0);
        for (int group = complete; complete < lines.size(); complete = group) {
            var waiting = new ArrayList<List<Integer>>();
            for (int p = 0; p < ends.length; p++) waiting.add(new ArrayList<>());
            for (int bytes = 0; group < lines.size() && bytes < BATCH_BYTES; ) {
                int p = Utils.toPositive(Utils.murmur2(part(++group, 0))) % ends.length;
                if (there[p] == null || group > there[p].unit) waiting.get(p).add(group);
                bytes += part(group, 0).length + part(group, 1).length + 500; // with headers
                must(bytes < 2 * BATCH_BYTES, "line " + group + " is too long");
            }
            for (int p = 0; p < ends.length; p++) while (!isAppended(new TopicPartition(topic, p), waiting.get(p))) {}
        }
    }

    byte[] part(int unit, int number) { // 0: the key of a line, 1: its value
        return lines.get(unit - 1).split("\t", 2)[number].getBytes(UTF_8);
    }

    /** False: others' records were appended, and are read. An error: the outcome is unknown, or another loader runs. */
    boolean isAppended(TopicPartition to, List<Integer> units) throws Exception {
        long expected = ends[to.partition()], begun = System.nanoTime();
        var writeId = UUID.randomUUID().toString().getBytes(UTF_8);
        var results = new ArrayList<Future<RecordMetadata>>();
        for (int unit : units) {
            var record = new ProducerRecord<>(topic, to.partition(), part(unit, 0), part(unit, 1));
            var stated = "%d@%s/%d@%s".formatted(expected + results.size(), topic, to.partition(), cluster);
            record.headers().add("fencepost-expected-offset", stated.getBytes(UTF_8)).add("fencepost-write-id", writeId)
                    .add("fencepost-load", progress(unit).getBytes(UTF_8)); // on each record: the producer may divide a batch
            results.add(producer.send(record));
        }
        must(System.nanoTime() - begun < LINGER_MS / 2 * 1_000_000L, "stopped for long: a part may have been sent and refused");
        producer.flush();
        try {
            for (var result : results) result.get();
            ends[to.partition()] += units.size();
            return true;
        } catch (ExecutionException failed) {
            long actual = actualOf(failed.getCause()).orElseThrow(() -> failed);
            must(actual > expected && read(to, expected, actual) == null, "another loader runs, or the topic was replaced");
            return false;
        }
    }

    /** The log end that a refusal states; empty for another error. */
    static OptionalLong actualOf(Throwable error) {
        var found = MISMATCH.matcher(error instanceof PolicyViolationException ? error.getMessage() : "");
        return found.find() ? OptionalLong.of(Long.parseLong(found.group(1))) : OptionalLong.empty();
    }

    /** Reads a partition to its end: the newest progress of the load, or null. */
    Progress last(TopicPartition of) {
        long start = consumer.beginningOffsets(List.of(of)).get(of), end = consumer.endOffsets(List.of(of)).get(of);
        recordsWereDeleted |= start > 0;
        for (long count = 1000; ; count *= 100) {
            var progress = read(of, Math.max(start, end - count), end);
            if (progress != null || end - count <= start) return progress;
        }
    }

    Progress read(TopicPartition of, long from, long end) {
        Progress newest = null;
        consumer.assign(List.of(of));
        consumer.seek(of, from);
        for (ends[of.partition()] = from; ends[of.partition()] < end; ends[of.partition()] = consumer.position(of)) {
            for (var record : consumer.poll(Duration.ofSeconds(1))) {
                var h = record.headers().lastHeader("fencepost-load");
                var json = h == null ? "" : new String(h.value(), UTF_8);
                if (field(json, "load").equals(load)) newest = new Progress(Integer.parseInt(field(json, "unit")),
                        Integer.parseInt(field(json, "complete")), Integer.parseInt(field(json, "partitions")));
            }
        }
        return newest;
    }

    String progress(int unit) {
        return "{\"load\":\"%s\",\"run\":\"%s\",\"unit\":%d,\"rows\":1,\"at\":\"%s\",\"complete\":%d,\"position\":\"%s\",\"partitions\":%d}"
                .formatted(load, run, unit, base64(unit), complete, base64(complete), ends.length);
    }

    static String field(String json, String name) {
        var found = Pattern.compile("\"" + name + "\":\\s*\"?([^\",}]*)").matcher(json);
        return found.find() ? found.group(1) : "";
    }

    static String base64(int number) {
        return number == 0 ? "" : Base64.getEncoder().encodeToString(Integer.toString(number).getBytes(UTF_8));
    }

    static void must(boolean holds, String otherwise) {
        if (!holds) throw new IllegalStateException(otherwise);
    }

    public static void main(String[] args) throws Exception { new Load(args[0], args[1], args[2], Path.of(args[3])).load(); }
}
