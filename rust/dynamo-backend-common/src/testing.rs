//! A check that an engine keeps its promises, without a network; and contexts for an engine's own tests.
//!
//! ```
//! # use dynamo_backend_common::testing::mock_context;
//! # use dynamo_backend_common::GenerateContext;
//! let ctx: GenerateContext = mock_context().into();
//! assert!(!ctx.is_stopped());
//! ```

mod encode;
mod raw;

pub use encode::run_encode_conformance;
pub use raw::run_raw_conformance;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use serde_json::json;

use crate::context::{AsyncEngineContext, Controller, GenerateContext};
use crate::engine::{LLMEngine, MetricsCtx};
use crate::error::DynamoError;
use crate::kv::KvEventSource;
use crate::metrics::EngineMetrics;
use crate::output::{FinishReason, LLMEngineOutput};
use crate::request::{PreprocessedRequest, SamplingOptions, StopConditions};

/// Within this time a stream whose request was stopped must end.
const CANCEL_PATIENCE: Duration = Duration::from_secs(2);
const CONCURRENT: usize = 8;

/// Returns a live context of a request.
pub fn mock_context() -> Arc<dyn AsyncEngineContext> {
    Controller::new("mock-request")
}

/// Returns a context that stops itself after a time; call it in a tokio runtime.
pub fn cancelling_context(after: Duration) -> Arc<dyn AsyncEngineContext> {
    let controller = Controller::new("mock-request");
    let stopped = Arc::clone(&controller);
    tokio::spawn(async move {
        tokio::time::sleep(after).await;
        stopped.stop_generating();
    });
    controller
}

/// The first promise that an engine broke.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ConformanceFailure {
    /// `start()` failed.
    StartFailed(DynamoError),
    /// `start()` returned an empty `model`.
    EmptyModelInConfig,
    /// `setup_metrics()` failed.
    SetupMetricsFailed(DynamoError),
    /// `setup_metrics()` declared other ranks when it was called again.
    ComponentMetricsNotIdempotent,
    /// `kv_event_sources()` failed.
    KvEventSourcesFailed(DynamoError),
    /// `kv_event_sources()` declared other ranks, or the same ones in another order, when it was called again.
    KvEventSourcesNotIdempotent,
    /// `generate()` failed before its stream began.
    GenerateFailed(DynamoError),
    /// A stream ended without an item.
    NoChunksYielded,
    /// A stream had an error.
    StreamYieldedError(DynamoError),
    /// The last chunk has no finish reason.
    NoTerminalChunk,
    /// Something followed a terminal chunk.
    ChunkAfterTerminal,
    /// The usage of the terminal chunk counts other tokens than there were.
    CompletionTokensMismatch {
        /// Tokens in the chunks.
        chunked: u32,
        /// Tokens in the usage.
        reported: u32,
    },
    /// One of eight concurrent requests failed; the text says how.
    ConcurrentGenerateFailed(String),
    /// The configuration of a raw engine has members about tokens.
    RawEngineAdvertisedLlmRegistration,
    /// An encode worker answered with another number of items than one.
    EncodeChunkCount {
        /// Its items.
        count: usize,
    },
    /// The item of an encode worker does not end with `stop`.
    EncodeTerminalExpected,
    /// The item of an encode worker has tokens.
    EncodeTokensNotEmpty {
        /// How many.
        count: usize,
    },
    /// The item of an encode worker has no `encoder_result`.
    EncoderResultExpectedObject,
    /// The usage of an encode worker is another one than that of its prompt.
    EncodeUsageMismatch {
        /// The usage, as JSON.
        usage: String,
    },
    /// A stream went on after its request was stopped.
    CancellationNotObserved {
        /// How long the check waited.
        after: Duration,
    },
    /// A stream whose request was stopped ended with something else than a `Cancelled` terminal.
    CancellationIgnored,
    /// `cleanup()` failed.
    CleanupFailed(DynamoError),
    /// The second `cleanup()` failed.
    SecondCleanupFailed(DynamoError),
    /// `cleanup()` failed for an engine that never started.
    CleanupWithoutStartFailed(DynamoError),
}

