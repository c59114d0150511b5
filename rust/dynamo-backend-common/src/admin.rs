//! The Worker Admin API: takes a worker out of service while its process lives, and reports when it may be deleted.
//!
//! ```text
//!            drain                   grace over, no request, no transfer
//! serving ----------> draining -------------------------------------------> drained
//!    ^                   |                                                     |
//!    +------ resume -----+------------------------- resume --------------------+     any --SIGTERM--> stopping
//! ```
//!
//! A drain has no deadline, and it never ends the process. The work of one runs apart from the request that asked for it: a
//! client that hangs up strands nothing.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::{Mutex as Transition, OwnedMutexGuard, oneshot};

use crate::config::DisaggregationMode;
use crate::engine::LLMEngine;
use crate::instance::Instance;
use crate::plane::{Server, lock};

/// How often a drain looks whether it is done, beside at the end of each request.
const TICK: Duration = Duration::from_millis(250);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Serving,
    Draining,
    Drained,
    Stopping,
}

impl State {
    fn word(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Draining => "draining",
            Self::Drained => "drained",
            Self::Stopping => "stopping",
        }
    }
}

#[derive(Debug)]
struct Book {
    state: State,
    /// What is known of the peers that read this worker's memory.
    kv_transfers: &'static str,
    last_error: Option<String>,
    /// Counts the transitions: work of an earlier one changes nothing any more.
    generation: u64,
}

/// The administrative state of one worker.
pub(crate) struct Admin {
    book: Mutex<Book>,
    /// Held during a transition.
    transition: Arc<Transition<()>>,
    server: Arc<Server>,
    instance: Arc<Instance>,
    engine: Arc<dyn LLMEngine>,
    mode: DisaggregationMode,
    grace: Duration,
}

impl Admin {
    /// `grace`: how long requests are still admitted after the worker left discovery.
    pub(crate) fn new(
        server: Arc<Server>,
        instance: Arc<Instance>,
        engine: Arc<dyn LLMEngine>,
        mode: DisaggregationMode,
        grace: Duration,
    ) -> Arc<Self> {
        let kv_transfers = initial_transfers(mode);
        let book = Book { state: State::Serving, kv_transfers, last_error: None, generation: 0 };
        Arc::new(Self { book: Mutex::new(book), transition: Arc::default(), server, instance, engine, mode, grace })
    }

    /// Returns the status object.
    pub(crate) fn status(&self) -> Value {
        let book = lock(&self.book);
        let mut status = json!({
            "state": book.state.word(),
            "inflight_requests": self.server.open_requests(),
            "kv_transfers": book.kv_transfers,
            "safe_to_delete": book.state == State::Drained,
            "discovery_registered": self.instance.is_registered(),
        });
        if let Some(error) = &book.last_error {
            status["last_error"] = json!(error);
        }
        status
    }

    /// Carries out `drain` or `resume`; `None` for another name. Answers with the status, or why it did nothing.
    pub(crate) async fn call(self: &Arc<Self>, name: &str, body: &Value) -> Option<Result<Value, String>> {
        if !matches!(name, "drain" | "resume") {
            return None;
        }
        if !body.is_object() {
            return Some(Err("worker Admin API request body must be a JSON object".to_owned()));
        }
        let done = if name == "drain" { self.drain().await } else { self.resume().await };
        Some(done.map(|()| self.status()))
    }

    /// Returns once the worker has left discovery.
    async fn drain(self: &Arc<Self>) -> Result<(), String> {
        let held = Arc::clone(&self.transition).lock_owned().await;
        let generation = {
            let mut book = lock(&self.book);
            match book.state {
                State::Serving => {}
                State::Draining | State::Drained => return Ok(()),
                State::Stopping => return Err(STOPPING.to_owned()),
            }
            book.state = State::Draining;
            book.last_error = None;
            book.kv_transfers = initial_transfers(self.mode);
            book.generation += 1;
            book.generation
        };
        let (answer, answered) = oneshot::channel();
        let admin = Arc::clone(self);
        tokio::spawn(async move { admin.leave(held, generation, answer).await });
        answered.await.unwrap_or_else(|_| Err("the drain was given up".to_owned()))
    }

    /// The work of a drain.
    async fn leave(
        self: Arc<Self>,
        held: OwnedMutexGuard<()>,
        generation: u64,
        answer: oneshot::Sender<Result<(), String>>,
    ) {
        let left = self.instance.hold_back(true).await;
        if let Err(error) = left {
            let text = format!("failed to unregister worker from discovery: {error}");
            let mut book = lock(&self.book);
            if book.generation == generation {
                book.state = State::Serving;
            }
            book.last_error = Some(text.clone());
            drop(book);
            // Whoever asked may have hung up; the status says it, too.
            let _ = answer.send(Err(text));
            return;
        }
        drop(held);
        let _ = answer.send(Ok(()));
        self.finish(generation).await;
    }

