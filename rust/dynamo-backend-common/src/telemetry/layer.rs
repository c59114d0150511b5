//! From the spans of `tracing` to spans of a trace: each gets its ids when it begins, and is exported when it ends.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use serde_json::{Value, json};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Dispatch, Subscriber, dispatcher};
use tracing_subscriber::Registry;
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;

use super::context::{Companions, CurrentTrace, SpanIds, new_id};
use super::exporter::Exporter;
use super::otlp::SpanRecord;

/// The target of the `engine.generate` spans, which are there at every level of the log.
pub(crate) const REQUEST_TARGET: &str = "request_span";
/// A member that is the span's name where that is not known when an engine is compiled.
const NAME_FIELD: &str = "otel.name";
/// A member that marks the span as failed, and says why.
pub(crate) const ERROR_FIELD: &str = "otel.status_description";

/// A span that will be exported.
#[derive(Debug)]
pub(crate) struct OpenSpan {
    pub(crate) record: SpanRecord,
    exporter: Arc<Exporter>,
}

impl OpenSpan {
    pub(crate) fn end(mut self) {
        self.record.end();
        self.exporter.send(self.record);
    }
}

/// What a request brought along, for the span that is made next.
#[derive(Debug, Default)]
pub(crate) struct Inbound {
    pub(crate) parent: Option<SpanIds>,
    pub(crate) companions: Arc<Companions>,
    pub(crate) link: Option<(u128, u64)>,
}

thread_local! {
    /// A span has no members for this: it is left here by the code that makes the span on this thread.
    static INBOUND: RefCell<Option<Inbound>> = const { RefCell::new(None) };
}

/// Makes the span of a request, as the child of the span that its caller named.
pub(crate) fn with_inbound(inbound: Inbound, make: impl FnOnce() -> tracing::Span) -> tracing::Span {
    INBOUND.set(Some(inbound));
    let span = make();
    INBOUND.take();
    span
}

/// Follows the spans of the process. Without an exporter it only knows the trace that a request came with.
#[derive(Debug)]
pub(crate) struct SpanLayer {
    pub(crate) exporter: Option<Arc<Exporter>>,
}

impl SpanLayer {
    /// Begins a span below `parent`, and returns its trace and, where it is exported, its record.
    fn begin(
        &self,
        name: Cow<'static, str>,
        parent: Option<SpanIds>,
        companions: Arc<Companions>,
    ) -> (CurrentTrace, Option<OpenSpan>) {
        let Some(exporter) = &self.exporter else {
            return (CurrentTrace { ids: parent, parent_id: None, companions }, None);
        };
        let trace_id = parent.map_or_else(|| u128::from(new_id()) << 64 | u128::from(new_id()), |ids| ids.trace_id);
        let is_declined = parent.is_some_and(|ids| !ids.is_sampled);
        if is_declined || !exporter.sampler().samples(trace_id, parent.is_some()) {
            // The headers of a trace that is not sampled pass through as they came.
            let ids = parent.map(|ids| SpanIds { is_sampled: false, ..ids });
            return (CurrentTrace { ids, parent_id: None, companions }, None);
        }
        Self::open(exporter, name, SpanIds { trace_id, span_id: new_id(), is_sampled: true }, parent, companions)
    }

    fn open(
        exporter: &Arc<Exporter>,
        name: Cow<'static, str>,
        ids: SpanIds,
        parent: Option<SpanIds>,
        companions: Arc<Companions>,
    ) -> (CurrentTrace, Option<OpenSpan>) {
        let parent_id = parent.map(|ids| ids.span_id);
        let mut record = SpanRecord::begin(name, ids, parent_id);
        record.trace_state.clone_from(&companions.tracestate);
        let current = CurrentTrace { ids: Some(ids), parent_id, companions };
        (current, Some(OpenSpan { record, exporter: Arc::clone(exporter) }))
    }

