//! A permit: what may be appended to one partition without its sequencer.
//!
//! The sequencer issues it while nothing is unusual (`sequencer/permits.py`), and takes it back before it decides
//! anything itself. What it admits and completes, `Admitter` and `KafkaAnswers` would too (`tests/unit/test_fast_path.py`).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::batch::{Digest, Fence, Scan};
use crate::frame::Frame;
use crate::produce::Appended;
use crate::topic::TopicSettings;
use crate::upward::{Append, Issuer, PermitTerms};

const SEQUENCE_MODULUS: i64 = 1 << 31;

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Mode {
    Conditional,
    Sequenced,
    PassThrough,
}

impl Mode {
    fn fenced(self) -> bool {
        self != Mode::PassThrough
    }
}

/// What holds for an append when it arrives, besides the permit.
pub struct AppendContext {
    pub connection: i64,
    pub opened_at: f64,
    pub now: f64,
    pub leader_epoch: i64,
    pub instance_id: i16,
    pub alone: bool,
    pub taken_over: bool,
    pub required: bool,
}

/// An append that was sent and is not answered.
struct InFlight {
    id: u64,
    connection: i64,
    mode: Mode,
    /// Where a fenced append must be appended; -1 for others.
    at: i64,
    count: i32,
    max_timestamp_ms: i64,
    sent_at: f64,
    leader_epoch: i64,
    origin: Origin,
}

enum Origin {
    /// It was sent before the permit was issued: the sequencer's own object.
    Adopted(Py<PyAny>),
    Permitted(Box<Permitted>),
}

struct Permitted {
    scan: Scan,
    fence: Option<Fence>,
    source: Source,
    alone: bool,
    taken_over: bool,
}

/// Where the batch is in its request.
pub struct Source {
    /// The `RequestTemplate` of its request: for Python.
    pub template: Py<PyAny>,
    pub topic_settings: Py<TopicSettings>,
    /// With its length.
    pub frame: Arc<Frame>,
    pub partition: i32,
    pub start: usize,
    pub end: usize,
}

/// For the retry cache of the sequencer.
struct Remembered {
    at: i64,
    count: i32,
    digest: Digest,
    write_id: Option<Vec<u8>>,
    producer: (i64, i16, i32),
    /// Where and when Kafka acknowledged it.
    acknowledged: (i64, f64),
}

/// Attributes: `issuer`, `partition` – as given. Times are monotonic seconds.
#[pyclass(module = "fencepost_native")]
pub struct Permit {
    live: bool,
    /// The log end is known.
    is_open: bool,
    /// Appends may be fenced.
    fences: bool,
    /// No other process fences here.
    exclusive: bool,
    #[pyo3(get)]
    issuer: Py<PyAny>,
    #[pyo3(get)]
    partition: Py<PyAny>,
    producer_id: i64,
    producer_epoch: i16,
    sequence_offset: i64,
    log_end: i64,
    end_as_of: f64,
    confirmed_until: f64,
    confirmed_since: f64,
    confirmed_epoch: i64,
    expiration_seconds: f64,
    expiration_known_until: f64,
    clock_offset_seconds: f64,
    in_flight_max: usize,
    remembered_max: usize,
    in_flight: VecDeque<InFlight>,
    remembered: VecDeque<Remembered>,
    /// The next sequence of a producer whose batches are fenced; `None`: its batches keep their sequences.
    producers: HashMap<(i64, i16), Option<i32>>,
    pass_through: VecDeque<(i64, i16, i32)>,
    last_topic_settings: Option<Py<TopicSettings>>,
    next_id: u64,
    /// The leader epoch, and when it was queried: `Remembered.number`.
    pub leader_epoch: (u64, i64),
    /// After it was taken back: the sequencer's objects for what was in flight.
    kept: HashMap<u64, Py<PyAny>>,
}

