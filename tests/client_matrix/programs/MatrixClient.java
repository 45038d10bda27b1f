import java.io.FileReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/** Arguments: properties for the connection, topic, group, transactional id, codecs, whether to have a record refused. */
public final class MatrixClient {
    private static final int RECORDS = 3;

    private final String connection;
    private final String topic;

    private MatrixClient(String connection, String topic) {
        this.connection = connection;
        this.topic = topic;
    }

    private Properties settings(Map<String, String> more) throws Exception {
        Properties settings = new Properties();
        settings.load(new FileReader(connection));
        settings.putAll(more);
        return settings;
    }

    private KafkaProducer<String, String> producer(Map<String, String> more) throws Exception {
        return new KafkaProducer<>(settings(more), new StringSerializer(), new StringSerializer());
    }

    private ProducerRecord<String, String> record(String value, String header, String headerValue) {
        ProducerRecord<String, String> record = new ProducerRecord<>(topic, 0, "k", value);
        record.headers().add(header, headerValue.getBytes(StandardCharsets.UTF_8));
        return record;
    }

    private static void say(String name, Object value) {
        System.out.println(name + "\t" + value);
    }

    public static void main(String[] args) throws Exception {
        MatrixClient client = new MatrixClient(args[0], args[1]);
        for (String codec : args[4].split(",")) {
            List<Long> offsets = new ArrayList<>();
            try (KafkaProducer<String, String> producer = client.producer(Map.of("compression.type", codec))) {
                for (int i = 0; i < RECORDS; i++) {
                    offsets.add(producer.send(client.record(codec, "h", "v")).get().offset());
                }
            }
            say(codec, offsets);
        }

        try (KafkaProducer<String, String> producer = client.producer(Map.of("transactional.id", args[3]))) {
            producer.initTransactions();
            for (String value : List.of("committed", "aborted")) {
                producer.beginTransaction();
                say(value, producer.send(client.record(value, "h", "v")).get().offset());
                if (value.equals("committed")) {
                    producer.commitTransaction();
                } else {
                    producer.abortTransaction();
                }
            }
        }

        if (args[5].equals("true")) {
            try (KafkaProducer<String, String> producer = client.producer(Map.of())) {
                try {
                    say("refused", producer.send(client.record("x", "fencepost-expected-offset", "0")).get().offset());
                } catch (ExecutionException failure) {
                    say("refused", failure.getCause());
                }
                producer.send(client.record("x", "h", "v")).get();
                say("after", "appended");
            }
        }

        Map<String, String> reading = Map.of(
                "group.id", args[2], "auto.offset.reset", "earliest", "isolation.level", "read_committed", "enable.auto.commit", "false");
        List<String> read = new ArrayList<>();
        try (KafkaConsumer<String, String> consumer =
                new KafkaConsumer<>(client.settings(reading), new StringDeserializer(), new StringDeserializer())) {
            consumer.subscribe(List.of(client.topic));
            while (!read.contains("committed")) {
                for (ConsumerRecord<String, String> each : consumer.poll(Duration.ofSeconds(1))) {
                    if (!read.contains("committed")) {
                        read.add(each.value());
                    }
                }
            }
            consumer.commitSync();
        }
        say("group", read);
    }
}
