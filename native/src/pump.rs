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

use crate::arriving::ReadUp;
use crate::connection::{Connection, Direction};
use crate::output::{Piece, Taken};
use crate::passing::Passing;
use crate::splicing::Spliced;
use crate::tls::Tls;

/// `IOV_MAX` of Linux and macOS.
const CHUNKS_MAX: usize = 1024;
/// Fewer bytes are read and written.
const SPLICE_BYTES_MIN: usize = 64 * 1024;
/// In one call.
const READS_MAX: usize = 8;
/// Read of a large frame to know what it is.
const BEGINNING_BYTES: usize = 4 * 1024;
#[cfg(target_os = "linux")]
const MORE: MsgFlags = MsgFlags::from_bits_retain(nix::libc::MSG_MORE);
#[cfg(not(target_os = "linux"))]
const MORE: MsgFlags = MsgFlags::empty();

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

impl Read<'_> {
    fn is_done(&self) -> bool {
        self.rest.is_none() && self.unsent.is_none() && self.failed.is_none()
    }
}

impl<'py> Pumped<'py> {
    /// Whether nothing is left for Python.
    pub fn is_done(&self) -> bool {
        match self {
            Pumped::Again => true,
            Pumped::Ended(_) => false,
            Pumped::Read(read) => read.is_done(),
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
    /// Reads once; of a large frame, more often. `limit`: bytes of one read at most, 0 for no limit. `take` gets the data and
    /// how many bytes of frames this call was done with before.
    pub fn pump<'py>(
        &mut self,
        py: Python<'py>,
        direction: Direction,
        from: RawFd,
        to: RawFd,
        limit: usize,
        mut take: impl FnMut(&mut Self, &[u8], usize, &mut Vec<Piece>) -> PyResult<Taken>,
    ) -> PyResult<Pumped<'py>> {
        let mut frame_bytes = 0;
        for index in 0..READS_MAX {
            // Of a large frame, what has to be read is read alone.
            let is_large = self.large[direction as usize];
            let is_read_alone = limit == 0 && is_large && self.unseen(direction) == 0;
            let limit = if is_read_alone { BEGINNING_BYTES } else { limit };
            let mut take_next = |it: &mut Self, data: &[u8], out: &mut Vec<Piece>| take(it, data, frame_bytes, out);
            match self.pump_once(py, direction, from, to, limit, &mut take_next)? {
                Pumped::Again if index > 0 => break,
                Pumped::Read(read) if read.is_done() && self.goes_on(direction) => frame_bytes += read.frame_bytes,
                Pumped::Read(read) => {
                    return Ok(Pumped::Read(Read { frame_bytes: frame_bytes + read.frame_bytes, ..read }));
                }
                other => return Ok(other),
            }
        }
        Ok(Pumped::Read(Read { frame_bytes, rest: None, unsent: None, failed: None }))
    }

    /// Whether the rest of a large frame is probably there.
    fn goes_on(&self, direction: Direction) -> bool {
        let is_up = direction == Direction::Up;
        let is_passing = if is_up { self.up.is_some() } else { self.down.is_some() };
        let is_collecting = is_up && self.collecting.as_ref().is_some_and(|it| !it.is_complete());
        self.large[direction as usize] && (is_collecting || is_passing)
    }

    fn unseen(&self, direction: Direction) -> usize {
        let passing = if direction == Direction::Up { &self.up } else { &self.down };
        passing.as_ref().map_or(0, Passing::unseen)
    }

