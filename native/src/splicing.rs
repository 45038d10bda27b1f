//! Moves bytes from socket to socket inside the kernel, where it can: Linux.

#[cfg(not(target_os = "linux"))]
use std::os::fd::RawFd;

use nix::errno::Errno;

/// What became of it. `unsent`: what the other socket did not take. `failed`: why it took nothing more.
pub enum Spliced {
    /// There was nothing to read.
    Again,
    /// The peer has closed, or the socket failed.
    Ended(Option<Errno>),
    /// These sockets cannot.
    Unsupported,
    Relayed {
        count: usize,
        unsent: Option<Vec<u8>>,
        failed: Option<Errno>,
    },
}

#[cfg(target_os = "linux")]
pub use linux::Pipe;

#[cfg(target_os = "linux")]
pub const CAN_SPLICE: bool = true;

#[cfg(target_os = "linux")]
mod linux {
    use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

    use nix::errno::Errno;
    use nix::fcntl::{FcntlArg, OFlag, SpliceFFlags, fcntl, splice};
    use nix::unistd::{pipe2, read};

    use super::Spliced;

    /// Its capacity, and so the maximum of one splice.
    const PIPE_BYTES: usize = 1024 * 1024;

    pub struct Pipe {
        from: OwnedFd,
        to: OwnedFd,
    }

    impl Pipe {
        /// None: no file descriptor is left.
        pub fn new() -> Option<Self> {
            let (from, to) = pipe2(OFlag::O_NONBLOCK | OFlag::O_CLOEXEC).ok()?;
            // It fails if the account's pipe quota is used up: a smaller pipe works too.
            let _ = fcntl(&to, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES as i32));
            Some(Pipe { from, to })
        }

        pub fn relay(&mut self, from: RawFd, to: RawFd, byte_count: usize) -> Spliced {
            let flags = SpliceFFlags::SPLICE_F_NONBLOCK | SpliceFFlags::SPLICE_F_MOVE;
            let count = match splice(socket(from), None, &self.to, None, byte_count.min(PIPE_BYTES), flags) {
                Ok(0) => return Spliced::Ended(None),
                Ok(count) => count,
                Err(Errno::EAGAIN | Errno::EINTR) => return Spliced::Again,
                Err(Errno::EINVAL) => return Spliced::Unsupported,
                Err(errno) => return Spliced::Ended(Some(errno)),
            };
            let mut left = count;
            let mut failed = None;
            while left > 0 {
                match splice(&self.from, None, socket(to), None, left, flags) {
                    Ok(sent) if sent > 0 => left -= sent,
                    Err(Errno::EINTR) => (),
                    Ok(_) | Err(Errno::EAGAIN) => break,
                    Err(errno) => {
                        failed = Some(errno);
                        break;
                    }
                }
            }
            match self.drain(left) {
                Ok(rest) => Spliced::Relayed { count, unsent: (left > 0).then_some(rest), failed },
                Err(errno) => Spliced::Relayed { count, unsent: None, failed: Some(errno) },
            }
        }

        fn drain(&mut self, byte_count: usize) -> nix::Result<Vec<u8>> {
            let mut bytes = vec![0; byte_count];
            let mut at = 0;
            while at < byte_count {
                match read(&self.from, &mut bytes[at..]) {
                    Ok(0) => return Err(Errno::EIO),
                    Ok(count) => at += count,
                    Err(Errno::EINTR) => (),
                    Err(errno) => return Err(errno),
                }
            }
            Ok(bytes)
        }
    }

    /// The only unsafe code here. Python's socket object owns the descriptor, and cannot close it during a call.
    #[allow(unsafe_code)]
    fn socket<'a>(fd: RawFd) -> BorrowedFd<'a> {
        // SAFETY: see above; a closed descriptor would be an error of the call, as for the other calls with `RawFd`.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

#[cfg(not(target_os = "linux"))]
pub const CAN_SPLICE: bool = false;

#[cfg(not(target_os = "linux"))]
pub struct Pipe;

#[cfg(not(target_os = "linux"))]
impl Pipe {
    pub fn new() -> Option<Self> {
        None
    }

    pub fn relay(&mut self, _from: RawFd, _to: RawFd, _byte_count: usize) -> Spliced {
        Spliced::Unsupported
    }
}
