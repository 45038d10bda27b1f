//! What native code calls of Python, by name. `proxy/fencepost_proxy/session/relay/native_calls.py` has a Protocol for each struct,
//! with the same members and parameters: a test compares them. No other file names anything of Python.

use std::collections::HashSet;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

/// Of the process.
#[derive(Clone, Copy)]
pub struct Services<'a, 'py>(pub &'a Bound<'py, PyAny>);

impl<'py> Services<'_, 'py> {
    pub fn fresh(self, now: f64) -> PyResult<bool> {
        self.0.call_method1(intern!(self.0.py(), "fresh"), (now,))?.extract()
    }

    pub fn alone(self, now: f64) -> PyResult<bool> {
        self.0.call_method1(intern!(self.0.py(), "alone"), (now,))?.extract()
    }

    pub fn taken_over(self, now: f64) -> PyResult<bool> {
        self.0.call_method1(intern!(self.0.py(), "taken_over"), (now,))?.extract()
    }

    pub fn instance_id(self) -> PyResult<i16> {
        self.0.getattr(intern!(self.0.py(), "instance_id"))?.extract()
    }

    pub fn in_flight_requests_max(self) -> PyResult<usize> {
        self.0.getattr(intern!(self.0.py(), "in_flight_requests_max"))?.extract()
    }

    pub fn produce_version_max(self) -> PyResult<i64> {
        self.0.call_method0(intern!(self.0.py(), "produce_version_max"))?.extract()
    }

    pub fn shared_producer_ids(self) -> PyResult<HashSet<i64>> {
        self.0.getattr(intern!(self.0.py(), "shared_producer_ids"))?.extract()
    }

    pub fn state_topic_marks(self) -> PyResult<Vec<Vec<u8>>> {
        self.0.getattr(intern!(self.0.py(), "state_topic_marks"))?.extract()
    }

    pub fn relayed_versions(self) -> PyResult<Bound<'py, PyAny>> {
        self.0.getattr(intern!(self.0.py(), "relayed_versions"))
    }

    pub fn policy(self, topic: &Py<PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.0.call_method1(intern!(self.0.py(), "policy"), (topic,))
    }

    pub fn topic_id(self, topic: &Py<PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.0.call_method1(intern!(self.0.py(), "topic_id"), (topic,))
    }

    pub fn leader_epoch(self, partition: &Py<PyAny>) -> PyResult<i64> {
        self.0.call_method1(intern!(self.0.py(), "leader_epoch"), (partition,))?.extract()
    }

    pub fn frame_bytes_max(self) -> PyResult<usize> {
        self.0.getattr(intern!(self.0.py(), "frame_bytes_max"))?.extract()
    }

    pub fn read_here_bytes_max(self) -> PyResult<usize> {
        self.0.getattr(intern!(self.0.py(), "read_here_bytes_max"))?.extract()
    }

    pub fn reserve(self, byte_count: usize) -> PyResult<bool> {
        self.0.call_method1(intern!(self.0.py(), "reserve"), (byte_count,))?.extract()
    }

    pub fn release(self, byte_count: usize) -> PyResult<()> {
        self.0.call_method1(intern!(self.0.py(), "release"), (byte_count,)).map(drop)
    }

    pub fn idempotence(self) -> PyResult<Bound<'py, PyAny>> {
        self.0.getattr(intern!(self.0.py(), "idempotence"))
    }
}

/// Of the process: which producers appended with their own ids.
pub struct Idempotence<'a, 'py>(pub &'a Bound<'py, PyAny>);

impl Idempotence<'_, '_> {
    pub fn acknowledged(self, partition: &Py<PyAny>, producer_id: i64, last_offset: i64) -> PyResult<()> {
        let arguments = (partition, producer_id, last_offset);
        self.0.call_method1(intern!(self.0.py(), "acknowledged"), arguments).map(drop)
    }
}

/// What has issued a permit.
pub struct Issuer<'a, 'py>(pub &'a Bound<'py, PyAny>);

