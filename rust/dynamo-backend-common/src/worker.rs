//! The worker: drives one engine from its start to its clean-up.
//!
//! The way up: connect, `start()`, metrics, register the model, serve. The way down: out of discovery, grace, streams in
//! flight, cut what is left, `drain()`, `cleanup()`, leave. Whatever fails on the way up, an engine whose `start()` was
//! entered is cleaned up exactly once.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::FutureExt;
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;

use crate::admin::Admin;
use crate::card::{self, Assets, CardFile};
use crate::config::{DisaggregationMode, EngineConfig, WorkerConfig};
use crate::deadline::Deadline;
use crate::discovery::{self, Discovery};
use crate::engine::{LLMEngine, MetricsCtx};
use crate::environment::{self, LOOPBACK, Planes, advertised};
use crate::error::{BackendError, DynamoError, ErrorType};
use crate::flag::Flag;
use crate::health::{self, Health};
use crate::instance::{self, Instance};
use crate::load::Load;
use crate::metrics::EngineMetrics;
use crate::nats::NatsConnection;
use crate::place::{Place, encode_path};
use crate::plane::{Front, Server, lock};
use crate::publishing::{Publishing, SnapshotPublisher};
use crate::raw::{Engine, RawEngine};
use crate::serving::Serving;
use crate::settings::{self, ListenerSettings, ShutdownTimes};
use crate::status::Status;

/// What the log and the exit status of a forced end name: 911, of which the system keeps eight bits.
const FORCED_EXIT_CODE: i32 = 911;
/// For streams that were cut to let go of the engine.
const CUT_PATIENCE: Duration = Duration::from_secs(2);
/// How often a long wait is logged.
const HEARTBEAT: Duration = Duration::from_secs(5);
const QUIESCENCE_POLL: Duration = Duration::from_millis(500);

/// Whether and when the end was asked for.
struct StopRequest {
    times: ShutdownTimes,
    flag: Flag,
    at: Mutex<Option<Instant>>,
    deadline: Mutex<Option<Deadline>>,
}

impl StopRequest {
    /// Begins the way down; the process is ended by force when it takes too long.
    fn request(&self, has_deadline: bool) {
        let mut at = lock(&self.at);
        if at.is_some() {
            return;
        }
        *at = Some(Instant::now());
        drop(at);
        self.flag.set();
        if has_deadline {
            let deadline = self.times.deadline();
            // Without the thread there is only no forced end; the orderly one does not need it.
            *lock(&self.deadline) = Deadline::begin(deadline, move || {
                tracing::error!(
                    "Graceful shutdown exceeded {}s; force-exiting with code {FORCED_EXIT_CODE}. Set \
                     DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT to override.",
                    deadline.as_secs_f64()
                );
                std::process::exit(FORCED_EXIT_CODE & 0xff);
            });
        }
    }

    /// Calls the forced end off: the orderly one is done, and the process may live on.
    fn done(&self) {
        *lock(&self.deadline) = None;
    }

    fn since(&self) -> Duration {
        lock(&self.at).map_or(Duration::ZERO, |at| at.elapsed())
    }

    /// Returns at this time after the request.
    async fn after(&self, offset: Duration) {
        self.flag.wait().await;
        tokio::time::sleep(offset.saturating_sub(self.since())).await;
    }
}

/// Serves one engine, once.
pub struct Worker {
    /// What requests are served with.
    serving: Engine,
    /// The same, where its hooks are called.
    engine: Arc<dyn LLMEngine>,
    config: WorkerConfig,
    stop: Arc<StopRequest>,
    health: Health,
    metrics: EngineMetrics,
    /// Which of the workers of this process it is, from 0 on.
    number: u16,
    hears_signals: AtomicBool,
}

