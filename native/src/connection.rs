//! The requests of one connection that need no decision: whole frames that are relayed, and appends that permits allow.
//!
//! Everything else is left to Python, byte for byte. See `session/fast_path.py`, which does the same for both.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;

use memchr::memmem;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::batch::{self, HEADER_BYTES, Scan};
use crate::bytes::Cursor;
use crate::fetch;
use crate::known::{Grounds, Known};
use crate::permit::{Circumstances, Mode, Permit, Source};
use crate::produce::{self, Batch};
use crate::pump::Pumped;
use crate::settings::Settings;

const LENGTH_BYTES: usize = 4;
const REQUEST_BYTES_MIN: usize = 8;
const RESPONSE_BYTES_MIN: usize = 4;
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
    frame: Arc<Vec<u8>>,
    grounds: Py<Grounds>,
    starts_at: i64,
    answer_by: f64,
    appends: Vec<(i32, Py<Permit>, u64)>,
}

/// A request with appends of which only the beginning is there. Memory for all of it is reserved.
struct Collecting {
    frame: Vec<u8>,
    length: usize,
    since: f64,
}

impl Collecting {
    fn without(mut self, last_bytes: usize) -> Self {
        self.frame.truncate(self.frame.len() - last_bytes);
        self
    }
}

/// Bytes to send: received ones, parts of a request, or made here.
pub enum Piece {
    Received(Range<usize>),
    Kept(Arc<Vec<u8>>, Range<usize>),
    Made(Vec<u8>),
}