impl ConformanceFailure {
    /// Returns the name of the promise.
    pub fn name(&self) -> &'static str {
        match self {
            Self::StartFailed(_) => "StartFailed",
            Self::EmptyModelInConfig => "EmptyModelInConfig",
            Self::SetupMetricsFailed(_) => "SetupMetricsFailed",
            Self::ComponentMetricsNotIdempotent => "ComponentMetricsNotIdempotent",
            Self::KvEventSourcesFailed(_) => "KvEventSourcesFailed",
            Self::KvEventSourcesNotIdempotent => "KvEventSourcesNotIdempotent",
            Self::GenerateFailed(_) => "GenerateFailed",
            Self::NoChunksYielded => "NoChunksYielded",
            Self::StreamYieldedError(_) => "StreamYieldedError",
            Self::NoTerminalChunk => "NoTerminalChunk",
            Self::ChunkAfterTerminal => "ChunkAfterTerminal",
            Self::CompletionTokensMismatch { .. } => "CompletionTokensMismatch",
            Self::ConcurrentGenerateFailed(_) => "ConcurrentGenerateFailed",
            Self::RawEngineAdvertisedLlmRegistration => "RawEngineAdvertisedLlmRegistration",
            Self::EncodeChunkCount { .. } => "EncodeChunkCount",
            Self::EncodeTerminalExpected => "EncodeTerminalExpected",
            Self::EncodeTokensNotEmpty { .. } => "EncodeTokensNotEmpty",
            Self::EncoderResultExpectedObject => "EncoderResultExpectedObject",
            Self::EncodeUsageMismatch { .. } => "EncodeUsageMismatch",
            Self::CancellationNotObserved { .. } => "CancellationNotObserved",
            Self::CancellationIgnored => "CancellationIgnored",
            Self::CleanupFailed(_) => "CleanupFailed",
            Self::SecondCleanupFailed(_) => "SecondCleanupFailed",
            Self::CleanupWithoutStartFailed(_) => "CleanupWithoutStartFailed",
        }
    }

    /// Returns what was expected, what came, and the method whose documentation says so.
    fn parts(&self) -> (&'static str, String, &'static str) {
        match self {
            Self::StartFailed(error) => ("start(0) returns the engine's figures", error.to_string(), "start"),
            Self::EmptyModelInConfig => ("EngineConfig.model names the model", "an empty text".into(), "start"),
            Self::SetupMetricsFailed(error) => ("setup_metrics() succeeds", error.to_string(), "setup_metrics"),
            Self::ComponentMetricsNotIdempotent => {
                ("the same ranks at every call", "other ranks at the second call".into(), "setup_metrics")
            }
            Self::KvEventSourcesFailed(error) => ("kv_event_sources() succeeds", error.to_string(), "kv_event_sources"),
            Self::KvEventSourcesNotIdempotent => (
                "the same ranks in the same order at every call",
                "other ranks at the second call".into(),
                "kv_event_sources",
            ),
            Self::GenerateFailed(error) => ("a stream", error.to_string(), "generate"),
            Self::NoChunksYielded => ("at least a terminal chunk", "an empty stream".into(), "generate"),
            Self::StreamYieldedError(error) => ("chunks", error.to_string(), "generate"),
            Self::NoTerminalChunk => {
                ("a last chunk with a finish reason", "a last chunk without one".into(), "generate")
            }
            Self::ChunkAfterTerminal => {
                ("nothing after the chunk with a finish reason", "another item".into(), "generate")
            }
            Self::CompletionTokensMismatch { chunked, reported } => (
                "a usage that counts the tokens of the chunks",
                format!("{reported} in the usage, {chunked} in the chunks"),
                "generate",
            ),
            Self::ConcurrentGenerateFailed(text) => ("8 answers at once", text.clone(), "generate"),
            Self::RawEngineAdvertisedLlmRegistration => {
                ("no members about tokens", "a configuration that has some".into(), "start")
            }
            Self::EncodeChunkCount { count } => ("one item", format!("{count}"), "generate"),
            Self::EncodeTerminalExpected => ("an item that ends with stop", "another end".into(), "generate"),
            Self::EncodeTokensNotEmpty { count } => ("no tokens", format!("{count}"), "generate"),
            Self::EncoderResultExpectedObject => ("an encoder_result", "none".into(), "generate"),
            Self::EncodeUsageMismatch { usage } => {
                ("a usage of the prompt and no completion", usage.clone(), "generate")
            }
            Self::CancellationNotObserved { after } => (
                "the end of the stream after its request was stopped",
                format!("a stream that still runs after {} s", after.as_secs_f64()),
                "generate",
            ),
            Self::CancellationIgnored => {
                ("LLMEngineOutput::cancelled() as the last item", "another end".into(), "generate")
            }
            Self::CleanupFailed(error) => ("cleanup() succeeds", error.to_string(), "cleanup"),
            Self::SecondCleanupFailed(error) => ("cleanup() succeeds again", error.to_string(), "cleanup"),
            Self::CleanupWithoutStartFailed(error) => {
                ("cleanup() succeeds for an engine that never started", error.to_string(), "cleanup")
            }
        }
    }
}