/// What the way up made and the way down takes back.
#[derive(Default)]
struct Parts {
    server: Option<Arc<Server>>,
    instance: Option<Arc<Instance>>,
    model_key: Option<String>,
    publishing: Option<Publishing>,
    admin: Option<Arc<Admin>>,
    nats: Option<Arc<NatsConnection>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Worker {
    /// Prepares to serve an engine.
    pub fn new(engine: Arc<dyn LLMEngine>, config: WorkerConfig) -> Self {
        Self::of(Engine::Tokens(engine), config)
    }

    /// Prepares to serve an engine that takes the bodies of requests.
    pub fn new_raw(engine: Arc<dyn RawEngine>, config: WorkerConfig) -> Self {
        Self::of(Engine::Raw(engine), config)
    }

    pub(crate) fn of(serving: Engine, config: WorkerConfig) -> Self {
        let stop = StopRequest {
            times: ShutdownTimes::from_env(),
            flag: Flag::default(),
            at: Mutex::default(),
            deadline: Mutex::default(),
        };
        let metrics = EngineMetrics::default();
        let health = Health::new(metrics.listener().clone());
        metrics.watch(health.progress());
        Self {
            engine: serving.hooks(),
            serving,
            config,
            stop: Arc::new(stop),
            health,
            metrics,
            number: 0,
            hears_signals: AtomicBool::new(false),
        }
    }

    /// Makes this one of several workers of a process: fixed ports of its listeners count up by `number`, which begins at 0.
    #[must_use]
    pub fn numbered(self, number: u16) -> Self {
        Self { number, ..self }
    }

    /// Serves until SIGTERM or SIGINT, and returns after the clean-up; the error is what failed first.
    pub async fn run(self) -> Result<(), DynamoError> {
        let stop = Arc::clone(&self.stop);
        let outcome = self.run_to_the_end().await;
        stop.done();
        outcome
    }

    async fn run_to_the_end(self) -> Result<(), DynamoError> {
        self.config.check(matches!(self.serving, Engine::Raw(_)))?;
        environment::check(&self.config)?;
        self.listen_to_signals()?;
        let nats = match Planes::of(&self.config)?.wanted_by() {
            Some(flag) => Some(NatsConnection::open(flag).await?),
            None => None,
        };
        let worker_id = crate::random::worker_id()
            .map_err(|error| DynamoError::builder().message("the system has no random numbers").cause(error).build())?;
        let backend = self.config.runtime.discovery_backend.clone();
        let opened = tokio::task::spawn_blocking(move || discovery::open(backend.as_deref(), worker_id)).await;
        let discovery = opened
            .map_err(|error| DynamoError::builder().message("discovery could not be opened").cause(error).build())??;
        let status = self.serve_status(discovery.default_host()).await?;
        if self.stop.flag.is_set() {
            tracing::info!("Shutdown requested before the engine was started; leaving");
            discovery::close(discovery).await;
            return Ok(());
        }
        let mut parts = Parts { nats, ..Parts::default() };
        let outcome = self.live(worker_id, &discovery, status.as_ref(), &mut parts).await;
        self.clean_up().await;
        if let Some(server) = &parts.server {
            server.close().await;
        }
        for task in &parts.tasks {
            task.abort();
        }
        drop(parts.publishing.take());
        if let Some(key) = parts.model_key.take()
            && let Err(error) = discovery::delete(&discovery, key).await
        {
            tracing::warn!("leaving discovery failed, its records will expire: {error}");
        }
        discovery::close(discovery).await;
        if let Some(nats) = parts.nats.take() {
            nats.close().await;
        }
        outcome
    }

    /// Returns once the worker was asked to end.
    pub(crate) fn stopping(&self) -> impl Future<Output = ()> + use<> {
        let stop = Arc::clone(&self.stop);
        async move { stop.flag.wait().await }
    }

    /// Begins the way down at SIGTERM or SIGINT. Idempotent.
    pub(crate) fn listen_to_signals(&self) -> Result<(), DynamoError> {
        if self.hears_signals.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        for (kind, name) in [(SignalKind::terminate(), "SIGTERM"), (SignalKind::interrupt(), "SIGINT")] {
            let mut received = signal(kind).map_err(|error| {
                DynamoError::builder().message(format!("{name} cannot be listened to")).cause(error).build()
            })?;
            let stop = Arc::clone(&self.stop);
            tokio::spawn(async move {
                while received.recv().await.is_some() {
                    if stop.flag.is_set() {
                        tracing::debug!("{name} received again; the shutdown is under way");
                        continue;
                    }
                    tracing::info!("{name} received");
                    stop.request(true);
                }
            });
        }
        Ok(())
    }

    /// Starts the status server where one is asked for; returns it with its address for others.
    async fn serve_status(&self, default_host: &str) -> Result<Option<(Arc<Status>, String)>, DynamoError> {
        let Ok(port) = u16::try_from(settings::integer("DYN_SYSTEM_PORT", -1, -1)) else { return Ok(None) };
        let port = shifted(port, self.number);
        let host = settings::text("DYN_SYSTEM_HOST").unwrap_or_else(|| default_host.to_owned());
        let is_local = matches!(host.as_str(), LOOPBACK | "::1" | "localhost");
        let status = Status::new(self.health.clone(), self.metrics.clone(), is_local);
        let address = status.listen(&host, port).await?;
        let url = format!("http://{}", advertised(&address.ip().to_string(), address.port()));
        tracing::info!("status server on {url}");
        if let Ok(port) = u16::try_from(settings::integer("DYN_ADMIN_PORT", -1, -1)) {
            let host = settings::text("DYN_ADMIN_HOST").unwrap_or_else(|| LOOPBACK.to_owned());
            let address = status.listen_admin(&host, shifted(port, self.number)).await?;
            tracing::info!("engine routes on http://{}", advertised(&address.ip().to_string(), address.port()));
            if !address.ip().is_loopback() {
                tracing::warn!(
                    "anybody who reaches the admin port at {host} can change this engine: no key protects it; \
                     DYN_ADMIN_HOST={LOOPBACK} closes it"
                );
            }
        }
        Ok(Some((status, url)))
    }

    // -- the way up and down -------------------------------------------------------------------------------------

    async fn live(
        &self,
        worker_id: u64,
        discovery: &Arc<dyn Discovery>,
        status: Option<&(Arc<Status>, String)>,
        parts: &mut Parts,
    ) -> Result<(), DynamoError> {
        let failed = |error: &DynamoError| match error.error_type() {
            ErrorType::Backend(BackendError::InvalidArgument) => {}
            _ => tracing::error!("worker start-up failed: {error}"),
        };
        let began = Instant::now();
        let engine_config = self.start_engine(worker_id).await.inspect_err(failed)?.flat();
        let load_seconds = began.elapsed().as_secs_f64();
        let outcome = if self.stop.flag.is_set() {
            Ok(())
        } else {
            let set_up =
                guarded("set-up", self.set_up(worker_id, &engine_config, load_seconds, discovery, status, parts));
            let outcome = set_up.await.inspect_err(failed);
            if outcome.is_err() {
                self.health.begin_shutdown();
                return outcome;
            }
            self.stop.flag.wait().await;
            outcome
        };
        self.drain(parts).await;
        outcome
    }

    async fn start_engine(&self, worker_id: u64) -> Result<EngineConfig, DynamoError> {
        let limit = self.stop.times.start_until();
        tokio::select! {
            biased;
            started = guarded("start", self.engine.start(worker_id)) => started,
            () = self.stop.after(limit) => Err(DynamoError::backend(
                BackendError::EngineShutdown,
                format!("start() had not returned {}s after the request to stop, and was cancelled", limit.as_secs_f64()),
            )),
        }
    }

    async fn set_up(
        &self,
        worker_id: u64,
        engine: &EngineConfig,
        load_seconds: f64,
        discovery: &Arc<dyn Discovery>,
        status: Option<&(Arc<Status>, String)>,
        parts: &mut Parts,
    ) -> Result<(), DynamoError> {
        let config = &self.config;
        let served_name = card::served_name(config, engine);
        let place = Place::new(config, worker_id);
        let planes = Planes::of(config)?;
        let over_nats = |is_chosen: bool| parts.nats.clone().filter(|_| is_chosen);
        let mut publishing = Publishing::new(place.clone(), Arc::clone(discovery), over_nats(planes.events_over_nats));
        let load = if config.enable_kv_routing { publishing.report_load(config, engine).await? } else { None };
        self.set_up_metrics(worker_id, engine, &served_name, load_seconds, load.clone()).await?;
        if config.enable_kv_routing {
            let sources = self.engine.kv_event_sources().await?;
            publishing.connect(sources, engine.kv_cache_block_size, &self.metrics).await?;
        }
        let server = Server::new(self.listener_settings(), self.metrics.listener().clone())?;
        let nats = over_nats(planes.requests_over_nats);
        let (front, listener) = Front::open(server, nats, discovery.default_host()).await?;
        let card = self.build_card(engine, status).await?;
        self.engine.on_endpoint_ready(&front.address(&place)).await?;
        let model_key = place.model_key();
        parts.model_key = Some(model_key.clone());
        discovery::put(discovery, model_key, place.model_record(&card).to_string())
            .await
            .map_err(|error| DynamoError::builder().message(format!("model attach: {error}")).cause(error).build())?;

        let record = front.record(&place).to_string();
        let instance = Instance::new(Arc::clone(discovery), place.instance_key(), record, self.health.clone());
        if let Some((status, _)) = status {
            status.set_control(instance::controls(&self.engine, &instance)?);
        }
        let (namespace, component, endpoint) = (&config.namespace, &config.component, &config.endpoint);
        tracing::info!("Serving {served_name} on {namespace}.{component}.{endpoint}");
        self.serve(&front, listener, &place, load, parts).await?;
        if config.has_local_indexer() {
            publishing.serve_recovery(&front).await?;
        }
        parts.publishing = Some(publishing);
        instance
            .publish()
            .await
            .map_err(|error| DynamoError::builder().message(format!("serve: {error}")).cause(error).build())?;
        let (engine, mode) = (Arc::clone(&self.engine), config.disaggregation_mode);
        let server = Arc::clone(front.server());
        let admin = Admin::new(server, Arc::clone(&instance), engine, mode, self.stop.times.grace);
        if let Some((status, _)) = status {
            status.set_admin(Arc::clone(&admin));
        }
        parts.admin = Some(admin);
        parts.instance = Some(instance);
        Ok(())
    }

    async fn set_up_metrics(
        &self,
        worker_id: u64,
        engine: &EngineConfig,
        served_name: &str,
        load_seconds: f64,
        load: Option<Arc<Load>>,
    ) -> Result<(), DynamoError> {
        let config = &self.config;
        let id = format!("{worker_id:x}");
        let endpoint = [
            ("dynamo_namespace", config.namespace.as_str()),
            ("dynamo_component", &config.component),
            ("dynamo_endpoint", &config.endpoint),
            ("worker_id", &id),
        ];
        let model = [("model", engine.model.as_str()), ("model_name", served_name)];
        self.metrics.name(&endpoint, &model, &config.metrics_labels);
        self.metrics.lifecycle().model_load_time_seconds.set(load_seconds);
        let bindings = self
            .engine
            .setup_metrics(MetricsCtx {
                model: &engine.model,
                component: &config.component,
                model_load_time_seconds: load_seconds,
                metrics: &self.metrics,
            })
            .await?;
        for rank in &bindings.dp_ranks {
            self.metrics.declare_rank(*rank);
        }
        if let (Some(on_ready), false, true) =
            (bindings.on_publisher_ready, bindings.dp_ranks.is_empty(), config.enable_kv_routing)
        {
            on_ready(SnapshotPublisher::new(self.metrics.clone(), load));
        }
        Ok(())
    }

    fn listener_settings(&self) -> ListenerSettings {
        let mut settings = ListenerSettings::from_env();
        settings.port = shifted(settings.port, self.number);
        settings
    }

    async fn build_card(
        &self,
        engine: &EngineConfig,
        status: Option<&(Arc<Status>, String)>,
    ) -> Result<Value, DynamoError> {
        let config = &self.config;
        let is_raw = matches!(self.serving, Engine::Raw(_));
        // The frontend makes no tokens for a raw engine: a card without files.
        let name = if is_raw { String::new() } else { config.model_name.clone() };
        let template = config.custom_jinja_template.clone().filter(|_| !is_raw);
        // Hashing a tokenizer takes its time, and signals are listened to meanwhile.
        let read = tokio::task::spawn_blocking(move || {
            let mut assets = Assets::find(&name)?;
            if let Some(template) = template {
                assets.use_template(&template)?;
            }
            Ok(assets)
        });
        let assets = read.await.map_err(|error| {
            DynamoError::builder().message("reading the model's files failed").cause(error).build()
        })??;
        let served = card::slug(&card::served_name(config, engine));
        let host = status.filter(|_| settings::switch("DYN_SELF_HOST_METADATA", true));
        card::card(config, engine, &assets, |file: &CardFile| match host {
            Some((status, url)) => {
                let name = file.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
                let (namespace, component, endpoint) = (&config.namespace, &config.component, &config.endpoint);
                let path =
                    format!("/v1/metadata/{namespace}/{component}/{endpoint}/{served}/_base/{}-{name}", file.kind);
                let path = encode_path(&path);
                status.add_file(path.clone(), file.path.clone());
                format!("{url}{path}")
            }
            None => file.path.display().to_string(),
        })
    }

    async fn serve(
        &self,
        front: &Front,
        listener: Option<tokio::net::TcpListener>,
        place: &Place,
        load: Option<Arc<Load>>,
        parts: &mut Parts,
    ) -> Result<(), DynamoError> {
        let server = Arc::clone(front.server());
        parts.server = Some(Arc::clone(&server));
        let payload = health::payload(self.config.health_check_payload.as_ref(), &*self.engine).await;
        let payload = payload.filter(|_| settings::switch("DYN_HEALTH_CHECK_ENABLED", false));
        let health = self.health.clone();
        health.serving(&self.config.endpoint, payload.is_some());
        let answered = self.health.clone();
        parts.tasks.push(tokio::spawn(Arc::clone(self.health.progress()).watch()));
        let serving = Serving {
            serving: self.serving.clone(),
            engine: Arc::clone(&self.engine),
            mode: self.config.disaggregation_mode,
            metrics: Arc::clone(self.metrics.requests()),
            server: Arc::clone(&server),
            progress: Arc::clone(self.health.progress()),
            load,
            answered: Arc::new(move || answered.answered()),
        };
        front.serve(place, Arc::new(serving)).await?;
        if let Some(listener) = listener {
            parts.tasks.push(tokio::spawn(server.accept(listener)));
        }
        if let Some(payload) = payload {
            parts.tasks.push(tokio::spawn(health::canary(self.serving.clone(), payload, health)));
        }
        Ok(())
    }

    // -- down ----------------------------------------------------------------------------------------------------

    /// Leaves discovery, lets the streams end, and drains the engine.
    async fn drain(&self, parts: &Parts) {
        let times = &self.stop.times;
        self.health.begin_shutdown();
        if let Some(admin) = &parts.admin {
            admin.stop().await;
        }
        if let Some(instance) = &parts.instance {
            match instance.leave().await {
                Ok(()) => tracing::info!("Endpoint unregistered from discovery"),
                Err(error) => {
                    tracing::warn!("discovery unregister failed: {error}");
                    if let Some(admin) = &parts.admin {
                        admin.note_failure(format!("failed to unregister worker from discovery: {error}"));
                    }
                }
            }
        }
        if !times.grace.is_zero() {
            tracing::info!("Grace period {:.2}s before drain", times.grace.as_secs_f64());
            tokio::time::sleep(times.grace).await;
        }
        let began = Instant::now();
        if let Some(server) = &parts.server {
            server.goaway("the worker is shutting down");
            self.await_streams(server).await;
            server.stop_accepting();
            if server.open_requests() > 0 {
                let count = server.open_requests();
                tracing::warn!("{count} streams were still running and were cut; frontends may migrate them");
                server.cut.set();
                if !server.wait_idle(CUT_PATIENCE).await {
                    let left = server.open_requests();
                    tracing::warn!("{left} of them ignored it and are left to the clean-up");
                }
            }
        }
        if let Err(error) = guarded("drain", self.engine.drain()).await {
            tracing::warn!("engine drain failed: {error}");
        }
        if self.config.disaggregation_mode == DisaggregationMode::Prefill {
            self.await_quiescence().await;
        }
        self.metrics.lifecycle().drain_time_seconds.set(began.elapsed().as_secs_f64());
    }

    async fn await_streams(&self, server: &Server) {
        let limit = self.stop.times.streams_until();
        loop {
            let left = limit.saturating_sub(self.stop.since());
            let count = server.open_requests();
            if count == 0 || left.is_zero() {
                return;
            }
            tracing::info!("Waiting for {count} streams in flight, at most {:.1}s more", left.as_secs_f64());
            if server.wait_idle(left.min(HEARTBEAT)).await {
                return;
            }
        }
    }

    /// Waits until no peer reads this worker's memory; an engine that does not know is not waited for.
    async fn await_quiescence(&self) {
        let budget = self.stop.times.quiescence();
        let began = Instant::now();
        let mut has_said = false;
        loop {
            match guarded("is_quiescent", self.engine.is_quiescent()).await {
                Ok(None | Some(true)) => return,
                Ok(Some(false)) => {}
                Err(error) => tracing::debug!("is_quiescent() failed: {error}"),
            }
            let left = budget.saturating_sub(began.elapsed());
            if left.is_zero() {
                let seconds = budget.as_secs_f64();
                tracing::warn!("drain: timed out at {seconds:.1}s; peers may lose what they still pull");
                return;
            }
            if !std::mem::replace(&mut has_said, true) {
                let seconds = left.as_secs_f64();
                tracing::info!("drain: the engine is not quiescent, waiting at most {seconds:.1}s more");
            }
            tokio::time::sleep(QUIESCENCE_POLL.min(left)).await;
        }
    }

    async fn clean_up(&self) {
        let began = Instant::now();
        match guarded("cleanup", self.engine.cleanup()).await {
            Ok(()) => tracing::info!("Engine cleanup complete"),
            Err(error) => tracing::error!("engine cleanup failed: {error}"),
        }
        self.metrics.lifecycle().cleanup_time_seconds.set(began.elapsed().as_secs_f64());
    }
}

/// Runs a hook of the engine; a panic in it becomes its error, so that the way down goes on.
async fn guarded<T>(name: &str, hook: impl Future<Output = Result<T, DynamoError>>) -> Result<T, DynamoError> {
    match AssertUnwindSafe(hook).catch_unwind().await {
        Ok(outcome) => outcome,
        Err(_) => Err(DynamoError::backend(BackendError::Unknown, format!("{name}() panicked; see above"))),
    }
}

/// Returns the port of worker `number` of a process; 0, any free port, stays that.
fn shifted(port: u16, number: u16) -> u16 {
    if port == 0 { 0 } else { port.saturating_add(number) }
}
