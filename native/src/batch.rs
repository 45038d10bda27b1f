//! One record batch of a Produce request: its header, its CRC, what its records state, and its fence.
//!
//! The layout is described in `wire/batch.py`, the record headers in `wire/batch_scan.py`. `None` always means: not the
//! usual form; Python decides.

use memchr::memmem::Finder;
use twox_hash::xxhash3_128;

use crate::bytes::{Cursor, crc32c};

pub const HEADER_BYTES: usize = 61;
const LENGTH_ENDS: usize = 12;
const ATTRIBUTES_AT: usize = 21;
const CRC_AT: usize = 17;
const MAGIC: u8 = 2;
/// Compressed, transactional or control batches are for Python.
const UNUSUAL_ATTRIBUTES: i16 = 0x07 | 0x10 | 0x20;
const INSTANCE_ID_BIT: u32 = 7;
const INSTANCE_ID_MAX: i16 = 0xFF;
/// Up to this many records, and records of this size on average, are always parsed: that takes less time than to search
/// them for the names of headers.
const WALKED_RECORDS_MAX: i32 = 2;
const WALKED_RECORD_BYTES: usize = 512;
/// See `_newest_delta` in `wire/batch_scan.py`.
const TIMESTAMP_SLACK_MS: i64 = 1000;
const TIMED_RECORDS_MAX: i32 = 1000;
const DIGITS_MAX: usize = 19;

pub type Digest = [u8; 28];

/// Names of the record headers that the proxy reads. Each occurs with and without the prefix `fencepost-`.
pub struct HeaderNames {
    finders: [Finder<'static>; 3],
    names: [Vec<u8>; 3],
    short: [Vec<u8>; 3],
}

#[derive(Clone, Copy, PartialEq)]
enum Name {
    ExpectedOffset,
    PartitionCount,
    WriteId,
}

const NAMES: [Name; 3] = [Name::ExpectedOffset, Name::PartitionCount, Name::WriteId];

impl HeaderNames {
    pub fn new(names: [Vec<u8>; 3]) -> Self {
        let short = names.clone().map(|name| name.strip_prefix(b"fencepost-").unwrap_or(&name).to_vec());
        let finders = short.clone().map(|name| Finder::new(&name).into_owned());
        HeaderNames { finders, names, short }
    }

    fn occur_in(&self, payload: &[u8]) -> bool {
        self.finders.iter().any(|finder| finder.find(payload).is_some())
    }

    fn which(&self, spelling: &[u8]) -> Option<Name> {
        (0..NAMES.len()).find(|&i| self.names[i] == spelling || self.short[i] == spelling).map(|i| NAMES[i])
    }
}

/// For which a batch is: header values may name it. See `wire/statements.py`.
pub struct Target<'a> {
    pub topic: &'a [u8],
    pub partition: i32,
    pub cluster_id: Option<&'a [u8]>,
}

impl Target<'_> {
    /// Whether `stated`, what follows a number, is of this form: `@TOPIC/PARTITION`, perhaps `@CLUSTER_ID`.
    fn is_named_by(&self, stated: &[u8]) -> bool {
        let Some(partition) = stated.strip_prefix(b"@").and_then(|rest| rest.strip_prefix(self.topic)) else {
            return false;
        };
        let Some(partition) = partition.strip_prefix(b"/") else {
            return false;
        };
        let digits = partition.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let (number, stated) = partition.split_at(digits);
        let canonical = !(number.len() > 1 && number[0] == b'0');
        let number = std::str::from_utf8(number).ok().and_then(|number| number.parse::<i32>().ok());
        if !canonical || number != Some(self.partition) {
            return false;
        }
        stated.is_empty() || stated.strip_prefix(b"@").is_some_and(|stated| self.cluster_id == Some(stated))
    }
}

/// A batch, and what it states.
pub struct Scan {
    pub record_count: i32,
    pub producer_id: i64,
    pub producer_epoch: i16,
    pub base_sequence: i32,
    pub expected: Option<i64>,
    pub write_id: Option<Vec<u8>>,
    pub max_timestamp_ms: i64,
    pub digest: Digest,
}

