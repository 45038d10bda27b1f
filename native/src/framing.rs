//! Where frames begin and end, and the fields by which requests and responses are recognized.

use crate::bytes::Cursor;

pub const LENGTH_BYTES: usize = 4;
pub const REQUEST_BYTES_MIN: usize = 8;
pub const RESPONSE_BYTES_MIN: usize = 4;
pub const LARGE_BYTES: usize = 64 * 1024;
pub const PRODUCE: i16 = 0;
pub const FETCH: i16 = 1;
pub const SHARE_FETCH: i16 = 78;
pub const SHARE_ACKNOWLEDGE: i16 = 79;

/// The length of the frame that begins here, and its first bytes after the length.
pub fn frame_start(rest: &[u8], bytes_min: usize, bytes_max: usize) -> Option<(usize, &[u8])> {
    let length = usize::try_from(Cursor::new(rest, 0).i32()?).ok()?;
    if length < bytes_min || length > bytes_max {
        return None;
    }
    Some((length, rest.get(LENGTH_BYTES..LENGTH_BYTES + bytes_min)?))
}

/// The frame at `at` with its length, and its first bytes after the length, if all of it is there.
pub fn whole_frame(data: &[u8], at: usize, bytes_min: usize, bytes_max: usize) -> Option<(&[u8], &[u8])> {
    let rest = data.get(at..)?;
    let (length, head) = frame_start(rest, bytes_min, bytes_max)?;
    Some((rest.get(..LENGTH_BYTES + length)?, head))
}

pub fn request_start(head: &[u8]) -> (i16, i16, i32) {
    let mut cursor = Cursor::new(head, 0);
    (cursor.i16().unwrap_or(-1), cursor.i16().unwrap_or(-1), cursor.i32().unwrap_or(-1))
}

pub fn response_start(head: &[u8]) -> i32 {
    Cursor::new(head, 0).i32().unwrap_or(-1)
}
