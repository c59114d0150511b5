//! The sample engine: it answers with the token ids 1, 2, 3, ... and waits before each of them.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use clap::Parser;
use dynamo_backend_common::engine::GenerateContext;
use dynamo_backend_common::{
    AsyncEngineContext, BackendError, CommonArgs, DisaggregationMode, DynamoError, EngineConfig, ErrorType,
    KvEventSource, LLMEngine, LLMEngineOutput, LLMEngineOutputExt, PreprocessedRequest, WorkerConfig, chunk, usage,
};
use futures::stream::BoxStream;
use serde_json::{Value, json};

/// Token ids begin again at 0 after this many.
const VOCABULARY: u32 = 32_000;

/// The sample engine's flags.
#[derive(Clone, Debug, Parser)]
#[command(about = "Serves the sample engine: rotating token ids, one after each delay")]
pub struct Args {
    /// Flags that every engine has
    #[command(flatten)]
    pub common: CommonArgs,

    /// Name of the model, or a directory with its tokenizer
    #[arg(long, default_value = "sample-model")]
    pub model_name: String,

    /// Name that clients use
    #[arg(long)]
    pub served_model_name: Option<String>,

    /// Tokens of an answer whose request sets no limit
    #[arg(long, default_value_t = 16)]
    pub max_tokens: u32,

    /// Seconds before each token
    #[arg(long, default_value_t = 0.01)]
    pub delay: f64,

    /// ZMQ socket of a process that publishes KV events as vLLM does: its blocks count as this worker's
    #[arg(long, value_name = "ENDPOINT")]
    pub zmq_kv_events: Option<String>,
}

/// Answers with rotating token ids.
#[derive(Clone, Debug)]
pub struct SampleEngine {
    model: String,
    max_tokens: u32,
    delay: Duration,
    mode: DisaggregationMode,
    kv_events: Option<String>,
}

/// Lets other requests run, for this long or for one turn.
async fn pause(delay: Duration) {
    if delay.is_zero() {
        tokio::task::yield_now().await; // a timer would wait for its next millisecond
    } else {
        tokio::time::sleep(delay).await;
    }
}

fn invalid(message: impl Into<String>) -> DynamoError {
    DynamoError::builder().error_type(ErrorType::Backend(BackendError::InvalidArgument)).message(message).build()
}

impl SampleEngine {
    /// Makes an engine that answers with `max_tokens` unless a request says otherwise, one after each `delay`.
    pub fn new(model: impl Into<String>, max_tokens: u32, delay: Duration) -> Self {
        Self { model: model.into(), max_tokens, delay, mode: DisaggregationMode::Aggregated, kv_events: None }
    }

    /// Makes the engine and the worker's configuration from flags; `None`: those of the process.
    pub fn from_args(argv: Option<Vec<String>>) -> Result<(Self, WorkerConfig), DynamoError> {
        let args = match argv {
            Some(argv) => Args::try_parse_from(argv).map_err(|error| invalid(error.to_string()))?,
            None => Args::parse(),
        };
        let delay = Duration::try_from_secs_f64(args.delay)
            .map_err(|error| invalid(format!("--delay {}: {error}", args.delay)))?;
        let mut engine = Self::new(&args.model_name, args.max_tokens, delay);
        engine.mode = args.common.disaggregation_mode;
        engine.kv_events = args.zmq_kv_events;
        let config = WorkerConfig {
            model_name: args.model_name,
            served_model_name: args.served_model_name,
            ..args.common.worker_config()
        };
        Ok((engine, config))
    }
}

#[async_trait]
impl LLMEngine for SampleEngine {
    async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
        Ok(EngineConfig {
            model: self.model.clone(),
            context_length: Some(2048),
            kv_cache_block_size: Some(16),
            total_kv_blocks: Some(1000),
            max_num_seqs: Some(64),
            max_num_batched_tokens: Some(2048),
            ..Default::default()
        })
    }

    async fn kv_event_sources(&self) -> Result<Vec<KvEventSource>, DynamoError> {
        let endpoint = self.kv_events.clone();
        let source = |endpoint| KvEventSource::Zmq { endpoint, topic: String::new(), dp_rank: 0, image_token_id: None };
        Ok(endpoint.into_iter().map(source).collect())
    }

    async fn generate(
        &self,
        request: PreprocessedRequest,
        ctx: GenerateContext,
    ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError> {
        if self.mode == DisaggregationMode::Encode {
            return Err(invalid("the sample engine in Rust does not encode images"));
        }
        if self.mode == DisaggregationMode::Decode && request.prefill_result.is_none() && !request.is_probe {
            return Err(invalid("a decode worker needs the prefill_result of its request"));
        }
        let is_prefill = self.mode == DisaggregationMode::Prefill;
        let asked = request.stop_conditions.max_tokens.filter(|limit| *limit > 0).unwrap_or(self.max_tokens).max(1);
        let (count, delay) = (if is_prefill { 1 } else { asked }, self.delay);
        let prompt = request.token_ids.len() as u32;
        Ok(Box::pin(async_stream::stream! {
            // Made once: a request for each token would enter and leave its list of waiters each time.
            let mut stopped = ctx.stopped();
            for made in 0..count {
                tokio::select! {
                    biased;
                    () = &mut stopped => {
                        yield Ok(LLMEngineOutput::cancelled().with_usage(usage(prompt, made)));
                        return;
                    }
                    () = pause(delay) => {}
                }
                let id = (made + 1) % VOCABULARY;
                if made + 1 < count {
                    yield Ok(chunk::token(id));
                    continue;
                }
                let mut last = LLMEngineOutput::length().with_tokens(vec![id]).with_usage(usage(prompt, count));
                if is_prefill {
                    last.disaggregated_params = Some(json!({"sample_handle": ctx.id(), "completed_tokens": [id]}));
                }
                yield Ok(last);
            }
        }))
    }

    async fn abort(&self, _ctx: Arc<dyn AsyncEngineContext>) {}

    async fn health_check_payload(&self) -> Result<Option<Value>, DynamoError> {
        let stop = json!({"max_tokens": 1, "ignore_eos": true});
        Ok(Some(json!({"token_ids": [1], "stop_conditions": stop, "sampling_options": {"temperature": 0.0}})))
    }

    async fn cleanup(&self) -> Result<(), DynamoError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dynamo_backend_common::testing::run_conformance;

    #[tokio::test]
    async fn it_keeps_the_contract() {
        let engine = || SampleEngine::new("sample-model", 16, Duration::ZERO);
        run_conformance(engine).await.expect("conformance");
    }

    #[test]
    fn flags_make_an_engine() {
        let flags = ["engine", "--model-name", "m", "--delay", "0.5", "--namespace", "n"].map(String::from);
        let (engine, config) = SampleEngine::from_args(Some(flags.to_vec())).expect("an engine");
        assert_eq!((engine.delay, config.namespace.as_str()), (Duration::from_millis(500), "n"));
        let wrong = ["engine", "--delay", "-1"].map(String::from);
        assert!(SampleEngine::from_args(Some(wrong.to_vec())).is_err());
    }
}