pub fn scan(batch: &[u8], names: &HeaderNames, target: &Target, seed: u64, source_is_base: bool) -> Option<Scan> {
    let mut at = Cursor::new(batch, 0);
    let base_offset = at.i64()?;
    let length = at.i32()?;
    at.i32()?; // leader epoch
    let magic = at.u8()?;
    let crc = at.i32()? as u32;
    let attributes = at.i16()?;
    let last_offset_delta = at.i32()?;
    let base_timestamp = at.i64()?;
    let max_timestamp = at.i64()?;
    let producer_id = at.i64()?;
    let producer_epoch = at.i16()?;
    let base_sequence = at.i32()?;
    let record_count = at.i32()?;
    let payload = batch.get(HEADER_BYTES..)?;
    if magic != MAGIC || attributes & UNUSUAL_ATTRIBUTES != 0 || record_count <= 0 {
        return None;
    }
    if usize::try_from(length).ok()? + LENGTH_ENDS != batch.len() || last_offset_delta != record_count - 1 {
        return None;
    }
    if crc32c([&batch[ATTRIBUTES_AT..]]) != crc {
        return None;
    }

    let first = Record::start(payload, 0)?;
    let first_ms = base_timestamp.checked_add(first.timestamp_delta)?;
    let newest = if record_count == 1
        || (first_ms >= 0 && first_ms <= max_timestamp && max_timestamp <= first_ms.checked_add(TIMESTAMP_SLACK_MS)?)
    {
        first.timestamp_delta
    } else {
        newest_delta(payload, record_count)?
    };
    let mut stated = Stated::default();
    let is_walked = record_count <= WALKED_RECORDS_MAX || payload.len() / WALKED_RECORD_BYTES >= record_count as usize;
    if is_walked || names.occur_in(payload) {
        stated.walk(payload, record_count, names, target)?;
    }
    let expected = match stated.expected {
        Some(expected) => Some(expected),
        None if base_offset < -1 => return None,
        None if base_offset > 0 || (source_is_base && base_offset == 0) => Some(base_offset),
        None => None,
    };
    let mut digest = [0; 28];
    digest[..8].copy_from_slice(&first_ms.to_be_bytes());
    digest[8..12].copy_from_slice(&record_count.to_be_bytes());
    digest[12..].copy_from_slice(&xxhash3_128::Hasher::oneshot_with_seed(seed, payload).to_be_bytes());
    Some(Scan {
        record_count,
        producer_id,
        producer_epoch,
        base_sequence,
        expected,
        write_id: stated.write_id,
        max_timestamp_ms: base_timestamp.checked_add(newest)?,
        digest,
    })
}

/// Where a record ends, and where its offset delta is.
struct Record {
    end: usize,
    timestamp_delta: i64,
    rest_at: usize,
}

impl Record {
    fn start(payload: &[u8], at: usize) -> Option<Record> {
        let mut cursor = Cursor::new(payload, at);
        let length = usize::try_from(cursor.varint()?).ok()?;
        let end = cursor.at.checked_add(length)?;
        cursor.u8()?; // attributes
        let timestamp_delta = cursor.varlong()?;
        (end <= payload.len()).then_some(Record { end, timestamp_delta, rest_at: cursor.at })
    }
}

fn newest_delta(payload: &[u8], record_count: i32) -> Option<i64> {
    let (mut newest, mut at) = (i64::MIN, 0);
    for _ in 0..record_count.min(TIMED_RECORDS_MAX) {
        let record = Record::start(payload, at)?;
        newest = newest.max(record.timestamp_delta);
        at = record.end;
    }
    Some(newest)
}

/// What the headers of a batch's records state.
#[derive(Default)]
struct Stated {
    expected: Option<i64>,
    write_id: Option<Vec<u8>>,
}

