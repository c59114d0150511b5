//! What the `engine.generate` span learns from one stream.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::Span;
use tracing::field::Empty;

use super::context::{Companions, SpanIds, TRACEPARENT};
use super::layer::{ERROR_FIELD, Inbound, REQUEST_TARGET, current, with_inbound};
use crate::config::DisaggregationMode;
use crate::context::GenerateContext;
use crate::output::{FinishReason, LLMEngineOutput};
use crate::request::{PreprocessedRequest, TraceLink};

/// Gaps kept of one stream. Past it every second one is dropped and from then on every second one is kept (then every
/// fourth, ...): the percentiles stay those of an even sample, mean and maximum stay exact.
const MAX_GAPS: usize = 4096;

/// The times between the tokens of one stream.
#[derive(Debug, Default)]
struct Gaps {
    kept: Vec<Duration>,
    /// Of so many gaps one is kept.
    stride: u64,
    count: u64,
    total: Duration,
    longest: Duration,
}

impl Gaps {
    fn add(&mut self, gap: Duration) {
        self.stride = self.stride.max(1);
        if self.count % self.stride == 0 {
            self.kept.push(gap);
            if self.kept.len() >= MAX_GAPS {
                let mut number = 0_u64;
                self.kept.retain(|_| {
                    number += 1;
                    number % 2 == 1
                });
                self.stride *= 2;
            }
        }
        self.count += 1;
        self.total += gap;
        self.longest = self.longest.max(gap);
    }

    /// Returns the element at `round((n - 1) * q)`.
    fn percentile(&mut self, quantile: f64) -> Duration {
        self.kept.sort_unstable();
        let place = ((self.kept.len().saturating_sub(1)) as f64 * quantile).round() as usize;
        self.kept.get(place).copied().unwrap_or_default()
    }
}

fn milliseconds(time: Duration) -> String {
    format!("{:.2}", time.as_secs_f64() * 1000.0)
}

/// The span of one request, from its call of the engine to the end of its stream.
#[derive(Debug)]
pub(crate) struct GenerateSpan {
    span: Span,
    /// `None`: the span is not exported, and nothing is measured for it.
    link: Option<TraceLink>,
    is_linked: bool,
    is_raw: bool,
    has_ended: bool,
    mode: DisaggregationMode,
    began: Instant,
    last: Option<Instant>,
    tokens: u64,
    gaps: Gaps,
}

impl GenerateSpan {
    /// Opens the span of a request for tokens; `None` where it would be of no use to anybody.
    pub(crate) fn begin(
        context: &GenerateContext,
        request: &PreprocessedRequest,
        mode: DisaggregationMode,
    ) -> Option<Self> {
        let parent = wanted(context)?;
        let migration = request.migration_link.as_ref();
        let link = migration.and_then(TraceLink::ids);
        let inbound = Inbound { parent, companions: companions(context), link };
        let span = with_inbound(inbound, || {
            tracing::info_span!(
                target: REQUEST_TARGET,
                "engine.generate",
                model = request.model.as_str(),
                input_tokens = request.token_ids.len(),
                disagg_role = mode.slug(),
                request_id = context.id(),
                migration_trace_id = migration.map(|link| link.trace_id.as_str()),
                migration_span_id = migration.map(|link| link.span_id.as_str()),
                ttft_ms = Empty,
                output_tokens = Empty,
                finish_reason = Empty,
                cancelled = Empty,
                avg_itl_ms = Empty,
                itl_p50_ms = Empty,
                itl_p99_ms = Empty,
                itl_max_ms = Empty,
                error_kind = Empty,
                otel.status_description = Empty,
            )
        });
        Some(Self::of(span, mode, false))
    }

    /// Opens the span of a request for objects, of which only its id and its failure are known; likewise.
    pub(crate) fn begin_raw(context: &GenerateContext, mode: DisaggregationMode) -> Option<Self> {
        let inbound = Inbound { parent: wanted(context)?, companions: companions(context), link: None };
        let span = with_inbound(inbound, || {
            tracing::info_span!(
                target: REQUEST_TARGET,
                "engine.generate",
                request_id = context.id(),
                error_kind = Empty,
                otel.status_description = Empty,
            )
        });
        Some(Self::of(span, mode, true))
    }

