//! The kits for raw engines and for encode workers: each check shown to fail on an engine that breaks just this promise.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use async_trait::async_trait;
use dynamo_backend_common::engine::GenerateContext;
use dynamo_backend_common::testing::{ConformanceFailure, run_encode_conformance, run_raw_conformance};
use dynamo_backend_common::{
    DynamoError, EngineConfig, LLMEngine, LLMEngineOutput, LLMEngineOutputExt, PreprocessedRequest, RawEngine, chunk,
    usage,
};
use futures::stream::BoxStream;
use serde_json::{Map, Value, json};

/// The promise that an engine breaks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Broken {
    Nothing,
    Start,
    EmptyModel,
    TokenMembers,
    Generate,
    Nothingness,
    Error,
    Concurrency,
    IgnoresStop,
    Cleanup,
    SecondCleanup,
    CleanupWithoutStart,
    TwoChunks,
    Length,
    Tokens,
    NoResult,
    Usage,
    EndsStopDifferently,
}

struct Engine {
    broken: Broken,
    starts: AtomicU32,
    cleanups: AtomicU32,
    running: Arc<AtomicU32>,
}

fn failing(fails: bool) -> Result<(), DynamoError> {
    if fails { Err(DynamoError::builder().message("on purpose").build()) } else { Ok(()) }
}

struct Running(Arc<AtomicU32>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Engine {
    fn new(broken: Broken) -> Self {
        Self { broken, starts: AtomicU32::new(0), cleanups: AtomicU32::new(0), running: Arc::default() }
    }

    fn begin(&self) -> Result<EngineConfig, DynamoError> {
        failing(self.broken == Broken::Start)?;
        self.starts.fetch_add(1, Ordering::SeqCst);
        let model = if self.broken == Broken::EmptyModel { "" } else { "m" };
        let context_length = (self.broken == Broken::TokenMembers).then_some(8);
        Ok(EngineConfig { model: model.into(), context_length, ..Default::default() })
    }

    fn enter(&self) -> Result<Running, DynamoError> {
        failing(self.broken == Broken::Generate)?;
        let running = Running(Arc::clone(&self.running));
        let others = self.running.fetch_add(1, Ordering::SeqCst);
        failing(self.broken == Broken::Concurrency && others > 0)?;
        Ok(running)
    }

    fn end(&self) -> Result<(), DynamoError> {
        failing(self.broken == Broken::CleanupWithoutStart && self.starts.load(Ordering::SeqCst) == 0)?;
        let before = self.cleanups.fetch_add(1, Ordering::SeqCst);
        failing(self.broken == Broken::Cleanup || (self.broken == Broken::SecondCleanup && before == 1))
    }
}

struct Raw(Engine);

#[async_trait]
impl RawEngine for Raw {
    async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
        self.0.begin()
    }

    async fn generate(
        &self,
        request: Value,
        ctx: GenerateContext,
    ) -> Result<BoxStream<'static, Result<Value, DynamoError>>, DynamoError> {
        let running = self.0.enter()?;
        let broken = self.0.broken;
        let steps = request["steps"].as_u64().unwrap_or(2);
        Ok(Box::pin(async_stream::stream! {
            let _running = running;
            if broken == Broken::Nothingness {
                return;
            }
            for step in 0..steps {
                tokio::task::yield_now().await;
                if ctx.is_stopped() {
                    if broken == Broken::IgnoresStop {
                        futures::future::pending::<()>().await;
                    }
                    return;
                }
                yield failing(broken == Broken::Error).map(|()| json!({"step": step}));
            }
        }))
    }

    async fn cleanup(&self) -> Result<(), DynamoError> {
        self.0.end()
    }
}

struct Encode(Engine);