impl Stated {
    fn walk(&mut self, payload: &[u8], record_count: i32, names: &HeaderNames, target: &Target) -> Option<()> {
        let mut at = 0;
        for index in 0..record_count {
            let record = Record::start(payload, at)?;
            self.read_record(&payload[..record.end], record.rest_at, index, names, target)?;
            at = record.end;
        }
        (at == payload.len()).then_some(())
    }

    fn read_record(
        &mut self,
        payload: &[u8],
        rest_at: usize,
        index: i32,
        names: &HeaderNames,
        target: &Target,
    ) -> Option<()> {
        let mut cursor = Cursor::new(payload, rest_at);
        if cursor.varint()? != index {
            return None;
        }
        for _key_and_value in 0..2 {
            if let Ok(length) = usize::try_from(cursor.varint()?) {
                cursor.take(length)?;
            }
        }
        let header_count = usize::try_from(cursor.varint()?).ok()?;
        let mut observed = [false; NAMES.len()];
        for _ in 0..header_count {
            let name_length = usize::try_from(cursor.varint()?).ok()?;
            let name = names.which(cursor.take(name_length)?);
            let value = match usize::try_from(cursor.varint()?) {
                Ok(length) => Some(cursor.take(length)?),
                Err(_) => None,
            };
            if let Some(name) = name {
                if std::mem::replace(&mut observed[name as usize], true) {
                    return None;
                }
                self.read_header(name, value?, index, target)?;
            }
        }
        (cursor.at == payload.len()).then_some(())
    }

    fn read_header(&mut self, name: Name, value: &[u8], index: i32, target: &Target) -> Option<()> {
        match name {
            Name::PartitionCount => return None,
            Name::WriteId if value.is_empty() => return None,
            Name::WriteId => {
                self.write_id.get_or_insert_with(|| value.to_vec());
            }
            Name::ExpectedOffset if value == b"-1" => (),
            Name::ExpectedOffset => {
                let digits = value.iter().take_while(|byte| byte.is_ascii_digit()).count();
                let (number, stated) = value.split_at(digits);
                if number.is_empty() || digits > DIGITS_MAX || !(stated.is_empty() || target.is_named_by(stated)) {
                    return None;
                }
                let expected: i64 = std::str::from_utf8(number).ok()?.parse().ok()?;
                let first = expected - i64::from(index);
                if *self.expected.get_or_insert(first) != first {
                    return None;
                }
            }
        }
        Some(())
    }
}

/// Replaces a batch's own producer.
pub struct Fence {
    pub producer_id: i64,
    pub producer_epoch: i16,
    pub base_sequence: i32,
    pub instance_id: i16,
}

/// The header to send: see `fenced_header` in `wire/batch.py`. Without a fence only the base offset is set to 0, as
/// brokers require.
pub fn header_to_send(batch: &[u8], fence: Option<&Fence>) -> Option<[u8; HEADER_BYTES]> {
    let mut header: [u8; HEADER_BYTES] = batch.get(..HEADER_BYTES)?.try_into().ok()?;
    header[..8].copy_from_slice(&0i64.to_be_bytes());
    if let Some(fence) = fence {
        header[12..16].copy_from_slice(&(-1i32).to_be_bytes());
        let attributes = i16::from_be_bytes([header[ATTRIBUTES_AT], header[ATTRIBUTES_AT + 1]]);
        let attributes = (attributes & !(INSTANCE_ID_MAX << INSTANCE_ID_BIT)) | (fence.instance_id << INSTANCE_ID_BIT);
        header[ATTRIBUTES_AT..ATTRIBUTES_AT + 2].copy_from_slice(&attributes.to_be_bytes());
        header[43..51].copy_from_slice(&fence.producer_id.to_be_bytes());
        header[51..53].copy_from_slice(&fence.producer_epoch.to_be_bytes());
        header[53..57].copy_from_slice(&fence.base_sequence.to_be_bytes());
        // A second pass takes less time than to combine two CRCs.
        let crc = crc32c([&header[ATTRIBUTES_AT..], &batch[HEADER_BYTES..]]);
        header[CRC_AT..ATTRIBUTES_AT].copy_from_slice(&crc.to_be_bytes());
    }
    Some(header)
}
