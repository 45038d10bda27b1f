//! The requests of one connection that need no decision: whole frames that are relayed, and appends that permits allow.
//!
//! Everything else is left to Python, byte for byte. See `session/fast_path.py`, which does the same for both.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;

use memchr::memmem;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::batch::{self, HEADER_BYTES, Scan, Target};
use crate::bytes::Cursor;
use crate::fetch;
use crate::frame::Frame;
use crate::known::{Grounds, Known};
use crate::passing::{Left, Passing};
use crate::permit::{Circumstances, Mode, Permit, Source};
use crate::produce::{self, Batch};
use crate::pump::{Direction, Pumped};
use crate::settings::Settings;
use crate::standing::{Standing, unreported};

const LENGTH_BYTES: usize = 4;
const REQUEST_BYTES_MIN: usize = 8;
const RESPONSE_BYTES_MIN: usize = 4;
/// Indexes of `Connection.large`.
const UP: usize = Direction::Up as usize;
const DOWN: usize = Direction::Down as usize;
const LARGE_BYTES: usize = 64 * 1024;
/// Of a request, for its watch.
const REQUEST_HEAD_BYTES: usize = 8 * 1024;
const PRODUCE: i16 = 0;
const FETCH: i16 = 1;
const SHARE_FETCH: i16 = 78;
const SHARE_ACKNOWLEDGE: i16 = 79;
const PRODUCE_BY_ID: i64 = 13;
/// The first versions whose responses can name a broker's address.
const PRODUCE_ENDPOINTS_FROM: i16 = 10;
const FETCH_ENDPOINTS_FROM: i16 = 16;
/// Clients give up at their timeout; an unknown outcome is reported a little earlier.
const ANSWER_BY: f64 = 0.9;

/// While nothing is in progress in Python, readable sockets are handled here alone.
pub struct Armed {
    pub client_fd: RawFd,
    pub upstream_fd: RawFd,
    pub login_ends: f64,
    /// From the client, in total.
    pub received: i64,
}

/// A request that was sent and is not answered.
struct Sent {
    api_key: i16,
    version: i16,
    correlation_id: i32,
    checked: Option<Box<Checked>>,
}

struct Checked {
    known: Py<Known>,
    frame: Arc<Frame>,
    grounds: Py<Grounds>,
    starts_at: i64,
    answer_by: f64,
    appends: Vec<(i32, Py<Permit>, u64)>,
}

/// A request with appends of which only the beginning is there. Memory for all of it is reserved.
pub struct Collecting {
    frame: Frame,
    filled: usize,
    since: f64,
}

