//! What an engine yields: chunks of tokens, and the terminal chunk that ends its stream.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::request::TraceLink;

/// Why a stream ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended its answer.
    EoS,
    /// The limit of tokens was reached.
    Length,
    /// A stop string or a stop token came.
    Stop,
    /// The engine failed; the text is for the log, the client sees a generic one.
    Error(String),
    /// The request was cancelled.
    Cancelled,
    /// A content filter ended the answer.
    ContentFilter,
}

impl FinishReason {
    /// Returns the word of the wire; `None` for an error, which travels as an error.
    pub(crate) fn word(&self) -> Option<&'static str> {
        match self {
            Self::EoS => Some("eos"),
            Self::Length => Some("length"),
            Self::Stop => Some("stop"),
            Self::Cancelled => Some("cancelled"),
            Self::ContentFilter => Some("content_filter"),
            Self::Error(_) => None,
        }
    }
}

/// Which of the request's stops ended the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum StopReason {
    /// A stop string.
    String(String),
    /// A stop token.
    Int(i64),
}

/// The log probability of each token of a chunk.
pub type LogProbs = Vec<f64>;

/// The likeliest tokens at each place of a chunk.
pub type TopLogprobs = Vec<Vec<TopLogprob>>;

/// One candidate of a place.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TopLogprob {
    /// Its place among the candidates, from 1 on.
    pub rank: u32,
    /// The token.
    pub token_id: u32,
    /// Its text.
    pub token: Option<String>,
    /// Its log probability.
    pub logprob: f64,
    /// Its bytes, where they are no text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Vec<u8>>,
}

/// Tokens that a request took.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompletionUsage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the answer.
    pub completion_tokens: u32,
    /// Both together.
    pub total_tokens: u32,
    /// What the tokens of the prompt were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_details: Option<PromptTokensDetails>,
    /// What the tokens of the answer were, as the engine counts them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<Value>,
}

/// What the tokens of a prompt were.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptTokensDetails {
    /// Those that the prefix cache held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u32>,
    /// Those of audio.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audio_tokens: Option<u32>,
}

/// One item of an engine's stream. A chunk with a `finish_reason` is terminal: nothing follows it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LLMEngineOutput {
    /// The new tokens; may be empty.
    pub token_ids: Vec<u32>,
    /// The text of each new token.
    pub tokens: Option<Vec<Option<String>>>,
    /// The text of the new tokens, where the engine decodes them itself.
    pub text: Option<String>,
    /// The log probability of the whole answer so far.
    pub cum_log_probs: Option<f64>,
    /// The log probability of each new token.
    pub log_probs: Option<LogProbs>,
    /// The candidates at the place of each new token.
    pub top_logprobs: Option<TopLogprobs>,
    /// Why the stream ends here; `None`: it goes on.
    pub finish_reason: Option<FinishReason>,
    /// Which of the request's stops ended the answer.
    pub stop_reason: Option<StopReason>,
    /// Which of several answers this belongs to; `None` is 0.
    pub index: Option<u32>,
    /// What a prefill worker hands to the decode worker.
    pub disaggregated_params: Option<Value>,
    /// What an encode worker hands on.
    pub encoder_result: Option<Map<String, Value>>,
    /// Further values for a client that asked for them.
    pub extra_args: Option<Value>,
    /// What the request took; the frontend counts itself where it is absent.
    pub completion_usage: Option<CompletionUsage>,
    /// What the engine wants to tell the client beside the answer.
    pub engine_data: Option<Value>,
    /// The span of the request on this worker; set by the framework.
    pub worker_trace_link: Option<TraceLink>,
}

impl LLMEngineOutput {
    fn ended(reason: FinishReason) -> Self {
        Self { finish_reason: Some(reason), ..Self::default() }
    }

    /// Ends a stream that met a stop.
    pub fn stop() -> Self {
        Self::ended(FinishReason::Stop)
    }

    /// Ends a stream that reached its limit of tokens.
    pub fn length() -> Self {
        Self::ended(FinishReason::Length)
    }

    /// Ends a stream whose request was cancelled.
    pub fn cancelled() -> Self {
        Self::ended(FinishReason::Cancelled)
    }

    /// Ends a stream that failed; its request is not tried elsewhere.
    pub fn error(message: String) -> Self {
        Self::ended(FinishReason::Error(message))
    }

