//! The check of an engine of an encode worker: one item, with the result and without tokens.

use serde_json::json;

use super::{
    CONCURRENT, ConformanceFailure, check_cancellation_of, check_clean_up, check_metrics, collect_of, encode_request,
};
use crate::engine::LLMEngine;
use crate::output::{FinishReason, LLMEngineOutput, usage};
use crate::request::PreprocessedRequest;

/// Checks an engine of an encode worker against its contract and returns the first promise that it breaks.
///
/// `factory` makes a fresh engine; it is called twice, for the checks and for a clean-up without a start.
pub async fn run_encode_conformance<E: LLMEngine>(mut factory: impl FnMut() -> E) -> Result<(), ConformanceFailure> {
    let engine = factory();
    let config = engine.start(0).await.map_err(ConformanceFailure::StartFailed)?;
    if config.model.is_empty() {
        return Err(ConformanceFailure::EmptyModelInConfig);
    }
    check_metrics(&engine, &config.model).await?;
    let request = encode_request(&config.model);
    check_answer(&collect_of(&engine, request.clone()).await?, &request)?;
    let failed = |text: String| ConformanceFailure::ConcurrentGenerateFailed(text);
    let answers = futures::future::join_all((0..CONCURRENT).map(|_| collect_of(&engine, request.clone()))).await;
    for (number, answer) in answers.into_iter().enumerate() {
        let checked = answer.and_then(|chunks| check_answer(&chunks, &request));
        checked.map_err(|failure| failed(format!("request {number}: {failure}")))?;
    }
    check_cancellation_of(&engine, request).await?;
    check_clean_up(&engine, &factory()).await
}

fn check_answer(chunks: &[LLMEngineOutput], request: &PreprocessedRequest) -> Result<(), ConformanceFailure> {
    let [chunk] = chunks else { return Err(ConformanceFailure::EncodeChunkCount { count: chunks.len() }) };
    if chunk.finish_reason != Some(FinishReason::Stop) {
        return Err(ConformanceFailure::EncodeTerminalExpected);
    }
    if !chunk.token_ids.is_empty() {
        return Err(ConformanceFailure::EncodeTokensNotEmpty { count: chunk.token_ids.len() });
    }
    if chunk.encoder_result.is_none() {
        return Err(ConformanceFailure::EncoderResultExpectedObject);
    }
    let prompt = u32::try_from(request.token_ids.len()).unwrap_or(u32::MAX);
    match &chunk.completion_usage {
        Some(own) if *own != usage(prompt, 0) => {
            Err(ConformanceFailure::EncodeUsageMismatch { usage: json!(own).to_string() })
        }
        _ => Ok(()),
    }
}
