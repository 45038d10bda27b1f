//! What the next Produce request of a connection likely shares with its last one. See `session/frames/request_template.py`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::permit::Permit;
use crate::topic::TopicSettings;
use crate::upward::RequestStart;

/// `maker`: makes the sequencer's objects for appends that are in flight when a permit is taken back.
#[pyclass(module = "fencepost_native")]
pub struct RequestTemplate {
    pub version: i16,
    pub prefix: Vec<u8>,
    pub before_acks: Vec<u8>,
    #[pyo3(get)]
    pub timeout_ms: i32,
    #[pyo3(get)]
    pub topic_name: Py<PyAny>,
    pub topic: Vec<u8>,
    pub is_checked: bool,
    #[pyo3(get)]
    pub maker: Py<PyAny>,
    #[pyo3(get, set)]
    pub topic_settings: Option<Py<TopicSettings>>,
    pub permits: HashMap<i32, Py<Permit>>,
    /// When it was last known that they hold: `Remembered.number`. Without checks: that there are none.
    hold_as_of: AtomicU64,
}

impl RequestTemplate {
    pub fn holds(&self, number: u64) -> bool {
        self.hold_as_of.load(Ordering::Relaxed) == number
    }

    pub fn hold(&self, number: u64) {
        self.hold_as_of.store(number, Ordering::Relaxed);
    }
}

#[pymethods]
impl RequestTemplate {
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.maker)?;
        self.permits.values().try_for_each(|permit| visit.call(permit))
    }

    #[new]
    fn new(start: &Bound<'_, PyAny>, maker: Py<PyAny>) -> PyResult<Self> {
        let start = RequestStart(start);
        Ok(RequestTemplate {
            version: start.version()?,
            prefix: start.prefix()?,
            before_acks: start.before_acks()?,
            timeout_ms: start.timeout_ms()?,
            topic_name: start.topic_name()?,
            topic: start.topic()?,
            is_checked: start.is_checked()?,
            maker,
            topic_settings: None,
            permits: HashMap::new(),
            hold_as_of: AtomicU64::new(0),
        })
    }

    #[getter]
    fn topic<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.topic)
    }

    fn permit(&mut self, partition: i32, permit: Py<Permit>) {
        self.permits.insert(partition, permit);
    }
}