#[pymethods]
impl Permit {
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.issuer)?;
        visit.call(&self.last_topic_settings)?;
        self.kept.values().try_for_each(|pending| visit.call(pending))
    }

    #[new]
    fn new(issuer: Py<PyAny>, partition: Py<PyAny>, terms: &Bound<'_, PyAny>) -> PyResult<Self> {
        let terms = PermitTerms(terms);
        Ok(Permit {
            live: true,
            issuer,
            partition,
            is_open: terms.is_open()?,
            fences: terms.fences()?,
            exclusive: terms.exclusive()?,
            producer_id: terms.producer_id()?,
            producer_epoch: terms.producer_epoch()?,
            sequence_offset: terms.sequence_offset()?,
            log_end: terms.log_end()?,
            end_as_of: terms.end_as_of()?,
            confirmed_until: terms.confirmed_until()?,
            confirmed_since: terms.confirmed_since()?,
            confirmed_epoch: terms.confirmed_epoch()?,
            expiration_seconds: terms.expiration_seconds()?,
            expiration_known_until: terms.expiration_known_until()?,
            clock_offset_seconds: terms.clock_offset_seconds()?,
            in_flight_max: terms.in_flight_max()?,
            remembered_max: terms.remembered_max()?,
            in_flight: VecDeque::new(),
            remembered: VecDeque::new(),
            producers: HashMap::new(),
            pass_through: VecDeque::new(),
            last_topic_settings: None,
            next_id: 0,
            leader_epoch: (0, -1),
            kept: HashMap::new(),
        })
    }

    /// An append that the sequencer sent before it issued the permit. `sent`: its mode (0 conditional, 1 sequenced,
    /// 2 pass-through), offset, time and leader epoch.
    fn adopt(
        &mut self,
        pending: &Bound<'_, PyAny>,
        append: &Bound<'_, PyAny>,
        connection: i64,
        sent: (u8, i64, f64, i64),
    ) -> PyResult<()> {
        let append = Append(append);
        let (mode, at, sent_at, leader_epoch) = sent;
        let in_flight = InFlight {
            id: self.number(),
            connection,
            mode: [Mode::Conditional, Mode::Sequenced, Mode::PassThrough][usize::from(mode)],
            at,
            count: append.record_count()?,
            max_timestamp_ms: append.max_timestamp_ms()?,
            sent_at,
            leader_epoch,
            origin: Origin::Adopted(pending.clone().unbind()),
        };
        self.in_flight.push_back(in_flight);
        Ok(())
    }

    /// Whether the answer to an adopted append is the expected success, and the next one due.
    fn may_complete_adopted(&self, pending: &Bound<'_, PyAny>, base_offset: i64, append_time_ms: i64) -> bool {
        match self.in_flight.front() {
            Some(first) => first.is(pending) && self.is_expected(first, base_offset, append_time_ms),
            None => false,
        }
    }

    /// After `may_complete_adopted`.
    fn complete_adopted(&mut self, base_offset: i64, now: f64) {
        if let Some(first) = self.in_flight.pop_front() {
            self.advance(&first, base_offset, now);
        }
    }

    #[getter(live)]
    fn py_live(&self) -> bool {
        self.live
    }

    #[getter]
    fn idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    #[getter]
    fn log_end(&self) -> i64 {
        self.log_end
    }

    #[getter]
    fn sequence_offset(&self) -> i64 {
        self.sequence_offset
    }

    /// Ends the permit. Returns what the sequencer has to know: see `fencepost_native.pyi`.
    fn take_back<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.live = false;
        let remembered = self
            .remembered
            .drain(..)
            .map(|each| {
                let digest = PyBytes::new(py, &each.digest);
                let write_id = each.write_id.map(|id| PyBytes::new(py, &id).unbind());
                (each.at, each.count, digest, write_id, each.producer, each.acknowledged).into_pyobject(py)
            })
            .collect::<PyResult<Vec<_>>>()?;
        let pass_through: Vec<_> = self.pass_through.drain(..).collect();
        let mut in_flight = Vec::new();
        for each in self.in_flight.drain(..) {
            in_flight.push(match each.origin {
                Origin::Adopted(pending) => (each.id, pending).into_pyobject(py)?.into_any(),
                Origin::Permitted(permitted) => {
                    let Permitted { fence, source, alone, taken_over, .. } = *permitted;
                    let fence = fence.map(|it| (it.producer_id, it.producer_epoch, it.base_sequence, it.instance_id));
                    let frame = PyBytes::new(py, &source.frame);
                    let batch =
                        (source.template, source.topic_settings, frame, source.partition, source.start, source.end);
                    let sent = (each.mode as u8, each.at, each.sent_at, each.leader_epoch, alone, taken_over);
                    (each.id, batch, sent, fence).into_pyobject(py)?.into_any()
                }
            });
        }
        let confirmed = (self.confirmed_until, self.confirmed_since, self.confirmed_epoch);
        let log = (self.log_end, self.sequence_offset, self.end_as_of);
        (log, confirmed, remembered, pass_through, in_flight, self.last_topic_settings.take()).into_pyobject(py)
    }

    /// The sequencer's object for an append that was in flight when the permit was taken back.
    fn keep(&mut self, id: u64, pending: Py<PyAny>) {
        self.kept.insert(id, pending);
    }

    fn kept(&mut self, id: u64) -> Option<Py<PyAny>> {
        self.kept.remove(&id)
    }
}

