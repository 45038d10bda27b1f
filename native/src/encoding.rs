//! Rows of the Spark sink: Arrow columns to record bodies, bodies to record batches, and hashes of keys and bodies.
//!
//! `client/fencepost/spark/columns.py` is the reference. Arrays of numbers are native-endian bytes. Numbers that do not
//! fit the bytes given with them are an error.

use std::io::Write;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::bytes::{crc32c, put_uvarint};

const NUMBER_BYTES: usize = 8;
const LENGTH_AT: usize = 8;
const LENGTH_ENDS: usize = 12;
const CRC_AT: usize = 17;
const CHECKED_AT: usize = 21;
/// Expected size of what a body adds to key and value, and a record to its body.
const ADDED_BYTES: usize = 8;
/// Zigzag-encoded -1.
const NULL: usize = 1;
const DIGITS_MAX: usize = 20;
const MURMUR_SEED: u32 = 0x9747_B28C;
const MURMUR_M: u32 = 0x5BD1_E995;
const M1: u64 = 0x9E37_79B9_7F4A_7C15;
const M2: u64 = 0xBF58_476D_1CE4_E5B9;

/// A byte for each value, 0 if it is null (None: none is); offsets of the values' starts and of the last one's end; and
/// the bytes between the first and the last offset.
type Column<'a> = (Option<&'a [u8]>, &'a [u8], &'a [u8]);
/// Header count of each row, names, values.
type Headers<'a> = (&'a [u8], Column<'a>, Column<'a>);
/// The encoded name of a header, a byte for each row (0 if it has none), and numbers, its values in decimal.
type Decimals<'a> = (&'a [u8], &'a [u8], &'a [u8]);

struct Values<'a> {
    valid: Option<&'a [u8]>,
    offsets: &'a [u8],
    data: &'a [u8],
    first: usize,
    count: usize,
}

impl<'a> Values<'a> {
    fn of((valid, offsets, data): Column<'a>) -> Option<Self> {
        let count = (offsets.len() / NUMBER_BYTES).checked_sub(1)?;
        Some(Values { valid, offsets, data, first: size_at(offsets, 0)?, count })
    }

    /// The bytes at an index, of a null too.
    fn bytes(&self, index: usize) -> Option<&'a [u8]> {
        let start = size_at(self.offsets, index)?.checked_sub(self.first)?;
        self.data.get(start..size_at(self.offsets, index + 1)?.checked_sub(self.first)?)
    }

    /// Append the value after its length, or the length of null.
    fn put(&self, out: &mut Vec<u8>, index: usize) -> Option<()> {
        match self.valid {
            Some(valid) if *valid.get(index)? == 0 => put_uvarint(out, NULL),
            _ => put_bytes(out, self.bytes(index)?),
        }
        Some(())
    }
}

fn number_at(numbers: &[u8], index: usize) -> Option<i64> {
    let at = index.checked_mul(NUMBER_BYTES)?;
    Some(i64::from_ne_bytes(numbers.get(at..at.checked_add(NUMBER_BYTES)?)?.try_into().ok()?))
}

fn size_at(numbers: &[u8], index: usize) -> Option<usize> {
    usize::try_from(number_at(numbers, index)?).ok()
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_uvarint(out, bytes.len() << 1);
    out.extend_from_slice(bytes);
}

fn misfit() -> PyErr {
    PyValueError::new_err("the offsets of a column do not fit its bytes")
}

/// The body of each row: where each ends, and the bytes. `begin`: where the first starts. `key` – None: no row has one.
#[pyfunction]
pub fn bodies<'py>(
    py: Python<'py>,
    begin: usize,
    key: Option<Column>,
    value: Column,
    headers: Option<Headers>,
    time: Option<Decimals>,
) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
    let (ends, data) = py.detach(|| encode(begin, key, value, headers, time)).ok_or_else(misfit)?;
    Ok((PyBytes::new(py, &ends), PyBytes::new(py, &data)))
}

fn encode(
    begin: usize,
    key: Option<Column>,
    value: Column,
    headers: Option<Headers>,
    time: Option<Decimals>,
) -> Option<(Vec<u8>, Vec<u8>)> {
    let key = match key {
        Some(key) => Some(Values::of(key)?),
        None => None,
    };
    let value = Values::of(value)?;
    let mut headers = match headers {
        Some((counts, names, values)) => Some((counts, 0, Values::of(names)?, Values::of(values)?)),
        None => None,
    };
    let data_bytes = value.data.len() + key.as_ref().map_or(0, |key| key.data.len());
    let mut out = Vec::with_capacity(data_bytes + value.count * ADDED_BYTES);
    let mut ends = Vec::with_capacity(value.offsets.len());
    for row in 0..value.count {
        match &key {
            Some(key) => key.put(&mut out, row)?,
            None => put_uvarint(&mut out, NULL),
        }
        value.put(&mut out, row)?;
        let header_count = match &headers {
            Some((counts, ..)) => size_at(counts, row)?,
            None => 0,
        };
        let time = match time {
            Some((name, known, values)) if *known.get(row)? != 0 => Some((name, number_at(values, row)?)),
            _ => None,
        };
        put_uvarint(&mut out, header_count.checked_add(usize::from(time.is_some()))?.checked_mul(2)?);
        if let Some((_, next, names, values)) = &mut headers {
            for _ in 0..header_count {
                names.put(&mut out, *next)?;
                values.put(&mut out, *next)?;
                *next += 1;
            }
        }
        if let Some((name, value)) = time {
            out.extend_from_slice(name);
            put_decimal(&mut out, value)?;
        }
        ends.extend_from_slice(&i64::try_from(begin.checked_add(out.len())?).ok()?.to_ne_bytes());
    }
    Some((ends, out))
}

