//! Traces: the `engine.generate` span of each request, an engine's own spans below it, and their export over OTLP.
//!
//! Spans whose name is known when the engine is compiled are those of the `tracing` crate:
//! `stream.instrument(tracing::info_span!("engine.decode"))`. [`start_span`] is for other names. Both lie below the
//! `engine.generate` span of the request whose stream runs. Nothing is made and nothing is paid for unless
//! `OTEL_EXPORT_ENABLED` is set.

mod context;
mod exporter;
mod generate;
mod layer;
mod otlp;
mod settings;

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde_json::Value;

pub use context::DistributedTraceContext;
pub(crate) use context::{CurrentTrace, SpanIds, TRACE_HEADERS, TRACEPARENT};
pub(crate) use exporter::Exporter;
pub(crate) use generate::GenerateSpan;
use layer::OpenSpan;
pub(crate) use layer::{REQUEST_TARGET, SpanLayer};
pub(crate) use settings::ExportSettings;

/// How long the end of a process waits for a collector to take the last spans.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);

/// What this process does with spans; set once, when its logging begins.
struct Tracing {
    exporter: Option<Arc<Exporter>>,
    logs_spans: bool,
}

static TRACING: OnceLock<Tracing> = OnceLock::new();

/// Sets where spans go. `logs_spans`: log lines name the request whose span they are in.
pub(crate) fn install(exporter: Option<Arc<Exporter>>, logs_spans: bool) {
    // A second call is of a process whose logging had begun before; what it began with stays.
    let _ = TRACING.set(Tracing { exporter, logs_spans });
}

fn exporter() -> Option<&'static Arc<Exporter>> {
    TRACING.get().and_then(|tracing| tracing.exporter.as_ref())
}

fn exports() -> bool {
    exporter().is_some()
}

fn logs_spans() -> bool {
    TRACING.get().is_some_and(|tracing| tracing.logs_spans)
}

/// Returns how many spans were lost; `None` where none is exported.
pub(crate) fn dropped() -> Option<u64> {
    exporter().map(|exporter| exporter.dropped())
}

/// Exports what is queued, at the end of the process.
pub(crate) fn close() {
    if let Some(exporter) = exporter() {
        exporter.close(CLOSE_PATIENCE);
    }
}

/// Begins a span below the current one; it ends when the guard is dropped.
///
/// Where nothing is exported, or the current trace is not sampled, the guard does nothing.
pub fn start_span(name: impl Into<String>) -> SpanGuard {
    let mut name = Some(name);
    let open = layer::start(|| name.take().map_or_else(String::new, Into::into));
    SpanGuard(open.map(Box::new))
}

/// A span of [`start_span`].
#[derive(Debug)]
#[must_use = "a span that is dropped at once measures nothing"]
pub struct SpanGuard(Option<Box<OpenSpan>>);

impl SpanGuard {
    /// Sets an attribute; the 129th and later ones are left out and counted.
    pub fn set_attribute(&mut self, key: impl Into<String>, value: impl Into<Value>) {
        if let Some(open) = &mut self.0 {
            open.record.set(key.into().into(), value.into());
        }
    }

    /// Notes that something happened; the 129th and later events are left out.
    pub fn add_event(&mut self, name: impl Into<String>) {
        if let Some(open) = &mut self.0 {
            open.record.add_event(name.into());
        }
    }

    /// Marks the work of the span as failed.
    pub fn set_error(&mut self, description: impl Into<String>) {
        if let Some(open) = &mut self.0 {
            open.record.error = Some(description.into());
        }
    }

    /// Ends the span now.
    pub fn close(self) {}
}

impl Drop for SpanGuard {
    fn drop(&mut self) {
        if let Some(open) = self.0.take() {
            open.end();
        }
    }
}

/// Returns the trace that the current span belongs to; `None` outside of a request, and in one without a trace.
pub fn get_distributed_tracing_context() -> Option<DistributedTraceContext> {
    layer::current().and_then(|current| current.distributed())
}

/// Adds the headers that continue the current trace in a call to another service: `traceparent`, and `tracestate`,
/// `x-request-id` and `request-id` where they are known. Adds nothing without a current trace.
pub fn inject_trace_headers_into_map(headers: &mut HashMap<String, String>) {
    let Some(context) = get_distributed_tracing_context() else { return };
    headers.insert(TRACEPARENT.to_owned(), context.create_traceparent());
    let companions = [context.tracestate, context.x_request_id, context.request_id];
    for (name, value) in TRACE_HEADERS[1..].iter().zip(companions) {
        if let Some(value) = value {
            headers.insert((*name).to_owned(), value);
        }
    }
}
