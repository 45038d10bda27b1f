//! Requests with appends that arrive in several pieces.

use crate::frame::Frame;

/// A request with appends of which only the beginning is there. Memory for all of it is reserved.
pub struct Collecting {
    pub frame: Frame,
    pub filled: usize,
    pub since: f64,
}

impl Collecting {
    pub fn without(mut self, last_bytes: usize) -> Self {
        self.filled -= last_bytes;
        self
    }

    /// Where the next bytes of the request belong.
    pub fn missing(&mut self) -> &mut [u8] {
        &mut self.frame[self.filled..]
    }

    pub fn is_complete(&self) -> bool {
        self.filled == self.frame.len()
    }

    pub fn received(&mut self, byte_count: usize) {
        self.filled += byte_count;
    }
}
