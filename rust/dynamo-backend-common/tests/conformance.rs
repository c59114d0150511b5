//! Each check of the conformance kit, shown to fail on an engine that breaks just this promise.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use dynamo_backend_common::engine::GenerateContext;
use dynamo_backend_common::testing::{ConformanceFailure, cancelling_context, mock_context, run_conformance};
use dynamo_backend_common::{
    DynamoError, EngineConfig, KvEventSource, LLMEngine, LLMEngineOutput, LLMEngineOutputExt, MetricsBindings,
    MetricsCtx, PreprocessedRequest, chunk, usage,
};
use futures::StreamExt;
use futures::stream::BoxStream;

/// The promise that an engine breaks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Broken {
    Nothing,
    Start,
    EmptyModel,
    Metrics,
    Ranks,
    KvSources,
    KvRanks,
    Generate,
    NoChunks,
    Error,
    NoTerminal,
    AfterTerminal,
    Usage,
    Concurrency,
    IgnoresStop,
    EndsStopDifferently,
    Cleanup,
    SecondCleanup,
    CleanupWithoutStart,
}

struct Engine {
    broken: Broken,
    starts: AtomicU32,
    cleanups: AtomicU32,
    running: std::sync::Arc<AtomicU32>,
    metric_calls: AtomicU32,
    source_calls: AtomicU32,
}

impl Engine {
    fn new(broken: Broken) -> Self {
        let zero = || AtomicU32::new(0);
        Self {
            broken,
            starts: zero(),
            cleanups: zero(),
            running: Default::default(),
            metric_calls: zero(),
            source_calls: zero(),
        }
    }
}

fn failure() -> DynamoError {
    DynamoError::builder().message("on purpose").build()
}

fn failing(fails: bool) -> Result<(), DynamoError> {
    if fails { Err(failure()) } else { Ok(()) }
}

