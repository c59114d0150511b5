//! What an engine is told about one request while it serves it, most of all whether it is still wanted.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use async_trait::async_trait;

use crate::flag::Flag;

/// Whether a request was stopped or killed. "Stop" asks to end gracefully, "kill" means that nobody reads any more.
#[async_trait]
pub trait AsyncEngineContext: Send + Sync + fmt::Debug {
    /// Returns the id of the request.
    fn id(&self) -> &str;

    /// Returns whether the request was stopped or killed.
    fn is_stopped(&self) -> bool;

    /// Returns whether the request was killed.
    fn is_killed(&self) -> bool;

    /// Returns once the request is stopped or killed, at once if it is already.
    async fn stopped(&self);

    /// Returns once the request is killed.
    async fn killed(&self);

    /// Asks the request to end gracefully; idempotent.
    fn stop_generating(&self);

    /// Ends the request: nobody reads what it still makes; idempotent.
    fn kill(&self);
}

/// The framework's context of one request.
#[derive(Debug)]
pub(crate) struct Controller {
    id: String,
    stopped: Flag,
    killed: Flag,
}

impl Controller {
    pub(crate) fn new(id: impl Into<String>) -> Arc<Self> {
        Arc::new(Self { id: id.into(), stopped: Flag::default(), killed: Flag::default() })
    }
}

#[async_trait]
impl AsyncEngineContext for Controller {
    fn id(&self) -> &str {
        &self.id
    }

    fn is_stopped(&self) -> bool {
        self.stopped.is_set()
    }

    fn is_killed(&self) -> bool {
        self.killed.is_set()
    }

    async fn stopped(&self) {
        self.stopped.wait().await;
    }

    async fn killed(&self) {
        self.killed.wait().await;
    }

    fn stop_generating(&self) {
        self.stopped.set();
    }

    fn kill(&self) {
        self.killed.set();
        self.stopped.set();
    }
}

/// Everything about a request that does not change while it runs.
#[derive(Debug, Default)]
struct Facts {
    metadata: BTreeMap<String, String>,
    trace: BTreeMap<String, String>,
    prompt_tokens: Option<u32>,
    first_token: Flag,
}

/// The context that [`generate`](crate::LLMEngine::generate) receives. Cheap to clone, so that a stream can own it.
#[derive(Clone, Debug)]
pub struct GenerateContext {
    inner: Arc<dyn AsyncEngineContext>,
    facts: Arc<Facts>,
}

impl GenerateContext {
    /// Wraps a context, with the metadata of its request.
    pub fn new(inner: Arc<dyn AsyncEngineContext>, metadata: BTreeMap<String, String>) -> Self {
        Self { inner, facts: Arc::new(Facts { metadata, ..Facts::default() }) }
    }

    pub(crate) fn of_request(
        inner: Arc<dyn AsyncEngineContext>,
        metadata: BTreeMap<String, String>,
        trace: BTreeMap<String, String>,
        prompt_tokens: Option<u32>,
    ) -> Self {
        let facts = Facts { metadata, trace, prompt_tokens, first_token: Flag::default() };
        Self { inner, facts: Arc::new(facts) }
    }

    /// Reports that the first token exists: on a decode worker the abort of a cancelled request waits for it.
    ///
    /// The framework reports it by itself with the first chunk that has tokens; an engine calls this when it knows
    /// earlier that the KV transfer of its prefill peer is complete.
    pub fn notify_first_token(&self) {
        self.facts.first_token.set();
    }

    /// Returns the metadata of the request.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.facts.metadata
    }

    /// Returns the trace headers that came with the request (`traceparent` and others); empty without tracing.
    pub fn trace_headers(&self) -> &BTreeMap<String, String> {
        &self.facts.trace
    }

    /// Returns how long the prompt was when its client sent it, where the request moved here with tokens of another
    /// worker behind its prompt.
    pub fn original_prompt_tokens(&self) -> Option<u32> {
        self.facts.prompt_tokens
    }

    /// Returns the context as what other parts of an engine may share.
    pub fn inner_arc(&self) -> Arc<dyn AsyncEngineContext> {
        Arc::clone(&self.inner)
    }

    pub(crate) fn has_first_token(&self) -> bool {
        self.facts.first_token.is_set()
    }

    pub(crate) async fn first_token(&self) {
        self.facts.first_token.wait().await;
    }
}

impl Deref for GenerateContext {
    type Target = dyn AsyncEngineContext;

    fn deref(&self) -> &Self::Target {
        &*self.inner
    }
}

impl From<Arc<dyn AsyncEngineContext>> for GenerateContext {
    fn from(inner: Arc<dyn AsyncEngineContext>) -> Self {
        Self::new(inner, BTreeMap::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_kill_is_also_a_stop() {
        let controller = Controller::new("r");
        let context = GenerateContext::from(controller.clone() as Arc<dyn AsyncEngineContext>);
        let waiting = tokio::spawn({
            let context = context.clone();
            async move { context.stopped().await }
        });
        assert!(!context.is_stopped() && !context.is_killed());
        controller.kill();
        waiting.await.expect("the waiter ends");
        assert!(context.is_stopped() && context.is_killed());
        context.killed().await;
    }

    #[tokio::test]
    async fn a_stop_is_no_kill() {
        let controller = Controller::new("r");
        controller.stop_generating();
        controller.stopped().await;
        assert!(controller.is_stopped() && !controller.is_killed());
    }
}
