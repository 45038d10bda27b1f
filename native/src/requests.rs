//! Requests of the client: relayed whole or as they arrive, collected, and sent as appends.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::arriving::{Arriving, ReadUp};
use crate::collecting::Collecting;
use crate::connection::{Connection, Sent, UP};
use crate::frame::Frame;
use crate::framing::{LARGE_BYTES, LENGTH_BYTES, PRODUCE, REQUEST_BYTES_MIN, frame_start, request_start, whole_frame};
use crate::output::{Piece, Relayed, Taken};
use crate::passing::Passing;
use crate::upward::{Services, Watches};

/// Of a request, for its watch.
const REQUEST_HEAD_BYTES: usize = 8 * 1024;
/// After a request with such a batch, the next one's beginning is read alone, and the batch spliced. To splice smaller ones,
/// with a read for each, costs more than to read and write them together.
const SPLICED_BATCH_BYTES: usize = 256 * 1024;

impl Connection {
    pub fn take_up(&mut self, py: Python<'_>, data: &[u8], read: &ReadUp, out: &mut Vec<Piece>) -> PyResult<Taken> {
        self.missing = None;
        let shared = self.settings.clone_ref(py);
        let services = shared.borrow(py).services.clone_ref(py).into_bound(py);
        shared.borrow_mut(py).remember(py, read.now)?;
        let queued = self.queue.len();
        let settings = shared.borrow(py);
        let taken =
            self.take_frames(&Arriving { settings: &settings, services: Services(&services), read }, data, out)?;
        drop(settings);
        let counts = &mut shared.borrow_mut(py).counts;
        for sent in self.queue.range(queued..) {
            *counts.requests.entry((sent.api_key, sent.version)).or_default() += 1;
            counts.admitted += sent.checked.as_ref().map_or(0, |checked| checked.appends.len() as u64);
        }
        Ok(taken)
    }

    fn take_frames(&mut self, it: &Arriving<'_, '_>, data: &[u8], out: &mut Vec<Piece>) -> PyResult<Taken> {
        let (py, settings, before) = (it.py(), it.settings, it.read.before);
        let in_flight_max = it.process().in_flight_max;
        let (mut taken, mut relayed) = (Taken::default(), Relayed { from: 0 });
        if let Some(passing) = &mut self.up {
            taken.data = passing.take(py, data)?;
            taken.frames = taken.data;
            if self.up.take_if(|passing| passing.left == 0).is_none() {
                relayed.end(taken.data, 0, out);
                return Ok(taken);
            }
        }
        if self.collecting.is_some() {
            taken.data = self.collect(data);
            if let Some(complete) = self.collecting.take_if(|it| it.is_complete()) {
                let is_free = before + self.queue.len() < in_flight_max;
                taken.frames = complete.frame.len();
                if let Some(complete) = self.send_collected(it, complete, is_free, out)? {
                    // The data that completes it goes to Python, after what was collected.
                    self.collecting = Some(complete.without(taken.data));
                    return Ok(Taken::default());
                }
            }
            relayed.from = taken.data;
        }
        while before + self.queue.len() < in_flight_max {
            let at = taken.data;
            let Some((frame, head)) = whole_frame(data, at, REQUEST_BYTES_MIN, settings.frame_bytes_max) else {
                break;
            };
            let (api_key, version, correlation_id) = request_start(head);
            let end = at + frame.len();
            if let Some((version_min, version_max, inspected)) = settings.relayed(api_key) {
                if !(version_min..=version_max).contains(&version) || inspected && it.concerns_state_topic(frame) {
                    break;
                }
                self.queue.push_back(Sent { api_key, version, correlation_id, checked: None });
            } else if api_key == PRODUCE {
                let Some(template) = self.matching(py, frame, version) else {
                    break;
                };
                if !it.process().fresh {
                    break;
                }
                if !template.borrow(py).is_checked {
                    if !it.may_relay(&template.borrow(py), frame, version)? {
                        break;
                    }
                    self.queue.push_back(Sent { api_key, version, correlation_id, checked: None });
                } else {
                    relayed.end(at, end, out);
                    let starts_at = it.read.received + (taken.frames + LENGTH_BYTES) as i64;
                    if !self.append(it, &template, frame, None, starts_at, out)? {
                        relayed.from = at;
                        break;
                    }
                }
            } else {
                break;
            }
            taken.data = end;
            taken.frames += frame.len();
            let is_append = self.queue.back().is_some_and(|sent| sent.checked.is_some());
            self.large[UP] = is_append && frame.len() >= LARGE_BYTES;
        }
        if taken.data < data.len() && before + self.queue.len() < in_flight_max {
            let rest = &data[taken.data..];
            if let Some((sent, mut passing)) = self.begin_passing(it, rest)? {
                let count = passing.take(py, rest)?;
                if count > 0 {
                    self.queue.push_back(sent);
                    self.up = Some(passing);
                }
                taken.data += count;
                taken.frames += count;
            } else if self.begin_collecting(it, rest)? {
                relayed.end(taken.data, taken.data, out);
                taken.data = data.len();
                return Ok(taken);
            }
        }
        relayed.end(taken.data, taken.data, out);
        Ok(taken)
    }