    /// Ends the stream of an encode worker with its result.
    pub fn encode_terminal(result: Map<String, Value>) -> Self {
        Self::stop().with_encoder_result(result)
    }

    /// Returns whether nothing may follow.
    pub fn is_terminal(&self) -> bool {
        self.finish_reason.is_some()
    }

    /// Returns the members that travel beside tokens and finish reason; `None` where there are none.
    pub(crate) fn extra(&self) -> Option<Extra<'_>> {
        let extra = Extra {
            completion_usage: self.completion_usage.as_ref(),
            text: self.text.as_deref(),
            tokens: self.tokens.as_deref(),
            log_probs: self.log_probs.as_deref(),
            top_logprobs: self.top_logprobs.as_deref(),
            cum_log_probs: self.cum_log_probs,
            stop_reason: self.stop_reason.as_ref(),
            disaggregated_params: self.disaggregated_params.as_ref(),
            encoder_result: self.encoder_result.as_ref(),
            engine_data: self.engine_data.as_ref(),
            extra_args: self.extra_args.as_ref(),
            worker_trace_link: self.worker_trace_link.as_ref(),
        };
        (!extra.is_empty()).then_some(extra)
    }
}

/// The part of a chunk that most chunks do not have.
#[derive(Serialize)]
pub(crate) struct Extra<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_usage: Option<&'a CompletionUsage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens: Option<&'a [Option<String>]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    log_probs: Option<&'a [f64]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<&'a [Vec<TopLogprob>]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cum_log_probs: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<&'a StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    disaggregated_params: Option<&'a Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    encoder_result: Option<&'a Map<String, Value>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    engine_data: Option<&'a Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    extra_args: Option<&'a Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker_trace_link: Option<&'a TraceLink>,
}

impl Extra<'_> {
    fn is_empty(&self) -> bool {
        self.completion_usage.is_none()
            && self.text.is_none()
            && self.tokens.is_none()
            && self.log_probs.is_none()
            && self.top_logprobs.is_none()
            && self.cum_log_probs.is_none()
            && self.stop_reason.is_none()
            && self.disaggregated_params.is_none()
            && self.encoder_result.is_none()
            && self.engine_data.is_none()
            && self.extra_args.is_none()
            && self.worker_trace_link.is_none()
    }
}

/// Setters that chain: `LLMEngineOutput::length().with_tokens(vec![7]).with_usage(usage(3, 8))`.
pub trait LLMEngineOutputExt {
    /// Sets the new tokens.
    fn with_tokens(self, token_ids: Vec<u32>) -> Self;

    /// Sets what the request took.
    fn with_usage(self, usage: CompletionUsage) -> Self;

    /// Sets the result of an encode worker.
    fn with_encoder_result(self, result: Map<String, Value>) -> Self;
}

impl LLMEngineOutputExt for LLMEngineOutput {
    fn with_tokens(mut self, token_ids: Vec<u32>) -> Self {
        self.token_ids = token_ids;
        self
    }

    fn with_usage(mut self, usage: CompletionUsage) -> Self {
        self.completion_usage = Some(usage);
        self
    }

    fn with_encoder_result(mut self, result: Map<String, Value>) -> Self {
        self.encoder_result = Some(result);
        self
    }
}

/// Chunks of common shapes.
pub mod chunk {
    use super::LLMEngineOutput;

    /// Makes a chunk of one token that does not end the stream.
    pub fn token(id: u32) -> LLMEngineOutput {
        LLMEngineOutput { token_ids: vec![id], ..LLMEngineOutput::default() }
    }
}

/// Counts what a request took; the total stops at the largest number instead of wrapping.
pub fn usage(prompt: u32, completion: u32) -> CompletionUsage {
    CompletionUsage {
        prompt_tokens: prompt,
        completion_tokens: completion,
        total_tokens: prompt.saturating_add(completion),
        ..CompletionUsage::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setters_chain_and_the_total_saturates() {
        let last = LLMEngineOutput::length().with_tokens(vec![7]).with_usage(usage(3, 8));
        assert!(last.is_terminal());
        assert_eq!(last.completion_usage.expect("usage").total_tokens, 11);
        assert_eq!(usage(u32::MAX, 5).total_tokens, u32::MAX);
        assert!(!chunk::token(1).is_terminal());
        assert!(chunk::token(1).extra().is_none());
    }
}
