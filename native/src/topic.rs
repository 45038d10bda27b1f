//! What holds of a topic with checks.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// What holds of the topic: the permits rely on these objects, by identity.
#[pyclass(module = "fencepost_native", frozen)]
pub struct TopicSettings {
    #[pyo3(get)]
    pub policy: Py<PyAny>,
    #[pyo3(get)]
    pub topic_id: Py<PyAny>,
    pub topic_id_bytes: [u8; 16],
    pub required: bool,
    pub source_is_base: bool,
    pub topic: Vec<u8>,
    pub cluster_id: Option<Vec<u8>>,
}

#[pymethods]
impl TopicSettings {
    #[new]
    fn new(
        policy: Py<PyAny>,
        topic_id: Py<PyAny>,
        topic_id_bytes: &[u8],
        required: bool,
        source_is_base: bool,
        topic: Vec<u8>,
        cluster_id: Option<Vec<u8>>,
    ) -> PyResult<Self> {
        let topic_id_bytes = topic_id_bytes.try_into().map_err(|_| PyValueError::new_err("a topic id has 16 bytes"))?;
        Ok(TopicSettings { policy, topic_id, topic_id_bytes, required, source_is_base, topic, cluster_id })
    }
}
