import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.consumer.ConsumerGroupMetadata;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * A process with transactional producers that runs the commands of tests/support/transactional_worker.py, its equivalent
 * for the Python clients. Argument: bootstrap.
 */
public final class TransactionalWorker {
    private static final long PATIENCE_SECONDS = 60;
    private static final Duration POLL = Duration.ofMillis(200);

    private static final Map<String, KafkaProducer<String, String>> instances = new HashMap<>();
    private static String bootstrap;

    public static void main(String[] args) throws Exception {
        bootstrap = args[0];
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String told;
            try {
                told = ("ok " + done(line.split(" "))).strip();
            } catch (ExecutionException failure) {
                told = failed(failure.getCause());
            } catch (Exception failure) {
                told = failed(failure);
            }
            System.out.println(told.replace('\n', ' '));
            System.out.flush();
        }
        Runtime.getRuntime().halt(0);
    }

    private static String failed(Throwable failure) {
        return "error " + failure.getClass().getSimpleName() + " " + failure.getMessage();
    }

    private static String done(String[] said) throws Exception {
        switch (said[0]) {
            case "init" -> {
                Properties settings = new Properties();
                settings.put("bootstrap.servers", bootstrap);
                boolean plain = said[2].equals("-");
                if (!plain) {
                    settings.put("transactional.id", said[2]);
                    settings.put("transaction.timeout.ms", said[3]);
                }
                settings.put("linger.ms", "0");
                settings.put("key.serializer", StringSerializer.class.getName());
                settings.put("value.serializer", StringSerializer.class.getName());
                KafkaProducer<String, String> producer = new KafkaProducer<>(settings);
                instances.put(said[1], producer);
                if (!plain) producer.initTransactions();
            }
            case "begin" -> instances.get(said[1]).beginTransaction();
            case "commit" -> instances.get(said[1]).commitTransaction();
            case "abort" -> instances.get(said[1]).abortTransaction();
            case "close" -> instances.get(said[1]).close(Duration.ofSeconds(5));
            case "send" -> {
                ProducerRecord<String, String> record =
                        new ProducerRecord<>(said[2], Integer.parseInt(said[3]), null, said[4]);
                if (!said[5].equals("-")) {
                    record.headers().add("fencepost-expected-offset", said[5].getBytes(StandardCharsets.US_ASCII));
                }
                return "" + instances.get(said[1]).send(record).get(PATIENCE_SECONDS, TimeUnit.SECONDS).offset();
            }
            case "offsets" -> offsets(instances.get(said[1]), said[2], said[3], said[4], Long.parseLong(said[5]));
            case "read" -> {
                return String.join(" ", read(said[1], said[2], said[3], said[4], Long.parseLong(said[5])));
            }
            case "transform" -> transform(instances.get(said[1]), said[2], said[3], said[4], said[5]);
            case "forward" -> forward(instances.get(said[1]), said[2], said[3], said[4], said[5]);
            default -> throw new IllegalArgumentException(String.join(" ", said));
        }
        return "";
    }

    private static void offsets(
            KafkaProducer<String, String> producer, String group, String topic, String partition, long offset) {
        TopicPartition where = new TopicPartition(topic, Integer.parseInt(partition));
        producer.sendOffsetsToTransaction(
                Map.of(where, new OffsetAndMetadata(offset)), new ConsumerGroupMetadata(group));
    }

    private static KafkaConsumer<String, String> reader(String topic, String partition, String level, String group) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", bootstrap);
        settings.put("isolation.level", "read_" + level);
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", "false");
        settings.put("max.poll.records", "20");
        if (group != null) settings.put("group.id", group);
        settings.put("key.deserializer", StringDeserializer.class.getName());
        settings.put("value.deserializer", StringDeserializer.class.getName());
        KafkaConsumer<String, String> consumer = new KafkaConsumer<>(settings);
        consumer.assign(List.of(new TopicPartition(topic, Integer.parseInt(partition))));
        return consumer;
    }

    private static List<String> read(String topic, String partition, String level, String stop, long idleMillis) {
        List<String> values = new ArrayList<>();
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(PATIENCE_SECONDS);
        try (KafkaConsumer<String, String> consumer = reader(topic, partition, level, null)) {
            while (!values.contains(stop) && System.nanoTime() < deadline) {
                int before = values.size();
                for (ConsumerRecord<String, String> record : consumer.poll(POLL)) values.add(record.value());
                if (values.size() > before && idleMillis > 0) {
                    deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(idleMillis);
                }
            }
        }
        return values;
    }

    private static void transform(
            KafkaProducer<String, String> producer, String group, String source, String target, String partition)
            throws Exception {
        try (KafkaConsumer<String, String> consumer = reader(source, partition, "committed", group)) {
            while (true) {
                List<ConsumerRecord<String, String>> found = awaited(consumer);
                producer.beginTransaction();
                at("send");
                for (ConsumerRecord<String, String> record : found) send(producer, target, partition, record);
                long next = found.get(found.size() - 1).offset() + 1;
                at("offsets");
                offsets(producer, group, source, partition, next);
                at("commit");
                producer.commitTransaction();
                System.out.println("ok " + next);
                System.out.flush();
            }
        }
    }

    private static void forward(
            KafkaProducer<String, String> producer, String group, String source, String target, String partition)
            throws Exception {
        try (KafkaConsumer<String, String> consumer = reader(source, partition, "committed", group)) {
            while (true) {
                List<ConsumerRecord<String, String>> found = awaited(consumer);
                at("send");
                List<Future<RecordMetadata>> sent = new ArrayList<>();
                for (ConsumerRecord<String, String> record : found) sent.add(send(producer, target, partition, record));
                for (Future<RecordMetadata> each : sent) each.get(PATIENCE_SECONDS, TimeUnit.SECONDS);
                long next = found.get(found.size() - 1).offset() + 1;
                at("commit");
                consumer.commitSync(Map.of(
                        new TopicPartition(source, Integer.parseInt(partition)), new OffsetAndMetadata(next)));
                System.out.println("ok " + next);
                System.out.flush();
            }
        }
    }

    private static Future<RecordMetadata> send(
            KafkaProducer<String, String> producer,
            String target,
            String partition,
            ConsumerRecord<String, String> record) {
        return producer.send(new ProducerRecord<>(target, Integer.parseInt(partition), null, record.value()));
    }

    private static List<ConsumerRecord<String, String>> awaited(KafkaConsumer<String, String> consumer) {
        at("poll");
        List<ConsumerRecord<String, String>> found = new ArrayList<>();
        while (found.isEmpty()) consumer.poll(POLL).forEach(found::add);
        return found;
    }

    private static void at(String step) {
        System.err.println("at " + step + " " + System.currentTimeMillis() / 1e3);
    }
}
