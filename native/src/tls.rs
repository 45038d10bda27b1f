//! TLS on a nonblocking socket, by rustls. `transport/native_tls.py` has its interface for Python.
//!
//! All connections share the buffers of one thread; a connection keeps ciphertext only: of an incomplete record, and what its
//! socket has not taken.

use std::cell::RefCell;
use std::os::fd::RawFd;

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{MsgFlags, Shutdown, recv, send, shutdown};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus, WriteTraffic};
use rustls::{CipherSuite, Error, ProtocolVersion};

/// Plaintext is never longer than its ciphertext: this and an incomplete record fit into `Settings.buffer`.
const RECEIVED_BYTES: usize = 224 * 1024;
const PLAINTEXT_BYTES: usize = 256 * 1024;
/// Encrypted per step, and so kept at most if the socket blocks.
const ENCRYPTED_BYTES: usize = 128 * 1024;
/// Maximum kept for a peer that does not read: TLS answers some records automatically.
const UNFLUSHED_BYTES_MAX: usize = 256 * 1024;
/// Plaintext that one key of TLS 1.3 encrypts. Java's limit is 2^37 bytes (`jdk.tls.keyLimits`). From then on it answers
/// each record with a request for new keys, and rustls, as other implementations, takes more than 32 at once for an attack.
const KEY_BYTES_MAX: u64 = 1 << 36;
/// Bytes of a relayed frame that wake the event loop.
const WAKES_AT_BYTES: usize = 128 * 1024;
/// Maximum plaintext of a record; its header.
const RECORD_BYTES_MAX: usize = 16 * 1024;
const HEADER_BYTES: usize = 5;
/// More than encryption adds to a record.
const OVERHEAD_BYTES_MAX: usize = 64;

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

/// Empty before the first TLS connection.
#[derive(Default)]
struct Buffers {
    received: Vec<u8>,
    encrypted: Vec<u8>,
    plaintext: Vec<u8>,
}

/// Boxed, because of their size and alignment.
pub enum Session {
    Server(Box<UnbufferedServerConnection>),
    Client(Box<UnbufferedClientConnection>),
}

/// Why a session failed. `alert`: the one that the peer sent. `reason`: OpenSSL's name of another one.
struct Failure {
    alert: Option<u8>,
    reason: Option<&'static str>,
    text: String,
}

/// What follows a step.
#[derive(PartialEq)]
enum Next {
    Again,
    /// The handshake needs more of the peer.
    Blocked,
    Established,
    PeerClosed,
    Closed,
}

/// What a step may write, once the handshake is complete.
enum Write<'a> {
    Nothing,
    Data(&'a [u8]),
    /// With new keys, which are announced before it.
    DataWithNewKeys(&'a [u8]),
    Close,
}

/// Where received plaintext goes.
struct Plaintext<'a> {
    space: &'a mut [u8],
    filled: usize,
}

/// Ciphertext. The vector may be longer than what is filled.
struct Ciphertext<'a> {
    bytes: &'a mut Vec<u8>,
    filled: usize,
}

impl Ciphertext<'_> {
    /// `write` gets the free space, and more of it if it needs that.
    fn write<E>(
        &mut self,
        mut write: impl FnMut(&mut [u8]) -> Result<usize, E>,
        needed: impl Fn(&E) -> Option<usize>,
    ) -> Result<(), E> {
        loop {
            match write(&mut self.bytes[self.filled..]) {
                Ok(count) => {
                    self.filled += count;
                    return Ok(());
                }
                Err(error) => match needed(&error) {
                    Some(byte_count) => self.bytes.resize(self.filled + byte_count, 0),
                    None => return Err(error),
                },
            }
        }
    }
}

impl Failure {
    fn of(error: &Error) -> Self {
        let alert = if let Error::AlertReceived(alert) = error { Some(u8::from(*alert)) } else { None };
        let no_certificate = matches!(error, Error::NoCertificatesPresented);
        let reason = no_certificate.then_some("PEER_DID_NOT_RETURN_A_CERTIFICATE");
        Failure { alert, reason, text: error.to_string() }
    }

    fn defect(text: &str) -> Self {
        Failure { alert: None, reason: None, text: text.to_owned() }
    }
}