    fn pump_once<'py>(
        &mut self,
        py: Python<'py>,
        direction: Direction,
        from: RawFd,
        to: RawFd,
        limit: usize,
        take: &mut impl FnMut(&mut Self, &[u8], &mut Vec<Piece>) -> PyResult<Taken>,
    ) -> PyResult<Pumped<'py>> {
        let unseen = self.unseen(direction);
        if unseen >= SPLICE_BYTES_MIN && self.tls.iter().all(Option::is_none) {
            if let Some(pumped) = self.splice(py, direction, from, to, unseen) {
                return Ok(pumped);
            }
        }
        let secured = self.tls[direction as usize].is_some();
        if let Some(collecting) = self.collecting.as_mut().filter(|_| direction == Direction::Up && !secured) {
            return match received(recv(from, collecting.missing(), MsgFlags::empty())) {
                Ok(count) => {
                    // The last byte is taken as any other data: what cannot be taken is left to Python.
                    let last = [collecting.missing()[count - 1]];
                    collecting.received(count - 1);
                    self.take_and_send(py, direction, &last, to, take)
                }
                Err(pumped) => Ok(pumped),
            };
        }
        let mut buffer = self.lend_buffer(py);
        let size = if limit == 0 { buffer.len() } else { limit.min(buffer.len()) };
        let result = match &self.tls[direction as usize] {
            Some(tls) => tls.borrow_mut(py).read(from, &mut buffer),
            None => recv(from, &mut buffer[..size], MsgFlags::empty()),
        };
        let pumped = match received(result) {
            Ok(count) => self.take_and_send(py, direction, &buffer[..count], to, take),
            Err(pumped) => Ok(pumped),
        };
        self.return_buffer(py, buffer);
        if let Some(tls) = &self.tls[direction as usize] {
            tls.borrow_mut(py).expect_plaintext(from, self.expected(direction));
        }
        pumped
    }

    /// So many bytes will follow.
    fn expected(&self, direction: Direction) -> usize {
        match self.collecting.as_ref().filter(|_| direction == Direction::Up) {
            Some(collecting) => collecting.frame.len() - collecting.filled,
            None => self.unseen(direction),
        }
    }

    fn take_and_send<'py>(
        &mut self,
        py: Python<'py>,
        direction: Direction,
        data: &[u8],
        to: RawFd,
        take: &mut impl FnMut(&mut Self, &[u8], &mut Vec<Piece>) -> PyResult<Taken>,
    ) -> PyResult<Pumped<'py>> {
        let mut out = Vec::new();
        let taken = catch_unwind(AssertUnwindSafe(|| take(self, data, &mut out)))
            .unwrap_or_else(|_| Err(PyRuntimeError::new_err("native code panicked")))?;
        // The rest of a large frame follows at once: together they fill packets.
        let more = self.unseen(direction) >= SPLICE_BYTES_MIN;
        let tls = self.tls[1 - direction as usize].as_ref();
        Ok(Pumped::Read(send(py, data, &taken, &out, to, tls, more)))
    }

    /// Relays bytes that need not be read. None: not possible, read instead.
    fn splice<'py>(
        &mut self,
        py: Python<'py>,
        direction: Direction,
        from: RawFd,
        to: RawFd,
        unseen: usize,
    ) -> Option<Pumped<'py>> {
        let mut settings = self.settings.borrow_mut(py);
        let spliced = settings.pipe()?.relay(from, to, unseen);
        let (count, unsent, failed) = match spliced {
            Spliced::Again => return Some(Pumped::Again),
            Spliced::Ended(failed) => return Some(Pumped::Ended(failed)),
            Spliced::Unsupported => {
                settings.cannot_splice();
                return None;
            }
            Spliced::Relayed { count, unsent, failed } => (count, unsent, failed),
        };
        drop(settings);
        self.passed(direction, count);
        let unsent = unsent.map(|bytes| PyBytes::new(py, &bytes));
        Some(Pumped::Read(Read { frame_bytes: count, rest: None, unsent, failed }))
    }

    /// None: Python has to read.
    pub fn pump_from_client<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Pumped<'py>>> {
        let now = monotonic();
        let Some(reading) = self.reading.as_ref().filter(|reading| now < reading.login_ends) else {
            return Ok(None);
        };
        let (from, to, waiting) = (reading.client_fd, reading.upstream_fd, self.len());
        let read = ReadUp { now, before: 0, received: reading.received };
        let pumped = self
            .pump(py, Direction::Up, from, to, 0, |it, data, done, out| it.take_up(py, data, &read.after(done), out))?;
        if let Pumped::Read(read) = &pumped {
            self.client_received_at = now;
            if let Some(reading) = &mut self.reading {
                reading.received += read.frame_bytes as i64;
            }
            let counts = &mut self.settings.borrow_mut(py).counts;
            counts.bytes_up += read.frame_bytes as u64;
            counts.request_seconds.observe(monotonic() - now, self.len().saturating_sub(waiting) as u64);
        }
        Ok(Some(pumped))
    }

    /// None: Python has to read.
    pub fn pump_from_upstream<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Pumped<'py>>> {
        let now = monotonic();
        let Some(reading) = &self.reading else {
            return Ok(None);
        };
        let (from, to, waiting) = (reading.upstream_fd, reading.client_fd, self.len());
        let pumped =
            self.pump(py, Direction::Down, from, to, 0, |it, data, _, out| it.take_down(py, data, now, out))?;
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

/// How many bytes were received.
fn received<'py>(result: nix::Result<usize>) -> Result<usize, Pumped<'py>> {
    match result {
        Ok(0) => Err(Pumped::Ended(None)),
        Ok(count) => Ok(count),
        Err(Errno::EAGAIN | Errno::EINTR) => Err(Pumped::Again),
        Err(errno) => Err(Pumped::Ended(Some(errno))),
    }
}

fn send<'py>(
    py: Python<'py>,
    data: &[u8],
    taken: &Taken,
    out: &[Piece],
    to: RawFd,
    tls: Option<&Py<Tls>>,
    more: bool,
) -> Read<'py> {
    let rest = (taken.data < data.len()).then(|| PyBytes::new(py, &data[taken.data..]));
    let mut read = Read { frame_bytes: taken.frames, rest, unsent: None, failed: None };
    if out.is_empty() {
        return read;
    }
    let parts: Vec<&[u8]> = out.iter().map(|piece| piece.bytes(data)).collect();
    let slices: Vec<IoSlice<'_>> = parts.iter().take(CHUNKS_MAX).map(|part| IoSlice::new(part)).collect();
    let size: usize = parts.iter().map(|part| part.len()).sum();
    let sent = match (tls, &parts[..]) {
        (None, _) => sendmsg::<()>(to, &slices, &[], if more { MORE } else { MsgFlags::empty() }, None),
        (Some(tls), [part]) => tls.borrow_mut(py).write(to, part),
        // In as few records as possible: each has an overhead.
        (Some(tls), _) => tls.borrow_mut(py).write(to, &parts.concat()),
    };
    match sent {
        Ok(sent) if sent == size => (),
        Ok(sent) => read.unsent = Some(PyBytes::new(py, &parts.concat()[sent..])),
        Err(Errno::EAGAIN | Errno::EINTR) => read.unsent = Some(PyBytes::new(py, &parts.concat())),
        Err(errno) => read.failed = Some(errno),
    }
    read
}
