//! An engine with a task of its own, which answers with the tokens of the prompt.

use std::collections::HashMap;

use async_trait::async_trait;
use dynamo_backend_common::engine::GenerateContext;
use dynamo_backend_common::{
    BackendError, CommonArgs, DynamoError, EngineConfig, ErrorType, FinishReason, LLMEngine, LLMEngineOutput,
    LLMEngineOutputExt, LlmRegistration, PreprocessedRequest, WorkerConfig, telemetry, usage,
};
use futures::stream::BoxStream;
use tokio::sync::{RwLock, mpsc};
use tracing::Instrument;

pub struct MyBackend {
    model: String,
    inner: RwLock<Option<Inner>>,
}

struct Inner {
    requests: mpsc::UnboundedSender<(Vec<u32>, usize, mpsc::Sender<Step>)>,
}

struct Step {
    tokens: Vec<u32>,
    terminal_reason: Option<FinishReason>,
}

#[derive(clap::Parser, Debug)]
#[command(name = env!("CARGO_BIN_NAME"), about = "My Dynamo Rust backend.")]
struct Args {
    #[command(flatten)]
    common: CommonArgs,

    #[arg(value_name = "MODEL")]
    model: String,

    #[arg(long)]
    served_model_name: Option<String>,
}

impl MyBackend {
    pub fn new(model: &str) -> Result<Self, DynamoError> {
        if model.is_empty() {
            return Err(invalid_arg("no model is named"));
        }
        Ok(Self { model: model.to_owned(), inner: RwLock::new(None) })
    }

    pub fn from_args(argv: Option<Vec<String>>) -> Result<(Self, WorkerConfig), DynamoError> {
        let args = match argv {
            Some(argv) => <Args as clap::Parser>::try_parse_from(argv),
            None => <Args as clap::Parser>::try_parse(),
        }
        .map_err(|error| invalid_arg(error.to_string()))?;
        let engine = Self::new(&args.model)?;
        let config = WorkerConfig {
            namespace: args.common.namespace,
            component: args.common.component,
            endpoint: args.common.endpoint,
            endpoint_types: args.common.endpoint_types,
            custom_jinja_template: args.common.custom_jinja_template,
            disaggregation_mode: args.common.disaggregation_mode,
            model_name: args.model,
            served_model_name: args.served_model_name,
            ..Default::default()
        };
        Ok((engine, config))
    }
}

#[async_trait]
impl LLMEngine for MyBackend {
    async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
        tracing::info!(model = %self.model, "starting my backend");
        let (requests, mut submitted) = mpsc::unbounded_channel::<(Vec<u32>, usize, mpsc::Sender<Step>)>();
        tokio::spawn(async move {
            while let Some((prompt, limit, steps)) = submitted.recv().await {
                tokio::spawn(async move {
                    for made in 1..=limit {
                        let terminal_reason = (made == limit).then_some(FinishReason::Length);
                        let token = prompt.get(made % prompt.len().max(1)).copied().unwrap_or(1);
                        if steps.send(Step { tokens: vec![token], terminal_reason }).await.is_err() {
                            return;
                        }
                        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                    }
                });
            }
        });
        *self.inner.write().await = Some(Inner { requests });
        Ok(EngineConfig {
            model: self.model.clone(),
            served_model_name: Some(self.model.clone()),
            llm: Some(LlmRegistration {
                context_length: Some(8192),
                kv_cache_block_size: Some(64),
                total_kv_blocks: Some(16384),
                max_num_seqs: Some(256),
                max_num_batched_tokens: Some(8192),
                ..Default::default()
            }),
            ..Default::default()
        })
    }

    async fn generate(
        &self,
        request: PreprocessedRequest,
        ctx: GenerateContext,
    ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError> {
        let PreprocessedRequest { token_ids, stop_conditions, .. } = request;
        let prompt_tokens = token_ids.len() as u32;
        let limit = stop_conditions.max_tokens.unwrap_or(16) as usize;
        let (steps, mut output_rx) = mpsc::channel(64);

        let mut span = telemetry::start_span(format!("submit_rank_{}", 0));
        span.set_attribute("blocks", 8);
        let mut headers = HashMap::new();
        dynamo_runtime::logging::inject_trace_headers_into_map(&mut headers);
        span.set_attribute("continues", headers.get("traceparent").cloned().unwrap_or_default());
        {
            let inner = self.inner.read().await;
            let Some(inner) = inner.as_ref() else { return Err(invalid_arg("the engine has not started")) };
            inner.requests.send((token_ids, limit, steps)).map_err(|error| invalid_arg(error.to_string()))?;
        }
        drop(span);

        Ok(Box::pin(async_stream::stream! {
            let mut completion_tokens = 0_u32;
            loop {
                tokio::select! {
                    biased;
                    _ = ctx.stopped() => {
                        yield Ok(LLMEngineOutput::cancelled().with_usage(usage(prompt_tokens, completion_tokens)));
                        break;
                    }
                    next = output_rx.recv().instrument(tracing::info_span!("engine.step", blocks_held = 8)) => {
                        let Some(step) = next else {
                            yield Ok(LLMEngineOutput::error("engine stream ended without a terminal".into()));
                            break;
                        };
                        let mut out = LLMEngineOutput {
                            token_ids: step.tokens,
                            finish_reason: step.terminal_reason,
                            ..Default::default()
                        };
                        completion_tokens += out.token_ids.len() as u32;
                        if out.finish_reason.is_some() {
                            out = out.with_usage(usage(prompt_tokens, completion_tokens));
                            yield Ok(out);
                            break;
                        }
                        yield Ok(out);
                    }
                }
            }
        }))
    }

    async fn cleanup(&self) -> Result<(), DynamoError> {
        *self.inner.write().await = None;
        Ok(())
    }
}

pub(crate) fn invalid_arg(msg: impl Into<String>) -> DynamoError {
    DynamoError::builder().error_type(ErrorType::Backend(BackendError::InvalidArgument)).message(msg).build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn my_engine_passes_conformance() {
        dynamo_backend_common::testing::run_conformance(|| MyBackend::new("m").expect("construct"))
            .await
            .expect("conformance");
    }
}