    /// Begins a span below one of this process; `None` where that one is in no trace, or in one that is not exported.
    fn begin_below(&self, name: Cow<'static, str>, above: &CurrentTrace) -> Option<(CurrentTrace, OpenSpan)> {
        let (exporter, parent) = (self.exporter.as_ref()?, above.ids.filter(|ids| ids.is_sampled)?);
        let ids = SpanIds { span_id: new_id(), ..parent };
        let (current, open) = Self::open(exporter, name, ids, Some(parent), Arc::clone(&above.companions));
        open.map(|open| (current, open))
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for SpanLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let name = Cow::Borrowed(span.name());
        let above = span.parent().and_then(|parent| found(parent.scope().map(|span| trace_of(span.extensions()))));
        let (current, open) = if attributes.metadata().target() == REQUEST_TARGET {
            let inbound = INBOUND.take().unwrap_or_default();
            let (current, open) = self.begin(name, inbound.parent, inbound.companions);
            (
                current,
                open.map(|mut open| {
                    open.record.links.extend(inbound.link);
                    open
                }),
            )
        } else if let Some(above) = above {
            match self.begin_below(name, &above) {
                Some((current, open)) => (current, Some(open)),
                None => return, // what lies below it finds the span above
            }
        } else if self.exporter.is_some() {
            self.begin(name, None, Arc::default())
        } else {
            return;
        };
        let mut extensions = span.extensions_mut();
        extensions.insert(current);
        if let Some(mut open) = open {
            attributes.record(&mut Members(&mut open.record));
            extensions.insert(open);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(open) = span.extensions_mut().get_mut::<OpenSpan>()
        {
            values.record(&mut Members(&mut open.record));
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        if let Some(span) = context.span(&id)
            && let Some(open) = span.extensions_mut().remove::<OpenSpan>()
        {
            open.end();
        }
    }
}

fn trace_of(extensions: tracing_subscriber::registry::Extensions<'_>) -> Option<CurrentTrace> {
    extensions.get::<CurrentTrace>().cloned()
}

fn found(traces: impl Iterator<Item = Option<CurrentTrace>>) -> Option<CurrentTrace> {
    traces.flatten().next()
}

/// Returns the trace of the span that is current for a subscriber.
fn current_in(dispatch: &Dispatch) -> Option<CurrentTrace> {
    let registry = dispatch.downcast_ref::<Registry>()?;
    let current = dispatch.current_span();
    let span = registry.span(current.id()?)?;
    found(span.scope().map(|span| trace_of(span.extensions())))
}

/// Returns the trace of the current span.
pub(crate) fn current() -> Option<CurrentTrace> {
    dispatcher::get_default(current_in)
}

/// Begins a span of any name below the current one, if it would be exported.
pub(crate) fn start(mut name: impl FnMut() -> String) -> Option<OpenSpan> {
    dispatcher::get_default(|dispatch| {
        let layer = dispatch.downcast_ref::<SpanLayer>().filter(|layer| layer.exporter.is_some())?;
        match current_in(dispatch) {
            Some(above) => layer.begin_below(name().into(), &above).map(|(_, open)| open),
            None => layer.begin(name().into(), None, Arc::default()).1,
        }
    })
}

/// Writes the members of a span into its record.
struct Members<'a>(&'a mut SpanRecord);

impl Members<'_> {
    fn set(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            (NAME_FIELD, Value::String(name)) => self.0.name = name.into(),
            (ERROR_FIELD, Value::String(text)) => self.0.error = Some(text),
            (name, value) => self.0.set(name.into(), value),
        }
    }
}

