//! Produce requests about one topic and their responses, in the usual form. See `wire/produce.py` for the versions.

use crate::bytes::{Cursor, put_uvarint};

const BY_ID_VERSION: i16 = 13;
pub const FLEXIBLE: i16 = 9;
/// Versions from which a response has a log start offset, and record errors with a message.
const LOG_START_OFFSET: i16 = 5;
const RECORD_ERRORS: i16 = 8;
const ACKS_ALL: i16 = -1;
/// Larger array lengths take more than one byte.
const COUNT_MAX: usize = 0x7F;
const PARTITION_BYTES: usize = 33;
const TOPIC_ID_BYTES: usize = 16;
const LENGTH_BYTES: usize = 4;
/// The end of a partition in a flexible response: no record errors, no message, no tagged field.
const NO_MORE: [u8; 3] = [1, 0, 0];
/// The same before that: no record errors, no message.
const NO_MORE_V8: [u8; 6] = [0, 0, 0, 0, 0xFF, 0xFF];
const BATCH_HEADER_BYTES: usize = 61;
const PRODUCER_ID_AT: usize = 43;
const FEW_PARTITIONS: usize = 100;

/// A partition's batch: where it is in the frame.
pub struct Batch {
    pub partition: i32,
    pub start: usize,
    pub end: usize,
}

/// The length of an array, or of bytes. `None` for null too.
fn read_length(cursor: &mut Cursor<'_>, version: i16) -> Option<usize> {
    if version < FLEXIBLE { usize::try_from(cursor.i32()?).ok() } else { cursor.uvarint()?.checked_sub(1) }
}

fn read_no_tagged_fields(cursor: &mut Cursor<'_>, version: i16) -> Option<()> {
    (version < FLEXIBLE || cursor.u8()? == 0).then_some(())
}

/// `at` is the end of the topic's name or id in `frame`.
pub fn read_request(frame: &[u8], at: usize, version: i16) -> Option<Vec<Batch>> {
    let mut cursor = Cursor::new(frame, at);
    let count = read_length(&mut cursor, version)?;
    if !(1..COUNT_MAX).contains(&count) {
        return None;
    }
    let mut batches = Vec::with_capacity(count);
    for _ in 0..count {
        let partition = cursor.i32()?;
        let size = read_length(&mut cursor, version)?;
        let start = cursor.at;
        cursor.take(size)?;
        read_no_tagged_fields(&mut cursor, version)?;
        if size == 0 || batches.iter().any(|each: &Batch| each.partition == partition) {
            return None;
        }
        batches.push(Batch { partition, start, end: start + size });
    }
    for _topic_and_request in 0..2 {
        read_no_tagged_fields(&mut cursor, version)?;
    }
    (cursor.at == frame.len()).then_some(batches)
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
    let topic_tagged_fields = cursor.u8()?;
    let throttle = cursor.i32()?;
    (topic_tagged_fields == 0 && cursor.u8()? == 0).then_some((throttle, partitions))
}

/// A successful response. `topic`: its name or id as encoded in the request.
pub fn response(version: i16, correlation_id: i32, topic: &[u8], partitions: &[Appended], throttle: i32) -> Vec<u8> {
    let no_tagged_fields: &[u8] = if version < FLEXIBLE { &[] } else { &[0] };
    let no_more: &[u8] = match version {
        FLEXIBLE.. => &NO_MORE,
        RECORD_ERRORS.. => &NO_MORE_V8,
        _ => &[],
    };
    let mut out = Vec::with_capacity(24 + topic.len() + partitions.len() * (PARTITION_BYTES + NO_MORE_V8.len()));
    out.extend_from_slice(&[0; LENGTH_BYTES]);
    out.extend_from_slice(&correlation_id.to_be_bytes());
    out.extend_from_slice(no_tagged_fields);
    put_length(&mut out, version, 1);
    out.extend_from_slice(topic);
    put_length(&mut out, version, partitions.len());
    for each in partitions {
        out.extend_from_slice(&each.partition.to_be_bytes());
        out.extend_from_slice(&0i16.to_be_bytes());
        out.extend_from_slice(&each.base_offset.to_be_bytes());
        out.extend_from_slice(&each.append_time_ms.to_be_bytes());
        if version >= LOG_START_OFFSET {
            out.extend_from_slice(&each.log_start.to_be_bytes());
        }
        out.extend_from_slice(no_more);
    }
    out.extend_from_slice(no_tagged_fields);
    out.extend_from_slice(&throttle.to_be_bytes());
    out.extend_from_slice(no_tagged_fields);
    let length = (out.len() - LENGTH_BYTES) as i32;
    out[..LENGTH_BYTES].copy_from_slice(&length.to_be_bytes());
    out
}

fn put_length(out: &mut Vec<u8>, version: i16, length: usize) {
    if version < FLEXIBLE {
        out.extend_from_slice(&(length as i32).to_be_bytes());
    } else {
        put_uvarint(out, length + 1);
    }
}

/// The producer ids of a request about one topic with few partitions. `at`: the end of the topic's name or id.
pub fn producer_ids(frame: &[u8], at: usize, version: i16) -> Option<Vec<i64>> {
    let mut cursor = Cursor::new(frame, at);
    let count = read_length(&mut cursor, version)?;
    if !(1..=FEW_PARTITIONS).contains(&count) {
        return None;
    }
    let mut found = Vec::with_capacity(count);
    for index in 0..count {
        if index > 0 {
            read_no_tagged_fields(&mut cursor, version)?;
        }
        cursor.i32()?;
        let length = read_length(&mut cursor, version)?;
        let batch = cursor.take(length)?;
        if length >= BATCH_HEADER_BYTES {
            found.push(Cursor::new(batch, PRODUCER_ID_AT).i64()?);
        }
    }
    Some(found)
}

/// Whether a Produce response certainly has no tagged field, such as the addresses of brokers. `frame`: with its length.
pub fn names_no_broker(frame: &[u8], version: i16) -> bool {
    version < FLEXIBLE || read_usual_response(frame, version >= BY_ID_VERSION).is_some()
}

fn read_usual_response(frame: &[u8], by_id: bool) -> Option<()> {
    let mut cursor = Cursor::new(frame, 8);
    let (tagged_fields, topics) = (cursor.u8()?, cursor.u8()?);
    if tagged_fields != 0 || !(2..=COUNT_MAX as u8).contains(&topics) {
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
