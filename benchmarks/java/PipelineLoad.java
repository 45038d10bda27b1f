import java.nio.charset.StandardCharsets;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * An idempotent producer that sends to partition 0 of one topic at full speed, with several batches in flight.
 * Arguments: bootstrap, topic, number of records, record size, expected offset of the first record (or "-" for no
 * expected offsets), then settings as KEY=VALUE. The first record is sent alone and not measured. Prints
 * "RECORDS MILLISECONDS".
 */
public final class PipelineLoad {
    private static final long NO_EXPECTATION = -1;

    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", args[0]);
        settings.put("enable.idempotence", "true");
        for (int i = 5; i < args.length; i++) {
            String[] setting = args[i].split("=", 2);
            settings.put(setting[0], setting[1]);
        }
        int records = Integer.parseInt(args[2]);
        byte[] value = new byte[Integer.parseInt(args[3])];
        long first = args[4].equals("-") ? NO_EXPECTATION : Long.parseLong(args[4]);
        AtomicReference<Exception> failure = new AtomicReference<>();
        ByteArraySerializer bytes = new ByteArraySerializer();
        try (KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(settings, bytes, bytes)) {
            producer.send(record(args[1], value, first, 0)).get();
            long started = System.nanoTime();
            for (int i = 1; i < records && failure.get() == null; i++) {
                producer.send(record(args[1], value, first, i), (metadata, error) -> {
                    if (error != null) failure.compareAndSet(null, error);
                });
            }
            producer.flush();
            if (failure.get() != null) throw failure.get();
            System.out.println(records - 1 + " " + (System.nanoTime() - started) / 1e6);
        }
    }

    private static ProducerRecord<byte[], byte[]> record(String topic, byte[] value, long first, int number) {
        ProducerRecord<byte[], byte[]> record = new ProducerRecord<>(topic, 0, null, value);
        if (first != NO_EXPECTATION) {
            record.headers().add("fencepost-expected-offset", Long.toString(first + number).getBytes(StandardCharsets.US_ASCII));
        }
        return record;
    }
}
