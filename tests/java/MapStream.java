import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.processor.api.ContextualProcessor;
import org.apache.kafka.streams.processor.api.ProcessorSupplier;
import org.apache.kafka.streams.processor.api.Record;

/**
 * Kafka Streams without state: bootstrap, application id, input topic, output topic, state directory, protocol. Prints
 * {@code mapped <partition> <offset>} for each record, until it is killed.
 */
public final class MapStream {
    public static void main(String[] args) throws Exception {
        Properties properties = new Properties();
        properties.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, args[0]);
        properties.put(StreamsConfig.APPLICATION_ID_CONFIG, args[1]);
        properties.put(StreamsConfig.STATE_DIR_CONFIG, args[4]);
        properties.put("group.protocol", args[5]);
        properties.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, "100");
        properties.put(StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, Serdes.String().getClass());
        properties.put(StreamsConfig.DEFAULT_VALUE_SERDE_CLASS_CONFIG, Serdes.String().getClass());
        properties.put(StreamsConfig.consumerPrefix(ConsumerConfig.AUTO_OFFSET_RESET_CONFIG), "earliest");
        properties.put(StreamsConfig.consumerPrefix(ConsumerConfig.METADATA_MAX_AGE_CONFIG), "500");
        properties.put(StreamsConfig.consumerPrefix(ConsumerConfig.HEARTBEAT_INTERVAL_MS_CONFIG), "300");
        ProcessorSupplier<String, String, Void, Void> supplier = () -> new ContextualProcessor<>() {
            @Override
            public void process(Record<String, String> record) {
                context().recordMetadata().ifPresent(place -> {
                    System.out.println("mapped " + place.partition() + " " + place.offset());
                    System.out.flush();
                });
            }
        };
        StreamsBuilder builder = new StreamsBuilder();
        builder.<String, String>stream(args[2]).process(supplier);
        KafkaStreams streams = new KafkaStreams(builder.build(), properties);
        streams.start();
        Thread.sleep(Long.MAX_VALUE);
    }
}
