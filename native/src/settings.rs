//! What all connections of a process share.

use std::collections::HashMap;

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::batch::HeaderNames;
use crate::memory::MemoryBudget;
use crate::process_state::{Remembered, Versions};
use crate::splicing::{CAN_SPLICE, Pipe};
use crate::upward::Services;

const RECEIVE_BUFFER_BYTES: usize = 256 * 1024;

#[pyclass(module = "fencepost_native")]
pub struct Settings {
    pub services: Py<PyAny>,
    /// Boxed, because it is aligned to more than Python's allocator aligns objects.
    pub names: Box<HeaderNames>,
    pub digest_seed: u64,
    pub frame_bytes_max: usize,
    /// Of the batches of one request.
    pub read_bytes_max: usize,
    pub producer_ids_end: i64,
    /// By API and version: where a response with its length has its throttle time. 0: at no fixed position.
    throttled_at: HashMap<i16, Vec<usize>>,
    pub shared: Option<Py<Shared>>,
    pub remembered: Remembered,
    /// What a socket has received: processed before the next one is read.
    pub buffer: Vec<u8>,
    /// Empty between calls. None before it is needed.
    pipe: Option<Pipe>,
    can_splice: bool,
    pub counts: Counts,
}

/// Of a process that reports every change by `changed`. `verify`: for tests, whether that is checked.
#[pyclass(module = "fencepost_native", frozen)]
pub struct Shared {
    fresh_until: Py<PyAny>,
    pub memory: Py<MemoryBudget>,
    pub verify: bool,
}

#[pymethods]
impl Shared {
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.fresh_until)
    }

    #[new]
    fn new(fresh_until: Py<PyAny>, memory: Py<MemoryBudget>, verify: bool) -> Self {
        Shared { fresh_until, memory, verify }
    }
}

/// For the metrics, since `take_counts`.
#[derive(Default)]
pub struct Counts {
    pub requests: HashMap<(i16, i16), u64>,
    pub admitted: u64,
    pub bytes_up: u64,
    pub bytes_down: u64,
    pub request_seconds: Distribution,
    pub response_seconds: Distribution,
}

/// See `metrics.Distribution`.
#[derive(Default)]
pub struct Distribution {
    bounds: Vec<f64>,
    counts: Vec<u64>,
    total: f64,
}

impl Distribution {
    fn new(bounds: Vec<f64>) -> Self {
        Distribution { counts: vec![0; bounds.len() + 1], bounds, total: 0.0 }
    }

    pub fn observe(&mut self, value: f64, times: u64) {
        self.counts[self.bounds.partition_point(|bound| *bound < value)] += times;
        self.total += value * times as f64;
    }

    fn take(&mut self) -> (Vec<u64>, f64) {
        let fresh = vec![0; self.counts.len()];
        (std::mem::replace(&mut self.counts, fresh), std::mem::take(&mut self.total))
    }
}

#[pymethods]
impl Settings {
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.services)?;
        visit.call(&self.shared)
    }

    /// `seconds`: bounds of the distributions of added time.
    /// `producer_ids_end`: greater producer ids are for Python. `throttled_at`: see `wire/throttle.py`.
    /// `shared`: None if changes are not reported.
    #[new]
    fn new(
        services: &Bound<'_, PyAny>,
        names: (Vec<u8>, Vec<u8>, Vec<u8>),
        digest_seed: u64,
        producer_ids_end: i64,
        seconds: Vec<f64>,
        throttled_at: HashMap<i16, Vec<usize>>,
        shared: Option<Py<Shared>>,
    ) -> PyResult<Self> {
        let names = Box::new(HeaderNames::new([names.0, names.1, names.2]));
        Ok(Settings {
            services: services.clone().unbind(),
            names,
            digest_seed,
            frame_bytes_max: Services(services).frame_bytes_max()?,
            read_bytes_max: Services(services).read_here_bytes_max()?,
            producer_ids_end,
            throttled_at,
            shared,
            remembered: Remembered::default(),
            buffer: vec![0; RECEIVE_BUFFER_BYTES],
            pipe: None,
            can_splice: CAN_SPLICE,
            counts: Counts {
                request_seconds: Distribution::new(seconds.clone()),
                response_seconds: Distribution::new(seconds),
                ..Counts::default()
            },
        })
    }

    /// Requests by API key and version, admitted appends, bytes to Kafka and to clients; request and response seconds.
    fn take_counts<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let counts = &mut self.counts;
        let requests: Vec<_> =
            counts.requests.drain().map(|((api_key, version), count)| (api_key, version, count)).collect();
        let (admitted, up) = (std::mem::take(&mut counts.admitted), std::mem::take(&mut counts.bytes_up));
        let down = std::mem::take(&mut counts.bytes_down);
        (requests, admitted, up, down, counts.request_seconds.take(), counts.response_seconds.take()).into_pyobject(py)
    }
}

impl Settings {
    pub fn verifies(&self) -> bool {
        self.shared.as_ref().is_some_and(|shared| shared.get().verify)
    }

    /// Queries Python for what it does not remember.
    pub fn remember(&mut self, py: Python<'_>, now: f64) -> PyResult<()> {
        let services = Services(self.services.bind(py));
        if self.remembered.holds(now) {
            return if self.verifies() { self.remembered.verify(services, now) } else { Ok(()) };
        }
        let fresh_until = match &self.shared {
            Some(shared) => Some(shared.get().fresh_until.call0(py)?.extract(py)?),
            None => None,
        };
        self.remembered = self.remembered.renewed(services, fresh_until, now)?;
        Ok(())
    }

    /// Where a response with its length has its throttle time, if that is at a fixed position.
    pub fn throttled_at(&self, api_key: i16, version: i16) -> Option<usize> {
        let positions = self.throttled_at.get(&api_key)?;
        positions.get(usize::try_from(version).ok()?).copied().filter(|at| *at > 0)
    }

    /// None: bytes cannot be relayed through the kernel.
    pub fn pipe(&mut self) -> Option<&mut Pipe> {
        if !self.can_splice {
            return None;
        }
        if self.pipe.is_none() {
            self.pipe = Pipe::new();
        }
        self.pipe.as_mut()
    }

    pub fn cannot_splice(&mut self) {
        self.can_splice = false;
    }

    pub fn relayed(&self, api_key: i16) -> Option<Versions> {
        self.remembered.process.relayed.versions.get(&api_key).copied()
    }
}