impl Issuer<'_, '_> {
    pub fn next_fenced_sequence(self, producer_id: i64, producer_epoch: i16) -> PyResult<Option<i32>> {
        let arguments = (producer_id, producer_epoch);
        self.0.call_method1(intern!(self.0.py(), "next_fenced_sequence"), arguments)?.extract()
    }
}

/// What a permit allows.
pub struct PermitTerms<'a, 'py>(pub &'a Bound<'py, PyAny>);

impl PermitTerms<'_, '_> {
    pub fn is_open(&self) -> PyResult<bool> {
        self.0.getattr(intern!(self.0.py(), "is_open"))?.extract()
    }

    pub fn fences(&self) -> PyResult<bool> {
        self.0.getattr(intern!(self.0.py(), "fences"))?.extract()
    }

    pub fn exclusive(&self) -> PyResult<bool> {
        self.0.getattr(intern!(self.0.py(), "exclusive"))?.extract()
    }

    pub fn producer_id(&self) -> PyResult<i64> {
        self.0.getattr(intern!(self.0.py(), "producer_id"))?.extract()
    }

    pub fn producer_epoch(&self) -> PyResult<i16> {
        self.0.getattr(intern!(self.0.py(), "producer_epoch"))?.extract()
    }

    pub fn sequence_offset(&self) -> PyResult<i64> {
        self.0.getattr(intern!(self.0.py(), "sequence_offset"))?.extract()
    }

    pub fn log_end(&self) -> PyResult<i64> {
        self.0.getattr(intern!(self.0.py(), "log_end"))?.extract()
    }

    pub fn end_as_of(&self) -> PyResult<f64> {
        self.0.getattr(intern!(self.0.py(), "end_as_of"))?.extract()
    }

    pub fn confirmed_until(&self) -> PyResult<f64> {
        self.0.getattr(intern!(self.0.py(), "confirmed_until"))?.extract()
    }

    pub fn confirmed_since(&self) -> PyResult<f64> {
        self.0.getattr(intern!(self.0.py(), "confirmed_since"))?.extract()
    }

    pub fn confirmed_epoch(&self) -> PyResult<i64> {
        self.0.getattr(intern!(self.0.py(), "confirmed_epoch"))?.extract()
    }

    pub fn expiration_seconds(&self) -> PyResult<f64> {
        self.0.getattr(intern!(self.0.py(), "expiration_seconds"))?.extract()
    }

    pub fn expiration_known_until(&self) -> PyResult<f64> {
        self.0.getattr(intern!(self.0.py(), "expiration_known_until"))?.extract()
    }

    pub fn clock_offset_seconds(&self) -> PyResult<f64> {
        self.0.getattr(intern!(self.0.py(), "clock_offset_seconds"))?.extract()
    }

    pub fn in_flight_max(&self) -> PyResult<usize> {
        self.0.getattr(intern!(self.0.py(), "in_flight_max"))?.extract()
    }

    pub fn remembered_max(&self) -> PyResult<usize> {
        self.0.getattr(intern!(self.0.py(), "remembered_max"))?.extract()
    }
}

/// The batch of an append that the sequencer sent before it issued a permit.
pub struct Append<'a, 'py>(pub &'a Bound<'py, PyAny>);

impl Append<'_, '_> {
    pub fn record_count(&self) -> PyResult<i32> {
        self.0.getattr(intern!(self.0.py(), "record_count"))?.extract()
    }

    pub fn max_timestamp_ms(&self) -> PyResult<i64> {
        self.0.getattr(intern!(self.0.py(), "max_timestamp_ms"))?.extract()
    }
}

/// The start of a Produce request that Python has parsed.
pub struct RequestStart<'a, 'py>(pub &'a Bound<'py, PyAny>);

impl RequestStart<'_, '_> {
    pub fn version(&self) -> PyResult<i16> {
        self.0.getattr(intern!(self.0.py(), "version"))?.extract()
    }

