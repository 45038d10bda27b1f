//! What Python calls of a connection: see `fencepost_native.pyi`.

use std::collections::VecDeque;
use std::os::fd::RawFd;

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::arriving::ReadUp;
use crate::connection::{Connection, Direction, NativeReading};
use crate::framing::LENGTH_BYTES;
use crate::output::joined;
use crate::passing::{Left, Passing};
use crate::pump::Pumped;
use crate::settings::Settings;
use crate::tls::Tls;
use crate::upward::Proxied;

#[pymethods]
impl Connection {
    #[new]
    fn new(settings: Py<Settings>, connection: i64, opened_at: f64, may_write: Py<PyDict>) -> Self {
        Connection {
            settings,
            connection,
            opened_at,
            template: None,
            queue: VecDeque::new(),
            missing: None,
            others_are_open: false,
            watches: None,
            collecting: None,
            up: None,
            down: None,
            large: [false; 2],
            proxied: None,
            reading: None,
            tls: [None, None],
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

    /// See `FastPath.take_up`.
    #[pyo3(name = "take_up")]
    fn py_take_up<'py>(
        &mut self,
        py: Python<'py>,
        data: &[u8],
        read: ReadUp,
    ) -> PyResult<(usize, usize, Option<Bound<'py, PyBytes>>)> {
        let mut out = Vec::new();
        let taken = self.take_up(py, data, &read, &mut out)?;
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
    fn pump_up<'py>(
        &mut self,
        py: Python<'py>,
        from: RawFd,
        to: RawFd,
        limit: usize,
        read: ReadUp,
    ) -> PyResult<Bound<'py, PyTuple>> {
        self.pump(py, Direction::Up, from, to, limit, |it, data, done, out| {
            it.take_up(py, data, &read.after(done), out)
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

    #[pyo3(signature = (proxied, client_tls, upstream_tls))]
    fn connect(&mut self, proxied: Py<PyAny>, client_tls: Option<Py<Tls>>, upstream_tls: Option<Py<Tls>>) {
        self.proxied = Some(proxied);
        self.tls = [client_tls, upstream_tls];
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.settings)?;
        visit.call(&self.template)?;
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
        self.template = None;
        self.reading = None;
        self.tls = [None, None];
    }

    /// From now on readable sockets are handled without Python, as long as everything is done with.
    fn start_reading(&mut self, client_fd: RawFd, upstream_fd: RawFd, login_ends: f64, received: i64) {
        self.reading = Some(NativeReading { client_fd, upstream_fd, login_ends, received });
    }

    /// Returns how many bytes the client has sent in total; None if it did not read.
    fn stop_reading(&mut self) -> Option<i64> {
        self.reading.take().map(|reading| reading.received)
    }

    fn client_readable(slf: &Bound<'_, Self>) -> PyResult<()> {
        let py = slf.py();
        let mut it = slf.borrow_mut();
        let pumped = it.pump_from_client(py);
        let Some(proxied) = it.proxied.as_ref().map(|proxied| proxied.clone_ref(py)) else {
            return Ok(());
        };
        let begins_to_wait = matches!(pumped, Ok(Some(_))) && !it.ticking && it.awaits_appends();
        it.ticking |= begins_to_wait;
        drop(it);
        let proxied = Proxied(proxied.bind(py));
        let pumped = pumped.or_else(|error| closed(proxied, error))?;
        if begins_to_wait {
            proxied.keep_time()?;
        }
        match pumped {
            None => proxied.read_client(),
            Some(pumped) if pumped.is_done() => Ok(()),
            Some(pumped) => proxied.read_from_client(pumped.into_pyobject(py)?),
        }
    }

    fn upstream_readable(slf: &Bound<'_, Self>) -> PyResult<()> {
        let py = slf.py();
        let mut it = slf.borrow_mut();
        let pumped = it.pump_from_upstream(py);
        let Some(proxied) = it.proxied.as_ref().map(|proxied| proxied.clone_ref(py)) else {
            return Ok(());
        };
        drop(it);
        let proxied = Proxied(proxied.bind(py));
        let pumped = pumped.or_else(|error| closed(proxied, error))?;
        match pumped {
            None => proxied.read_upstream(),
            Some(pumped) if pumped.is_done() => Ok(()),
            Some(pumped) => proxied.read_from_upstream(pumped.into_pyobject(py)?),
        }
    }

    /// Removes all requests. Each: API key, version, correlation id, and for appends the frame, where it starts,
    /// when its answer is due, and for each append its permit and number there.
    fn return_requests<'py>(&mut self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        self.queue
            .drain(..)
            .map(|sent| {
                let checked = sent.checked.map(|checked| {
                    let appends: Vec<_> = checked.appends.into_iter().map(|(_, permit, id)| (permit, id)).collect();
                    (PyBytes::new(py, &checked.frame[LENGTH_BYTES..]), checked.starts_at, checked.answer_by, appends)
                });
                (sent.api_key, sent.version, sent.correlation_id, checked).into_pyobject(py)
            })
            .collect()
    }
}

/// A defect: the event loop logs the error, and the connection does not go on.
fn closed<'py>(proxied: Proxied<'_, 'py>, error: PyErr) -> PyResult<Option<Pumped<'py>>> {
    proxied.abort()?;
    Err(error)
}
