//! Engines that take the body of a request as its client sent it, and answer with objects.

use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::BoxStream;
use serde_json::Value;

use crate::config::EngineConfig;
use crate::context::{AsyncEngineContext, GenerateContext};
use crate::engine::{LLMEngine, MetricsBindings, MetricsCtx, unsupported};
use crate::error::DynamoError;
use crate::output::LLMEngineOutput;
use crate::request::PreprocessedRequest;

/// An engine that takes a body in the shape of the API and yields JSON objects; the end of the stream is the end.
///
/// It needs `ModelInput::Text` or `ModelInput::Tensor`. There is no terminal item, no usage, no migration in the middle, and
/// there are no KV events. Life and hooks are those of [`LLMEngine`].
#[async_trait]
pub trait RawEngine: Send + Sync + 'static {
    /// Loads the model. The members about tokens of what it returns stay `None`.
    async fn start(&self, worker_id: u64) -> Result<EngineConfig, DynamoError>;

    /// Answers one request: every object reaches the client as it is. The stream ends when the context is stopped.
    async fn generate(
        &self,
        request: Value,
        ctx: GenerateContext,
    ) -> Result<BoxStream<'static, Result<Value, DynamoError>>, DynamoError>;

    /// Gives everything back: once at the end of the worker. Must also succeed for an engine that never started, or only
    /// half, and when it is called again.
    async fn cleanup(&self) -> Result<(), DynamoError>;

    /// Gives up what a cancelled request still holds; called at most once, and only for a stopped or killed context.
    async fn abort(&self, _ctx: Arc<dyn AsyncEngineContext>) {}

    /// Prepares the end: called once, after the worker left discovery and its streams ended.
    async fn drain(&self) -> Result<(), DynamoError> {
        Ok(())
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

/// An engine of either kind.
#[derive(Clone)]
pub(crate) enum Engine {
    Tokens(Arc<dyn LLMEngine>),
    Raw(Arc<dyn RawEngine>),
}

impl Engine {
    /// Returns what the hooks are called on, which both kinds have.
    pub(crate) fn hooks(&self) -> Arc<dyn LLMEngine> {
        match self {
            Self::Tokens(engine) => Arc::clone(engine),
            Self::Raw(engine) => Arc::new(Hooks(Arc::clone(engine))),
        }
    }
}

/// Stands for a raw engine where hooks are called.
pub(crate) struct Hooks(pub(crate) Arc<dyn RawEngine>);

#[async_trait]
impl LLMEngine for Hooks {
    async fn start(&self, worker_id: u64) -> Result<EngineConfig, DynamoError> {
        self.0.start(worker_id).await
    }

    async fn generate(
        &self,
        _request: PreprocessedRequest,
        _ctx: GenerateContext,
    ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError> {
        Err(DynamoError::invalid("this engine takes the body of a request, and no tokens"))
    }

    async fn cleanup(&self) -> Result<(), DynamoError> {
        self.0.cleanup().await
    }

    async fn abort(&self, ctx: Arc<dyn AsyncEngineContext>) {
        self.0.abort(ctx).await;
    }

    async fn drain(&self) -> Result<(), DynamoError> {
        self.0.drain().await
    }

    async fn setup_metrics(&self, ctx: MetricsCtx<'_>) -> Result<MetricsBindings, DynamoError> {
        self.0.setup_metrics(ctx).await
    }

    async fn health_check_payload(&self) -> Result<Option<Value>, DynamoError> {
        self.0.health_check_payload().await
    }

    fn supported_controls(&self) -> Vec<String> {
        self.0.supported_controls()
    }

    async fn engine_control(&self, name: &str, body: Value) -> Result<Value, DynamoError> {
        self.0.engine_control(name, body).await
    }

    fn supported_updates(&self) -> Vec<String> {
        self.0.supported_updates()
    }

    async fn engine_update(&self, name: &str, body: Value) -> Result<Value, DynamoError> {
        self.0.engine_update(name, body).await
    }

    async fn on_endpoint_ready(&self, address: &str) -> Result<(), DynamoError> {
        self.0.on_endpoint_ready(address).await
    }
}
