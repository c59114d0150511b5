//! A raw engine for the end-to-end tests: it counts up to `steps`, fails where `fail` says so, and waits where there are none.
//! To a chat it answers with its last message, a word at a time.

use std::sync::Arc;

use async_trait::async_trait;
use clap::Parser;
use dynamo_backend_common::engine::GenerateContext;
use dynamo_backend_common::{
    BackendError, CommonArgs, DynamoError, EngineConfig, ErrorType, ModelInput, RawEngine, WorkerConfig, run_raw,
};
use futures::stream::BoxStream;
use serde_json::{Value, json};

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    common: CommonArgs,

    #[arg(long, default_value = "raw-model")]
    model_name: String,
}

struct Counter {
    model: String,
}

fn chat_chunk(delta: &Value, finish_reason: &Value) -> Value {
    let choice = json!({"index": 0, "delta": delta, "finish_reason": finish_reason});
    json!({"object": "chat.completion.chunk", "choices": [choice]})
}

#[async_trait]
impl RawEngine for Counter {
    async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
        Ok(EngineConfig { model: self.model.clone(), ..Default::default() })
    }

    async fn generate(
        &self,
        request: Value,
        ctx: GenerateContext,
    ) -> Result<BoxStream<'static, Result<Value, DynamoError>>, DynamoError> {
        if let Some(text) = request["fail"].as_str() {
            let kind = ErrorType::Backend(BackendError::InvalidArgument);
            return Err(DynamoError::builder().error_type(kind).message(text).build());
        }
        if let Some(messages) = request["messages"].as_array() {
            let text = messages.last().map_or("", |message| message["content"].as_str().unwrap_or_default()).to_owned();
            return Ok(Box::pin(async_stream::stream! {
                for word in text.split_inclusive(' ') {
                    yield Ok(chat_chunk(&json!({"content": word}), &Value::Null));
                }
                yield Ok(chat_chunk(&json!({}), &json!("stop")));
            }));
        }
        let steps = request["steps"].as_u64();
        Ok(Box::pin(async_stream::stream! {
            for step in 0..steps.unwrap_or(1) {
                if ctx.is_stopped() {
                    return;
                }
                yield Ok(json!({"step": step, "prompt": request["prompt"]}));
            }
            if steps.is_none() {
                ctx.stopped().await;
            }
        }))
    }

    async fn cleanup(&self) -> Result<(), DynamoError> {
        Ok(())
    }
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let config = WorkerConfig {
        model_input: ModelInput::Text,
        model_name: arguments.model_name.clone(),
        ..arguments.common.worker_config()
    };
    run_raw(Arc::new(Counter { model: arguments.model_name }), config)
}
