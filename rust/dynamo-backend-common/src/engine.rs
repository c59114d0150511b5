//! The contract of an engine.

use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::BoxStream;
use serde_json::Value;

use crate::config::EngineConfig;
pub use crate::context::{AsyncEngineContext, GenerateContext};
use crate::error::DynamoError;
use crate::kv::KvEventSource;
use crate::metrics::EngineMetrics;
use crate::output::LLMEngineOutput;
use crate::publishing::OnSnapshotPublisherReady;
use crate::request::PreprocessedRequest;

/// What [`LLMEngine::setup_metrics`] gets.
#[derive(Debug)]
pub struct MetricsCtx<'a> {
    /// The model's name, as `start()` returned it.
    pub model: &'a str,
    /// The endpoint's component.
    pub component: &'a str,
    /// What `start()` took, in seconds.
    pub model_load_time_seconds: f64,
    /// Where an engine adds metrics of its own.
    pub metrics: &'a EngineMetrics,
}

/// What an engine wants of the worker's metrics.
#[derive(Default)]
pub struct MetricsBindings {
    /// The data-parallel ranks that the engine will publish snapshots of.
    pub dp_ranks: Vec<u32>,
    /// Receives the publisher of snapshots, once, where there is a rank.
    pub on_publisher_ready: Option<OnSnapshotPublisherReady>,
}

impl std::fmt::Debug for MetricsBindings {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let has_callback = self.on_publisher_ready.is_some();
        write!(formatter, "MetricsBindings {{ dp_ranks: {:?}, on_publisher_ready: {has_callback} }}", self.dp_ranks)
    }
}

/// The answer of an engine to a control or an update that it does not know.
pub(crate) fn unsupported(what: &str, name: &str) -> Value {
    serde_json::json!({"status": "error", "message": format!("unsupported engine {what}: {name}")})
}

/// An engine that takes tokens and answers with tokens. One value serves many requests at once.
///
/// A stream yields any number of chunks without a finish reason, and then one terminal item: a chunk with a finish reason,
/// or an `Err`. Nothing follows it. See [`testing::run_conformance`](crate::testing) for a check of all promises.
#[async_trait]
pub trait LLMEngine: Send + Sync + 'static {
    /// Loads the model and reports its figures. `worker_id` is unique among the replicas.
    async fn start(&self, worker_id: u64) -> Result<EngineConfig, DynamoError>;

    /// Answers one request. Errors of the request itself are returned before the stream begins, or are its last item.
    async fn generate(
        &self,
        request: PreprocessedRequest,
        ctx: GenerateContext,
    ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError>;

    /// Gives everything back: once at the end of the worker. Must also succeed for an engine that never started, or only
    /// half, and when it is called again.
    async fn cleanup(&self) -> Result<(), DynamoError>;

    /// Gives up what a cancelled request still holds; called at most once, and only for a stopped or killed context.
    async fn abort(&self, _ctx: Arc<dyn AsyncEngineContext>) {}

    /// Prepares the end: called once, after the worker left discovery and its streams ended.
    async fn drain(&self) -> Result<(), DynamoError> {
        Ok(())
    }

    /// Returns whether no peer reads this prefill worker's memory any more; `None`: not known, and not waited for.
    async fn is_quiescent(&self) -> Result<Option<bool>, DynamoError> {
        Ok(None)
    }

    /// Returns where the KV events of each data-parallel rank come from, once after `start()`. Without `kv_cache_block_size` in
    /// the engine's configuration none is published.
    async fn kv_event_sources(&self) -> Result<Vec<KvEventSource>, DynamoError> {
        Ok(Vec::new())
    }

    /// Sets up metrics, once after `start()`.
    async fn setup_metrics(&self, _ctx: MetricsCtx<'_>) -> Result<MetricsBindings, DynamoError> {
        Ok(MetricsBindings::default())
    }

    /// Returns the request of the health check; `None`: there is none.
    async fn health_check_payload(&self) -> Result<Option<Value>, DynamoError> {
        Ok(None)
    }

    /// Returns the controls that `POST /engine/control/NAME` reaches.
    fn supported_controls(&self) -> Vec<String> {
        Vec::new()
    }

    /// Carries out a control.
    async fn engine_control(&self, name: &str, _body: Value) -> Result<Value, DynamoError> {
        Ok(unsupported("control", name))
    }

    /// Returns the updates that `POST /engine/update/NAME` reaches.
    fn supported_updates(&self) -> Vec<String> {
        Vec::new()
    }

    /// Carries out an update.
    async fn engine_update(&self, name: &str, _body: Value) -> Result<Value, DynamoError> {
        Ok(unsupported("update", name))
    }

    /// Hears of the endpoint's address, after the listener is there and before the model is registered.
    async fn on_endpoint_ready(&self, _address: &str) -> Result<(), DynamoError> {
        Ok(())
    }
}
