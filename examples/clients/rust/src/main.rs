//! Appends one record at the end of partition 0. Arguments: proxy, topic, value.
//!
//!     cargo run -- 127.0.0.1:19092 orders one
use std::error::Error;
use std::sync::Mutex;
use std::time::Duration;

use futures_executor::block_on;
use rdkafka::admin::{AdminClient, AdminOptions, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, Headers, Message, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, DeliveryResult, Producer, ProducerContext};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka::ClientContext;

const SECONDS: Duration = Duration::from_secs(30);

/// Keeps the outcome of the last record: its offset or error.
#[derive(Default)]
struct Outcome(Mutex<Option<Result<i64, KafkaError>>>);

impl ClientContext for Outcome {}

impl ProducerContext for Outcome {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, _: ()) {
        let outcome = result.as_ref().map(Message::offset).map_err(|(error, _)| error.clone());
        *self.0.lock().unwrap() = Some(outcome);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let [proxy, topic, value]: [String; 3] = std::env::args().skip(1).collect::<Vec<_>>().try_into().unwrap();
    let write_id = format!("{:?}-{}", std::time::SystemTime::now(), std::process::id());
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", &proxy).set("enable.idempotence", "true");
    let producer: BaseProducer<Outcome> = config.create_with_context(Outcome::default())?;
    let mut reading = config.clone();
    reading.set("group.id", "append").set("enable.auto.commit", "false");
    reading.set("enable.partition.eof", "true"); // the last record may be a transaction marker, which is no message
    let consumer: BaseConsumer = reading.create()?;
    let admin: AdminClient<DefaultClientContext> = config.create()?;
    let found = block_on(admin.describe_configs(&[ResourceSpecifier::Topic(&topic)], &AdminOptions::new()))?;
    let configs = found.into_iter().next().ok_or("no configs")??;
    let check = configs.entry_map().get("fencepost.check.expected.offsets").and_then(|entry| entry.value.clone());
    if check.is_none_or(|check| check == "false") {
        return Err(format!("{topic} does not check expected offsets: they would be ignored").into());
    }
    // Other tools copy headers with records: an expected offset with this suffix counts only where it was made for.
    let binding = match producer.client().fetch_cluster_id(SECONDS) {
        Some(cluster_id) => format!("@{topic}/0@{cluster_id}"),
        None => format!("@{topic}/0"),
    };
    let mut expected = 0; // nothing is read yet
    loop {
        let offset = format!("{expected}{binding}");
        let headers = OwnedHeaders::new()
            .insert(Header { key: "fencepost-expected-offset", value: Some(&offset) })
            .insert(Header { key: "fencepost-write-id", value: Some(&write_id) });
        let record: BaseRecord<'_, (), String> = BaseRecord::to(&topic).partition(0).payload(&value).headers(headers);
        producer.send(record).map_err(|(error, _)| error)?;
        producer.flush(SECONDS)?;
        match producer.context().0.lock().unwrap().take() {
            Some(Ok(offset)) => return Ok(println!("appended at {offset}")),
            Some(Err(KafkaError::MessageProduction(RDKafkaErrorCode::PolicyViolation))) => {
                println!("refused: expected {expected}")
            }
            other => return Err(format!("{other:?}").into()), // the outcome is unknown, or a retry does not help
        }
        // Read what others have appended, then decide again. This also shows whether an earlier attempt succeeded.
        let (_, end) = consumer.fetch_watermarks(&topic, 0, SECONDS)?;
        let mut from = TopicPartitionList::new();
        from.add_partition_offset(&topic, 0, Offset::Offset(expected))?;
        consumer.assign(&from)?;
        while expected < end {
            let read = match consumer.poll(SECONDS).ok_or("no records")? {
                Ok(read) => read,
                Err(KafkaError::PartitionEOF(_)) => {
                    expected = end;
                    break;
                }
                Err(_) => continue, // such as a lost connection: librdkafka reconnects
            };
            let id = read.headers().and_then(|all| all.iter().find(|each| each.key == "fencepost-write-id"));
            if id.and_then(|each| each.value) == Some(write_id.as_bytes()) {
                return Ok(println!("appended at {}", read.offset()));
            }
            expected = read.offset() + 1;
        }
    }
}
