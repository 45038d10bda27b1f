//! What requests are checked against. Python is queried for what is not remembered.

use memchr::memmem;
use pyo3::Borrowed;
use pyo3::prelude::*;

use crate::framing::{LENGTH_BYTES, REQUEST_BYTES_MIN};
use crate::permit::Permit;
use crate::process_state::{ProcessState, unreported};
use crate::produce;
use crate::request_template::RequestTemplate;
use crate::settings::Settings;
use crate::topic::TopicSettings;
use crate::upward::Services;

const PRODUCE_BY_ID: i64 = 13;

/// What requests are checked against.
pub struct Arriving<'a, 'py> {
    pub settings: &'a Settings,
    pub services: Services<'a, 'py>,
    pub read: &'a ReadUp,
}

/// A read from the client, a tuple in Python. `before`: requests in progress that Python keeps. `received`: bytes of the
/// client before it.
#[derive(Clone, Copy)]
pub struct ReadUp {
    pub now: f64,
    pub before: usize,
    pub received: i64,
}

impl ReadUp {
    /// After so many more bytes of the client.
    pub fn after(self, byte_count: usize) -> Self {
        ReadUp { received: self.received + byte_count as i64, ..self }
    }
}

impl FromPyObject<'_, '_> for ReadUp {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let (now, before, received) = object.extract()?;
        Ok(ReadUp { now, before, received })
    }
}

impl<'py> Arriving<'_, 'py> {
    pub fn py(&self) -> Python<'py> {
        self.services.0.py()
    }

    pub fn process(&self) -> &ProcessState {
        &self.settings.remembered.process
    }

    pub fn reserve(&self, byte_count: usize) -> PyResult<bool> {
        let py = self.py();
        match &self.settings.shared {
            Some(shared) => Ok(shared.get().memory.borrow_mut(py).reserve(byte_count as i64)),
            None => self.services.reserve(byte_count),
        }
    }

    /// What the permits rely on, if it still holds.
    pub fn topic_settings<'k>(&self, template: &'k RequestTemplate) -> PyResult<Option<&'k Py<TopicSettings>>> {
        let Some(topic_settings) = &template.topic_settings else {
            return Ok(None);
        };
        let holds = self.remembered(template, || {
            let (known, topic) = (topic_settings.get(), &template.topic_name);
            Ok(self.services.policy(topic)?.is(&known.policy) && self.services.topic_id(topic)?.is(&known.topic_id))
        })?;
        Ok((holds && self.process().produce_version_max >= PRODUCE_BY_ID).then_some(topic_settings))
    }

    /// Whether a Produce request for a topic without checks may be relayed unread.
    pub fn may_relay(&self, template: &RequestTemplate, frame: &[u8], version: i16) -> PyResult<bool> {
        let after_topic = LENGTH_BYTES + REQUEST_BYTES_MIN + template.prefix.len();
        let Some(producer_ids) = produce::producer_ids(frame, after_topic, version) else {
            return Ok(false);
        };
        if producer_ids.iter().any(|id| self.process().producer_ids.contains(id)) {
            return Ok(false);
        }
        self.is_unchecked(template)
    }

    pub fn is_unchecked(&self, template: &RequestTemplate) -> PyResult<bool> {
        self.remembered(template, || Ok(self.services.policy(&template.topic_name)?.is_none()))
    }

    /// What holds of its topic, queried only if it is not remembered.
    fn remembered(&self, template: &RequestTemplate, query: impl FnOnce() -> PyResult<bool>) -> PyResult<bool> {
        let number = self.settings.remembered.number;
        let remembered = template.holds(number);
        if remembered && !self.settings.verifies() {
            return Ok(true);
        }
        let holds = query()?;
        if remembered && !holds {
            return Err(unreported("a topic"));
        }
        if holds {
            template.hold(number);
        }
        Ok(holds)
    }

    pub fn leader_epoch(&self, permit: &mut Permit) -> PyResult<i64> {
        let (py, number) = (self.py(), self.settings.remembered.number);
        let (queried, remembered) = permit.leader_epoch;
        if queried == number && !self.settings.verifies() {
            return Ok(remembered);
        }
        let partition = permit.partition(py);
        let epoch = self.services.leader_epoch(&partition)?;
        if queried == number && epoch != remembered {
            return Err(unreported("a leader"));
        }
        permit.leader_epoch = (number, epoch);
        Ok(epoch)
    }

    pub fn concerns_state_topic(&self, frame: &[u8]) -> bool {
        self.process().state_topic_marks.iter().any(|mark| memmem::find(frame, mark).is_some())
    }
}