    fn of(span: Span, mode: DisaggregationMode, is_raw: bool) -> Self {
        let ids = span.in_scope(current).and_then(|trace| trace.ids);
        let ids = ids.filter(|ids| ids.is_sampled && super::exports());
        Self {
            span,
            link: ids.map(TraceLink::of),
            is_linked: false,
            is_raw,
            has_ended: false,
            mode,
            began: Instant::now(),
            last: None,
            tokens: 0,
            gaps: Gaps::default(),
        }
    }

    /// Returns the span that the engine runs in.
    pub(crate) fn span(&self) -> Span {
        self.span.clone()
    }

    /// Notes a chunk, and tells the first one with tokens (of a prefill or encode worker: the terminal one) which span it is of.
    pub(crate) fn on_chunk(&mut self, chunk: &mut LLMEngineOutput) {
        let Some(link) = &self.link else { return };
        let count = chunk.token_ids.len() as u64;
        let hands_over = matches!(self.mode, DisaggregationMode::Prefill | DisaggregationMode::Encode);
        if !self.is_linked && (count > 0 || (hands_over && chunk.is_terminal())) {
            chunk.worker_trace_link = Some(link.clone());
            self.is_linked = true;
        }
        if count == 0 {
            return;
        }
        let now = Instant::now();
        match self.last.replace(now) {
            None => {
                self.span.record("ttft_ms", milliseconds(now - self.began));
            }
            Some(last) => self.gaps.add(now - last),
        }
        self.tokens += count;
    }

    /// Notes the end of the answer.
    pub(crate) fn finish(&mut self, reason: &FinishReason, is_cancelled: bool) {
        if self.is_over() {
            return;
        }
        self.outcome(reason.word().unwrap_or("error"), is_cancelled);
        if let FinishReason::Error(_) = reason {
            self.failed("the engine ended the stream with an error");
        }
    }

    /// Notes the error that ended the request.
    pub(crate) fn fail(&mut self, kind: &str) {
        if self.is_over() {
            return;
        }
        if self.last.is_some() {
            self.span.record("output_tokens", self.tokens);
            self.pace();
        }
        self.span.record("error_kind", kind);
        self.failed(kind);
    }

    /// Notes the end of the request: without a terminal chunk its stream was dropped. One for objects has none.
    pub(crate) fn close(&mut self) {
        if self.is_over() || self.is_raw {
            return;
        }
        self.outcome("Dropped", true);
        self.failed("the stream was dropped before its terminal chunk");
    }

    fn is_over(&mut self) -> bool {
        std::mem::replace(&mut self.has_ended, true) || self.link.is_none()
    }

    fn failed(&self, text: &str) {
        self.span.record(ERROR_FIELD, text);
    }

    fn outcome(&mut self, reason: &str, is_cancelled: bool) {
        self.span.record("output_tokens", self.tokens);
        self.span.record("finish_reason", reason);
        self.span.record("cancelled", is_cancelled);
        self.pace();
    }

    fn pace(&mut self) {
        let count = u32::try_from(self.gaps.count).unwrap_or(u32::MAX);
        if count == 0 {
            return;
        }
        self.span.record("avg_itl_ms", milliseconds(self.gaps.total / count));
        self.span.record("itl_p50_ms", milliseconds(self.gaps.percentile(0.5)));
        self.span.record("itl_p99_ms", milliseconds(self.gaps.percentile(0.99)));
        self.span.record("itl_max_ms", milliseconds(self.gaps.longest));
    }
}

/// Returns the span of the caller; `None` where neither a trace nor a log line would have a use for a span.
fn wanted(context: &GenerateContext) -> Option<Option<SpanIds>> {
    let parent = context.trace_headers().get(TRACEPARENT).and_then(|header| SpanIds::read(header));
    (parent.is_some() || super::exports() || super::logs_spans()).then_some(parent)
}

fn companions(context: &GenerateContext) -> Arc<Companions> {
    let mut found = Companions::of(context.trace_headers());
    found.request_id.get_or_insert_with(|| context.id().to_owned());
    Arc::new(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_an_even_sample_and_the_mean_is_exact() {
        let mut gaps = Gaps::default();
        for millisecond in 0..20_000 {
            gaps.add(Duration::from_millis(millisecond));
        }
        assert!(gaps.kept.len() < MAX_GAPS);
        assert_eq!((gaps.count, gaps.longest), (20_000, Duration::from_millis(19_999)));
        assert_eq!(gaps.total, Duration::from_millis(19_999 * 10_000));
        let middle = gaps.percentile(0.5).as_millis();
        assert!((9_900..=10_100).contains(&middle), "{middle}");
        assert_eq!(milliseconds(Duration::from_micros(1239)), "1.24");
    }
}
