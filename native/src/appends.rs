//! Appends that permits allow, and their answers.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::arriving::Arriving;
use crate::batch::{self, HEADER_BYTES, Scan, Target};
use crate::connection::{Checked, Connection, Sent};
use crate::frame::Frame;
use crate::framing::{LENGTH_BYTES, PRODUCE, REQUEST_BYTES_MIN, request_start};
use crate::output::Piece;
use crate::permit::{AppendContext, Mode, Permit, Source};
use crate::produce::{self, Batch};
use crate::request_template::RequestTemplate;
use crate::topic::TopicSettings;
use crate::upward::{Idempotence, Services};

/// Clients give up at their timeout; an unknown outcome is reported a little earlier.
const ANSWER_BY: f64 = 0.9;

struct Admitted {
    permit: Py<Permit>,
    scan: Scan,
    mode: Mode,
    at: i64,
    header: [u8; HEADER_BYTES],
    context: AppendContext,
}

impl Connection {
    /// Sends all appends of a request, or none. `frame`: with its length. `collected`: the same, if memory is reserved.
    pub fn append(
        &mut self,
        it: &Arriving<'_, '_>,
        shared_template: &Py<RequestTemplate>,
        frame: &[u8],
        collected: Option<&Arc<Frame>>,
        starts_at: i64,
        out: &mut Vec<Piece>,
    ) -> PyResult<bool> {
        if self.waits_for_others() {
            return Ok(false);
        }
        let py = it.py();
        let template = shared_template.borrow(py);
        let (_, version, correlation_id) = request_start(&frame[LENGTH_BYTES..]);
        let after_topic = LENGTH_BYTES + REQUEST_BYTES_MIN + template.prefix.len();
        let Some(batches) = produce::read_request(frame, after_topic, version) else {
            return Ok(false);
        };
        let Some(topic_settings) = it.topic_settings(&template)? else {
            self.missing = Some(Vec::new());
            return Ok(false);
        };
        let missing =
            |batch: &&Batch| !template.permits.get(&batch.partition).is_some_and(|permit| permit.borrow(py).is_live());
        let missing: Vec<i32> = batches.iter().filter(missing).map(|batch| batch.partition).collect();
        if !missing.is_empty() {
            self.missing = Some(missing);
            return Ok(false);
        }
        let Some(admitted) = self.admit_all(frame, &batches, it, &template, topic_settings.get())? else {
            return Ok(false);
        };
        if collected.is_none() && !it.reserve(frame.len() - LENGTH_BYTES)? {
            return Ok(false);
        }
        let frame = collected.map_or_else(|| Arc::new(Frame::copy_of(frame)), Arc::clone);

        let mut heads = Vec::with_capacity(batches.len());
        let mut appends = Vec::with_capacity(batches.len());
        for (batch, append) in batches.iter().zip(admitted) {
            let Admitted { permit, scan, mode, at, header, context } = append;
            heads.push(produce::partition_head(batch.partition, batch.end - batch.start, &header));
            let source = Source {
                template: shared_template.clone_ref(py).into_any(),
                topic_settings: topic_settings.clone_ref(py),
                frame: Arc::clone(&frame),
                partition: batch.partition,
                start: batch.start,
                end: batch.end,
            };
            let id = permit.borrow_mut(py).take(scan, mode, at, &context, source);
            appends.push((batch.partition, permit, id));
        }
        let rest_bytes =
            batches.iter().zip(&heads).map(|(batch, head)| head.len() + batch.end - batch.start - HEADER_BYTES + 1);
        let rest_bytes = rest_bytes.sum::<usize>() + 2;
        let topic_id = &topic_settings.get().topic_id_bytes;
        let mut made = produce::request_head(
            correlation_id,
            &template.before_acks,
            template.timeout_ms,
            topic_id,
            batches.len(),
            rest_bytes,
        );
        for (batch, head) in batches.iter().zip(heads) {
            made.extend_from_slice(&head);
            out.push(Piece::Made(std::mem::take(&mut made)));
            out.push(Piece::Kept(Arc::clone(&frame), batch.start + HEADER_BYTES..batch.end));
            made.push(0);
        }
        made.extend_from_slice(&[0, 0]);
        out.push(Piece::Made(made));
        let timeout_seconds = f64::from(template.timeout_ms.max(100)) / 1000.0;
        let checked = Checked {
            template: shared_template.clone_ref(py),
            frame,
            topic_settings: topic_settings.clone_ref(py),
            starts_at,
            answer_by: it.read.now + ANSWER_BY * timeout_seconds,
            appends,
        };
        self.queue.push_back(Sent { api_key: PRODUCE, version, correlation_id, checked: Some(Box::new(checked)) });
        Ok(true)
    }

