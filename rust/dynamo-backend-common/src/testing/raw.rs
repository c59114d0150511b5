//! The check of a raw engine: objects instead of chunks, the end of the stream instead of a terminal chunk.

use std::sync::Arc;

use futures::StreamExt;
use serde_json::{Value, json};

use super::{CANCEL_PATIENCE, CONCURRENT, ConformanceFailure, check_metrics, mock_context};
use crate::config::EngineConfig;
use crate::context::GenerateContext;
use crate::raw::{Hooks, RawEngine};

/// Checks a raw engine against its contract and returns the first promise that it breaks.
///
/// `factory` makes a fresh engine; it is called twice, for the checks and for a clean-up without a start. The requests are
/// `{"prompt": "ping"}`, and one with `"steps": 100000` for the cancellation.
pub async fn run_raw_conformance<E: RawEngine>(mut factory: impl FnMut() -> E) -> Result<(), ConformanceFailure> {
    let engine = Arc::new(factory());
    let config = engine.start(0).await.map_err(ConformanceFailure::StartFailed)?;
    if config.model.is_empty() {
        return Err(ConformanceFailure::EmptyModelInConfig);
    }
    if has_token_members(&config) {
        return Err(ConformanceFailure::RawEngineAdvertisedLlmRegistration);
    }
    check_metrics(&Hooks(Arc::clone(&engine) as Arc<dyn RawEngine>), &config.model).await?;
    collect(&*engine).await?;
    for (number, answer) in
        futures::future::join_all((0..CONCURRENT).map(|_| collect(&*engine))).await.into_iter().enumerate()
    {
        answer
            .map_err(|failure| ConformanceFailure::ConcurrentGenerateFailed(format!("request {number}: {failure}")))?;
    }
    check_cancellation(&*engine).await?;
    engine.cleanup().await.map_err(ConformanceFailure::CleanupFailed)?;
    engine.cleanup().await.map_err(ConformanceFailure::SecondCleanupFailed)?;
    factory().cleanup().await.map_err(ConformanceFailure::CleanupWithoutStartFailed)
}

fn has_token_members(config: &EngineConfig) -> bool {
    config.llm.is_some()
        || config.context_length.is_some()
        || config.kv_cache_block_size.is_some()
        || config.total_kv_blocks.is_some()
        || config.max_num_seqs.is_some()
        || config.max_num_batched_tokens.is_some()
        || config.data_parallel_size.is_some()
        || config.data_parallel_start_rank.is_some()
        || config.bootstrap_host.is_some()
        || config.bootstrap_port.is_some()
}

async fn collect(engine: &impl RawEngine) -> Result<Vec<Value>, ConformanceFailure> {
    let stream = engine.generate(json!({"prompt": "ping"}), mock_context().into()).await;
    let mut stream = stream.map_err(ConformanceFailure::GenerateFailed)?;
    let mut objects = Vec::new();
    while let Some(item) = stream.next().await {
        objects.push(item.map_err(ConformanceFailure::StreamYieldedError)?);
    }
    if objects.is_empty() { Err(ConformanceFailure::NoChunksYielded) } else { Ok(objects) }
}

async fn check_cancellation(engine: &impl RawEngine) -> Result<(), ConformanceFailure> {
    let inner = mock_context();
    let ctx = GenerateContext::from(Arc::clone(&inner));
    let stream = engine.generate(json!({"prompt": "ping", "steps": 100_000}), ctx).await;
    let stream = stream.map_err(ConformanceFailure::GenerateFailed)?;
    inner.stop_generating();
    let ended = tokio::time::timeout(CANCEL_PATIENCE, stream.for_each(|_| async {})).await;
    ended.map_err(|_| ConformanceFailure::CancellationNotObserved { after: CANCEL_PATIENCE })
}