impl Collecting {
    fn without(mut self, last_bytes: usize) -> Self {
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

/// Attributes: `due` – when the first answer is due, None without appends in flight. `missing` – set if the last call
/// stopped at an append without a permit: its partitions, empty if `Known.grounds` do not hold.
#[pyclass(module = "fencepost_native")]
pub struct Connection {
    pub settings: Py<Settings>,
    connection: i64,
    opened_at: f64,
    #[pyo3(get, set)]
    known: Option<Py<Known>>,
    queue: VecDeque<Sent>,
    #[pyo3(get)]
    missing: Option<Vec<i32>>,
    /// Python waits for an answer to another request than Produce: appends are left to it.
    #[pyo3(get, set)]
    others_are_open: bool,
    /// Makes the watches of frames that are relayed as they arrive. None: Python relays such frames.
    #[pyo3(get, set)]
    watches: Option<Py<PyAny>>,
    pub collecting: Option<Collecting>,
    /// The frames of the client and of the broker that are being relayed as they arrive.
    pub up: Option<Passing>,
    pub down: Option<Passing>,
    /// Whether the last request was a large append, and the last response large: then the beginning of the next one is read
    /// alone, and the rest where it goes.
    pub large: [bool; 2],
    /// The `ProxiedConnection`, from when both sockets are open until both are closed.
    proxied: Option<Py<PyAny>>,
    pub armed: Option<Armed>,
    /// Whether the session is ticked while appends are in flight.
    #[pyo3(get, set)]
    ticking: bool,
    /// When the client and the broker last sent something, monotonic seconds.
    #[pyo3(get)]
    pub client_received_at: f64,
    #[pyo3(get)]
    pub upstream_received_at: f64,
    /// By topic: when Kafka last confirmed that the client may write. The session's own.
    may_write: Py<PyDict>,
}

#[pymethods]
impl Connection {
    #[new]
    fn new(settings: Py<Settings>, connection: i64, opened_at: f64, may_write: Py<PyDict>) -> Self {
        Connection {
            settings,
            connection,
            opened_at,
            known: None,
            queue: VecDeque::new(),
            missing: None,
            others_are_open: false,
            watches: None,
            collecting: None,
            up: None,
            down: None,
            large: [false; 2],
            proxied: None,
            armed: None,
            ticking: false,
            client_received_at: 0.0,
            upstream_received_at: 0.0,
            may_write,
        }
    }

    fn __len__(&self) -> usize {
        self.queue.len()
    }

    #[getter]
    fn awaits_appends(&self) -> bool {
        self.queue.iter().any(|sent| sent.checked.is_some())
    }

    #[getter]
    fn due(&self) -> Option<f64> {
        self.queue.iter().filter_map(|sent| sent.checked.as_ref()).map(|checked| checked.answer_by).reduce(f64::min)
    }

    /// Since when a request is incomplete.
    #[getter]
    fn collecting_since(&self) -> Option<f64> {
        self.collecting.as_ref().map(|collecting| collecting.since)
    }

    /// What Python relays from now on: the client's frame, and the broker's.
    fn take_passing(&mut self) -> (Option<Left>, Option<Left>) {
        (self.up.take().map(Passing::into_left), self.down.take().map(Passing::into_left))
    }

    /// The beginning of an incomplete request, which Python collects from now on.
    fn take_collected<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let Some(collecting) = self.collecting.take() else {
            return Ok(None);
        };
        self.release(py, collecting.frame.len() - LENGTH_BYTES)?;
        Ok(Some(PyBytes::new(py, &collecting.frame[..collecting.filled])))
    }

    /// See `FastPath.take_up`. `before`: requests in progress that Python keeps; `received`: bytes before `data`.
    #[pyo3(name = "take_up")]
    fn py_take_up<'py>(
        &mut self,
        py: Python<'py>,
        data: &[u8],
        now: f64,
        before: usize,
        received: i64,
    ) -> PyResult<(usize, usize, Option<Bound<'py, PyBytes>>)> {
        let mut out = Vec::new();
        let taken = self.take_up(py, data, now, before, received, &mut out)?;
        Ok((taken.data, taken.frames, joined(py, data, &out)))
    }