    // ---- relayed requests that arrive in several pieces

    /// The request whose beginning the rest of the data is, if it is relayed.
    fn begin_passing(&mut self, it: &Arriving<'_, '_>, rest: &[u8]) -> PyResult<Option<(Sent, Passing)>> {
        let py = it.py();
        let Some((length, head)) = frame_start(rest, REQUEST_BYTES_MIN, it.settings.frame_bytes_max) else {
            return Ok(None);
        };
        if rest.len() >= LENGTH_BYTES + length {
            return Ok(None);
        }
        let Some(watches) = &self.watches else {
            return Ok(None);
        };
        let (api_key, version, correlation_id) = request_start(head);
        let left = LENGTH_BYTES + length;
        let passing = match it.settings.relayed(api_key) {
            Some((version_min, version_max, inspected)) => {
                if inspected || !(version_min..=version_max).contains(&version) {
                    return Ok(None);
                }
                Passing::unwatched(left)
            }
            None if api_key == PRODUCE => {
                let Some(template) = self.matching(py, rest, version) else {
                    return Ok(None);
                };
                let template = template.borrow(py);
                if template.is_checked || !it.process().fresh || !it.is_unchecked(&template)? {
                    return Ok(None);
                }
                let head = &rest[LENGTH_BYTES..rest.len().min(REQUEST_HEAD_BYTES)];
                let topic_end = REQUEST_BYTES_MIN + template.prefix.len();
                match Watches(watches.bind(py)).request_watch(head, topic_end, version)? {
                    Some(watch) => Passing::watched(left, watch)?,
                    None => return Ok(None),
                }
            }
            None => return Ok(None),
        };
        self.large[UP] = passing.unseen() >= SPLICED_BATCH_BYTES;
        let sent = Sent { api_key, version, correlation_id, checked: None };
        Ok(Some((sent, passing)))
    }

    // ---- requests with appends that arrive in several pieces

    /// Whether the rest of the data is the beginning of a request that is collected here.
    fn begin_collecting(&mut self, it: &Arriving<'_, '_>, rest: &[u8]) -> PyResult<bool> {
        let py = it.py();
        let length_max = it.settings.frame_bytes_max.min(it.settings.read_bytes_max);
        let Some((length, head)) = frame_start(rest, REQUEST_BYTES_MIN, length_max) else {
            return Ok(false);
        };
        let (api_key, version, _) = request_start(head);
        let whole = LENGTH_BYTES + length;
        if rest.len() >= whole || api_key != PRODUCE {
            return Ok(false);
        }
        let Some(template) = self.matching(py, rest, version) else {
            return Ok(false);
        };
        if !template.borrow(py).is_checked || self.waits_for_others() {
            return Ok(false);
        }
        if it.topic_settings(&template.borrow(py))?.is_none() {
            self.missing = Some(Vec::new());
            return Ok(false);
        }
        if !it.reserve(length)? {
            return Ok(false);
        }
        self.large[UP] = whole >= LARGE_BYTES;
        let mut frame = Frame::with_length(whole);
        frame[..rest.len()].copy_from_slice(rest);
        self.collecting = Some(Collecting { frame, filled: rest.len(), since: it.read.now });
        Ok(true)
    }

    /// How many bytes of the data belong to the request that is collected.
    fn collect(&mut self, data: &[u8]) -> usize {
        let Some(collecting) = &mut self.collecting else {
            return 0;
        };
        let missing = collecting.missing();
        let count = data.len().min(missing.len());
        missing[..count].copy_from_slice(&data[..count]);
        collecting.received(count);
        count
    }

    /// Sends a request that was collected. Returns it if it is not permitted.
    fn send_collected(
        &mut self,
        it: &Arriving<'_, '_>,
        complete: Collecting,
        is_free: bool,
        out: &mut Vec<Piece>,
    ) -> PyResult<Option<Collecting>> {
        let version = request_start(&complete.frame[LENGTH_BYTES..]).1;
        let frame = Arc::new(complete.frame);
        let template = if is_free { self.matching(it.py(), &frame, version) } else { None };
        if let Some(template) = template {
            let starts_at = it.read.received + LENGTH_BYTES as i64;
            if it.process().fresh && self.append(it, &template, &frame, Some(&frame), starts_at, out)? {
                return Ok(None);
            }
        }
        Ok(Some(Collecting { frame: Arc::unwrap_or_clone(frame), ..complete }))
    }
}