impl InFlight {
    fn is(&self, pending: &Bound<'_, PyAny>) -> bool {
        matches!(&self.origin, Origin::Adopted(original) if original.is(pending))
    }
}

impl Permit {
    pub fn is_live(&self) -> bool {
        self.live
    }

    pub fn partition(&self, py: Python<'_>) -> Py<PyAny> {
        self.partition.clone_ref(py)
    }

    fn number(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// How the append would be sent, and the offset for a fenced one. None: the sequencer must decide.
    pub fn admits(&mut self, py: Python<'_>, scan: &Scan, it: &AppendContext) -> PyResult<Option<(Mode, i64)>> {
        if !self.live || self.in_flight.len() >= self.in_flight_max {
            return Ok(None);
        }
        if self.remembered.len() + self.in_flight.len() >= self.remembered_max
            || self.pass_through.len() >= self.remembered_max
        {
            return Ok(None); // the sequencer remembers some of each producer: it must get them all
        }
        let fenced_next = if scan.producer_id < 0 { None } else { self.next_sequence(py, scan)? };
        let oldest = (it.now + self.clock_offset_seconds - self.expiration_seconds / 2.0) * 1000.0;
        let too_old = scan.max_timestamp_ms <= oldest as i64;
        let mode = match (scan.expected, scan.producer_id < 0 || fenced_next.is_some()) {
            (Some(_), true) => Mode::Conditional,
            (Some(_), false) => return Ok(None), // its first batch with an expectation
            (None, true) if scan.producer_id < 0 && too_old && self.fences => Mode::PassThrough,
            (None, true) => Mode::Sequenced,
            (None, false) => Mode::PassThrough,
        };
        if fenced_next.is_some_and(|next| next != scan.base_sequence) {
            return Ok(None); // perhaps a retry
        }
        if it.required && scan.expected.is_none() || !it.required && scan.expected.is_some() && !it.taken_over {
            return Ok(None);
        }
        if mode == Mode::PassThrough {
            let alongside = self.in_flight.iter().all(|each| each.mode == Mode::PassThrough);
            return Ok(alongside.then_some((mode, -1)));
        }
        let confirmed = self.fences
            && it.now < self.confirmed_until
            && it.opened_at <= self.confirmed_since
            && it.leader_epoch == self.confirmed_epoch;
        let pipelined = self.in_flight.is_empty()
            || (it.alone || self.exclusive)
                && self.in_flight.iter().all(|each| each.mode.fenced() && each.connection == it.connection);
        let end = self.in_flight.back().map_or(self.log_end, |last| last.at + i64::from(last.count));
        let fits = confirmed && pipelined && !too_old && scan.expected.is_none_or(|expected| expected == end);
        Ok(fits.then_some((mode, end)))
    }

    fn next_sequence(&mut self, py: Python<'_>, scan: &Scan) -> PyResult<Option<i32>> {
        let producer = (scan.producer_id, scan.producer_epoch);
        if let Some(next) = self.producers.get(&producer) {
            return Ok(*next);
        }
        let next = Issuer(self.issuer.bind(py)).next_fenced_sequence(producer.0, producer.1)?;
        self.producers.insert(producer, next);
        Ok(next)
    }

    /// After `admits`. Returns its number, and its fence.
    pub fn take(&mut self, scan: Scan, mode: Mode, at: i64, it: &AppendContext, source: Source) -> u64 {
        let id = self.number();
        let producer = (scan.producer_id, scan.producer_epoch);
        if scan.producer_id >= 0 {
            if mode.fenced() {
                self.producers.insert(producer, Some(scan.base_sequence.wrapping_add(scan.record_count) & i32::MAX));
            } else {
                self.pass_through.push_back((producer.0, producer.1, scan.base_sequence));
                bound(&mut self.pass_through, self.remembered_max);
            }
        }
        self.in_flight.push_back(InFlight {
            id,
            connection: it.connection,
            mode,
            at,
            count: scan.record_count,
            max_timestamp_ms: scan.max_timestamp_ms,
            sent_at: it.now,
            leader_epoch: it.leader_epoch,
            origin: Origin::Permitted(Box::new(Permitted {
                fence: self.fence(mode, at, it.instance_id),
                scan,
                source,
                alone: it.alone,
                taken_over: it.taken_over,
            })),
        });
        id
    }

    pub fn fence(&self, mode: Mode, at: i64, instance_id: i16) -> Option<Fence> {
        let base_sequence = (at - self.sequence_offset).rem_euclid(SEQUENCE_MODULUS) as i32;
        let (producer_id, producer_epoch) = (self.producer_id, self.producer_epoch);
        mode.fenced().then_some(Fence { producer_id, producer_epoch, base_sequence, instance_id })
    }

    pub fn may_complete(&self, id: u64, result: &Appended) -> bool {
        self.live
            && self.in_flight.front().is_some_and(|first| {
                first.id == id && self.is_expected(first, result.base_offset, result.append_time_ms)
            })
    }

    fn is_expected(&self, sent: &InFlight, base_offset: i64, append_time_ms: i64) -> bool {
        if sent.mode.fenced() {
            base_offset == sent.at && append_time_ms == -1 && sent.max_timestamp_ms >= 0
        } else {
            !self.is_open || base_offset == self.log_end
        }
    }

    /// After `may_complete`. Returns the producer id of an append that kept it, and its last offset.
    pub fn complete(&mut self, result: &Appended, now: f64) -> Option<(i64, i64)> {
        let first = self.in_flight.pop_front()?;
        self.advance(&first, result.base_offset, now);
        let Origin::Permitted(permitted) = first.origin else {
            return None;
        };
        let Permitted { scan, source, .. } = *permitted;
        self.last_topic_settings = Some(source.topic_settings);
        if !first.mode.fenced() {
            return (scan.producer_id >= 0)
                .then(|| (scan.producer_id, result.base_offset + i64::from(first.count) - 1));
        }
        self.remembered.push_back(Remembered {
            at: first.at,
            count: first.count,
            digest: scan.digest,
            write_id: scan.write_id,
            producer: (scan.producer_id, scan.producer_epoch, scan.base_sequence),
            acknowledged: (first.leader_epoch, now),
        });
        bound(&mut self.remembered, self.remembered_max);
        None
    }

    fn advance(&mut self, sent: &InFlight, base_offset: i64, now: f64) {
        if !self.is_open {
            return;
        }
        let end = base_offset + i64::from(sent.count);
        self.end_as_of = sent.sent_at;
        if sent.mode.fenced() {
            self.log_end = self.log_end.max(end);
            self.confirmed_until = (now + self.expiration_seconds / 4.0).min(self.expiration_known_until);
            self.confirmed_since = now;
            self.confirmed_epoch = sent.leader_epoch;
        } else {
            self.sequence_offset += end - self.log_end;
            self.log_end = end;
        }
    }
}

fn bound<T>(members: &mut VecDeque<T>, count_max: usize) {
    while members.len() > count_max {
        members.pop_front();
    }
}