impl Visit for Members<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.set(field, json!(format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.set(field, json!(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field, json!(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field, json!(value));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(field, json!(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field, json!(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::layer::SubscriberExt;

    const CALLER: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    /// Runs `work` with spans that are kept, and returns those that ended.
    fn ended(work: impl FnOnce()) -> Vec<SpanRecord> {
        let exporter = Exporter::idle();
        let layer = SpanLayer { exporter: Some(Arc::clone(&exporter)) };
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), work);
        exporter.take()
    }

    fn request_span(header: &str) -> tracing::Span {
        let companions = Companions { tracestate: Some("a=b".into()), ..Companions::default() };
        let inbound = Inbound { parent: SpanIds::read(header), companions: Arc::new(companions), link: Some((7, 8)) };
        with_inbound(
            inbound,
            || tracing::info_span!(target: REQUEST_TARGET, "engine.generate", model = "m", output_tokens = tracing::field::Empty),
        )
    }

    #[test]
    fn spans_below_a_request_are_of_the_trace_of_its_caller() {
        let mut headers = std::collections::HashMap::new();
        let spans = ended(|| {
            let request = request_span(CALLER);
            request.in_scope(|| {
                tracing::info_span!("engine.decode", blocks = 8).in_scope(|| {
                    let mut load = crate::telemetry::start_span(format!("load {}", 3));
                    load.set_attribute("rank", 3);
                    load.add_event("half");
                    crate::telemetry::inject_trace_headers_into_map(&mut headers);
                });
            });
            request.record("output_tokens", 5);
        });
        let names: Vec<&str> = spans.iter().map(|span| &*span.name).collect();
        assert_eq!(names, ["load 3", "engine.decode", "engine.generate"]);
        let caller = SpanIds::read(CALLER).expect("ids");
        assert!(spans.iter().all(|span| span.ids.trace_id == caller.trace_id));
        assert_eq!(spans[0].parent_id, Some(spans[1].ids.span_id));
        assert_eq!(spans[1].parent_id, Some(spans[2].ids.span_id));
        assert_eq!(spans[2].parent_id, Some(caller.span_id));
        assert_eq!(spans[2].links, [(7, 8)]);
        assert_eq!(spans[2].attribute("output_tokens"), Some(&json!(5)));
        assert_eq!(headers["traceparent"], spans[1].ids.header());
        assert_eq!(headers["tracestate"], "a=b");
    }

    #[test]
    fn a_trace_that_its_caller_did_not_sample_passes_through_and_is_not_exported() {
        let header = CALLER.replace("-01", "-00");
        let mut headers = std::collections::HashMap::new();
        let spans = ended(|| {
            request_span(&header).in_scope(|| {
                let _ended = tracing::info_span!("engine.decode").entered();
                drop(crate::telemetry::start_span("load"));
                crate::telemetry::inject_trace_headers_into_map(&mut headers);
            });
        });
        assert!(spans.is_empty(), "{spans:?}");
        assert_eq!(headers["traceparent"], header);
    }

    #[test]
    fn without_an_exporter_a_request_keeps_the_trace_it_came_with() {
        let mut headers = std::collections::HashMap::new();
        let subscriber = tracing_subscriber::registry().with(SpanLayer { exporter: None });
        tracing::subscriber::with_default(subscriber, || {
            request_span(CALLER).in_scope(|| {
                tracing::info_span!("engine.decode").in_scope(|| {
                    assert!(start(|| "load".into()).is_none());
                    crate::telemetry::inject_trace_headers_into_map(&mut headers);
                });
            });
            crate::telemetry::inject_trace_headers_into_map(&mut std::collections::HashMap::new());
        });
        assert_eq!(headers["traceparent"], CALLER);
        crate::telemetry::inject_trace_headers_into_map(&mut headers);
        assert_eq!(headers.len(), 2);
    }

    #[test]
    fn names_and_failures_may_be_members() {
        let spans = ended(|| {
            let span = tracing::info_span!("x", otel.name = "load 7", otel.status_description = tracing::field::Empty);
            span.record("otel.status_description", "it failed");
        });
        assert_eq!((&*spans[0].name, spans[0].error.as_deref()), ("load 7", Some("it failed")));
        assert_eq!(spans[0].parent_id, None);
    }
}