    /// See `FastPath.take_down`.
    #[pyo3(name = "take_down")]
    fn py_take_down<'py>(
        &mut self,
        py: Python<'py>,
        data: &[u8],
        now: f64,
    ) -> PyResult<(usize, Option<Bound<'py, PyBytes>>)> {
        let mut out = Vec::new();
        let taken = self.take_down(py, data, now, &mut out)?;
        Ok((taken.data, joined(py, data, &out)))
    }

    /// `take_up` for what the client's socket `from` has received; writes to the broker's socket `to`. `limit`: bytes to
    /// receive at most, 0 for no limit.
    #[allow(clippy::too_many_arguments)]
    fn pump_up<'py>(
        &mut self,
        py: Python<'py>,
        from: RawFd,
        to: RawFd,
        limit: usize,
        now: f64,
        before: usize,
        received: i64,
    ) -> PyResult<Bound<'py, PyTuple>> {
        self.pump(py, Direction::Up, from, to, limit, |it, data, done, out| {
            it.take_up(py, data, now, before, received + done as i64, out)
        })?
        .into_pyobject(py)
    }

    /// `take_down` for what the broker's socket `from` has received; writes to the client's socket `to`.
    fn pump_down<'py>(
        &mut self,
        py: Python<'py>,
        from: RawFd,
        to: RawFd,
        limit: usize,
        now: f64,
    ) -> PyResult<Bound<'py, PyTuple>> {
        self.pump(py, Direction::Down, from, to, limit, |it, data, _, out| it.take_down(py, data, now, out))?
            .into_pyobject(py)
    }

    // ---- readable sockets

    fn connect(&mut self, proxied: Py<PyAny>) {
        self.proxied = Some(proxied);
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.settings)?;
        visit.call(&self.known)?;
        visit.call(&self.proxied)?;
        visit.call(&self.watches)
    }

    fn __clear__(&mut self) {
        self.disconnect();
    }

    /// Drops what refers to this object, without a garbage collection.
    fn disconnect(&mut self) {
        self.proxied = None;
        self.watches = None;
        self.known = None;
        self.armed = None;
    }

    /// From now on readable sockets are handled without Python, as long as everything is done with.
    fn arm(&mut self, client_fd: RawFd, upstream_fd: RawFd, login_ends: f64, received: i64) {
        self.armed = Some(Armed { client_fd, upstream_fd, login_ends, received });
    }

    /// Returns how many bytes the client has sent in total; None if it was not armed.
    fn disarm(&mut self) -> Option<i64> {
        self.armed.take().map(|armed| armed.received)
    }

    fn client_readable(slf: &Bound<'_, Self>) -> PyResult<()> {
        let py = slf.py();
        let mut it = slf.borrow_mut();
        let pumped = it.pump_armed_up(py);
        let Some(proxied) = it.proxied.as_ref().map(|proxied| proxied.clone_ref(py)) else {
            return Ok(());
        };
        let begins_to_wait = matches!(pumped, Ok(Some(_))) && !it.ticking && it.awaits_appends();
        it.ticking |= begins_to_wait;
        drop(it);
        let pumped = pumped.or_else(|error| closed(py, &proxied, error))?;
        if begins_to_wait {
            proxied.call_method0(py, intern!(py, "keep_time"))?;
        }
        match pumped {
            None => proxied.call_method0(py, intern!(py, "read_client"))?,
            Some(pumped) if pumped.is_done() => return Ok(()),
            Some(pumped) => proxied.call_method1(py, intern!(py, "read_from_client"), (pumped.into_pyobject(py)?,))?,
        };
        Ok(())
    }

    fn upstream_readable(slf: &Bound<'_, Self>) -> PyResult<()> {
        let py = slf.py();
        let mut it = slf.borrow_mut();
        let pumped = it.pump_armed_down(py);
        let Some(proxied) = it.proxied.as_ref().map(|proxied| proxied.clone_ref(py)) else {
            return Ok(());
        };
        drop(it);
        let pumped = pumped.or_else(|error| closed(py, &proxied, error))?;
        match pumped {
            None => proxied.call_method0(py, intern!(py, "read_upstream"))?,
            Some(pumped) if pumped.is_done() => return Ok(()),
            Some(pumped) => {
                proxied.call_method1(py, intern!(py, "read_from_upstream"), (pumped.into_pyobject(py)?,))?
            }
        };
        Ok(())
    }

    /// Removes all requests. Each: API key, version, correlation id, and for appends their `Known`, the frame, where it
    /// starts, when its answer is due, and for each append its permit and number there.
    fn give_back<'py>(&mut self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        self.queue
            .drain(..)
            .map(|sent| {
                let checked = sent.checked.map(|checked| {
                    let appends: Vec<_> = checked.appends.into_iter().map(|(_, permit, id)| (permit, id)).collect();
                    (
                        checked.known,
                        checked.grounds,
                        PyBytes::new(py, &checked.frame[LENGTH_BYTES..]),
                        checked.starts_at,
                        checked.answer_by,
                        appends,
                    )
                });
                (sent.api_key, sent.version, sent.correlation_id, checked).into_pyobject(py)
            })
            .collect()
    }
}

/// A defect: the event loop logs the error, and the connection does not go on.
fn closed<'py>(py: Python<'py>, proxied: &Py<PyAny>, error: PyErr) -> PyResult<Option<Pumped<'py>>> {
    proxied.call_method0(py, intern!(py, "abort"))?;
    Err(error)
}

fn joined<'py>(py: Python<'py>, data: &[u8], out: &[Piece]) -> Option<Bound<'py, PyBytes>> {
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
struct Relayed {
    from: usize,
}

impl Relayed {
    fn end(&mut self, at: usize, next: usize, out: &mut Vec<Piece>) {
        if self.from < at {
            out.push(Piece::Received(self.from..at));
        }
        self.from = next;
    }
}

