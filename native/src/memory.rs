//! See `transport/memory_budget.py`: the same interface.

use pyo3::prelude::*;

#[pyclass(module = "fencepost_native")]
pub struct MemoryBudget {
    bytes_max: i64,
    free_bytes: i64,
}

#[pymethods]
impl MemoryBudget {
    #[new]
    fn new(bytes_max: i64) -> Self {
        MemoryBudget { bytes_max, free_bytes: bytes_max }
    }

    pub fn reserve(&mut self, byte_count: i64) -> bool {
        let is_free = byte_count <= self.free_bytes;
        if is_free {
            self.free_bytes -= byte_count;
        }
        is_free
    }

    pub fn release(&mut self, byte_count: i64) {
        self.free_bytes += byte_count;
    }

    #[getter]
    fn reserved_bytes(&self) -> i64 {
        self.bytes_max - self.free_bytes
    }

    fn resize(&mut self, bytes_max: i64) {
        self.free_bytes += bytes_max - self.bytes_max;
        self.bytes_max = bytes_max;
    }
}
