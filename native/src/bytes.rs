//! Reads untrusted bytes. Every read is checked: `None` is the end of the bytes, or a number that is too long.

use crc_fast::{CrcAlgorithm, Digest};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

pub struct Cursor<'a> {
    data: &'a [u8],
    pub at: usize,
}

impl<'a> Cursor<'a> {
    pub fn new(data: &'a [u8], at: usize) -> Self {
        Cursor { data, at }
    }

    pub fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let end = self.at.checked_add(count)?;
        let taken = self.data.get(self.at..end)?;
        self.at = end;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    pub fn u8(&mut self) -> Option<u8> {
        Some(self.array::<1>()?[0])
    }

    pub fn i16(&mut self) -> Option<i16> {
        Some(i16::from_be_bytes(self.array()?))
    }

    pub fn i32(&mut self) -> Option<i32> {
        Some(i32::from_be_bytes(self.array()?))
    }

    pub fn i64(&mut self) -> Option<i64> {
        Some(i64::from_be_bytes(self.array()?))
    }

    /// An unsigned varint of at most five bytes that fits 32 bits.
    pub fn uvarint(&mut self) -> Option<usize> {
        let mut value = 0u64;
        for bit in (0..=28).step_by(7) {
            let byte = self.u8()?;
            value |= u64::from(byte & 0x7F) << bit;
            if byte < 0x80 {
                return usize::try_from(u32::try_from(value).ok()?).ok();
            }
        }
        None
    }

    /// A zigzag-encoded varint that fits 32 bits.
    pub fn varint(&mut self) -> Option<i32> {
        i32::try_from(self.zigzag(28)?).ok()
    }

    /// A zigzag-encoded varint that fits 64 bits.
    pub fn varlong(&mut self) -> Option<i64> {
        self.zigzag(63)
    }

    fn zigzag(&mut self, bit_max: u32) -> Option<i64> {
        let mut value = 0u128;
        for bit in (0..=bit_max).step_by(7) {
            let byte = self.u8()?;
            value |= u128::from(byte & 0x7F) << bit;
            if byte < 0x80 {
                let value = u64::try_from(value).ok()?;
                return Some((value >> 1) as i64 ^ -((value & 1) as i64));
            }
        }
        None
    }
}

pub fn put_uvarint(out: &mut Vec<u8>, mut value: usize) {
    while value >= 0x80 {
        out.push((value & 0x7F) as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// The CRC of a batch, whose parts these are.
pub fn crc32c<const N: usize>(parts: [&[u8]; N]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    for part in parts {
        digest.update(part);
    }
    digest.finalize() as u32
}

/// The same for Python.
#[pyfunction(name = "crc32c")]
#[pyo3(signature = (*parts))]
pub fn crc32c_of(parts: &Bound<'_, PyTuple>) -> PyResult<u32> {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    for part in parts {
        digest.update(part.cast::<PyBytes>()?.as_bytes());
    }
    Ok(digest.finalize() as u32)
}