impl Connection {
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// So many bytes that need not be read were relayed.
    pub fn passed(&mut self, direction: Direction, byte_count: usize) {
        let passing = match direction {
            Direction::Up => &mut self.up,
            Direction::Down => &mut self.down,
        };
        if let Some(it) = passing {
            it.passed(byte_count);
        }
        if passing.take_if(|it| it.left == 0).is_some() && direction == Direction::Down {
            self.queue.pop_front();
        }
    }

    pub fn lend_buffer(&self, py: Python<'_>) -> Vec<u8> {
        std::mem::take(&mut self.settings.borrow_mut(py).buffer)
    }

    pub fn return_buffer(&self, py: Python<'_>, buffer: Vec<u8>) {
        self.settings.borrow_mut(py).buffer = buffer;
    }

    pub fn take_up(
        &mut self,
        py: Python<'_>,
        data: &[u8],
        now: f64,
        before: usize,
        received: i64,
        out: &mut Vec<Piece>,
    ) -> PyResult<Taken> {
        self.missing = None;
        let shared = self.settings.clone_ref(py);
        let services = shared.borrow(py).services.clone_ref(py).into_bound(py);
        shared.borrow_mut(py).remember(py, now)?;
        let queued = self.queue.len();
        let taken = self.take_frames(py, &shared.borrow(py), &services, data, now, before, received, out)?;
        let counts = &mut shared.borrow_mut(py).counts;
        for sent in self.queue.range(queued..) {
            *counts.requests.entry((sent.api_key, sent.version)).or_default() += 1;
            counts.admitted += sent.checked.as_ref().map_or(0, |checked| checked.appends.len() as u64);
        }
        Ok(taken)
    }

