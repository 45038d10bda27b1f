//! Requests in memory that is used again: fresh memory for each large one costs a page fault for every 4 KiB.

use std::ops::{Deref, DerefMut};
use std::sync::Mutex;

/// Sizes that are kept, and how many.
const KEPT_BYTES_MIN: usize = 64 * 1024;
const KEPT_BYTES_MAX: usize = 512 * 1024;
const KEPT_MAX: usize = 8;

static KEPT: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// A request with its length. Its memory may be larger.
#[derive(Clone)]
pub struct Frame {
    memory: Vec<u8>,
    length: usize,
}

impl Frame {
    /// With any content.
    pub fn with_length(length: usize) -> Self {
        if length < KEPT_BYTES_MIN {
            return Frame { memory: vec![0; length], length };
        }
        let kept = KEPT.lock().ok().and_then(|mut kept| {
            let found = kept.iter().position(|memory| memory.len() >= length)?;
            Some(kept.swap_remove(found))
        });
        Frame { memory: kept.unwrap_or_else(|| vec![0; length.next_power_of_two()]), length }
    }

    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut frame = Frame::with_length(bytes.len());
        frame.copy_from_slice(bytes);
        frame
    }
}

impl Deref for Frame {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[..self.length]
    }
}

impl DerefMut for Frame {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.length]
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        if (KEPT_BYTES_MIN..=KEPT_BYTES_MAX).contains(&self.memory.len()) {
            if let Ok(mut kept) = KEPT.lock() {
                if kept.len() < KEPT_MAX {
                    kept.push(std::mem::take(&mut self.memory));
                }
            }
        }
    }
}