/// A session's step: how many bytes of the input are done with, and what follows.
fn step<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    plaintext: &mut Plaintext<'_>,
    out: &mut Ciphertext<'_>,
    write: &mut Write<'_>,
) -> (usize, Result<Next, Failure>) {
    let mut done = status.discard;
    let next = match status.state {
        Err(error) => Err(Failure::of(&error)),
        Ok(ConnectionState::ReadTraffic(mut traffic)) => loop {
            match traffic.next_record() {
                None => break Ok(Next::Again),
                Some(Err(error)) => break Err(Failure::of(&error)),
                Some(Ok(record)) => {
                    done += record.discard;
                    let end = plaintext.filled + record.payload.len();
                    let Some(space) = plaintext.space.get_mut(plaintext.filled..end) else {
                        break Err(Failure::defect("more plaintext than there is space for"));
                    };
                    space.copy_from_slice(record.payload);
                    plaintext.filled = end;
                }
            }
        },
        Ok(ConnectionState::EncodeTlsData(mut message)) => out
            .write(
                |space| message.encode(space),
                |error| match error {
                    EncodeError::InsufficientSize(size) => Some(size.required_size),
                    EncodeError::AlreadyEncoded => None,
                },
            )
            .map_or_else(|error| Err(Failure::defect(&error.to_string())), |()| Ok(Next::Again)),
        Ok(ConnectionState::TransmitTlsData(message)) => {
            message.done();
            Ok(Next::Again)
        }
        Ok(ConnectionState::WriteTraffic(traffic)) => write_next(traffic, out, write),
        Ok(ConnectionState::BlockedHandshake) => Ok(Next::Blocked),
        Ok(ConnectionState::PeerClosed) => Ok(Next::PeerClosed),
        Ok(ConnectionState::Closed) => Ok(Next::Closed),
        Ok(_) => Err(Failure::defect("unexpected early data")),
    };
    (done, next)
}

fn write_next<Data>(
    mut traffic: WriteTraffic<'_, Data>,
    out: &mut Ciphertext<'_>,
    write: &mut Write<'_>,
) -> Result<Next, Failure> {
    let needed = |error: &EncryptError| match error {
        EncryptError::InsufficientSize(size) => Some(size.required_size),
        EncryptError::EncryptExhausted => None,
    };
    let written = match std::mem::replace(write, Write::Nothing) {
        Write::Nothing => Ok(()),
        Write::Data(data) => out.write(|space| traffic.encrypt(data, space), needed),
        Write::DataWithNewKeys(data) => {
            *write = Write::Data(data);
            return traffic.refresh_traffic_keys().map_err(|error| Failure::of(&error)).map(|()| Next::Again);
        }
        Write::Close => out.write(|space| traffic.queue_close_notify(space), needed),
    };
    written.map_err(|error| Failure::defect(&error.to_string())).map(|()| Next::Established)
}

/// One TLS connection. Like a socket's methods, its methods raise BlockingIOError if they would block.
#[pyclass(module = "fencepost_native")]
pub struct Tls {
    session: Session,
    /// Received ciphertext of an incomplete record.
    carried: Vec<u8>,
    /// Encrypted, not yet sent.
    unflushed: Vec<u8>,
    /// Plaintext size of `unflushed` that `send` has not returned yet. To encrypt it again would send it twice.
    owed_bytes: usize,
    /// Plaintext that the current key has encrypted, and what it may encrypt: no limit before TLS 1.3.
    key_bytes: u64,
    #[pyo3(set)]
    key_bytes_max: u64,
    /// Bytes that encryption adds to a record, without its header.
    overhead_bytes: usize,
    wakes_at: usize,
    /// The peer has closed.
    ended: bool,
    failure: Option<Failure>,
}

impl Tls {
    pub fn new(session: Session) -> Self {
        Tls {
            session,
            carried: Vec::new(),
            unflushed: Vec::new(),
            owed_bytes: 0,
            key_bytes: 0,
            key_bytes_max: KEY_BYTES_MAX,
            overhead_bytes: 0,
            wakes_at: 1,
            ended: false,
            failure: None,
        }
    }

