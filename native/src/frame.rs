//! Requests in memory that is used again: fresh memory for each large one costs a page fault for every 4 KiB.

use std::ops::{Deref, DerefMut};
use std::sync::Mutex;

/// Sizes that are kept: `max.request.size` is 1 MB by default, and memory is allocated in powers of two.
const KEPT_BYTES_MIN: usize = 64 * 1024;
const KEPT_BYTES_MAX: usize = 2 * 1024 * 1024;
/// All that is kept: five requests of 1 MB are in flight by default.
const KEPT_TOTAL_BYTES_MAX: usize = 8 * 1024 * 1024;

static KEPT: Mutex<Kept> = Mutex::new(Kept { free: Vec::new(), byte_count: 0 });

struct Kept {
    free: Vec<Vec<u8>>,
    byte_count: usize,
}

impl Kept {
    /// The smallest that is large enough.
    fn take(&mut self, length: usize) -> Option<Vec<u8>> {
        let fitting = self.free.iter().enumerate().filter(|(_, memory)| memory.len() >= length);
        let (index, _) = fitting.min_by_key(|(_, memory)| memory.len())?;
        let memory = self.free.swap_remove(index);
        self.byte_count -= memory.len();
        Some(memory)
    }

    fn keep(&mut self, memory: Vec<u8>) {
        if self.byte_count + memory.len() <= KEPT_TOTAL_BYTES_MAX {
            self.byte_count += memory.len();
            self.free.push(memory);
        }
    }
}

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
        let kept = KEPT.lock().ok().and_then(|mut kept| kept.take(length));
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
                kept.keep(std::mem::take(&mut self.memory));
            }
        }
    }
}
