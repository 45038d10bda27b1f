//! Where encoded values end. See `proxy/fencepost_proxy/wire/layouts.py`, which explains the steps.

use pyo3::prelude::*;

use crate::bytes::Cursor;

const FIXED: u8 = 0;
const COMPACT: u8 = 1;
const SHORT: u8 = 2;
const LONG: u8 = 3;
const COMPACT_STRUCTS: u8 = 4;
const LONG_STRUCTS: u8 = 5;
const NULLABLE: u8 = 6;
const TAGS: u8 = 7;

/// `TAGS_MAX` in `wire/primitives.py`.
const TAGS_MAX: usize = 64;

/// Without the interpreter's lock. None if Python raises an error.
#[pyfunction]
pub fn element_ends(
    py: Python<'_>,
    data: &[u8],
    at: usize,
    count: usize,
    layout: Vec<(u8, usize)>,
) -> Option<Vec<usize>> {
    py.detach(|| {
        let mut cursor = Cursor::new(data, at);
        let mut ends = Vec::new();
        for _ in 0..count {
            skip(&mut cursor, &layout)?;
            ends.push(cursor.at);
        }
        Some(ends)
    })
}

fn skip(cursor: &mut Cursor<'_>, mut steps: &[(u8, usize)]) -> Option<()> {
    while let Some((&(step, argument), rest)) = steps.split_first() {
        steps = rest;
        match step {
            FIXED => drop(cursor.take(argument)?),
            COMPACT => {
                let count = cursor.uvarint()?.saturating_sub(1);
                cursor.take(count.checked_mul(argument)?)?;
            }
            SHORT | LONG => {
                let count = if step == SHORT { i32::from(cursor.i16()?) } else { cursor.i32()? };
                cursor.take(length_of(count)?.checked_mul(argument)?)?;
            }
            COMPACT_STRUCTS | LONG_STRUCTS => {
                let count =
                    if step == LONG_STRUCTS { length_of(cursor.i32()?)? } else { cursor.uvarint()?.saturating_sub(1) };
                let body = rest.get(..argument)?;
                steps = &rest[argument..];
                for _ in 0..count {
                    skip(cursor, body)?;
                }
            }
            NULLABLE => {
                let body = rest.get(..argument)?;
                steps = &rest[argument..];
                if cursor.u8()? < 0x80 {
                    skip(cursor, body)?;
                }
            }
            TAGS => skip_tags(cursor)?,
            _ => return None,
        }
    }
    Some(())
}

/// -1 is null.
fn length_of(count: i32) -> Option<usize> {
    if count == -1 { Some(0) } else { usize::try_from(count).ok() }
}

fn skip_tags(cursor: &mut Cursor<'_>) -> Option<()> {
    let count = cursor.uvarint()?;
    if count > TAGS_MAX {
        return None;
    }
    for _ in 0..count {
        cursor.uvarint()?;
        let size = cursor.uvarint()?;
        cursor.take(size)?;
    }
    Some(())
}
