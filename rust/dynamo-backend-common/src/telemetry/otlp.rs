//! One span as it is exported, and the messages of OTLP (Protocol Buffers, `opentelemetry/proto/trace/v1`).

use std::borrow::Cow;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::context::SpanIds;

/// How many attributes and events one span keeps, each.
const MAX_ENTRIES: usize = 128;
/// The kind of a span that is neither the end of a call nor its beginning.
const INTERNAL: u64 = 1;
const STATUS_ERROR: u64 = 2;

/// What is known of one span.
#[derive(Debug)]
pub(crate) struct SpanRecord {
    pub(crate) name: Cow<'static, str>,
    pub(crate) ids: SpanIds,
    pub(crate) parent_id: Option<u64>,
    pub(crate) trace_state: Option<String>,
    /// Trace and span of each.
    pub(crate) links: Vec<(u128, u64)>,
    /// Why the work failed.
    pub(crate) error: Option<String>,
    attributes: Vec<(Cow<'static, str>, Value)>,
    left_out: u64,
    events: Vec<(u64, String)>,
    began: Instant,
    began_ns: u64,
    ended_ns: u64,
}

impl SpanRecord {
    pub(crate) fn begin(name: Cow<'static, str>, ids: SpanIds, parent_id: Option<u64>) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            name,
            ids,
            parent_id,
            trace_state: None,
            links: Vec::new(),
            error: None,
            attributes: Vec::new(),
            left_out: 0,
            events: Vec::new(),
            began: Instant::now(),
            began_ns: u64::try_from(since.as_nanos()).unwrap_or(u64::MAX),
            ended_ns: 0,
        }
    }

    /// Sets an attribute.
    pub(crate) fn set(&mut self, key: Cow<'static, str>, value: Value) {
        if let Some((_, known)) = self.attributes.iter_mut().find(|(name, _)| *name == key) {
            *known = value;
        } else if self.attributes.len() < MAX_ENTRIES {
            self.attributes.push((key, value));
        } else {
            self.left_out += 1;
        }
    }

    #[cfg(test)]
    pub(crate) fn attribute(&self, key: &str) -> Option<&Value> {
        self.attributes.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    pub(crate) fn add_event(&mut self, name: String) {
        if self.events.len() < MAX_ENTRIES {
            self.events.push((self.now_ns(), name));
        }
    }

    pub(crate) fn end(&mut self) {
        self.ended_ns = self.now_ns();
    }

    /// Returns the time by the clock that does not jump.
    fn now_ns(&self) -> u64 {
        self.began_ns.saturating_add(u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    fn put(&self, out: &mut Vec<u8>) {
        put_bytes(out, 1, &self.ids.trace_id.to_be_bytes());
        put_bytes(out, 2, &self.ids.span_id.to_be_bytes());
        if let Some(state) = &self.trace_state {
            put_bytes(out, 3, state.as_bytes());
        }
        if let Some(parent) = self.parent_id {
            put_bytes(out, 4, &parent.to_be_bytes());
        }
        put_bytes(out, 5, self.name.as_bytes());
        put_number(out, 6, INTERNAL);
        put_fixed(out, 7, self.began_ns);
        put_fixed(out, 8, self.ended_ns);
        for (key, value) in &self.attributes {
            put_message(out, 9, |out| put_pair(out, key, value));
        }
        if self.left_out > 0 {
            put_number(out, 10, self.left_out);
        }
        for (at_ns, name) in &self.events {
            put_message(out, 11, |out| {
                put_fixed(out, 1, *at_ns);
                put_bytes(out, 2, name.as_bytes());
            });
        }
        for (trace_id, span_id) in &self.links {
            put_message(out, 13, |out| {
                put_bytes(out, 1, &trace_id.to_be_bytes());
                put_bytes(out, 2, &span_id.to_be_bytes());
            });
        }
        if let Some(text) = &self.error {
            put_message(out, 15, |out| {
                put_bytes(out, 2, text.as_bytes());
                put_number(out, 3, STATUS_ERROR);
            });
        }
    }
}

/// Returns an `ExportTraceServiceRequest`.
pub(crate) fn export_request(resource: &[(String, String)], spans: &[SpanRecord]) -> Vec<u8> {
    let mut request = Vec::new();
    put_message(&mut request, 1, |out| {
        put_message(out, 1, |out| {
            for (key, value) in resource {
                put_message(out, 1, |out| put_pair(out, key, &Value::String(value.clone())));
            }
        });
        put_message(out, 2, |out| {
            put_message(out, 1, |out| {
                put_bytes(out, 1, env!("CARGO_PKG_NAME").as_bytes());
                put_bytes(out, 2, env!("CARGO_PKG_VERSION").as_bytes());
            });
            for span in spans {
                put_message(out, 2, |out| span.put(out));
            }
        });
    });
    request
}

// -- Protocol Buffers --------------------------------------------------------------------------------------------

const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const LENGTH: u64 = 2;

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn put_number(out: &mut Vec<u8>, field: u64, value: u64) {
    put_varint(out, field << 3 | VARINT);
    put_varint(out, value);
}

fn put_fixed(out: &mut Vec<u8>, field: u64, value: u64) {
    put_varint(out, field << 3 | FIXED64);
    out.extend_from_slice(&value.to_le_bytes());
}

fn put_bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    put_varint(out, field << 3 | LENGTH);
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

fn put_message(out: &mut Vec<u8>, field: u64, write: impl FnOnce(&mut Vec<u8>)) {
    let mut inner = Vec::new();
    write(&mut inner);
    put_bytes(out, field, &inner);
}

/// Writes a `KeyValue`. Lists and objects are written as JSON.
fn put_pair(out: &mut Vec<u8>, key: &str, value: &Value) {
    put_bytes(out, 1, key.as_bytes());
    put_message(out, 2, |out| match value {
        Value::String(text) => put_bytes(out, 1, text.as_bytes()),
        Value::Bool(is_true) => put_number(out, 2, u64::from(*is_true)),
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(whole), _) => put_number(out, 3, whole as u64),
            (None, Some(float)) => put_fixed(out, 4, float.to_bits()),
            (None, None) => put_bytes(out, 1, number.to_string().as_bytes()),
        },
        other => put_bytes(out, 1, other.to_string().as_bytes()),
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_varints_and_messages_have_their_length() {
        let mut out = Vec::new();
        put_number(&mut out, 3, 300);
        put_message(&mut out, 2, |out| put_pair(out, "a", &Value::from(-1)));
        assert_eq!(out[..3], [0x18, 0xac, 2]);
        assert_eq!(out[3..8], [0x12, 16, 0x0a, 1, b'a']);
        assert_eq!(out[8..11], [0x12, 11, 0x18]);
        assert_eq!(out[11..], [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]);
    }

    #[test]
    fn a_span_keeps_so_many_attributes_and_counts_the_others() {
        let ids = SpanIds { trace_id: 1, span_id: 2, is_sampled: true };
        let mut record = SpanRecord::begin("s".into(), ids, None);
        for number in 0..130 {
            record.set(format!("key {number}").into(), Value::from(number));
            record.add_event(format!("event {number}"));
        }
        record.set("key 0".into(), Value::from("again"));
        assert_eq!((record.attributes.len(), record.left_out, record.events.len()), (128, 2, 128));
        assert_eq!(record.attributes[0].1, "again");
    }
}
