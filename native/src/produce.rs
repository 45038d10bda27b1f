//! Produce requests about one topic and their responses, in the usual form. See `wire/one_topic.py`, `wire/peeks.py`.

use crate::bytes::{Cursor, put_uvarint};

const BY_ID_VERSION: i16 = 13;
pub const FLEXIBLE: i16 = 9;
const ACKS_ALL: i16 = -1;
/// Larger array lengths take more than one byte.
const COUNT_MAX: usize = 0x7F;
const PARTITION_BYTES: usize = 33;
const TOPIC_ID_BYTES: usize = 16;
/// No record errors, no message, no tags.
const NO_MORE: [u8; 3] = [1, 0, 0];
const BATCH_HEADER_BYTES: usize = 61;
const PRODUCER_ID_AT: usize = 43;
const FEW_PARTITIONS: i64 = 100;

/// A partition's batch: where it is in the frame.
pub struct Batch {
    pub partition: i32,
    pub start: usize,
    pub end: usize,
}

/// `frame` excludes its length; `at` is the end of the topic's name or id.
pub fn read_request(frame: &[u8], at: usize) -> Option<Vec<Batch>> {
    let mut cursor = Cursor::new(frame, at);
    let length = usize::from(cursor.u8()?);
    if !(2..=COUNT_MAX).contains(&length) {
        return None;
    }
    let mut batches = Vec::with_capacity(length - 1);
    for _ in 1..length {
        let partition = cursor.i32()?;
        let size = cursor.uvarint()?.checked_sub(2)? + 1;
        let start = cursor.at;
        cursor.take(size)?;
        if cursor.u8()? != 0 || batches.iter().any(|each: &Batch| each.partition == partition) {
            return None;
        }
        batches.push(Batch { partition, start, end: start + size });
    }
    (cursor.take(2)? == [0, 0] && cursor.at == frame.len()).then_some(batches)
}

/// The head of a Produce v13 request. `rest_bytes`: length of what follows it.
pub fn request_head(
    correlation_id: i32,
    before_acks: &[u8],
    timeout_ms: i32,
    topic_id: &[u8; 16],
    count: usize,
    rest_bytes: usize,
) -> Vec<u8> {
    let length = 8 + before_acks.len() + 6 + 1 + 16 + 1 + rest_bytes;
    let mut out = Vec::with_capacity(length + 4);
    out.extend_from_slice(&(length as i32).to_be_bytes());
    out.extend_from_slice(&0i16.to_be_bytes());
    out.extend_from_slice(&BY_ID_VERSION.to_be_bytes());
    out.extend_from_slice(&correlation_id.to_be_bytes());
    out.extend_from_slice(before_acks);
    out.extend_from_slice(&ACKS_ALL.to_be_bytes());
    out.extend_from_slice(&timeout_ms.to_be_bytes());
    out.push(2);
    out.extend_from_slice(topic_id);
    out.push(count as u8 + 1);
    out
}

/// What precedes the records of a partition: its index, the length, and the batch's header.
pub fn partition_head(partition: i32, batch_bytes: usize, header: &[u8; BATCH_HEADER_BYTES]) -> Vec<u8> {
    let mut out = Vec::with_capacity(4 + 5 + BATCH_HEADER_BYTES);
    out.extend_from_slice(&partition.to_be_bytes());
    put_uvarint(&mut out, batch_bytes + 1);
    out.extend_from_slice(header);
    out
}

/// One partition in a successful response.
#[derive(Clone, Copy)]
pub struct Appended {
    pub partition: i32,
    pub base_offset: i64,
    pub append_time_ms: i64,
    pub log_start: i64,
}

