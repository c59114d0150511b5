//! An engine for clusters of both systems: the Rust twin of `tests/support/interop_engine.py`.
//!
//! It says one sentence, whose tokens are in `INTEROP_TOKENS`. What goes wrong is asked for by `max_tokens`; what the engine
//! lives through is a line in its journal.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use clap::Parser;
use dynamo_backend_common::engine::GenerateContext;
use dynamo_backend_common::{
    AsyncEngineContext, BackendError, DynamoError, EngineConfig, ErrorType, LLMEngine, LLMEngineOutput,
    LLMEngineOutputExt, PreprocessedRequest, RuntimeConfig, WorkerConfig, chunk, run, usage,
};
use futures::stream::BoxStream;
use serde_json::json;

const FOREVER: u32 = 2000;
const SILENT: u32 = 999;

#[derive(Parser)]
struct Arguments {
    model_dir: PathBuf,
    journal: PathBuf,

    #[arg(long, default_value = "file")]
    discovery_backend: String,

    #[arg(long, default_value = "tcp")]
    request_plane: String,
}

/// Writes the lines of one engine.
#[derive(Clone)]
struct Journal(PathBuf);

impl Journal {
    fn note(&self, line: &str) {
        // A test whose journal cannot be written fails by what is missing in it.
        let file = OpenOptions::new().create(true).append(true).open(&self.0);
        let _ = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    }
}

/// Writes the last line of a request, however its stream ends.
struct Left(Journal);

impl Drop for Left {
    fn drop(&mut self) {
        self.0.note("generate left");
    }
}

struct InteropEngine {
    journal: Journal,
    answer: Vec<u32>,
}

fn failure(limit: u32) -> Option<DynamoError> {
    use BackendError::*;
    let asserts = |code: u16, message: &str| {
        let kind = if code < 500 { InvalidArgument } else { Unknown };
        (ErrorType::Backend(kind), json!({"message": message, "code": code}).to_string())
    };
    let plain = |kind: BackendError, message: &str| (ErrorType::Backend(kind), message.to_owned());
    let (kind, message) = match limit {
        101 => plain(InvalidArgument, "prompt too odd"),
        102 => plain(Cancelled, "nobody wants it"),
        103 | 104 | 113 => plain(Unknown, "a secret"),
        105 => plain(CannotConnect, "kv store"),
        106 => plain(Disconnected, "peer"),
        107 => plain(EngineShutdown, "bye"),
        108 => plain(StreamIncomplete, "no end"),
        109 => (ErrorType::WorkerUnavailable, "not now".to_owned()),
        110 => plain(ConnectionTimeout, "slow"),
        111 => asserts(418, "I am a teapot"),
        112 => asserts(503, "a secret"),
        114 => asserts(429, "slow down"),
        115 => asserts(404, "no such adapter"),
        116 => asserts(422, "too odd"),
        117 => asserts(529, "a secret"),
        _ => return None,
    };
    Some(DynamoError::builder().error_type(kind).message(message).build())
}

#[async_trait]
impl LLMEngine for InteropEngine {
    async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
        Ok(EngineConfig {
            model: "tiny-model".into(),
            served_model_name: Some("tiny-model".into()),
            context_length: Some(40_000),
            kv_cache_block_size: Some(16),
            ..Default::default()
        })
    }

    async fn generate(
        &self,
        request: PreprocessedRequest,
        ctx: GenerateContext,
    ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError> {
        self.journal.note("request");
        let limit = request.stop_conditions.max_tokens.unwrap_or(0);
        if let Some(failure) = failure(limit) {
            return Err(failure);
        }
        let prompt = request.token_ids.len() as u32;
        let is_forever = limit > FOREVER / 2;
        let (answer, left) = (self.answer.clone(), Left(self.journal.clone()));
        Ok(Box::pin(async_stream::stream! {
            let _left = left;
            let mut sent = 0;
            while !ctx.is_stopped() {
                if limit == SILENT {
                    ctx.stopped().await;
                    break;
                }
                for id in &answer {
                    yield Ok(chunk::token(*id));
                    sent += 1;
                    if is_forever {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                }
                if !is_forever {
                    yield Ok(LLMEngineOutput::stop().with_usage(usage(prompt, sent)));
                    return;
                }
            }
            yield Ok(LLMEngineOutput::cancelled());
        }))
    }

    async fn abort(&self, _ctx: Arc<dyn AsyncEngineContext>) {
        self.journal.note("abort");
    }

    async fn cleanup(&self) -> Result<(), DynamoError> {
        self.journal.note("cleanup");
        Ok(())
    }
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let answer: Result<Vec<u32>, _> = std::env::var("INTEROP_TOKENS")?.split(',').map(str::parse).collect();
    let config = WorkerConfig {
        namespace: "interop".into(),
        component: "backend".into(),
        endpoint: "generate".into(),
        model_name: arguments.model_dir.display().to_string(),
        served_model_name: Some("tiny-model".into()),
        runtime: RuntimeConfig {
            discovery_backend: Some(arguments.discovery_backend),
            request_plane: Some(arguments.request_plane),
            ..Default::default()
        },
        ..WorkerConfig::default()
    };
    run(Arc::new(InteropEngine { journal: Journal(arguments.journal), answer: answer? }), config)
}