#[async_trait]
impl LLMEngine for Engine {
    async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
        self.starts.fetch_add(1, Ordering::SeqCst);
        failing(self.broken == Broken::Start)?;
        let model = if self.broken == Broken::EmptyModel { "" } else { "m" };
        Ok(EngineConfig { model: model.into(), ..Default::default() })
    }

    async fn setup_metrics(&self, _ctx: MetricsCtx<'_>) -> Result<MetricsBindings, DynamoError> {
        failing(self.broken == Broken::Metrics)?;
        let call = self.metric_calls.fetch_add(1, Ordering::SeqCst);
        let rank = if self.broken == Broken::Ranks { call } else { 0 };
        Ok(MetricsBindings { dp_ranks: vec![rank], ..Default::default() })
    }

    async fn kv_event_sources(&self) -> Result<Vec<KvEventSource>, DynamoError> {
        failing(self.broken == Broken::KvSources)?;
        let call = self.source_calls.fetch_add(1, Ordering::SeqCst);
        let ranks = if self.broken == Broken::KvRanks && call > 0 { [1, 0] } else { [0, 1] };
        let source = |dp_rank| KvEventSource::Push { on_ready: Box::new(drop), dp_rank };
        Ok(ranks.map(source).into())
    }

    async fn generate(
        &self,
        request: PreprocessedRequest,
        ctx: GenerateContext,
    ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError> {
        failing(self.broken == Broken::Generate)?;
        let broken = self.broken;
        let running = std::sync::Arc::clone(&self.running);
        let count = request.stop_conditions.max_tokens.unwrap_or(4);
        Ok(Box::pin(async_stream::stream! {
            if broken == Broken::NoChunks {
                return;
            }
            let others = running.fetch_add(1, Ordering::SeqCst);
            for made in 0..count {
                if ctx.is_stopped() && broken != Broken::IgnoresStop {
                    yield Ok(match broken {
                        Broken::EndsStopDifferently => LLMEngineOutput::stop(),
                        _ => LLMEngineOutput::cancelled(),
                    });
                    running.fetch_sub(1, Ordering::SeqCst);
                    return;
                }
                if broken == Broken::Error || (broken == Broken::Concurrency && others > 0) {
                    yield Err(failure());
                    return;
                }
                if made + 1 < count || broken == Broken::NoTerminal {
                    yield Ok(chunk::token(made));
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            running.fetch_sub(1, Ordering::SeqCst);
            if broken == Broken::NoTerminal {
                return;
            }
            let reported = if broken == Broken::Usage { count + 1 } else { count };
            yield Ok(LLMEngineOutput::length().with_tokens(vec![count]).with_usage(usage(3, reported)));
            if broken == Broken::AfterTerminal {
                yield Ok(chunk::token(1));
            }
        }))
    }

    async fn cleanup(&self) -> Result<(), DynamoError> {
        let before = self.cleanups.fetch_add(1, Ordering::SeqCst);
        let started = self.starts.load(Ordering::SeqCst) > 0;
        failing(match self.broken {
            Broken::Cleanup => started,
            Broken::SecondCleanup => before > 0,
            Broken::CleanupWithoutStart => !started,
            _ => false,
        })
    }
}

async fn name_of(broken: Broken) -> String {
    match run_conformance(|| Engine::new(broken)).await {
        Ok(()) => String::new(),
        Err(failure) => {
            let text = failure.to_string();
            assert!(text.starts_with(failure.name()) && text.contains("expected"), "{text}");
            failure.name().to_owned()
        }
    }
}

#[tokio::test(start_paused = true)]
async fn every_broken_promise_is_named() {
    for (broken, name) in [
        (Broken::Nothing, ""),
        (Broken::Start, "StartFailed"),
        (Broken::EmptyModel, "EmptyModelInConfig"),
        (Broken::Metrics, "SetupMetricsFailed"),
        (Broken::Ranks, "ComponentMetricsNotIdempotent"),
        (Broken::KvSources, "KvEventSourcesFailed"),
        (Broken::KvRanks, "KvEventSourcesNotIdempotent"),
        (Broken::Generate, "GenerateFailed"),
        (Broken::NoChunks, "NoChunksYielded"),
        (Broken::Error, "StreamYieldedError"),
        (Broken::NoTerminal, "NoTerminalChunk"),
        (Broken::AfterTerminal, "ChunkAfterTerminal"),
        (Broken::Usage, "CompletionTokensMismatch"),
        (Broken::Concurrency, "ConcurrentGenerateFailed"),
        (Broken::IgnoresStop, "CancellationNotObserved"),
        (Broken::EndsStopDifferently, "CancellationIgnored"),
        (Broken::Cleanup, "CleanupFailed"),
        (Broken::SecondCleanup, "SecondCleanupFailed"),
        (Broken::CleanupWithoutStart, "CleanupWithoutStartFailed"),
    ] {
        assert_eq!(name_of(broken).await, name, "{broken:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancelling_context_stops_itself() {
    let inner = cancelling_context(Duration::from_millis(50));
    let request = PreprocessedRequest::builder().token_ids(vec![1]).build();
    let request = PreprocessedRequest {
        stop_conditions: dynamo_backend_common::StopConditions { max_tokens: Some(10_000), ..Default::default() },
        ..request
    };
    let stream = Engine::new(Broken::Nothing).generate(request, inner.into()).await.expect("a stream");
    let items: Vec<_> = stream.collect().await;
    let last = items.last().expect("an item").as_ref().expect("a chunk");
    assert_eq!(last.finish_reason, Some(dynamo_backend_common::FinishReason::Cancelled));
    assert!(items.len() > 10);
    assert!(!mock_context().is_stopped());
}

#[test]
fn a_failure_is_an_error() {
    let error: anyhow::Error = ConformanceFailure::NoTerminalChunk.into();
    assert!(error.to_string().contains("LLMEngine::generate"));
}
