//! Responses of the broker: relayed whole or as they arrive, and the answers to appends.

use pyo3::prelude::*;

use crate::connection::{Connection, DOWN, Sent};
use crate::fetch;
use crate::framing::{
    FETCH, LARGE_BYTES, LENGTH_BYTES, PRODUCE, RESPONSE_BYTES_MIN, SHARE_ACKNOWLEDGE, SHARE_FETCH, frame_start,
    response_start, whole_frame,
};
use crate::output::{Piece, Relayed, Taken};
use crate::passing::Passing;
use crate::produce;
use crate::settings::Settings;
use crate::upward::Watches;

/// The first versions whose responses can name a broker's address.
const PRODUCE_ENDPOINTS_FROM: i16 = 10;
const FETCH_ENDPOINTS_FROM: i16 = 16;

impl Connection {
    pub fn take_down(&mut self, py: Python<'_>, data: &[u8], now: f64, out: &mut Vec<Piece>) -> PyResult<Taken> {
        let mut relayed = Relayed { from: 0 };
        let mut at = 0;
        if let Some(passing) = &mut self.down {
            at = passing.take(py, data)?;
            if self.down.take_if(|passing| passing.left == 0).is_some() {
                self.queue.pop_front();
            }
        }
        while let Some(sent) = self.queue.front().filter(|_| self.down.is_none()) {
            let Some((frame, head)) = whole_frame(data, at, RESPONSE_BYTES_MIN, usize::MAX) else {
                if let Some(mut passing) = self.begin_response(py, sent, &data[at..])? {
                    self.large[DOWN] = passing.left >= LARGE_BYTES;
                    at += passing.take(py, &data[at..])?;
                    self.down = Some(passing);
                }
                break;
            };
            let end = at + frame.len();
            if response_start(head) != sent.correlation_id {
                break;
            }
            if let Some(checked) = &sent.checked {
                let Some(answer) = self.complete(py, checked, sent.correlation_id, &frame[LENGTH_BYTES..], now)? else {
                    break;
                };
                relayed.end(at, end, out);
                out.push(Piece::Made(answer));
            } else if !names_no_broker(sent, frame) || is_throttled(&self.settings.borrow(py), sent, frame) {
                break;
            }
            self.large[DOWN] = frame.len() >= LARGE_BYTES;
            self.queue.pop_front();
            at = end;
        }
        relayed.end(at, at, out);
        Ok(Taken { data: at, frames: at })
    }

    /// The response to `sent`, if that is relayed and `rest` is the beginning of it.
    fn begin_response(&self, py: Python<'_>, sent: &Sent, rest: &[u8]) -> PyResult<Option<Passing>> {
        let Some((length, head)) = frame_start(rest, RESPONSE_BYTES_MIN, usize::MAX) else {
            return Ok(None);
        };
        if sent.checked.is_some() || response_start(head) != sent.correlation_id {
            return Ok(None);
        }
        let Some(watches) = &self.watches else {
            return Ok(None);
        };
        let left = LENGTH_BYTES + length;
        if is_throttled(&self.settings.borrow(py), sent, rest) {
            return Ok(None);
        }
        let is_watched = match sent.api_key {
            PRODUCE => return Ok(None),
            FETCH => sent.version >= FETCH_ENDPOINTS_FROM,
            SHARE_FETCH | SHARE_ACKNOWLEDGE => true,
            _ => false,
        };
        if !is_watched {
            return Ok(Some(Passing::unwatched(left)));
        }
        let watch = Watches(watches.bind(py)).response_watch(sent.api_key, sent.version, length)?;
        Passing::watched(left, watch).map(Some)
    }
}

/// Whether a response certainly has no broker's address to be rewritten.
fn names_no_broker(sent: &Sent, frame: &[u8]) -> bool {
    match sent.api_key {
        PRODUCE => sent.version < PRODUCE_ENDPOINTS_FROM || produce::names_no_broker(frame, sent.version),
        FETCH => sent.version < FETCH_ENDPOINTS_FROM || fetch::names_no_broker(frame),
        SHARE_FETCH | SHARE_ACKNOWLEDGE => false,
        _ => true,
    }
}

/// Whether a response, or its beginning, has a throttle time, or does not show that it has none. `frame`: with its length.
fn is_throttled(settings: &Settings, sent: &Sent, frame: &[u8]) -> bool {
    let at = if sent.api_key == PRODUCE {
        frame.len().checked_sub(if sent.version < produce::FLEXIBLE { 4 } else { 5 })
    } else {
        match settings.throttled_at(sent.api_key, sent.version) {
            None => return false,
            at => at,
        }
    };
    at.and_then(|at| frame.get(at..at + 4)) != Some(&[0; 4])
}