impl fmt::Display for ConformanceFailure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (expected, came, method) = self.parts();
        write!(formatter, "{}: expected {expected}; got {came}. See LLMEngine::{method}", self.name())
    }
}

impl std::error::Error for ConformanceFailure {}

/// Checks an engine against its contract and returns the first promise that it breaks.
///
/// `factory` makes a fresh engine; it is called twice, for the checks and for a clean-up without a start.
pub async fn run_conformance<E: LLMEngine>(mut factory: impl FnMut() -> E) -> Result<(), ConformanceFailure> {
    let engine = factory();
    let config = engine.start(0).await.map_err(ConformanceFailure::StartFailed)?;
    if config.model.is_empty() {
        return Err(ConformanceFailure::EmptyModelInConfig);
    }
    check_metrics(&engine, &config.model).await?;
    check_kv_sources(&engine).await?;
    check_stream(&engine, &config.model).await?;
    check_concurrency(&engine, &config.model).await?;
    check_cancellation_of(&engine, request(&config.model, 10_000)).await?;
    check_clean_up(&engine, &factory()).await
}

async fn check_clean_up(engine: &impl LLMEngine, fresh: &impl LLMEngine) -> Result<(), ConformanceFailure> {
    engine.cleanup().await.map_err(ConformanceFailure::CleanupFailed)?;
    engine.cleanup().await.map_err(ConformanceFailure::SecondCleanupFailed)?;
    fresh.cleanup().await.map_err(ConformanceFailure::CleanupWithoutStartFailed)
}

/// Returns the request of an encode worker.
fn encode_request(model: &str) -> PreprocessedRequest {
    let mut request = request(model, 8);
    request.mm_processor_kwargs = Some(json!({"min_pixels": 64}));
    request.multi_modal_data = Some(json!({"image": [{"Url": "data:image/png;base64,AA=="}]}));
    request
}

fn request(model: &str, max_tokens: u32) -> PreprocessedRequest {
    PreprocessedRequest::builder()
        .model(model)
        .token_ids(vec![1, 2, 3])
        .stop_conditions(StopConditions { max_tokens: Some(max_tokens), ..StopConditions::default() })
        .sampling_options(SamplingOptions::default())
        .build()
}

async fn check_metrics(engine: &impl LLMEngine, model: &str) -> Result<(), ConformanceFailure> {
    let mut ranks = Vec::new();
    for _ in 0..2 {
        let metrics = EngineMetrics::default();
        let ctx = MetricsCtx { model, component: "backend", model_load_time_seconds: 0.0, metrics: &metrics };
        let bindings = engine.setup_metrics(ctx).await.map_err(ConformanceFailure::SetupMetricsFailed)?;
        ranks.push(bindings.dp_ranks);
    }
    if ranks[0] == ranks[1] { Ok(()) } else { Err(ConformanceFailure::ComponentMetricsNotIdempotent) }
}