#[async_trait]
impl LLMEngine for Encode {
    async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
        self.0.begin()
    }

    async fn generate(
        &self,
        request: PreprocessedRequest,
        ctx: GenerateContext,
    ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError> {
        let running = self.0.enter()?;
        let broken = self.0.broken;
        assert!(request.multi_modal_data.is_some() && request.mm_processor_kwargs.is_some());
        let prompt = request.token_ids.len() as u32;
        Ok(Box::pin(async_stream::stream! {
            let _running = running;
            tokio::task::yield_now().await;
            if ctx.is_stopped() && broken != Broken::EndsStopDifferently {
                if broken == Broken::IgnoresStop {
                    futures::future::pending::<()>().await;
                }
                yield Ok(LLMEngineOutput::cancelled());
                return;
            }
            let counted = usage(prompt, u32::from(broken == Broken::Usage));
            let result: Map<String, Value> = [("handle".to_owned(), json!("h"))].into_iter().collect();
            match broken {
                Broken::Nothingness => {}
                Broken::Error => yield failing(true).map(|()| LLMEngineOutput::default()),
                Broken::Length => yield Ok(LLMEngineOutput::length().with_encoder_result(result)),
                Broken::NoResult => yield Ok(LLMEngineOutput::stop()),
                Broken::Tokens => yield Ok(LLMEngineOutput::encode_terminal(result).with_tokens(vec![1])),
                _ => {
                    if broken == Broken::TwoChunks {
                        yield Ok(chunk::token(1));
                    }
                    yield Ok(LLMEngineOutput::encode_terminal(result).with_usage(counted));
                }
            }
        }))
    }

    async fn cleanup(&self) -> Result<(), DynamoError> {
        self.0.end()
    }
}

const OF_BOTH: [(Broken, &str); 8] = [
    (Broken::Start, "StartFailed"),
    (Broken::EmptyModel, "EmptyModelInConfig"),
    (Broken::Generate, "GenerateFailed"),
    (Broken::Error, "StreamYieldedError"),
    (Broken::Concurrency, "ConcurrentGenerateFailed"),
    (Broken::Cleanup, "CleanupFailed"),
    (Broken::SecondCleanup, "SecondCleanupFailed"),
    (Broken::CleanupWithoutStart, "CleanupWithoutStartFailed"),
];

fn name(outcome: Result<(), ConformanceFailure>) -> &'static str {
    outcome.map_or_else(|failure| failure.name(), |()| "")
}

#[tokio::test(start_paused = true)]
async fn a_raw_engine_is_held_to_each_promise() {
    assert_eq!(run_raw_conformance(|| Raw(Engine::new(Broken::Nothing))).await, Ok(()));
    let own = [
        (Broken::TokenMembers, "RawEngineAdvertisedLlmRegistration"),
        (Broken::Nothingness, "NoChunksYielded"),
        (Broken::IgnoresStop, "CancellationNotObserved"),
    ];
    for (broken, expected) in OF_BOTH.into_iter().chain(own) {
        assert_eq!(name(run_raw_conformance(|| Raw(Engine::new(broken))).await), expected, "{broken:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_encode_worker_is_held_to_each_promise() {
    assert_eq!(run_encode_conformance(|| Encode(Engine::new(Broken::Nothing))).await, Ok(()));
    let own = [
        (Broken::Nothingness, "EncodeChunkCount"),
        (Broken::TwoChunks, "EncodeChunkCount"),
        (Broken::Length, "EncodeTerminalExpected"),
        (Broken::Tokens, "EncodeTokensNotEmpty"),
        (Broken::NoResult, "EncoderResultExpectedObject"),
        (Broken::Usage, "EncodeUsageMismatch"),
        (Broken::IgnoresStop, "CancellationNotObserved"),
        (Broken::EndsStopDifferently, "CancellationIgnored"),
    ];
    for (broken, expected) in OF_BOTH.into_iter().chain(own) {
        assert_eq!(name(run_encode_conformance(|| Encode(Engine::new(broken))).await), expected, "{broken:?}");
    }
}
