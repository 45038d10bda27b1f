//! What a call is done with, and what it sends.

use std::ops::Range;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::frame::Frame;

/// Bytes to send: received ones, parts of a request, or made here.
pub enum Piece {
    Received(Range<usize>),
    Kept(Arc<Frame>, Range<usize>),
    Made(Vec<u8>),
}

/// How many bytes are done with: of the data, and of frames.
#[derive(Default)]
pub struct Taken {
    pub data: usize,
    pub frames: usize,
}

pub fn joined<'py>(py: Python<'py>, data: &[u8], out: &[Piece]) -> Option<Bound<'py, PyBytes>> {
    let parts: Vec<&[u8]> = out.iter().map(|piece| piece.bytes(data)).collect();
    (!parts.is_empty()).then(|| PyBytes::new(py, &parts.concat()))
}

impl Piece {
    pub fn bytes<'a>(&'a self, data: &'a [u8]) -> &'a [u8] {
        match self {
            Piece::Received(range) => &data[range.clone()],
            Piece::Kept(frame, range) => &frame[range.clone()],
            Piece::Made(made) => made,
        }
    }
}

/// Where relayed bytes begin that are not in the output yet.
pub struct Relayed {
    pub from: usize,
}

impl Relayed {
    pub fn end(&mut self, at: usize, next: usize, out: &mut Vec<Piece>) {
        if self.from < at {
            out.push(Piece::Received(self.from..at));
        }
        self.from = next;
    }
}
