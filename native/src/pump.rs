//! Reads one socket and writes the other, as `transport/proxied_socket.py` does.

use std::io::IoSlice;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, sendmsg};
use nix::time::{ClockId, clock_gettime};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::connection::{Connection, Piece, Taken};

/// `IOV_MAX` of Linux and macOS.
const CHUNKS_MAX: usize = 1024;

/// What became of a read.
pub enum Pumped<'py> {
    /// There was nothing to read.
    Again,
    /// The peer has closed, or the socket failed.
    Ended(Option<Errno>),
    Read(Read<'py>),
}

/// `frame_bytes`: of the frames done with. `rest`: received bytes that are not. `failed`: why nothing can be sent.
pub struct Read<'py> {
    frame_bytes: usize,
    rest: Option<Bound<'py, PyBytes>>,
    unsent: Option<Bound<'py, PyBytes>>,
    failed: Option<Errno>,
}

impl<'py> Pumped<'py> {
    /// Whether nothing is left for Python.
    pub fn is_done(&self) -> bool {
        match self {
            Pumped::Again => true,
            Pumped::Ended(_) => false,
            Pumped::Read(read) => read.rest.is_none() && read.unsent.is_none() && read.failed.is_none(),
        }
    }

    /// See `fencepost_native.pyi`.
    pub fn into_pyobject(self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let errno = |errno: Errno| errno as i32;
        match self {
            Pumped::Again => (false, 0, None::<()>, None::<()>, None::<i32>, None::<i32>).into_pyobject(py),
            Pumped::Ended(failed) => {
                (false, 0, None::<()>, None::<()>, None::<i32>, Some(failed.map_or(0, errno))).into_pyobject(py)
            }
            Pumped::Read(Read { frame_bytes, rest, unsent, failed }) => {
                (true, frame_bytes, rest, unsent, failed.map(errno), None::<i32>).into_pyobject(py)
            }
        }
    }
}

impl Connection {
    pub fn pump<'py>(
        &mut self,
        py: Python<'py>,
        from: RawFd,
        to: RawFd,
        limit: usize,
        take: impl FnOnce(&mut Self, &[u8], &mut Vec<Piece>) -> PyResult<Taken>,
    ) -> PyResult<Pumped<'py>> {
        let mut buffer = self.lend_buffer(py);
        let size = if limit == 0 { buffer.len() } else { limit.min(buffer.len()) };
        let pumped = match recv(from, &mut buffer[..size], MsgFlags::empty()) {
            Ok(0) => Ok(Pumped::Ended(None)),
            Ok(count) => {
                let (data, mut out) = (&buffer[..count], Vec::new());
                catch_unwind(AssertUnwindSafe(|| take(self, data, &mut out)))
                    .unwrap_or_else(|_| Err(PyRuntimeError::new_err("native code panicked")))
                    .map(|taken| Pumped::Read(send(py, data, &taken, &out, to)))
            }
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(Pumped::Again),
            Err(errno) => Ok(Pumped::Ended(Some(errno))),
        };
        self.return_buffer(py, buffer);
        pumped
    }

    /// None: Python has to read.
    pub fn pump_armed_up<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Pumped<'py>>> {
        let now = monotonic();
        let Some(armed) = self.armed.as_ref().filter(|armed| now < armed.login_ends) else {
            return Ok(None);
        };
        let (from, to, received, waiting) = (armed.client_fd, armed.upstream_fd, armed.received, self.len());
        let pumped = self.pump(py, from, to, 0, |it, data, out| it.take_up(py, data, now, 0, received, out))?;
        if let Pumped::Read(read) = &pumped {
            self.client_received_at = now;
            if let Some(armed) = &mut self.armed {
                armed.received += read.frame_bytes as i64;
            }
            let counts = &mut self.settings.borrow_mut(py).counts;
            counts.bytes_up += read.frame_bytes as u64;
            counts.request_seconds.observe(monotonic() - now, self.len().saturating_sub(waiting) as u64);
        }
        Ok(Some(pumped))
    }

    /// None: Python has to read.
    pub fn pump_armed_down<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Pumped<'py>>> {
        let now = monotonic();
        let Some(armed) = &self.armed else {
            return Ok(None);
        };
        let (from, to, waiting) = (armed.upstream_fd, armed.client_fd, self.len());
        let pumped = self.pump(py, from, to, 0, |it, data, out| it.take_down(py, data, now, out))?;
        if let Pumped::Read(read) = &pumped {
            self.upstream_received_at = now;
            let counts = &mut self.settings.borrow_mut(py).counts;
            counts.bytes_down += read.frame_bytes as u64;
            counts.response_seconds.observe(monotonic() - now, waiting.saturating_sub(self.len()) as u64);
        }
        Ok(Some(pumped))
    }
}

fn monotonic() -> f64 {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0.0, |time| time.tv_sec() as f64 + time.tv_nsec() as f64 * 1e-9)
}

fn send<'py>(py: Python<'py>, data: &[u8], taken: &Taken, out: &[Piece], to: RawFd) -> Read<'py> {
    let rest = (taken.data < data.len()).then(|| PyBytes::new(py, &data[taken.data..]));
    let mut read = Read { frame_bytes: taken.frames, rest, unsent: None, failed: None };
    if out.is_empty() {
        return read;
    }
    let parts: Vec<&[u8]> = out.iter().map(|piece| piece.bytes(data)).collect();
    let slices: Vec<IoSlice<'_>> = parts.iter().take(CHUNKS_MAX).map(|part| IoSlice::new(part)).collect();
    let size: usize = parts.iter().map(|part| part.len()).sum();
    match sendmsg::<()>(to, &slices, &[], MsgFlags::empty(), None) {
        Ok(sent) if sent == size => (),
        Ok(sent) => read.unsent = Some(PyBytes::new(py, &parts.concat()[sent..])),
        Err(Errno::EAGAIN | Errno::EINTR) => read.unsent = Some(PyBytes::new(py, &parts.concat())),
        Err(errno) => read.failed = Some(errno),
    }
    read
}