    /// Takes steps until the input is done with, and what `write` has is written. Returns how many bytes are done with.
    fn run(
        &mut self,
        input: &mut [u8],
        plaintext: &mut Plaintext<'_>,
        out: &mut Ciphertext<'_>,
        mut write: Write<'_>,
    ) -> (usize, Result<Next, Failure>) {
        let mut at = 0;
        let mut failure = None;
        loop {
            let rest = &mut input[at..];
            let (done, next) = match &mut self.session {
                Session::Server(session) => step(session.process_tls_records(rest), plaintext, out, &mut write),
                Session::Client(session) => step(session.process_tls_records(rest), plaintext, out, &mut write),
            };
            at += done;
            match next {
                Ok(Next::Again) => (),
                Ok(Next::PeerClosed) => self.ended = true,
                Ok(next) => return (at, failure.map_or(Ok(next), Err)),
                // The next step has the alert for the peer, if there is one; then the failure again.
                Err(first) if failure.is_none() => failure = Some(first),
                Err(_) => return (at, failure.map_or(Ok(Next::Closed), Err)),
            }
        }
    }

    fn failed(&mut self, failure: Failure) -> Errno {
        self.failure = Some(failure);
        Errno::EPROTO
    }

    /// Reads once and decrypts. 0: the peer has closed.
    pub fn read(&mut self, fd: RawFd, space: &mut [u8]) -> nix::Result<usize> {
        if self.ended {
            return Ok(0);
        }
        let mut received = BUFFERS.with_borrow_mut(|buffers| std::mem::take(&mut buffers.received));
        received.resize(self.carried.len().max(RECORD_BYTES_MAX * 2) + RECEIVED_BYTES, 0);
        let result = self.read_by(fd, space, &mut received);
        BUFFERS.with_borrow_mut(|buffers| buffers.received = received);
        result
    }

    fn read_by(&mut self, fd: RawFd, space: &mut [u8], received: &mut [u8]) -> nix::Result<usize> {
        let carried = self.carried.len();
        received[..carried].copy_from_slice(&self.carried);
        let count = recv(fd, &mut received[carried..carried + RECEIVED_BYTES], MsgFlags::empty())?;
        if count == 0 {
            return Ok(0);
        }
        let mut plaintext = Plaintext { space, filled: 0 };
        let mut responses = std::mem::take(&mut self.unflushed);
        let before = responses.len();
        let mut out = Ciphertext { filled: before, bytes: &mut responses };
        let (done, next) = self.run(&mut received[..carried + count], &mut plaintext, &mut out, Write::Nothing);
        let (filled, byte_count) = (out.filled, plaintext.filled);
        responses.truncate(filled);
        self.unflushed = responses;
        let rest = &received[done..carried + count];
        self.carried = if next.is_ok() && !self.ended { rest.to_vec() } else { Vec::new() };
        if !self.unflushed.is_empty() && self.owed_bytes == 0 {
            // A response by TLS. If the socket blocks, it is sent before the next write.
            match self.flush_to(fd) {
                Ok(()) | Err(Errno::EAGAIN | Errno::EINTR) => (),
                Err(errno) if next.is_ok() => return Err(errno),
                Err(_) => (),
            }
        }
        if let Err(failure) = next {
            return Err(self.failed(failure));
        }
        if self.unflushed.len() > UNFLUSHED_BYTES_MAX {
            self.failure = Some(Failure::defect("the peer does not read TLS responses"));
            return Err(Errno::ECONNABORTED);
        }
        if byte_count == 0 && !self.ended {
            return Err(Errno::EAGAIN);
        }
        if byte_count > 0 && self.ended {
            // The peer's close came with its last data: the next read returns 0, since nothing else may arrive.
            let _ = shutdown(fd, Shutdown::Read);
        }
        Ok(byte_count)
    }

    /// How many bytes were taken. As with a socket, the caller must pass the rest again.
    pub fn write(&mut self, fd: RawFd, data: &[u8]) -> nix::Result<usize> {
        self.flush_to(fd)?;
        let mut taken = self.owed_bytes.min(data.len());
        self.owed_bytes -= taken;
        while taken < data.len() {
            let piece = &data[taken..data.len().min(taken + ENCRYPTED_BYTES)];
            match self.encrypt_and_send(fd, piece) {
                Ok(()) => taken += piece.len(),
                Err(Errno::EAGAIN | Errno::EINTR) => {
                    self.owed_bytes = piece.len();
                    return if taken > 0 { Ok(taken) } else { Err(Errno::EAGAIN) };
                }
                Err(errno) => return Err(errno),
            }
        }
        Ok(taken)
    }