/// Throttle time and partitions of a v13 response, if all of them succeeded. `frame` excludes its length.
pub fn read_response(frame: &[u8], topic_id: &[u8; 16], count: usize) -> Option<(i32, Vec<Appended>)> {
    if frame.len() != 23 + count * PARTITION_BYTES + 6 {
        return None;
    }
    let mut cursor = Cursor::new(frame, 4);
    if cursor.take(2)? != [0, 2] || cursor.take(16)? != topic_id || usize::from(cursor.u8()?) != count + 1 {
        return None;
    }
    let mut partitions = Vec::with_capacity(count);
    for _ in 0..count {
        let partition = cursor.i32()?;
        let error = cursor.i16()?;
        let each =
            Appended { partition, base_offset: cursor.i64()?, append_time_ms: cursor.i64()?, log_start: cursor.i64()? };
        if error != 0 || cursor.take(3)? != NO_MORE {
            return None;
        }
        partitions.push(each);
    }
    let topic_tags = cursor.u8()?;
    let throttle = cursor.i32()?;
    (topic_tags == 0 && cursor.u8()? == 0).then_some((throttle, partitions))
}

/// The response of v9 to v13. `topic`: its name or id as encoded in the request.
pub fn response(correlation_id: i32, topic: &[u8], partitions: &[Appended], throttle: i32) -> Vec<u8> {
    let length = 4 + 1 + 1 + topic.len() + 1 + partitions.len() * PARTITION_BYTES + 6;
    let mut out = Vec::with_capacity(length + 4);
    out.extend_from_slice(&(length as i32).to_be_bytes());
    out.extend_from_slice(&correlation_id.to_be_bytes());
    out.extend_from_slice(&[0, 2]);
    out.extend_from_slice(topic);
    out.push(partitions.len() as u8 + 1);
    for each in partitions {
        out.extend_from_slice(&each.partition.to_be_bytes());
        out.extend_from_slice(&0i16.to_be_bytes());
        for number in [each.base_offset, each.append_time_ms, each.log_start] {
            out.extend_from_slice(&number.to_be_bytes());
        }
        out.extend_from_slice(&NO_MORE);
    }
    out.push(0);
    out.extend_from_slice(&throttle.to_be_bytes());
    out.push(0);
    out
}

/// The producer ids of a request about one topic with few partitions. `at`: the end of the topic's name or id.
pub fn producer_ids(frame: &[u8], at: usize, version: i16) -> Option<Vec<i64>> {
    let flexible = version >= FLEXIBLE;
    let mut cursor = Cursor::new(frame, at);
    let count = if flexible { cursor.uvarint()? as i64 - 1 } else { i64::from(cursor.i32()?) };
    if !(1..=FEW_PARTITIONS).contains(&count) {
        return None;
    }
    let mut found = Vec::with_capacity(count as usize);
    for index in 0..count {
        if index > 0 && flexible && cursor.u8()? != 0 {
            return None;
        }
        cursor.i32()?;
        let length = if flexible { cursor.uvarint()?.checked_sub(1)? } else { usize::try_from(cursor.i32()?).ok()? };
        let batch = cursor.take(length)?;
        if length >= BATCH_HEADER_BYTES {
            found.push(Cursor::new(batch, PRODUCER_ID_AT).i64()?);
        }
    }
    Some(found)
}

/// Whether a Produce response certainly has no tagged field, such as the addresses of brokers. `frame`: with its length.
pub fn names_no_broker(frame: &[u8], version: i16) -> bool {
    version < FLEXIBLE || read_plain_response(frame, version >= BY_ID_VERSION).is_some()
}

fn read_plain_response(frame: &[u8], by_id: bool) -> Option<()> {
    let mut cursor = Cursor::new(frame, 8);
    let (tags, topics) = (cursor.u8()?, cursor.u8()?);
    if tags != 0 || !(2..=COUNT_MAX as u8).contains(&topics) {
        return None;
    }
    for _ in 1..topics {
        let name_bytes = if by_id { TOPIC_ID_BYTES } else { usize::from(cursor.u8()?).checked_sub(1)? };
        if name_bytes >= COUNT_MAX {
            return None;
        }
        cursor.take(name_bytes)?;
        let partitions = usize::from(cursor.u8()?).checked_sub(1)?;
        if partitions >= COUNT_MAX {
            return None;
        }
        for _ in 0..partitions {
            cursor.take(PARTITION_BYTES - 3)?;
            let more = cursor.take(3)?;
            if more[0] > 1 || more[1..] != [0, 0] {
                return None;
            }
        }
        if cursor.u8()? != 0 {
            return None;
        }
    }
    cursor.take(4)?; // throttle time
    (cursor.u8()? == 0 && cursor.at == frame.len()).then_some(())
}
