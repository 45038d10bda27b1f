//! Frames that are relayed as they arrive. See `session/frames/cutter.py`, whose watches look at some bytes of them.

use pyo3::prelude::*;

use crate::framing::LENGTH_BYTES;
use crate::upward;

/// The rest of a frame.
pub struct Passing {
    pub left: usize,
    watch: Option<Watch>,
}

/// `until_probe`: bytes before the next bytes to look at.
struct Watch {
    watch: Py<PyAny>,
    until_probe: usize,
    head_bytes: usize,
    error: Option<PyErr>,
}

/// What is left, its watch, the bytes before its next probe, and what its last probe raised: see `fencepost_native.pyi`.
pub type Left = (usize, Option<Py<PyAny>>, usize, Option<PyErr>);

impl Passing {
    pub fn unwatched(left: usize) -> Self {
        Passing { left, watch: None }
    }

    /// `left`: of a frame with its length. `watch`: one of Python's.
    pub fn watched(left: usize, watch: Bound<'_, PyAny>) -> PyResult<Self> {
        let of_watch = upward::Watch(&watch);
        let (until_probe, head_bytes) = (LENGTH_BYTES + of_watch.first_at()?, of_watch.head_bytes()?);
        let watch = Watch { watch: watch.unbind(), until_probe, head_bytes, error: None };
        Ok(Passing { left, watch: Some(watch) })
    }

    /// How many of the next bytes need not be read.
    pub fn unseen(&self) -> usize {
        self.watch.as_ref().map_or(self.left, |watch| self.left.min(watch.until_probe))
    }

    /// So many of the unseen bytes were relayed.
    pub fn passed(&mut self, byte_count: usize) {
        self.left -= byte_count;
        if let Some(watch) = &mut self.watch {
            watch.until_probe -= byte_count;
        }
    }

    /// Relays what is there. Returns how many bytes that is: if some of the frame's are left, they are for Python.
    pub fn take(&mut self, py: Python<'_>, data: &[u8]) -> PyResult<usize> {
        let mut at = 0;
        while self.left > 0 {
            if self.unseen() == 0 {
                let Some(watch) = &mut self.watch else {
                    break;
                };
                let Some(head) = data.get(at..at + watch.head_bytes.min(self.left)) else {
                    break;
                };
                if watch.is_for_python(py, head)? {
                    break;
                }
            }
            let step = self.unseen().min(data.len() - at);
            if step == 0 {
                break;
            }
            self.passed(step);
            at += step;
        }
        Ok(at)
    }

    pub fn into_left(self) -> Left {
        match self.watch {
            None => (self.left, None, 0, None),
            Some(watch) => (self.left, Some(watch.watch), watch.until_probe, watch.error),
        }
    }
}

impl Watch {
    /// After it has read the next bytes.
    fn is_for_python(&mut self, py: Python<'_>, head: &[u8]) -> PyResult<bool> {
        if self.error.is_some() {
            return Ok(true);
        }
        let watch = upward::Watch(self.watch.bind(py));
        match watch.probe(head) {
            Ok(until_probe) => {
                self.until_probe = until_probe.extract()?;
                watch.at_trailer()
            }
            Err(error) => {
                self.error = Some(error);
                Ok(true)
            }
        }
    }
}