    fn encrypt_and_send(&mut self, fd: RawFd, piece: &[u8]) -> nix::Result<()> {
        let mut encrypted = BUFFERS.with_borrow_mut(|buffers| std::mem::take(&mut buffers.encrypted));
        let needed = piece.len() + (piece.len() / RECORD_BYTES_MAX + 2) * OVERHEAD_BYTES_MAX;
        if encrypted.len() < needed {
            encrypted.resize(needed, 0);
        }
        let result = self.encrypt(piece, &mut encrypted).and_then(|byte_count| {
            let sent = match send(fd, &encrypted[..byte_count], MsgFlags::empty()) {
                Ok(sent) => sent,
                Err(Errno::EAGAIN | Errno::EINTR) => 0,
                Err(errno) => return Err(errno),
            };
            self.unflushed = encrypted[sent..byte_count].to_vec();
            if sent < byte_count { Err(Errno::EAGAIN) } else { Ok(()) }
        });
        BUFFERS.with_borrow_mut(|buffers| buffers.encrypted = encrypted);
        result
    }

    fn encrypt(&mut self, piece: &[u8], encrypted: &mut Vec<u8>) -> nix::Result<usize> {
        let mut out = Ciphertext { bytes: encrypted, filled: 0 };
        self.key_bytes += piece.len() as u64;
        let write = if self.key_bytes > self.key_bytes_max {
            self.key_bytes = piece.len() as u64;
            Write::DataWithNewKeys(piece)
        } else {
            Write::Data(piece)
        };
        let next = self.idle(&mut out, write);
        match next {
            Ok(Next::Established) => Ok(out.filled),
            Ok(_) => Err(Errno::EPIPE),
            Err(failure) => Err(self.failed(failure)),
        }
    }

    /// Steps without new input.
    fn idle(&mut self, out: &mut Ciphertext<'_>, write: Write<'_>) -> Result<Next, Failure> {
        let mut carried = std::mem::take(&mut self.carried);
        let (done, next) = self.run(&mut carried, &mut Plaintext { space: &mut [], filled: 0 }, out, write);
        if done > 0 {
            carried.drain(..done);
        }
        self.carried = carried;
        next
    }

    fn flush_to(&mut self, fd: RawFd) -> nix::Result<()> {
        if self.unflushed.is_empty() {
            return Ok(());
        }
        let sent = send(fd, &self.unflushed, MsgFlags::empty())?;
        if sent < self.unflushed.len() {
            self.unflushed.drain(..sent);
            return Err(Errno::EAGAIN);
        }
        self.unflushed = Vec::new();
        Ok(())
    }

    /// At least `byte_count` of plaintext will follow: wake the event loop for many records together, and for the last one.
    pub fn expect_plaintext(&mut self, fd: RawFd, byte_count: usize) {
        let wakes_at =
            if byte_count > RECORD_BYTES_MAX { self.bytes_before(byte_count).clamp(1, WAKES_AT_BYTES) } else { 1 };
        self.wake(fd, wakes_at);
    }

    /// Minimum stream bytes that bring so much plaintext, with records of maximum size.
    fn bytes_before(&self, byte_count: usize) -> usize {
        let (mut left, mut begun) = (0, 0);
        if let Some(&[_, _, _, high, low]) = self.carried.first_chunk::<HEADER_BYTES>() {
            let length = usize::from(u16::from_be_bytes([high, low]));
            left = (HEADER_BYTES + length).saturating_sub(self.carried.len());
            begun = length.saturating_sub(self.overhead_bytes);
        }
        let more = byte_count.saturating_sub(begun);
        let headers = more.div_ceil(RECORD_BYTES_MAX) * (HEADER_BYTES + self.overhead_bytes);
        let header = if left > 0 { 0 } else { self.carried.len().min(HEADER_BYTES) };
        (left + more + headers).saturating_sub(header)
    }

    fn wake(&mut self, fd: RawFd, wakes_at: usize) {
        if wakes_at != self.wakes_at {
            self.wakes_at = wakes_at;
            set_low_water(fd, i32::try_from(wakes_at).unwrap_or(1));
        }
    }

    fn established(&mut self) {
        let (version, suite) = match &self.session {
            Session::Server(it) => (it.protocol_version(), it.negotiated_cipher_suite()),
            Session::Client(it) => (it.protocol_version(), it.negotiated_cipher_suite()),
        };
        self.overhead_bytes = if version == Some(ProtocolVersion::TLSv1_3) {
            17 // the true record type, and 16 bytes for authentication
        } else {
            self.key_bytes_max = u64::MAX;
            match suite.map(|suite| suite.suite()) {
                Some(
                    CipherSuite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256
                    | CipherSuite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
                ) => 16,
                _ => 24,
            }
        };
    }
}

