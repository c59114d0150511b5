//! Write an LLM engine in Rust and serve it behind an OpenAI-compatible frontend.
//!
//! An engine implements [`LLMEngine`]; [`run`] serves it: it registers the model, takes requests over the `mux` wire and
//! that of ai-dynamo 1.6, keeps to cancellations and limits, answers `/health` and `/metrics`, and ends in order on SIGTERM.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use async_trait::async_trait;
//! use dynamo_backend_common::engine::GenerateContext;
//! use dynamo_backend_common::{
//!     DynamoError, EngineConfig, LLMEngine, LLMEngineOutput, LLMEngineOutputExt, PreprocessedRequest, WorkerConfig, chunk,
//!     run, usage,
//! };
//! use futures::stream::BoxStream;
//!
//! struct Counter;
//!
//! #[async_trait]
//! impl LLMEngine for Counter {
//!     async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
//!         Ok(EngineConfig { model: "counter".into(), context_length: Some(2048), ..Default::default() })
//!     }
//!
//!     async fn generate(
//!         &self,
//!         request: PreprocessedRequest,
//!         ctx: GenerateContext,
//!     ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError> {
//!         let prompt = request.token_ids.len() as u32;
//!         let count = request.stop_conditions.max_tokens.unwrap_or(16).max(1);
//!         Ok(Box::pin(async_stream::stream! {
//!             for made in 0..count - 1 {
//!                 if ctx.is_stopped() {
//!                     yield Ok(LLMEngineOutput::cancelled().with_usage(usage(prompt, made)));
//!                     return;
//!                 }
//!                 yield Ok(chunk::token(made + 1));
//!             }
//!             yield Ok(LLMEngineOutput::length().with_tokens(vec![count]).with_usage(usage(prompt, count)));
//!         }))
//!     }
//!
//!     async fn cleanup(&self) -> Result<(), DynamoError> {
//!         Ok(())
//!     }
//! }
//!
//! fn main() -> anyhow::Result<()> {
//!     run(Arc::new(Counter), WorkerConfig::default())
//! }
//! ```
//!
//! # What is not built
//!
//! Discovery other than `file` and `etcd`, request planes other than `tcp` and `nats`, event planes other than `zmq` and `nats`, fault injection: a setting that
//! asks for one of these ends the start with an error that says so. [TLS](tls) comes with a crate of its own. LoRA adapters: a worker runs without them.

/// The page for writers of engines: its snippets are compiled and run as they stand there.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/writing-a-backend-in-rust.md")]
pub struct Page;

mod admin;
mod args;
mod card;
mod config;
mod context;
mod deadline;
mod discovery;
pub mod engine;
mod environment;
mod error;
mod events;
mod flag;
mod hash;
mod health;
mod http;
mod instance;
pub mod kv;
mod load;
mod logging;
mod metrics;
mod nats;
mod output;
mod place;
mod plane;
mod progress;
mod publishing;
mod random;
mod raw;
mod request;
mod run;
pub mod schema;
mod serving;
mod settings;
mod status;
pub mod telemetry;
#[cfg(feature = "testing")]
pub mod testing;
pub mod tls;
mod wire;
mod worker;

pub use args::CommonArgs;
pub use config::{
    DisaggregationMode, EngineConfig, LlmRegistration, ModelInput, RuntimeConfig, StructuralTagMode,
    StructuralTagSchema, StructuralTagScope, WorkerConfig,
};
pub use context::{AsyncEngineContext, GenerateContext};
pub use engine::{LLMEngine, MetricsBindings, MetricsCtx};
pub use error::{BackendError, DynamoError, DynamoErrorBuilder, ErrorType};
pub use kv::{KvEventPublisher, KvEventSource, OnPublisherReady};
pub use metrics::{ComponentGauges, ComponentSnapshot, EngineMetrics, ExpositionCallback, Gauge, LifecycleGauges};
pub use output::{
    CompletionUsage, FinishReason, LLMEngineOutput, LLMEngineOutputExt, LogProbs, PromptTokensDetails, StopReason,
    TopLogprob, TopLogprobs, chunk, usage,
};
pub use publishing::{OnSnapshotPublisherReady, SnapshotPublisher};
pub use raw::RawEngine;
pub use request::{
    BootstrapInfo, GuidedDecodingOptions, HEALTH_CHECK_KEY, OutputOptions, PrefillResult, PreprocessedRequest,
    PreprocessedRequestBuilder, RoutingHints, SamplingOptions, StopConditions, TraceLink,
};
pub use run::{run, run_many, run_raw};
pub use worker::Worker;