    #[allow(clippy::too_many_arguments)]
    fn take_frames(
        &mut self,
        py: Python<'_>,
        settings: &Settings,
        services: &Bound<'_, PyAny>,
        data: &[u8],
        now: f64,
        before: usize,
        received: i64,
        out: &mut Vec<Piece>,
    ) -> PyResult<Taken> {
        let it = Arriving { settings, services, now };
        let in_flight_max = it.standing().in_flight_max;
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
                if let Some(complete) = self.send_collected(py, &it, complete, is_free, received, out)? {
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
                let Some(known) = self.matching(py, frame, version) else {
                    break;
                };
                if !it.standing().fresh {
                    break;
                }
                if !known.borrow(py).is_checked {
                    if !it.may_relay(&known.borrow(py), frame, version)? {
                        break;
                    }
                    self.queue.push_back(Sent { api_key, version, correlation_id, checked: None });
                } else {
                    relayed.end(at, end, out);
                    let starts_at = received + (taken.frames + LENGTH_BYTES) as i64;
                    if !self.append(py, &it, &known, frame, None, starts_at, out)? {
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
            if let Some((sent, mut passing)) = self.begin_passing(py, &it, rest)? {
                let count = passing.take(py, rest)?;
                if count > 0 {
                    self.queue.push_back(sent);
                    self.up = Some(passing);
                }
                taken.data += count;
                taken.frames += count;
            } else if self.begin_collecting(py, &it, rest)? {
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
    fn begin_passing(
        &mut self,
        py: Python<'_>,
        it: &Arriving<'_, '_>,
        rest: &[u8],
    ) -> PyResult<Option<(Sent, Passing)>> {
        let Some((length, head)) = frame_start(rest, REQUEST_BYTES_MIN, it.settings.frame_bytes_max) else {
            return Ok(None);
        };
        if rest.len() >= LENGTH_BYTES + length || self.watches.is_none() {
            return Ok(None);
        }
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
                let Some(known) = self.matching(py, rest, version) else {
                    return Ok(None);
                };
                let known = known.borrow(py);
                if known.is_checked || !it.standing().fresh || !it.is_unchecked(&known)? {
                    return Ok(None);
                }
                let head = PyBytes::new(py, &rest[LENGTH_BYTES..rest.len().min(REQUEST_HEAD_BYTES)]);
                let arguments = (head, REQUEST_BYTES_MIN + known.prefix.len(), version);
                match self.watch(py, |watches| watches.call_method1(intern!(py, "request_watch"), arguments))? {
                    Some(watch) => Passing::watched(left, watch)?,
                    None => return Ok(None),
                }
            }
            None => return Ok(None),
        };
        self.large[UP] = false;
        let sent = Sent { api_key, version, correlation_id, checked: None };
        Ok(Some((sent, passing)))
    }

    /// The response to `sent`, if that is relayed and `rest` is the beginning of it.
    fn begin_response(&self, py: Python<'_>, sent: &Sent, rest: &[u8]) -> PyResult<Option<Passing>> {
        let Some((length, head)) = frame_start(rest, RESPONSE_BYTES_MIN, usize::MAX) else {
            return Ok(None);
        };
        if sent.checked.is_some() || response_start(head) != sent.correlation_id || self.watches.is_none() {
            return Ok(None);
        }
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
        let arguments = (sent.api_key, sent.version, length);
        let watch = self.watch(py, |watches| watches.call_method1(intern!(py, "response_watch"), arguments))?;
        watch.map(|watch| Passing::watched(left, watch)).transpose()
    }

    /// One of Python's watches. None: there is none for this frame.
    fn watch<'py>(
        &self,
        py: Python<'py>,
        make: impl FnOnce(&Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(watches) = &self.watches else {
            return Ok(None);
        };
        let watch = make(watches.bind(py))?;
        Ok((!watch.is_none()).then_some(watch))
    }

    // ---- requests with appends that arrive in several pieces

    /// Whether the rest of the data is the beginning of a request that is collected here.
    fn begin_collecting(&mut self, py: Python<'_>, it: &Arriving<'_, '_>, rest: &[u8]) -> PyResult<bool> {
        let length_max = it.settings.frame_bytes_max.min(it.settings.read_bytes_max);
        let Some((length, head)) = frame_start(rest, REQUEST_BYTES_MIN, length_max) else {
            return Ok(false);
        };
        let (api_key, version, _) = request_start(head);
        let whole = LENGTH_BYTES + length;
        if rest.len() >= whole || api_key != PRODUCE {
            return Ok(false);
        }
        let Some(known) = self.matching(py, rest, version) else {
            return Ok(false);
        };
        if !known.borrow(py).is_checked || self.waits_for_others() {
            return Ok(false);
        }
        if it.grounds(&known.borrow(py))?.is_none() {
            self.missing = Some(Vec::new());
            return Ok(false);
        }
        if !it.reserve(length)? {
            return Ok(false);
        }
        self.large[UP] = whole >= LARGE_BYTES;
        let mut frame = Frame::with_length(whole);
        frame[..rest.len()].copy_from_slice(rest);
        self.collecting = Some(Collecting { frame, filled: rest.len(), since: it.now });
        Ok(true)
    }

    /// Whether Kafka will handle an append after requests whose time the client may choose.
    fn waits_for_others(&self) -> bool {
        self.others_are_open || self.queue.iter().any(|sent| sent.api_key != PRODUCE)
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
        py: Python<'_>,
        it: &Arriving<'_, '_>,
        complete: Collecting,
        is_free: bool,
        received: i64,
        out: &mut Vec<Piece>,
    ) -> PyResult<Option<Collecting>> {
        let version = request_start(&complete.frame[LENGTH_BYTES..]).1;
        let frame = Arc::new(complete.frame);
        let known = if is_free { self.matching(py, &frame, version) } else { None };
        if let Some(known) = known {
            if it.standing().fresh
                && self.append(py, it, &known, &frame, Some(&frame), received + LENGTH_BYTES as i64, out)?
            {
                return Ok(None);
            }
        }
        Ok(Some(Collecting { frame: Arc::unwrap_or_clone(frame), ..complete }))
    }

    fn release(&self, py: Python<'_>, byte_count: usize) -> PyResult<()> {
        let settings = self.settings.borrow(py);
        match &settings.shared {
            Some(shared) => shared.get().memory.borrow_mut(py).release(byte_count as i64),
            None => {
                settings.services.call_method1(py, intern!(py, "release"), (byte_count,))?;
            }
        }
        Ok(())
    }

    /// The known start of a Produce request, if this one starts so. `frame`: with its length.
    fn matching(&self, py: Python<'_>, frame: &[u8], version: i16) -> Option<Py<Known>> {
        let known = self.known.as_ref()?;
        let it = known.borrow(py);
        let matches = it.version == version && frame[LENGTH_BYTES + REQUEST_BYTES_MIN..].starts_with(&it.prefix);
        matches.then(|| known.clone_ref(py))
    }

    /// Sends all appends of a request, or none. `frame`: with its length. `collected`: the same, if memory is reserved.
    #[allow(clippy::too_many_arguments)]
    fn append(
        &mut self,
        py: Python<'_>,
        it: &Arriving<'_, '_>,
        known_start: &Py<Known>,
        frame: &[u8],
        collected: Option<&Arc<Frame>>,
        starts_at: i64,
        out: &mut Vec<Piece>,
    ) -> PyResult<bool> {
        if self.waits_for_others() {
            return Ok(false);
        }
        let known = known_start.borrow(py);
        let (_, version, correlation_id) = request_start(&frame[LENGTH_BYTES..]);
        let after_topic = LENGTH_BYTES + REQUEST_BYTES_MIN + known.prefix.len();
        let Some(batches) = produce::read_request(frame, after_topic, version) else {
            return Ok(false);
        };
        let Some(grounds) = it.grounds(&known)? else {
            self.missing = Some(Vec::new());
            return Ok(false);
        };
        let missing =
            |batch: &&Batch| !known.permits.get(&batch.partition).is_some_and(|permit| permit.borrow(py).is_live());
        let missing: Vec<i32> = batches.iter().filter(missing).map(|batch| batch.partition).collect();
        if !missing.is_empty() {
            self.missing = Some(missing);
            return Ok(false);
        }
        let Some(fitting) = self.fitting(py, frame, &batches, it, &known, grounds.get())? else {
            return Ok(false);
        };
        if collected.is_none() && !it.reserve(frame.len() - LENGTH_BYTES)? {
            return Ok(false);
        }
        let frame = collected.map_or_else(|| Arc::new(Frame::copy_of(frame)), Arc::clone);

        let mut heads = Vec::with_capacity(batches.len());
        let mut appends = Vec::with_capacity(batches.len());
        for (batch, fits) in batches.iter().zip(fitting) {
            let Fitting { permit, scan, mode, at, header, circumstances } = fits;
            heads.push(produce::partition_head(batch.partition, batch.end - batch.start, &header));
            let source = Source {
                known: known_start.clone_ref(py),
                grounds: grounds.clone_ref(py),
                frame: Arc::clone(&frame),
                partition: batch.partition,
                start: batch.start,
                end: batch.end,
            };
            let id = permit.borrow_mut(py).take(scan, mode, at, &circumstances, source);
            appends.push((batch.partition, permit, id));
        }
        let rest_bytes =
            batches.iter().zip(&heads).map(|(batch, head)| head.len() + batch.end - batch.start - HEADER_BYTES + 1);
        let rest_bytes = rest_bytes.sum::<usize>() + 2;
        let topic_id = &grounds.get().topic_id_bytes;
        let mut made = produce::request_head(
            correlation_id,
            &known.before_acks,
            known.timeout_ms,
            topic_id,
            batches.len(),
            rest_bytes,
        );
        for (batch, head) in batches.iter().zip(heads) {
            made.extend_from_slice(&head);
            out.push(Piece::Made(std::mem::take(&mut made)));
            out.push(Piece::Kept(Arc::clone(&frame), batch.start + HEADER_BYTES..batch.end));
            made.push(0);
        }
        made.extend_from_slice(&[0, 0]);
        out.push(Piece::Made(made));
        let timeout_seconds = f64::from(known.timeout_ms.max(100)) / 1000.0;
        let checked = Checked {
            known: known_start.clone_ref(py),
            frame,
            grounds: grounds.clone_ref(py),
            starts_at,
            answer_by: it.now + ANSWER_BY * timeout_seconds,
            appends,
        };
        self.queue.push_back(Sent { api_key: PRODUCE, version, correlation_id, checked: Some(Box::new(checked)) });
        Ok(true)
    }

    /// Each batch with its permit; None if not all of them fit at once.
    fn fitting(
        &self,
        py: Python<'_>,
        frame: &[u8],
        batches: &[Batch],
        it: &Arriving<'_, '_>,
        known: &Known,
        grounds: &Grounds,
    ) -> PyResult<Option<Vec<Fitting>>> {
        let standing = it.standing();
        let mut bytes_left = it.settings.read_bytes_max;
        let mut fitting = Vec::with_capacity(batches.len());
        for batch in batches {
            let bytes = &frame[batch.start..batch.end];
            let Some(left) = bytes_left.checked_sub(bytes.len()) else {
                return Ok(None);
            };
            bytes_left = left;
            let settings = it.settings;
            let target =
                Target { topic: &grounds.topic, partition: batch.partition, cluster_id: grounds.cluster_id.as_deref() };
            let source_is_base = grounds.source_is_base;
            let Some(scan) = batch::scan(bytes, &settings.names, &target, settings.digest_seed, source_is_base) else {
                return Ok(None);
            };
            if scan.producer_id >= 0
                && (scan.producer_id >= settings.producer_ids_end || standing.producer_ids.contains(&scan.producer_id))
            {
                return Ok(None);
            }
            let permit = known.permits[&batch.partition].clone_ref(py);
            let circumstances = Circumstances {
                connection: self.connection,
                opened_at: self.opened_at,
                now: it.now,
                leader_epoch: it.leader_epoch(&mut permit.borrow_mut(py))?,
                instance_id: standing.instance_id,
                alone: standing.alone,
                taken_over: standing.taken_over,
                required: grounds.required,
            };
            let Some((mode, at)) = permit.borrow_mut(py).admits(py, &scan, &circumstances)? else {
                return Ok(None);
            };
            let fence = permit.borrow(py).fence(mode, at, standing.instance_id);
            let Some(header) = batch::header_to_send(bytes, fence.as_ref()) else {
                return Ok(None);
            };
            fitting.push(Fitting { permit, scan, mode, at, header, circumstances });
        }
        Ok(Some(fitting))
    }

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

    /// The answer to a request's appends, if all of it is the expected success. None: nothing has happened.
    fn complete(
        &self,
        py: Python<'_>,
        checked: &Checked,
        correlation_id: i32,
        frame: &[u8],
        now: f64,
    ) -> PyResult<Option<Vec<u8>>> {
        let Some((throttle, results)) =
            produce::read_response(frame, &checked.grounds.get().topic_id_bytes, checked.appends.len())
        else {
            return Ok(None);
        };
        if throttle != 0 {
            return Ok(None);
        }
        let mut ordered = Vec::with_capacity(results.len());
        for (partition, permit, id) in &checked.appends {
            let result = results.iter().find(|each| each.partition == *partition);
            let Some(result) = result.filter(|result| permit.borrow(py).may_complete(*id, result)) else {
                return Ok(None);
            };
            ordered.push(*result);
        }
        let services = self.settings.borrow(py).services.clone_ref(py).into_bound(py);
        for ((_, permit, _), result) in checked.appends.iter().zip(&ordered) {
            let kept_id = permit.borrow_mut(py).complete(result, now);
            if let Some((producer_id, last_offset)) = kept_id {
                let partition = permit.borrow(py).partition(py);
                let memory = services.getattr(intern!(py, "idempotence"))?;
                memory.call_method1(intern!(py, "acknowledged"), (partition, producer_id, last_offset))?;
            }
        }
        let known = checked.known.borrow(py);
        self.may_write.bind(py).set_item(&known.topic_name, now)?;
        self.release(py, checked.frame.len() - LENGTH_BYTES)?;
        Ok(Some(produce::response(known.version, correlation_id, &known.topic, &ordered, throttle)))
    }
}

/// What requests are judged by.
struct Arriving<'a, 'py> {
    settings: &'a Settings,
    services: &'a Bound<'py, PyAny>,
    now: f64,
}

struct Fitting {
    permit: Py<Permit>,
    scan: Scan,
    mode: Mode,
    at: i64,
    header: [u8; HEADER_BYTES],
    circumstances: Circumstances,
}

impl Arriving<'_, '_> {
    fn standing(&self) -> &Standing {
        &self.settings.remembered.standing
    }

    fn reserve(&self, byte_count: usize) -> PyResult<bool> {
        let py = self.services.py();
        match &self.settings.shared {
            Some(shared) => Ok(shared.get().memory.borrow_mut(py).reserve(byte_count as i64)),
            None => self.services.call_method1(intern!(py, "reserve"), (byte_count,))?.extract(),
        }
    }

    /// What the permits rely on, if it still holds.
    fn grounds<'k>(&self, known: &'k Known) -> PyResult<Option<&'k Py<Grounds>>> {
        let Some(grounds) = &known.grounds else {
            return Ok(None);
        };
        let holds = self.remembered(known, || {
            let (py, held, topic) = (self.services.py(), grounds.get(), (&known.topic_name,));
            Ok(self.services.call_method1(intern!(py, "policy"), topic)?.is(&held.policy)
                && self.services.call_method1(intern!(py, "topic_id"), topic)?.is(&held.topic_id))
        })?;
        Ok((holds && self.standing().produce_version_max >= PRODUCE_BY_ID).then_some(grounds))
    }

    /// Whether a Produce request for a topic without checks may be relayed unread.
    fn may_relay(&self, known: &Known, frame: &[u8], version: i16) -> PyResult<bool> {
        let after_topic = LENGTH_BYTES + REQUEST_BYTES_MIN + known.prefix.len();
        let Some(producer_ids) = produce::producer_ids(frame, after_topic, version) else {
            return Ok(false);
        };
        if producer_ids.iter().any(|id| self.standing().producer_ids.contains(id)) {
            return Ok(false);
        }
        self.is_unchecked(known)
    }

    fn is_unchecked(&self, known: &Known) -> PyResult<bool> {
        self.remembered(known, || {
            let policy = self.services.call_method1(intern!(self.services.py(), "policy"), (&known.topic_name,))?;
            Ok(policy.is_none())
        })
    }

    /// What holds of its topic, asked only if it is not remembered.
    fn remembered(&self, known: &Known, query: impl FnOnce() -> PyResult<bool>) -> PyResult<bool> {
        let number = self.settings.remembered.number;
        let remembered = known.holds(number);
        if remembered && !self.settings.verifies() {
            return Ok(true);
        }
        let holds = query()?;
        if remembered && !holds {
            return Err(unreported("a topic"));
        }
        if holds {
            known.hold(number);
        }
        Ok(holds)
    }

    fn leader_epoch(&self, permit: &mut Permit) -> PyResult<i64> {
        let (py, number) = (self.services.py(), self.settings.remembered.number);
        let (asked, remembered) = permit.leader_epoch;
        if asked == number && !self.settings.verifies() {
            return Ok(remembered);
        }
        let partition = permit.partition(py);
        let epoch = self.services.call_method1(intern!(py, "leader_epoch"), (partition,))?.extract()?;
        if asked == number && epoch != remembered {
            return Err(unreported("a leader"));
        }
        permit.leader_epoch = (number, epoch);
        Ok(epoch)
    }

    fn concerns_state_topic(&self, frame: &[u8]) -> bool {
        self.standing().state_topic_marks.iter().any(|mark| memmem::find(frame, mark).is_some())
    }
}

/// The length of the frame that begins here, and its first bytes after the length.
fn frame_start(rest: &[u8], bytes_min: usize, bytes_max: usize) -> Option<(usize, &[u8])> {
    let length = usize::try_from(Cursor::new(rest, 0).i32()?).ok()?;
    if length < bytes_min || length > bytes_max {
        return None;
    }
    Some((length, rest.get(LENGTH_BYTES..LENGTH_BYTES + bytes_min)?))
}

/// The frame at `at` with its length, and its first bytes after the length, if all of it is there.
fn whole_frame(data: &[u8], at: usize, bytes_min: usize, bytes_max: usize) -> Option<(&[u8], &[u8])> {
    let rest = data.get(at..)?;
    let (length, head) = frame_start(rest, bytes_min, bytes_max)?;
    Some((rest.get(..LENGTH_BYTES + length)?, head))
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

fn request_start(head: &[u8]) -> (i16, i16, i32) {
    let mut cursor = Cursor::new(head, 0);
    (cursor.i16().unwrap_or(-1), cursor.i16().unwrap_or(-1), cursor.i32().unwrap_or(-1))
}

fn response_start(head: &[u8]) -> i32 {
    Cursor::new(head, 0).i32().unwrap_or(-1)
}