async fn check_kv_sources(engine: &impl LLMEngine) -> Result<(), ConformanceFailure> {
    let mut ranks: [Vec<u32>; 2] = Default::default();
    for found in &mut ranks {
        let sources = engine.kv_event_sources().await.map_err(ConformanceFailure::KvEventSourcesFailed)?;
        *found = sources.iter().map(KvEventSource::dp_rank).collect();
    }
    if ranks[0] == ranks[1] { Ok(()) } else { Err(ConformanceFailure::KvEventSourcesNotIdempotent) }
}

async fn collect(engine: &impl LLMEngine, model: &str) -> Result<Vec<LLMEngineOutput>, ConformanceFailure> {
    collect_of(engine, request(model, 8)).await
}

async fn collect_of(
    engine: &impl LLMEngine,
    request: PreprocessedRequest,
) -> Result<Vec<LLMEngineOutput>, ConformanceFailure> {
    let stream = engine.generate(request, mock_context().into()).await;
    let mut stream = stream.map_err(ConformanceFailure::GenerateFailed)?;
    let mut chunks = Vec::new();
    while let Some(item) = stream.next().await {
        if chunks.last().is_some_and(LLMEngineOutput::is_terminal) {
            return Err(ConformanceFailure::ChunkAfterTerminal);
        }
        chunks.push(item.map_err(ConformanceFailure::StreamYieldedError)?);
    }
    Ok(chunks)
}

async fn check_stream(engine: &impl LLMEngine, model: &str) -> Result<(), ConformanceFailure> {
    let chunks = collect(engine, model).await?;
    let last = chunks.last().ok_or(ConformanceFailure::NoChunksYielded)?;
    match &last.finish_reason {
        None => return Err(ConformanceFailure::NoTerminalChunk),
        Some(FinishReason::Error(text)) => {
            let error = DynamoError::builder().message(text.clone()).build();
            return Err(ConformanceFailure::StreamYieldedError(error));
        }
        Some(_) => {}
    }
    let chunked = chunks.iter().map(|chunk| chunk.token_ids.len() as u32).sum();
    match &last.completion_usage {
        Some(usage) if usage.completion_tokens != chunked => {
            Err(ConformanceFailure::CompletionTokensMismatch { chunked, reported: usage.completion_tokens })
        }
        _ => Ok(()),
    }
}

async fn check_concurrency(engine: &impl LLMEngine, model: &str) -> Result<(), ConformanceFailure> {
    let failed = |text: String| ConformanceFailure::ConcurrentGenerateFailed(text);
    let answers = futures::future::join_all((0..CONCURRENT).map(|_| collect(engine, model))).await;
    for (number, answer) in answers.into_iter().enumerate() {
        let chunks = answer.map_err(|failure| failed(format!("request {number}: {failure}")))?;
        if !chunks.last().is_some_and(LLMEngineOutput::is_terminal) {
            return Err(failed(format!("request {number} has no terminal chunk")));
        }
    }
    Ok(())
}

async fn check_cancellation_of(
    engine: &impl LLMEngine,
    request: PreprocessedRequest,
) -> Result<(), ConformanceFailure> {
    let inner = mock_context();
    let ctx = GenerateContext::from(Arc::clone(&inner));
    let stream = engine.generate(request, ctx).await;
    let stream = stream.map_err(ConformanceFailure::GenerateFailed)?;
    inner.stop_generating();
    let items = tokio::time::timeout(CANCEL_PATIENCE, stream.collect::<Vec<_>>()).await;
    let items = items.map_err(|_| ConformanceFailure::CancellationNotObserved { after: CANCEL_PATIENCE })?;
    match items.into_iter().last() {
        None => Err(ConformanceFailure::NoChunksYielded),
        Some(Err(error)) => Err(ConformanceFailure::StreamYieldedError(error)),
        Some(Ok(chunk)) if chunk.finish_reason == Some(FinishReason::Cancelled) => Ok(()),
        Some(Ok(_)) => Err(ConformanceFailure::CancellationIgnored),
    }
}