    /// Waits for the end of a drain: the grace, the requests, the transfers.
    async fn finish(&self, generation: u64) {
        if !self.server.is_admission_closed() {
            tokio::time::sleep(self.grace).await;
            if !self.is_current(generation) {
                return;
            }
            self.server.close_admission(true);
        }
        loop {
            let idle = self.server.idle();
            if !self.is_current(generation) {
                return;
            }
            if self.server.open_requests() == 0 && self.has_settled(generation).await {
                return;
            }
            // A tick that comes first looks again, which is what it is for.
            let _ = tokio::time::timeout(TICK, idle).await;
        }
    }

    /// Returns whether the drain is over, as far as the peers of a prefill worker are concerned.
    async fn has_settled(&self, generation: u64) -> bool {
        let (kv_transfers, error) = if self.mode == DisaggregationMode::Prefill {
            match self.engine.is_quiescent().await {
                Ok(Some(true)) => ("complete", None),
                Ok(Some(false)) => ("pending", None),
                Ok(None) => ("unknown", None),
                Err(error) => ("unknown", Some(format!("is_quiescent() failed: {error}"))),
            }
        } else {
            ("not_applicable", None)
        };
        let mut book = lock(&self.book);
        if book.generation != generation || book.state != State::Draining {
            return true;
        }
        book.kv_transfers = kv_transfers;
        if error.is_some() {
            book.last_error = error;
        }
        let is_over = matches!(kv_transfers, "complete" | "not_applicable");
        if is_over {
            book.state = State::Drained;
            drop(book);
            tracing::info!("worker drained and is safe to delete");
        }
        is_over
    }

    fn is_current(&self, generation: u64) -> bool {
        let book = lock(&self.book);
        book.generation == generation && book.state == State::Draining
    }

    async fn resume(self: &Arc<Self>) -> Result<(), String> {
        let held = Arc::clone(&self.transition).lock_owned().await;
        let generation = {
            let mut book = lock(&self.book);
            match book.state {
                State::Serving => return Ok(()),
                State::Draining | State::Drained => {}
                State::Stopping => return Err(STOPPING.to_owned()),
            }
            book.generation += 1;
            book.generation
        };
        let admin = Arc::clone(self);
        let back = tokio::spawn(async move { admin.come_back(held, generation).await });
        back.await.unwrap_or_else(|_| Err("the resumption was given up".to_owned()))
    }

    /// The work of a resumption.
    async fn come_back(self: Arc<Self>, _held: OwnedMutexGuard<()>, generation: u64) -> Result<(), String> {
        let back = self.instance.hold_back(false).await;
        let mut book = lock(&self.book);
        if book.state == State::Stopping {
            return Err(STOPPING.to_owned());
        }
        let Err(error) = back else {
            book.state = State::Serving;
            book.last_error = None;
            book.kv_transfers = initial_transfers(self.mode);
            self.server.close_admission(false);
            return Ok(());
        };
        let text = format!("failed to re-register worker in discovery: {error}");
        book.last_error = Some(text.clone());
        if book.state == State::Draining {
            let admin = Arc::clone(&self);
            tokio::spawn(async move { admin.finish(generation).await });
        }
        Err(text)
    }

    /// Begins the end of the process: no transition is possible any more.
    pub(crate) async fn stop(&self) {
        let _held = self.transition.lock().await;
        let mut book = lock(&self.book);
        book.state = State::Stopping;
        book.generation += 1;
    }

    /// Notes that leaving discovery failed at the end of the process.
    pub(crate) fn note_failure(&self, text: String) {
        lock(&self.book).last_error = Some(text);
    }
}

const STOPPING: &str = "worker shutdown is already in progress";

