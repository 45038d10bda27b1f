//! What Python's services say of the moment. Remembered until something of it changes, where Python reports that.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyMapping;

use crate::upward::Services;

/// Versions of an API that are relayed unread, and whether the state topic must not occur in their bytes.
pub type Versions = (i16, i16, bool);

/// How often Python has reported a change.
static CHANGES: AtomicU64 = AtomicU64::new(0);

/// To be called after every change of what the services would say.
#[pyfunction]
pub fn changed() {
    CHANGES.fetch_add(1, Ordering::Relaxed);
}

#[derive(PartialEq, Default)]
pub struct ProcessState {
    pub fresh: bool,
    pub alone: bool,
    pub taken_over: bool,
    pub instance_id: i16,
    pub in_flight_max: usize,
    pub produce_version_max: i64,
    pub producer_ids: HashSet<i64>,
    pub state_topic_marks: Vec<Vec<u8>>,
    pub relayed: Arc<Relayed>,
}

/// By API key; made from Python's dictionary, which is not modified.
#[derive(Default)]
pub struct Relayed {
    pub versions: HashMap<i16, Versions>,
    from: Option<Py<PyAny>>,
}

impl PartialEq for Relayed {
    fn eq(&self, other: &Self) -> bool {
        self.versions == other.versions
    }
}

impl Relayed {
    fn of(current: Bound<'_, PyAny>, earlier: &Arc<Self>) -> PyResult<Arc<Self>> {
        if earlier.from.as_ref().is_some_and(|from| from.is(&current)) {
            return Ok(Arc::clone(earlier));
        }
        let items = current.cast::<PyMapping>()?.items()?;
        let versions = items.iter().map(|item| item.extract()).collect::<PyResult<_>>()?;
        Ok(Arc::new(Relayed { versions, from: Some(current.unbind()) }))
    }
}

/// `number`: what was queried at an earlier number is queried again. `until`: monotonic seconds.
#[derive(Default)]
pub struct Remembered {
    pub number: u64,
    pub process: ProcessState,
    changes: u64,
    until: f64,
}

impl ProcessState {
    fn query(services: Services<'_, '_>, earlier: &Self, now: f64) -> PyResult<Self> {
        Ok(ProcessState {
            fresh: services.fresh(now)?,
            alone: services.alone(now)?,
            taken_over: services.taken_over(now)?,
            instance_id: services.instance_id()?,
            in_flight_max: services.in_flight_requests_max()?,
            produce_version_max: services.produce_version_max()?,
            producer_ids: services.shared_producer_ids()?,
            state_topic_marks: services.state_topic_marks()?,
            relayed: Relayed::of(services.relayed_versions()?, &earlier.relayed)?,
        })
    }
}

impl Remembered {
    /// Whether it still holds.
    pub fn holds(&self, now: f64) -> bool {
        now < self.until && self.changes == CHANGES.load(Ordering::Relaxed)
    }

    /// `fresh_until`: None if changes are not reported.
    pub fn renewed(&self, services: Services<'_, '_>, fresh_until: Option<f64>, now: f64) -> PyResult<Self> {
        let changes = CHANGES.load(Ordering::Relaxed);
        let process = ProcessState::query(services, &self.process, now)?;
        // What time alone changes is not remembered.
        let until = fresh_until.filter(|_| process.fresh && process.taken_over).unwrap_or(f64::NEG_INFINITY);
        Ok(Remembered { number: self.number + 1, process, changes, until })
    }

    /// For tests: an error if a change was not reported.
    pub fn verify(&self, services: Services<'_, '_>, now: f64) -> PyResult<()> {
        let current = ProcessState::query(services, &self.process, now)?;
        // With time, other processes leave: that is noticed later.
        let as_remembered = ProcessState { alone: current.alone && self.process.alone, ..current };
        if as_remembered == self.process { Ok(()) } else { Err(unreported("the services' answers")) }
    }
}

pub fn unreported(what: &str) -> PyErr {
    PyRuntimeError::new_err(format!("{what} changed, and `changed` was not called"))
}