    /// Each batch with its permit; None if not all of them fit at once.
    fn admit_all(
        &self,
        frame: &[u8],
        batches: &[Batch],
        it: &Arriving<'_, '_>,
        template: &RequestTemplate,
        topic_settings: &TopicSettings,
    ) -> PyResult<Option<Vec<Admitted>>> {
        let (py, process) = (it.py(), it.process());
        let mut bytes_left = it.settings.read_bytes_max;
        let mut admitted = Vec::with_capacity(batches.len());
        for batch in batches {
            let bytes = &frame[batch.start..batch.end];
            let Some(left) = bytes_left.checked_sub(bytes.len()) else {
                return Ok(None);
            };
            bytes_left = left;
            let settings = it.settings;
            let target = Target {
                topic: &topic_settings.topic,
                partition: batch.partition,
                cluster_id: topic_settings.cluster_id.as_deref(),
            };
            let source_is_base = topic_settings.source_is_base;
            let Some(scan) = batch::scan(bytes, &settings.names, &target, settings.digest_seed, source_is_base) else {
                return Ok(None);
            };
            if scan.producer_id >= 0
                && (scan.producer_id >= settings.producer_ids_end || process.producer_ids.contains(&scan.producer_id))
            {
                return Ok(None);
            }
            let permit = template.permits[&batch.partition].clone_ref(py);
            let context = AppendContext {
                connection: self.connection,
                opened_at: self.opened_at,
                now: it.read.now,
                leader_epoch: it.leader_epoch(&mut permit.borrow_mut(py))?,
                instance_id: process.instance_id,
                alone: process.alone,
                taken_over: process.taken_over,
                required: topic_settings.required,
            };
            let Some((mode, at)) = permit.borrow_mut(py).admits(py, &scan, &context)? else {
                return Ok(None);
            };
            let fence = permit.borrow(py).fence(mode, at, process.instance_id);
            let Some(header) = batch::header_to_send(bytes, fence.as_ref()) else {
                return Ok(None);
            };
            admitted.push(Admitted { permit, scan, mode, at, header, context });
        }
        Ok(Some(admitted))
    }

    /// The answer to a request's appends, if all of it is the expected success. None: nothing has happened.
    pub fn complete(
        &self,
        py: Python<'_>,
        checked: &Checked,
        correlation_id: i32,
        frame: &[u8],
        now: f64,
    ) -> PyResult<Option<Vec<u8>>> {
        let Some((throttle, results)) =
            produce::read_response(frame, &checked.topic_settings.get().topic_id_bytes, checked.appends.len())
        else {
            return Ok(None);
        };
        if throttle != 0 {
            return Ok(None);
        }
        let mut ordered = Vec::with_capacity(results.len());
        for (partition, permit, id) in &checked.appends {
            let result = results.iter().find(|each| each.partition == *partition);
            let Some(result) = result.filter(|result| permit.borrow(py).may_complete(*id, result)) else {
                return Ok(None);
            };
            ordered.push(*result);
        }
        let services = self.settings.borrow(py).services.clone_ref(py);
        for ((_, permit, _), result) in checked.appends.iter().zip(&ordered) {
            let kept_id = permit.borrow_mut(py).complete(result, now);
            if let Some((producer_id, last_offset)) = kept_id {
                let partition = permit.borrow(py).partition(py);
                let idempotence = Services(services.bind(py)).idempotence()?;
                Idempotence(&idempotence).acknowledged(&partition, producer_id, last_offset)?;
            }
        }
        let template = checked.template.borrow(py);
        self.may_write.bind(py).set_item(&template.topic_name, now)?;
        self.release(py, checked.frame.len() - LENGTH_BYTES)?;
        Ok(Some(produce::response(template.version, correlation_id, &template.topic, &ordered, throttle)))
    }
}
