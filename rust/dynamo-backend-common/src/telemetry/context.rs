//! W3C trace context: which trace a request belongs to, and the ids of spans.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) const TRACEPARENT: &str = "traceparent";
/// The headers of a trace that travel with a request.
pub(crate) const TRACE_HEADERS: [&str; 4] = [TRACEPARENT, "tracestate", "x-request-id", "request-id"];

/// One span of a trace, as `traceparent` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpanIds {
    pub(crate) trace_id: u128,
    pub(crate) span_id: u64,
    pub(crate) is_sampled: bool,
}

impl SpanIds {
    /// Reads `traceparent`; `None` for one that is not valid.
    pub(crate) fn read(header: &str) -> Option<Self> {
        let mut parts = header.trim().split('-');
        let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let is_hex = |text: &str| text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let lengths = (trace.len(), span.len(), flags.len());
        if version != "00" || lengths != (32, 16, 2) || parts.next().is_some() {
            return None;
        }
        if ![trace, span, flags].into_iter().all(is_hex) {
            return None;
        }
        let trace_id = u128::from_str_radix(trace, 16).ok().filter(|id| *id != 0)?;
        let span_id = u64::from_str_radix(span, 16).ok().filter(|id| *id != 0)?;
        let is_sampled = u8::from_str_radix(flags, 16).ok()? & 1 == 1;
        Some(Self { trace_id, span_id, is_sampled })
    }

    #[cfg(test)]
    pub(crate) fn header(&self) -> String {
        format!("00-{:032x}-{:016x}-{:02x}", self.trace_id, self.span_id, u8::from(self.is_sampled))
    }
}

/// What a request brought along beside its `traceparent`.
#[derive(Debug, Default)]
pub(crate) struct Companions {
    pub(crate) tracestate: Option<String>,
    pub(crate) x_request_id: Option<String>,
    pub(crate) request_id: Option<String>,
}

impl Companions {
    pub(crate) fn of(headers: &BTreeMap<String, String>) -> Self {
        let of = |name: &str| headers.get(name).cloned();
        Self { tracestate: of("tracestate"), x_request_id: of("x-request-id"), request_id: of("request-id") }
    }
}

/// The trace of a span that is open, kept with the span.
#[derive(Clone, Debug, Default)]
pub(crate) struct CurrentTrace {
    /// `None`: the span belongs to no trace, and neither does what lies below it.
    pub(crate) ids: Option<SpanIds>,
    pub(crate) parent_id: Option<u64>,
    pub(crate) companions: Arc<Companions>,
}

impl CurrentTrace {
    pub(crate) fn distributed(&self) -> Option<DistributedTraceContext> {
        let ids = self.ids?;
        let companions = &self.companions;
        Some(DistributedTraceContext {
            trace_id: format!("{:032x}", ids.trace_id),
            span_id: format!("{:016x}", ids.span_id),
            parent_id: self.parent_id.map(|id| format!("{id:016x}")),
            tracestate: companions.tracestate.clone(),
            x_request_id: companions.x_request_id.clone(),
            request_id: companions.request_id.clone(),
            is_sampled: ids.is_sampled,
        })
    }
}

/// The trace that the current span belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DistributedTraceContext {
    /// 32 hexadecimal digits.
    pub trace_id: String,
    /// 16 hexadecimal digits: the current span.
    pub span_id: String,
    /// The span that it lies below.
    pub parent_id: Option<String>,
    /// What systems on the way here added to the trace.
    pub tracestate: Option<String>,
    /// The id that the client gave its request.
    pub x_request_id: Option<String>,
    /// The id of the request in this system.
    pub request_id: Option<String>,
    is_sampled: bool,
}

impl DistributedTraceContext {
    /// Returns the value of the header `traceparent` for a call below the current span.
    pub fn create_traceparent(&self) -> String {
        format!("00-{}-{}-{:02x}", self.trace_id, self.span_id, u8::from(self.is_sampled))
    }
}

/// Returns a number for a new id: never 0, and never twice in a process.
pub(crate) fn new_id() -> u64 {
    static NEXT: OnceLock<AtomicU64> = OnceLock::new();
    // A system without random numbers starts no worker; until then any start will do.
    let next = NEXT.get_or_init(|| AtomicU64::new(crate::random::seed().unwrap_or(1)));
    // The steps of SplitMix64: a permutation of all numbers, so that two of them differ as long as the counter does.
    let mut mixed = next.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ (mixed >> 31)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_and_written_alike_and_others_are_none() {
        let header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let ids = SpanIds::read(header).expect("ids");
        assert!(ids.is_sampled);
        assert_eq!(ids.header(), header);
        assert!(
            SpanIds::read("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00").is_some_and(|i| !i.is_sampled)
        );
        for wrong in [
            "",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x",
        ] {
            assert_eq!(SpanIds::read(wrong), None, "{wrong}");
        }
    }
}
