//! Fetch responses from v16 on, which may have brokers' addresses after the records. See `wire/node_endpoints.py`.

use crate::bytes::Cursor;

const TOPIC_ID_BYTES: usize = 16;
/// Throttle time, error code, session id.
const START_BYTES: usize = 10;
/// Index, error code, high watermark, last stable offset, log start offset.
const PARTITION_BYTES: usize = 30;
const ABORTED_TRANSACTION_BYTES: usize = 16;
const PREFERRED_REPLICA_BYTES: usize = 4;

/// Whether a response certainly has none. `frame`: with its length. Tagged fields are left to Python.
pub fn names_no_broker(frame: &[u8]) -> bool {
    read_usual_response(frame).is_some()
}

fn read_usual_response(frame: &[u8]) -> Option<()> {
    let mut cursor = Cursor::new(frame, 8);
    no_tagged_fields(&mut cursor)?;
    cursor.take(START_BYTES)?;
    for _ in 1..cursor.uvarint()? {
        cursor.take(TOPIC_ID_BYTES)?;
        for _ in 1..cursor.uvarint()? {
            cursor.take(PARTITION_BYTES)?;
            for _ in 1..cursor.uvarint()? {
                cursor.take(ABORTED_TRANSACTION_BYTES)?;
                no_tagged_fields(&mut cursor)?;
            }
            cursor.take(PREFERRED_REPLICA_BYTES)?;
            let records_bytes = cursor.uvarint()?;
            cursor.take(records_bytes.saturating_sub(1))?;
            no_tagged_fields(&mut cursor)?;
        }
        no_tagged_fields(&mut cursor)?;
    }
    no_tagged_fields(&mut cursor)?;
    (cursor.at == frame.len()).then_some(())
}

fn no_tagged_fields(cursor: &mut Cursor<'_>) -> Option<()> {
    (cursor.u8()? == 0).then_some(())
}