fn initial_transfers(mode: DisaggregationMode) -> &'static str {
    if mode == DisaggregationMode::Prefill { "unknown" } else { "not_applicable" }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use async_trait::async_trait;
    use futures::FutureExt;
    use futures::future::BoxFuture;
    use futures::stream::BoxStream;

    use super::*;
    use crate::config::EngineConfig;
    use crate::context::GenerateContext;
    use crate::discovery::Discovery;
    use crate::error::{DynamoError, ErrorType};
    use crate::health::Health;
    use crate::metrics::ListenerMetrics;
    use crate::output::LLMEngineOutput;
    use crate::plane::{Call, Handler};
    use crate::request::PreprocessedRequest;
    use crate::settings::ListenerSettings;

    #[derive(Default)]
    struct Store {
        fails: AtomicBool,
        holds: AtomicBool,
    }

    impl Store {
        fn write(&self, is_there: bool) -> Result<(), DynamoError> {
            if self.fails.load(Ordering::SeqCst) {
                return Err(DynamoError::top(ErrorType::CannotConnect, "no etcd"));
            }
            self.holds.store(is_there, Ordering::SeqCst);
            Ok(())
        }
    }

    impl Discovery for Store {
        fn put(&self, _: &str, _: &str) -> Result<(), DynamoError> {
            self.write(true)
        }

        fn delete(&self, _: &str) -> Result<(), DynamoError> {
            self.write(false)
        }

        fn close(&self) {}

        fn default_host(&self) -> &'static str {
            "127.0.0.1"
        }
    }

    /// An engine whose peers are what a test says.
    #[derive(Default)]
    struct Engine(Mutex<Option<Result<Option<bool>, DynamoError>>>);

    impl Engine {
        fn peers(&self, answer: Result<Option<bool>, DynamoError>) {
            *lock(&self.0) = Some(answer);
        }
    }

    #[async_trait]
    impl LLMEngine for Engine {
        async fn start(&self, _: u64) -> Result<EngineConfig, DynamoError> {
            Ok(EngineConfig::default())
        }

        async fn generate(
            &self,
            _: PreprocessedRequest,
            _: GenerateContext,
        ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError> {
            Ok(Box::pin(futures::stream::empty()))
        }

        async fn cleanup(&self) -> Result<(), DynamoError> {
            Ok(())
        }

        async fn is_quiescent(&self) -> Result<Option<bool>, DynamoError> {
            lock(&self.0).clone().unwrap_or(Ok(None))
        }
    }

    struct Nothing;

    impl Handler for Nothing {
        fn serve(self: Arc<Self>, _: Call) -> BoxFuture<'static, ()> {
            async {}.boxed()
        }
    }

    struct Rig {
        admin: Arc<Admin>,
        server: Arc<Server>,
        instance: Arc<Instance>,
        store: Arc<Store>,
        engine: Arc<Engine>,
        health: Health,
    }

    impl Rig {
        async fn new(mode: DisaggregationMode) -> Self {
            let server = Server::new(ListenerSettings::from_env(), ListenerMetrics::default()).expect("a server");
            server.register("p", Arc::new(Nothing));
            let (store, engine) = (Arc::<Store>::default(), Arc::<Engine>::default());
            let (key, health) = ("k".to_owned(), Health::new(ListenerMetrics::default()));
            health.serving("p", true);
            health.answered();
            let instance = Instance::new(Arc::clone(&store) as Arc<dyn Discovery>, key.clone(), key, health.clone());
            instance.publish().await.expect("published");
            let hooks: Arc<dyn LLMEngine> = engine.clone();
            let grace = Duration::from_secs(5);
            let admin = Admin::new(Arc::clone(&server), Arc::clone(&instance), hooks, mode, grace);
            Self { admin, server, instance, store, engine, health }
        }

        async fn call(&self, name: &str) -> Result<Value, String> {
            self.admin.call(name, &json!({})).await.expect("a known name")
        }

        /// Returns state, transfers and whether callers find the worker.
        fn facts(&self) -> (String, String, bool) {
            self.health.answered(); // a probe, or the end of a request
            let status = self.admin.status();
            assert_eq!(status["discovery_registered"], self.health.body().0);
            assert_eq!(status["discovery_registered"], self.store.holds.load(Ordering::SeqCst));
            assert_eq!(status["safe_to_delete"], status["state"] == "drained");
            let text = |name: &str| status[name].as_str().expect("a text").to_owned();
            (text("state"), text("kv_transfers"), status["discovery_registered"] == true)
        }

        fn state(&self) -> String {
            self.facts().0
        }

        async fn wait(&self, state: &str) {
            while self.state() != state {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_waits_for_its_grace_and_its_requests_and_can_be_taken_back() {
        let rig = Rig::new(DisaggregationMode::Aggregated).await;
        let running = rig.server.admit("p").expect("admitted");
        let status = rig.call("drain").await.expect("a status");
        assert_eq!((&status["state"], &status["inflight_requests"]), (&json!("draining"), &json!(1)));
        assert_eq!(rig.facts(), ("draining".into(), "not_applicable".into(), false));
        drop(rig.server.admit("p").expect("admitted during the grace"));
        assert_eq!(rig.call("drain").await.expect("a status")["state"], "draining");
        tokio::time::sleep(Duration::from_secs(6)).await;
        let late = rig.server.admit("p").err().expect("declined");
        assert_eq!(late.error_type(), ErrorType::WorkerUnavailable);
        assert!(late.to_string().contains("worker is not accepting new requests"));
        assert_eq!(rig.state(), "draining");
        drop(running);
        rig.wait("drained").await;
        assert_eq!(rig.call("drain").await.expect("a status")["safe_to_delete"], true);
        let status = rig.call("resume").await.expect("a status");
        assert_eq!((&status["state"], &status["discovery_registered"]), (&json!("serving"), &json!(true)));
        drop(rig.server.admit("p").expect("admitted again"));
        assert_eq!(rig.call("resume").await.expect("a status")["state"], "serving");
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(rig.state(), "serving");
    }

    #[tokio::test(start_paused = true)]
    async fn what_fails_leaves_the_state_before_and_says_why() {
        let rig = Rig::new(DisaggregationMode::Decode).await;
        rig.store.fails.store(true, Ordering::SeqCst);
        let why = rig.call("drain").await.expect_err("no discovery");
        assert_eq!(why, "failed to unregister worker from discovery: CannotConnect: no etcd");
        assert_eq!(rig.admin.status()["last_error"], why);
        assert_eq!(rig.facts(), ("serving".into(), "not_applicable".into(), true));
        drop(rig.server.admit("p").expect("still admitted"));

        rig.store.fails.store(false, Ordering::SeqCst);
        let running = rig.server.admit("p").expect("admitted");
        assert_eq!(rig.call("drain").await.expect("a status").get("last_error"), None);
        tokio::time::sleep(Duration::from_secs(6)).await;
        rig.store.fails.store(true, Ordering::SeqCst);
        let why = rig.call("resume").await.expect_err("no discovery");
        assert_eq!(why, "failed to re-register worker in discovery: CannotConnect: no etcd");
        assert_eq!(rig.state(), "draining");
        assert!(rig.server.admit("p").is_err());
        drop(running);
        rig.wait("drained").await;
        assert!(rig.call("resume").await.is_err());
        assert_eq!(rig.state(), "drained");
        rig.store.fails.store(false, Ordering::SeqCst);
        assert_eq!(rig.call("resume").await.expect("a status").get("last_error"), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_prefill_worker_is_drained_once_its_peers_are_known_to_be_done() {
        let rig = Rig::new(DisaggregationMode::Prefill).await;
        assert_eq!(rig.facts().1, "unknown");
        rig.call("drain").await.expect("a status");
        for (answer, transfers) in [
            (Ok(None), "unknown"),
            (Ok(Some(false)), "pending"),
            (Err(DynamoError::builder().message("no answer").build()), "unknown"),
        ] {
            rig.engine.peers(answer);
            tokio::time::sleep(Duration::from_secs(30)).await;
            assert_eq!(rig.facts(), ("draining".into(), transfers.into(), false));
        }
        assert_eq!(rig.admin.status()["last_error"], "is_quiescent() failed: Unknown: no answer");
        rig.engine.peers(Ok(Some(true)));
        rig.wait("drained").await;
        assert_eq!(rig.facts().1, "complete");
        rig.call("resume").await.expect("a status");
        assert_eq!(rig.facts().1, "unknown");
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_changes_a_worker_that_stops() {
        let rig = Rig::new(DisaggregationMode::Aggregated).await;
        rig.call("drain").await.expect("a status");
        rig.admin.stop().await;
        for name in ["drain", "resume"] {
            assert_eq!(rig.call(name).await, Err(STOPPING.to_owned()));
        }
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(rig.state(), "stopping");
        assert!(rig.admin.call("other", &json!({})).await.is_none());
        assert!(rig.admin.call("drain", &json!([])).await.is_some_and(|answer| answer.is_err()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_sleeping_engine_is_not_put_back_by_an_operator_nor_a_drained_one_by_a_control() {
        let rig = Rig::new(DisaggregationMode::Aggregated).await;
        let control = |name: &'static str| rig.instance.control(&*rig.engine, name, json!({}));
        control("sleep").await.expect("an answer");
        rig.call("drain").await.expect("a status");
        assert_eq!(rig.call("resume").await.expect("a status")["discovery_registered"], false);
        rig.instance.control(&Waking, "wake_up", json!({})).await.expect("an answer");
        assert_eq!(rig.facts(), ("serving".into(), "not_applicable".into(), true));
        rig.call("drain").await.expect("a status");
        rig.instance.control(&Waking, "wake_up", json!({})).await.expect("an answer");
        assert!(!rig.facts().2);
    }

    /// An engine that does what every control asks.
    struct Waking;

    #[async_trait]
    impl LLMEngine for Waking {
        async fn start(&self, _: u64) -> Result<EngineConfig, DynamoError> {
            Ok(EngineConfig::default())
        }

        async fn generate(
            &self,
            _: PreprocessedRequest,
            _: GenerateContext,
        ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError> {
            Ok(Box::pin(futures::stream::empty()))
        }

        async fn cleanup(&self) -> Result<(), DynamoError> {
            Ok(())
        }

        async fn engine_control(&self, _: &str, _: Value) -> Result<Value, DynamoError> {
            Ok(json!({"status": "ok"}))
        }
    }
}