fn put_decimal(out: &mut Vec<u8>, value: i64) -> Option<()> {
    let mut digits = [0; DIGITS_MAX];
    let mut rest = digits.as_mut_slice();
    write!(rest, "{value}").ok()?;
    let length = DIGITS_MAX - rest.len();
    put_bytes(out, &digits[..length]);
    Some(())
}

/// A batch of the records `first`, one of each body, and `last`. `delta`: offset delta of the first body.
///
/// `header`: the batch's, whose length and CRC are set. None: only the records.
#[pyfunction]
pub fn batch<'py>(
    py: Python<'py>,
    header: Option<&[u8]>,
    first: &[u8],
    bodies: Column,
    delta: usize,
    last: &[u8],
) -> PyResult<Bound<'py, PyBytes>> {
    let batch = py.detach(|| {
        let mut out = header.unwrap_or_default().to_vec();
        out.extend_from_slice(first);
        put_records(&mut out, bodies, delta)?;
        out.extend_from_slice(last);
        if header.is_some() {
            seal(&mut out)?;
        }
        Some(out)
    });
    Ok(PyBytes::new(py, &batch.ok_or_else(misfit)?))
}

fn put_records(out: &mut Vec<u8>, bodies: Column, delta: usize) -> Option<()> {
    let bodies = Values::of(bodies)?;
    out.reserve(bodies.data.len() + bodies.count * ADDED_BYTES);
    let mut delta_bytes = Vec::new();
    for index in 0..bodies.count {
        let body = bodies.bytes(index)?;
        delta_bytes.clear();
        put_uvarint(&mut delta_bytes, delta.checked_add(index)?.checked_mul(2)?);
        put_uvarint(out, (2 + delta_bytes.len() + body.len()) << 1);
        out.extend_from_slice(&[0, 0]); // attributes, timestamp delta
        out.extend_from_slice(&delta_bytes);
        out.extend_from_slice(body);
    }
    Some(())
}

fn seal(batch: &mut [u8]) -> Option<()> {
    let length = i32::try_from(batch.len().checked_sub(LENGTH_ENDS)?).ok()?;
    batch.get_mut(LENGTH_AT..LENGTH_ENDS)?.copy_from_slice(&length.to_be_bytes());
    let crc = crc32c([batch.get(CHECKED_AT..)?]);
    batch.get_mut(CRC_AT..CHECKED_AT)?.copy_from_slice(&crc.to_be_bytes());
    Some(())
}

/// The partition of each key as by Java's default partitioner, as 32-bit numbers.
#[pyfunction]
pub fn java_partitions<'py>(py: Python<'py>, keys: Column, partition_count: u32) -> PyResult<Bound<'py, PyBytes>> {
    let placed = py.detach(|| {
        let keys = Values::of(keys)?;
        let mut out = Vec::with_capacity(keys.count * size_of::<u32>());
        for index in 0..keys.count {
            let hash = murmur2(keys.bytes(index)?) & 0x7FFF_FFFF;
            out.extend_from_slice(&hash.checked_rem(partition_count)?.to_ne_bytes());
        }
        Some(out)
    });
    Ok(PyBytes::new(py, &placed.ok_or_else(misfit)?))
}

fn murmur2(key: &[u8]) -> u32 {
    let words = key.chunks_exact(4);
    let rest = words.remainder();
    let mut h = MURMUR_SEED ^ key.len() as u32;
    for word in words {
        let k = word.iter().rev().fold(0, |k, byte| k << 8 | u32::from(*byte)).wrapping_mul(MURMUR_M);
        h = h.wrapping_mul(MURMUR_M) ^ (k ^ (k >> 24)).wrapping_mul(MURMUR_M);
    }
    if !rest.is_empty() {
        let k = rest.iter().rev().fold(0, |k, byte| k << 8 | u32::from(*byte));
        h = (h ^ k).wrapping_mul(MURMUR_M);
    }
    h = (h ^ (h >> 13)).wrapping_mul(MURMUR_M);
    h ^ (h >> 15)
}

/// The sum of the hashes of bodies of at most `bytes_max`; longer ones do not count. `seeds`: a number of each body.
#[pyfunction]
pub fn hash_sum(py: Python<'_>, bodies: Column, seeds: &[u8], bytes_max: usize) -> PyResult<u64> {
    let sum = py.detach(|| {
        let bodies = Values::of(bodies)?;
        let mut sum = 0u64;
        for index in 0..bodies.count {
            let body = bodies.bytes(index)?;
            let seed = number_at(seeds, index)? as u64;
            if body.len() <= bytes_max {
                sum = sum.wrapping_add(hash(body, seed));
            }
        }
        Some(sum)
    });
    sum.ok_or_else(misfit)
}

fn hash(body: &[u8], seed: u64) -> u64 {
    let words = body.chunks_exact(8);
    let rest = words.remainder();
    let mut h = mixed((body.len() as u64).wrapping_mul(M2).wrapping_add(seed));
    for word in words {
        h = (h ^ word_of(word)).wrapping_mul(M1);
        h ^= h >> 32;
    }
    mixed(h ^ word_of(rest))
}

/// Little-endian, of at most 8 bytes.
fn word_of(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

fn mixed(h: u64) -> u64 {
    let h = (h ^ (h >> 32)).wrapping_mul(M1);
    let h = (h ^ (h >> 29)).wrapping_mul(M2);
    h ^ (h >> 32)
}
