//! The state of one connection: what was sent and is not answered, and what arrives in several pieces.
//!
//! Its requests need no decision: whole frames that are relayed, and appends that permits allow. Everything else is left to
//! Python, byte for byte. See `session/relay/fast_path.py`, which does the same for both. `requests.rs` and `responses.rs` have what
//! is done with received bytes, `methods.rs` what Python calls.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::collecting::Collecting;
use crate::frame::Frame;
use crate::framing::{LENGTH_BYTES, PRODUCE, REQUEST_BYTES_MIN};
use crate::passing::Passing;
use crate::permit::Permit;
use crate::request_template::RequestTemplate;
use crate::settings::Settings;
use crate::tls::Tls;
use crate::topic::TopicSettings;
use crate::upward::Services;

#[derive(Clone, Copy, PartialEq)]
pub enum Direction {
    Up,
    Down,
}

/// Indexes of `Connection.large`.
pub const UP: usize = Direction::Up as usize;
pub const DOWN: usize = Direction::Down as usize;

/// While nothing is in progress in Python, readable sockets are handled here alone.
pub struct NativeReading {
    pub client_fd: RawFd,
    pub upstream_fd: RawFd,
    pub login_ends: f64,
    /// From the client, in total.
    pub received: i64,
}

/// A request that was sent and is not answered.
pub struct Sent {
    pub api_key: i16,
    pub version: i16,
    pub correlation_id: i32,
    pub checked: Option<Box<Checked>>,
}

pub struct Checked {
    pub template: Py<RequestTemplate>,
    pub frame: Arc<Frame>,
    pub topic_settings: Py<TopicSettings>,
    pub starts_at: i64,
    pub answer_by: f64,
    pub appends: Vec<(i32, Py<Permit>, u64)>,
}

/// Attributes: `due` – when the first answer is due, None without appends in flight. `missing` – set if the last call
/// stopped at an append without a permit: its partitions, empty if `RequestTemplate.topic_settings` do not hold.
#[pyclass(module = "fencepost_native")]
pub struct Connection {
    pub settings: Py<Settings>,
    pub connection: i64,
    pub opened_at: f64,
    #[pyo3(get, set)]
    pub template: Option<Py<RequestTemplate>>,
    pub queue: VecDeque<Sent>,
    #[pyo3(get)]
    pub missing: Option<Vec<i32>>,
    /// Python waits for an answer to another request than Produce: appends are left to it.
    #[pyo3(get, set)]
    pub others_are_open: bool,
    /// Makes the watches of frames that are relayed as they arrive. None: Python relays such frames.
    #[pyo3(get, set)]
    pub watches: Option<Py<PyAny>>,
    pub collecting: Option<Collecting>,
    /// The frames of the client and of the broker that are being relayed as they arrive.
    pub up: Option<Passing>,
    pub down: Option<Passing>,
    /// Whether the last request was a large append, and the last response large: then the beginning of the next one is read
    /// alone, and the rest where it goes.
    pub large: [bool; 2],
    /// The `ProxiedConnection`, from when both sockets are open until both are closed.
    pub proxied: Option<Py<PyAny>>,
    pub reading: Option<NativeReading>,
    /// Of the client's socket and of the broker's, where they have TLS.
    pub tls: [Option<Py<Tls>>; 2],
    /// Whether the session is ticked while appends are in flight.
    #[pyo3(get, set)]
    pub ticking: bool,
    /// When the client and the broker last sent something, monotonic seconds.
    #[pyo3(get)]
    pub client_received_at: f64,
    #[pyo3(get)]
    pub upstream_received_at: f64,
    /// By topic: when Kafka last confirmed that the client may write. The session's own.
    pub may_write: Py<PyDict>,
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

    /// Whether Kafka will handle an append after requests whose time the client may choose.
    pub fn waits_for_others(&self) -> bool {
        self.others_are_open || self.queue.iter().any(|sent| sent.api_key != PRODUCE)
    }

    pub fn release(&self, py: Python<'_>, byte_count: usize) -> PyResult<()> {
        let settings = self.settings.borrow(py);
        match &settings.shared {
            Some(shared) => shared.get().memory.borrow_mut(py).release(byte_count as i64),
            None => {
                Services(settings.services.bind(py)).release(byte_count)?;
            }
        }
        Ok(())
    }

    /// The template of a Produce request, if this one starts so. `frame`: with its length.
    pub fn matching(&self, py: Python<'_>, frame: &[u8], version: i16) -> Option<Py<RequestTemplate>> {
        let template = self.template.as_ref()?;
        let it = template.borrow(py);
        let matches = it.version == version && frame[LENGTH_BYTES + REQUEST_BYTES_MIN..].starts_with(&it.prefix);
        matches.then(|| template.clone_ref(py))
    }
}