/// How many bytes are done with: of the data, and of whole frames.
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
    collecting: Option<Collecting>,
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
            collecting: None,
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

    /// The beginning of an incomplete request, which Python collects from now on.
    fn take_collected<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let Some(collecting) = self.collecting.take() else {
            return Ok(None);
        };
        self.release(py, collecting.length - LENGTH_BYTES)?;
        Ok(Some(PyBytes::new(py, &collecting.frame)))
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
        self.pump(py, from, to, limit, |it, data, out| it.take_up(py, data, now, before, received, out))?
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
        self.pump(py, from, to, limit, |it, data, out| it.take_down(py, data, now, out))?.into_pyobject(py)
    }

    // ---- readable sockets

    fn connect(&mut self, proxied: Py<PyAny>) {
        self.proxied = Some(proxied);
    }

    /// Drops what refers to this object: Python's garbage collection does not look inside it.
    fn disconnect(&mut self) {
        self.proxied = None;
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
        shared.borrow_mut(py).update_relayed(services.getattr(intern!(py, "relayed_versions"))?)?;
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
        let in_flight_max: usize = services.getattr(intern!(py, "in_flight_requests_max"))?.extract()?;
        let mut taken = Taken::default();
        if self.collecting.is_some() {
            taken.data = self.collect(data);
            if let Some(complete) = self.collecting.take_if(|it| it.frame.len() == it.length) {
                let is_free = before + self.queue.len() < in_flight_max;
                taken.frames = complete.frame.len();
                if let Some(complete) = self.send_collected(py, &it, complete, is_free, received, out)? {
                    // The data that completes it goes to Python, after what was collected.
                    self.collecting = Some(complete.without(taken.data));
                    return Ok(Taken::default());
                }
            }
        }
        let mut relayed = Relayed { from: taken.data };
        while before + self.queue.len() < in_flight_max {
            let at = taken.data;
            let Some((frame, head)) = whole_frame(data, at, REQUEST_BYTES_MIN, settings.frame_bytes_max) else {
                break;
            };
            let (api_key, version, correlation_id) = request_start(head);
            let end = at + frame.len();
            if let Some((version_min, version_max, inspected)) = settings.relayed(api_key) {
                if !(version_min..=version_max).contains(&version)
                    || inspected && concerns_state_topic(services, frame)?
                {
                    break;
                }
                self.queue.push_back(Sent { api_key, version, correlation_id, checked: None });
            } else if api_key == PRODUCE {
                let Some(known) = self.matching(py, frame, version) else {
                    break;
                };
                if !it.is_fresh()? {
                    break;
                }
                if !known.borrow(py).is_checked {
                    if !may_relay(services, &known.borrow(py), frame, version)? {
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
        }
        relayed.end(taken.data, taken.data, out);
        if taken.data < data.len()
            && before + self.queue.len() < in_flight_max
            && self.begin_collecting(py, &it, &data[taken.data..])?
        {
            taken.data = data.len();
        }
        Ok(taken)
    }

    // ---- requests with appends that arrive in several pieces

    /// Whether the rest of the data is the beginning of a request that is collected here.
    fn begin_collecting(&mut self, py: Python<'_>, it: &Arriving<'_, '_>, rest: &[u8]) -> PyResult<bool> {
        let Some(length) = Cursor::new(rest, 0).i32().and_then(|length| usize::try_from(length).ok()) else {
            return Ok(false);
        };
        let Some(head) = rest.get(LENGTH_BYTES..LENGTH_BYTES + REQUEST_BYTES_MIN) else {
            return Ok(false);
        };
        let (api_key, version, _) = request_start(head);
        let whole = LENGTH_BYTES + length;
        if rest.len() >= whole
            || length > it.settings.frame_bytes_max.min(it.settings.read_bytes_max)
            || api_key != PRODUCE
        {
            return Ok(false);
        }
        let Some(known) = self.matching(py, rest, version) else {
            return Ok(false);
        };
        if !known.borrow(py).is_checked || it.grounds(&known.borrow(py))?.is_none() || !it.reserve(length)? {
            return Ok(false);
        }
        let mut frame = Vec::with_capacity(whole);
        frame.extend_from_slice(rest);
        self.collecting = Some(Collecting { frame, length: whole, since: it.now });
        Ok(true)
    }

    /// How many bytes of the data belong to the request that is collected.
    fn collect(&mut self, data: &[u8]) -> usize {
        let Some(collecting) = &mut self.collecting else {
            return 0;
        };
        let count = data.len().min(collecting.length - collecting.frame.len());
        collecting.frame.extend_from_slice(&data[..count]);
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
            if it.is_fresh()?
                && self.append(py, it, &known, &frame, Some(&frame), received + LENGTH_BYTES as i64, out)?
            {
                return Ok(None);
            }
        }
        Ok(Some(Collecting { frame: Arc::unwrap_or_clone(frame), ..complete }))
    }

    fn release(&self, py: Python<'_>, byte_count: usize) -> PyResult<()> {
        let services = self.settings.borrow(py).services.clone_ref(py).into_bound(py);
        services.call_method1(intern!(py, "release"), (byte_count,))?;
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
        collected: Option<&Arc<Vec<u8>>>,
        starts_at: i64,
        out: &mut Vec<Piece>,
    ) -> PyResult<bool> {
        let known = known_start.borrow(py);
        let (_, version, correlation_id) = request_start(&frame[LENGTH_BYTES..]);
        let Some(batches) = produce::read_request(frame, LENGTH_BYTES + REQUEST_BYTES_MIN + known.prefix.len()) else {
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
        let frame = collected.map_or_else(|| Arc::new(frame.to_vec()), Arc::clone);

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
        let services = it.services;
        let instance_id: i16 = services.getattr(intern!(py, "instance_id"))?.extract()?;
        let alone: bool = services.call_method1(intern!(py, "alone"), (it.now,))?.extract()?;
        let taken_over: bool = services.call_method1(intern!(py, "taken_over"), (it.now,))?.extract()?;
        let mut bytes_left = it.settings.read_bytes_max;
        let mut fitting = Vec::with_capacity(batches.len());
        for batch in batches {
            let bytes = &frame[batch.start..batch.end];
            let Some(left) = bytes_left.checked_sub(bytes.len()) else {
                return Ok(None);
            };
            bytes_left = left;
            let settings = it.settings;
            let Some(scan) = batch::scan(bytes, &settings.names, settings.digest_seed, grounds.source_is_base) else {
                return Ok(None);
            };
            if scan.producer_id >= 0
                && (scan.producer_id >= settings.producer_ids_end || is_shared(services, scan.producer_id)?)
            {
                return Ok(None);
            }
            let permit = known.permits[&batch.partition].clone_ref(py);
            let partition = permit.borrow(py).partition(py);
            let circumstances = Circumstances {
                connection: self.connection,
                opened_at: self.opened_at,
                now: it.now,
                leader_epoch: services.call_method1(intern!(py, "leader_epoch"), (partition,))?.extract()?,
                instance_id,
                alone,
                taken_over,
                required: grounds.required,
            };
            let Some((mode, at)) = permit.borrow_mut(py).admits(py, &scan, &circumstances)? else {
                return Ok(None);
            };
            let fence = permit.borrow(py).fence(mode, at, instance_id);
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
        while let Some(sent) = self.queue.front() {
            let Some((frame, head)) = whole_frame(data, at, RESPONSE_BYTES_MIN, usize::MAX) else {
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
            } else if !names_no_broker(sent, frame) {
                break;
            }
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
        Ok(Some(produce::response(correlation_id, &known.topic, &ordered, throttle)))
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
    /// Whether the virtual configs are recent enough to rely on.
    fn is_fresh(&self) -> PyResult<bool> {
        self.services.call_method1(intern!(self.services.py(), "fresh"), (self.now,))?.extract()
    }

    fn reserve(&self, byte_count: usize) -> PyResult<bool> {
        self.services.call_method1(intern!(self.services.py(), "reserve"), (byte_count,))?.extract()
    }

    /// What the permits rely on, if it still holds.
    fn grounds<'k>(&self, known: &'k Known) -> PyResult<Option<&'k Py<Grounds>>> {
        let py = self.services.py();
        let Some(grounds) = &known.grounds else {
            return Ok(None);
        };
        let held = grounds.get();
        let topic = (&known.topic_name,);
        if !self.services.call_method1(intern!(py, "policy"), topic)?.is(&held.policy) {
            return Ok(None);
        }
        if !self.services.call_method1(intern!(py, "topic_id"), topic)?.is(&held.topic_id) {
            return Ok(None);
        }
        let version_max: i64 = self.services.call_method0(intern!(py, "produce_version_max"))?.extract()?;
        Ok((version_max >= PRODUCE_BY_ID).then_some(grounds))
    }
}

/// The frame at `at` with its length, and its first bytes after the length, if all of it is there.
fn whole_frame(data: &[u8], at: usize, bytes_min: usize, bytes_max: usize) -> Option<(&[u8], &[u8])> {
    let rest = data.get(at..)?;
    let length = usize::try_from(Cursor::new(rest, 0).i32()?).ok()?;
    if length < bytes_min || length > bytes_max {
        return None;
    }
    let frame = rest.get(..LENGTH_BYTES + length)?;
    Some((frame, &frame[LENGTH_BYTES..LENGTH_BYTES + bytes_min]))
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

fn request_start(head: &[u8]) -> (i16, i16, i32) {
    let mut cursor = Cursor::new(head, 0);
    (cursor.i16().unwrap_or(-1), cursor.i16().unwrap_or(-1), cursor.i32().unwrap_or(-1))
}

fn response_start(head: &[u8]) -> i32 {
    Cursor::new(head, 0).i32().unwrap_or(-1)
}

fn concerns_state_topic(services: &Bound<'_, PyAny>, frame: &[u8]) -> PyResult<bool> {
    for mark in services.getattr(intern!(services.py(), "state_topic_marks"))?.try_iter()? {
        if memmem::find(frame, mark?.extract()?).is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a Produce request for a topic without checks may be relayed unread.
fn may_relay(services: &Bound<'_, PyAny>, known: &Known, frame: &[u8], version: i16) -> PyResult<bool> {
    let Some(producer_ids) =
        produce::producer_ids(frame, LENGTH_BYTES + REQUEST_BYTES_MIN + known.prefix.len(), version)
    else {
        return Ok(false);
    };
    for producer_id in producer_ids.into_iter().filter(|id| *id >= 0) {
        if is_shared(services, producer_id)? {
            return Ok(false);
        }
    }
    Ok(services.call_method1(intern!(services.py(), "policy"), (&known.topic_name,))?.is_none())
}

/// Whether it is one of the proxy's own.
fn is_shared(services: &Bound<'_, PyAny>, producer_id: i64) -> PyResult<bool> {
    services.getattr(intern!(services.py(), "shared_producer_ids"))?.contains(producer_id)
}
