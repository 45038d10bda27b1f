import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.internals.RecordHeaders;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;

/**
 * Copies records with their headers: bootstrap, input topic, output topic of Kafka Streams, dead-letter topic, number of
 * records, state directory. The dead-letter route does what Spring's DeadLetterPublishingRecoverer does: the same
 * partition, key, value and headers, and headers about the failure.
 */
public final class CopyHeaders {
    public static void main(String[] args) throws Exception {
        int count = Integer.parseInt(args[4]);
        Properties properties = new Properties();
        properties.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, args[0]);
        properties.put(StreamsConfig.APPLICATION_ID_CONFIG, "copy-" + args[1]);
        properties.put(StreamsConfig.STATE_DIR_CONFIG, args[5]);
        properties.put(StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, Serdes.ByteArray().getClass());
        properties.put(StreamsConfig.DEFAULT_VALUE_SERDE_CLASS_CONFIG, Serdes.ByteArray().getClass());
        properties.put(StreamsConfig.consumerPrefix("auto.offset.reset"), "earliest");
        StreamsBuilder builder = new StreamsBuilder();
        builder.<byte[], byte[]>stream(args[1]).mapValues(value -> value).to(args[2]);
        KafkaStreams streams = new KafkaStreams(builder.build(), properties);
        streams.start();

        Map<String, Object> settings = Map.of("bootstrap.servers", args[0]);
        var input = new TopicPartition(args[1], 0);
        var output = new TopicPartition(args[2], 0);
        var bytes = new ByteArrayDeserializer();
        try (var consumer = new KafkaConsumer<>(settings, bytes, bytes);
                var producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            consumer.assign(List.of(input));
            consumer.seekToBeginning(List.of(input));
            for (int read = 0; read < count; ) {
                for (ConsumerRecord<byte[], byte[]> each : consumer.poll(Duration.ofSeconds(1))) {
                    var headers = new RecordHeaders(each.headers().toArray());
                    headers.add("kafka_dlt-exception-message", "failed".getBytes(StandardCharsets.UTF_8));
                    headers.add("kafka_dlt-original-topic", each.topic().getBytes(StandardCharsets.UTF_8));
                    producer.send(new ProducerRecord<>(args[3], each.partition(), each.key(), each.value(), headers)).get();
                    read++;
                }
            }
            System.out.println("dead letters written");
            while (consumer.endOffsets(List.of(output)).get(output) <= count && streams.state().isRunningOrRebalancing()) {
                Thread.sleep(100);
            }
            System.out.println("streams " + streams.state());
        }
        streams.close(Duration.ofSeconds(30));
    }
}
