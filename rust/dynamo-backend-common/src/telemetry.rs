//! Spans of an engine's own work on a request.
//!
//! A span becomes one log record of level DEBUG and target `dynamo_backend_common::telemetry` when it ends, with the ids of
//! the request and of its trace. Export over OTLP is not built into the Rust SDK.

use std::time::Instant;

use serde_json::{Map, Value};

use crate::context::GenerateContext;

/// A span that ends when it is dropped or closed.
#[derive(Debug)]
#[must_use = "a span that is dropped at once measures nothing"]
pub struct Span {
    name: String,
    request_id: String,
    traceparent: String,
    began: Instant,
    attributes: Map<String, Value>,
    events: Vec<Value>,
}

/// How many attributes and events one span keeps, each.
const MAX_ENTRIES: usize = 128;

/// Begins a span of a request.
pub fn start_span(ctx: &GenerateContext, name: &str) -> Span {
    Span {
        name: name.to_owned(),
        request_id: ctx.id().to_owned(),
        traceparent: ctx.trace_headers().get("traceparent").cloned().unwrap_or_default(),
        began: Instant::now(),
        attributes: Map::new(),
        events: Vec::new(),
    }
}

impl Span {
    /// Sets an attribute; the 129th and later ones are left out.
    pub fn set_attribute(&mut self, key: &str, value: impl Into<Value>) {
        if self.attributes.len() < MAX_ENTRIES || self.attributes.contains_key(key) {
            self.attributes.insert(key.to_owned(), value.into());
        }
    }

    /// Notes that something happened; the 129th and later events are left out.
    pub fn add_event(&mut self, name: &str) {
        if self.events.len() < MAX_ENTRIES {
            let after_ms = self.began.elapsed().as_secs_f64() * 1000.0;
            self.events.push(serde_json::json!({"name": name, "after_ms": after_ms}));
        }
    }

    /// Ends the span now.
    pub fn close(self) {}
}

impl Drop for Span {
    fn drop(&mut self) {
        let milliseconds = self.began.elapsed().as_secs_f64() * 1000.0;
        let attributes = Value::Object(std::mem::take(&mut self.attributes)).to_string();
        let events = Value::Array(std::mem::take(&mut self.events)).to_string();
        tracing::debug!(
            span_name = self.name.as_str(),
            request_id = self.request_id.as_str(),
            traceparent = self.traceparent.as_str(),
            attributes,
            events,
            duration_ms = milliseconds,
            "span {} ended",
            self.name,
        );
    }
}