    pub fn prefix(&self) -> PyResult<Vec<u8>> {
        self.0.getattr(intern!(self.0.py(), "prefix"))?.extract()
    }

    pub fn before_acks(&self) -> PyResult<Vec<u8>> {
        self.0.getattr(intern!(self.0.py(), "before_acks"))?.extract()
    }

    pub fn timeout_ms(&self) -> PyResult<i32> {
        self.0.getattr(intern!(self.0.py(), "timeout_ms"))?.extract()
    }

    pub fn topic_name(&self) -> PyResult<Py<PyAny>> {
        self.0.getattr(intern!(self.0.py(), "topic_name")).map(Bound::unbind)
    }

    pub fn topic(&self) -> PyResult<Vec<u8>> {
        self.0.getattr(intern!(self.0.py(), "topic"))?.extract()
    }

    pub fn is_checked(&self) -> PyResult<bool> {
        self.0.getattr(intern!(self.0.py(), "is_checked"))?.extract()
    }
}

/// Of a connection: makes the watches of frames that are relayed as they arrive.
pub struct Watches<'a, 'py>(pub &'a Bound<'py, PyAny>);

impl<'py> Watches<'_, 'py> {
    pub fn request_watch(self, head: &[u8], topic_end: usize, version: i16) -> PyResult<Option<Bound<'py, PyAny>>> {
        let arguments = (PyBytes::new(self.0.py(), head), topic_end, version);
        let watch = self.0.call_method1(intern!(self.0.py(), "request_watch"), arguments)?;
        Ok((!watch.is_none()).then_some(watch))
    }

    pub fn response_watch(self, api_key: i16, version: i16, frame_bytes: usize) -> PyResult<Bound<'py, PyAny>> {
        self.0.call_method1(intern!(self.0.py(), "response_watch"), (api_key, version, frame_bytes))
    }
}

/// Probes some bytes of a frame that is relayed as it arrives.
pub struct Watch<'a, 'py>(pub &'a Bound<'py, PyAny>);

impl Watch<'_, '_> {
    pub fn first_at(&self) -> PyResult<usize> {
        self.0.getattr(intern!(self.0.py(), "first_at"))?.extract()
    }

    pub fn head_bytes(&self) -> PyResult<usize> {
        self.0.getattr(intern!(self.0.py(), "head_bytes"))?.extract()
    }

    pub fn at_trailer(&self) -> PyResult<bool> {
        self.0.getattr(intern!(self.0.py(), "at_trailer"))?.extract()
    }

    pub fn probe(&self, head: &[u8]) -> PyResult<Bound<'_, PyAny>> {
        self.0.call_method1(intern!(self.0.py(), "probe"), (PyBytes::new(self.0.py(), head),))
    }
}

/// The sockets of a connection.
#[derive(Clone, Copy)]
pub struct Proxied<'a, 'py>(pub &'a Bound<'py, PyAny>);

impl<'py> Proxied<'_, 'py> {
    pub fn keep_time(self) -> PyResult<()> {
        self.0.call_method0(intern!(self.0.py(), "keep_time")).map(drop)
    }

    pub fn read_client(self) -> PyResult<()> {
        self.0.call_method0(intern!(self.0.py(), "read_client")).map(drop)
    }

    pub fn read_upstream(self) -> PyResult<()> {
        self.0.call_method0(intern!(self.0.py(), "read_upstream")).map(drop)
    }

    pub fn read_from_client(self, pumped: Bound<'py, PyTuple>) -> PyResult<()> {
        self.0.call_method1(intern!(self.0.py(), "read_from_client"), (pumped,)).map(drop)
    }

    pub fn read_from_upstream(self, pumped: Bound<'py, PyTuple>) -> PyResult<()> {
        self.0.call_method1(intern!(self.0.py(), "read_from_upstream"), (pumped,)).map(drop)
    }

    pub fn abort(self) -> PyResult<()> {
        self.0.call_method0(intern!(self.0.py(), "abort")).map(drop)
    }
}