#[pymethods]
impl Tls {
    /// Continues the handshake with a record of the peer. Returns whether it is complete. `flush` sends what it has to send.
    fn advance(&mut self, record: &[u8]) -> PyResult<bool> {
        self.carried.extend_from_slice(record);
        let mut unflushed = std::mem::take(&mut self.unflushed);
        let mut out = Ciphertext { filled: unflushed.len(), bytes: &mut unflushed };
        let next = self.idle(&mut out, Write::Nothing);
        let filled = out.filled;
        unflushed.truncate(filled);
        self.unflushed = unflushed;
        match next {
            Ok(Next::Established) => {
                self.established();
                self.carried.shrink_to_fit();
                Ok(true)
            }
            Ok(Next::Blocked) => Ok(false),
            Ok(_) => Err(PyOSError::new_err((Errno::ECONNRESET as i32, "closed during the handshake"))),
            Err(failure) => {
                let error = PyOSError::new_err((Errno::EPROTO as i32, failure.text.clone()));
                self.failure = Some(failure);
                Err(error)
            }
        }
    }

    fn flush(&mut self, fd: RawFd) -> PyResult<()> {
        self.flush_to(fd).map_err(raised)
    }

    /// `recv`: one read, decrypted. Empty: the peer has closed.
    fn recv<'py>(&mut self, py: Python<'py>, fd: RawFd) -> PyResult<Bound<'py, PyBytes>> {
        let mut space = BUFFERS.with_borrow_mut(|buffers| std::mem::take(&mut buffers.plaintext));
        space.resize(PLAINTEXT_BYTES, 0);
        let data = self.read(fd, &mut space).map(|byte_count| PyBytes::new(py, &space[..byte_count]));
        BUFFERS.with_borrow_mut(|buffers| buffers.plaintext = space);
        data.map_err(raised)
    }

    fn send(&mut self, fd: RawFd, data: &[u8]) -> PyResult<usize> {
        self.write(fd, data).map_err(raised)
    }

    /// Sends close_notify, so that the peer detects no truncation; skipped if the socket blocks.
    fn end(&mut self, fd: RawFd) {
        if self.unflushed.is_empty() {
            let mut unflushed = Vec::new();
            let mut out = Ciphertext { bytes: &mut unflushed, filled: 0 };
            let _ = self.idle(&mut out, Write::Close);
            let filled = out.filled;
            unflushed.truncate(filled);
            self.unflushed = unflushed;
        }
        let _ = self.flush_to(fd);
        self.unflushed = Vec::new();
    }

    fn expect(&mut self, fd: RawFd, byte_count: usize) {
        self.expect_plaintext(fd, byte_count);
    }

    /// Wake the event loop for one record of that size, or for anything with 1.
    fn wake_at(&mut self, fd: RawFd, byte_count: usize) {
        let overhead = HEADER_BYTES + self.overhead_bytes;
        self.wake(fd, if byte_count == 1 { 1 } else { byte_count + overhead });
    }

    #[getter]
    fn unflushed_bytes(&self) -> usize {
        self.unflushed.len()
    }

    #[getter]
    fn overhead_bytes(&self) -> usize {
        self.overhead_bytes
    }

    /// Received ciphertext of an incomplete record.
    #[getter]
    fn carried<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.carried)
    }

    #[getter]
    fn is_tls13(&self) -> bool {
        let version = match &self.session {
            Session::Server(it) => it.protocol_version(),
            Session::Client(it) => it.protocol_version(),
        };
        version == Some(ProtocolVersion::TLSv1_3)
    }

    /// Why it failed: the peer's alert, OpenSSL's name of another reason, and a description.
    #[getter]
    fn failure(&self) -> Option<(Option<u8>, Option<&str>, &str)> {
        self.failure.as_ref().map(|failure| (failure.alert, failure.reason, failure.text.as_str()))
    }
}

fn raised(errno: Errno) -> PyErr {
    std::io::Error::from(errno).into()
}

/// So many unread bytes make the socket readable. A closed connection shows in the next read.
#[allow(unsafe_code)]
fn set_low_water(fd: RawFd, byte_count: i32) {
    let (value, size) = ((&raw const byte_count).cast(), size_of::<i32>() as libc::socklen_t);
    // SAFETY: the value is an i32, which outlives the call; the call does not keep it.
    unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, value, size) };
}
