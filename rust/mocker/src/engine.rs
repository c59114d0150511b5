//! The mock engine behind the contract: one scheduler task that drives all streams, one task that fans its passes out, and a
//! channel for each request.
//!
//! ```text
//! generate() --submit--> [ ranks ] <--begin, end-- scheduler task --passes--> fan-out task --steps--> each stream
//!                                                                                    \--> KV events, snapshots, metrics
//! ```

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use dynamo_backend_common::engine::GenerateContext;
use dynamo_backend_common::{
    AsyncEngineContext, BackendError, CompletionUsage, ComponentSnapshot, DynamoError, EngineConfig, ErrorType,
    KvEventPublisher, KvEventSource, LLMEngine, LLMEngineOutput, LLMEngineOutputExt, MetricsBindings, MetricsCtx,
    PreprocessedRequest, PromptTokensDetails, SnapshotPublisher, chunk, usage,
};
use futures::stream::BoxStream;
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::metrics::MockMetrics;
use crate::options::{MockOptions, invalid};
use crate::output::{Output, ResponseTrace, seed_of};
use crate::scheduler::{Core, Emitted, PassResult, Role, Ticket, Wanted};

const REPLAY_ANNOTATION: &str = "output_replay_id:";
const REJECTED: &str = "request rejected: request exceeds worker admission limits";
/// Passes that may wait to be fanned out; the scheduler waits for the tasks behind it then.
const MAX_PASSES: usize = 16;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn shutdown(message: &str) -> DynamoError {
    DynamoError::builder().error_type(ErrorType::Backend(BackendError::EngineShutdown)).message(message).build()
}

/// What the fan-out task sends to one stream. Small, because a stream that is not read keeps one for each of its tokens.
enum Step {
    /// One token in the middle of an answer.
    Token(u32),
    /// The first or the last one, or several.
    Tokens(Box<Emitted>),
    Rejected,
}

impl Step {
    fn of(emitted: &Emitted) -> Self {
        match emitted.tokens() {
            [token] if !(emitted.is_first || emitted.is_last) => Self::Token(*token),
            _ => Self::Tokens(Box::new(*emitted)),
        }
    }
}

/// One stream, as the fan-out task and the clean-up reach it.
struct Route {
    steps: mpsc::Sender<Step>,
    context: Arc<dyn AsyncEngineContext>,
    began: Instant,
    last: Option<Instant>,
}

/// What the tasks, the streams and the worker share.
struct Shared {
    model: String,
    cores: Mutex<Vec<Core>>,
    routes: Mutex<HashMap<u64, Route>>,
    /// Wakes a scheduler without work.
    arrived: Notify,
    next_number: AtomicU64,
    next_rank: AtomicUsize,
    is_closed: AtomicBool,
    metrics: MockMetrics,
    publishers: Mutex<HashMap<usize, KvEventPublisher>>,
    snapshots: Mutex<Option<SnapshotPublisher>>,
    trace: ResponseTrace,
}

impl Shared {
    /// Begins a pass of every rank with work and returns how long it lasts: as long as that of the slowest rank.
    fn begin_pass(&self) -> Option<Duration> {
        let mut longest: Option<f64> = None;
        for core in lock(&self.cores).iter_mut() {
            if let Some(duration) = core.begin_pass() {
                longest = Some(longest.unwrap_or(0.0).max(duration));
            }
        }
        longest.map(|ms| Duration::try_from_secs_f64(ms / 1000.0).unwrap_or(Duration::ZERO))
    }

    fn end_pass(&self) -> Pass {
        let mut cores = lock(&self.cores);
        let busy = cores.iter_mut().enumerate().filter(|(_, core)| core.is_in_pass());
        let ranks = busy.map(|(rank, core)| (rank, core.end_pass())).collect();
        Pass { ranks, used: cores.iter().map(|core| core.pool.used()).collect() }
    }
}

/// What one pass of all ranks brought.
struct Pass {
    ranks: Vec<(usize, PassResult)>,
    /// Blocks that running requests of each rank hold now.
    used: Vec<usize>,
}

/// Runs one pass after another while there is work. The end of a pass is the planned end of the one before and its duration, so
/// delays of timers do not add up.
async fn schedule(shared: Arc<Shared>, passes: mpsc::Sender<Pass>) {
    let mut ends_at: Option<Instant> = None;
    loop {
        let Some(duration) = shared.begin_pass() else {
            shared.arrived.notified().await;
            // Requests that come together begin in one pass.
            tokio::task::yield_now().await;
            ends_at = None;
            continue;
        };
        let end = ends_at.unwrap_or_else(Instant::now) + duration;
        tokio::time::sleep_until(end).await;
        ends_at = Some(end);
        if passes.send(shared.end_pass()).await.is_err() {
            return;
        }
    }
}

/// Sends what passes brought to the streams, and publishes what they changed.
async fn fan_out(shared: Arc<Shared>, mut passes: mpsc::Receiver<Pass>) {
    let mut reported: Vec<usize> = Vec::new();
    while let Some(pass) = passes.recv().await {
        let now = Instant::now();
        for (rank, result) in pass.ranks {
            deliver(&shared, &result, now);
            if !result.changes.is_empty() {
                let publisher = lock(&shared.publishers).get(&rank).cloned();
                if let Some(publisher) = publisher {
                    publisher.publish_changes(result.changes);
                }
            }
        }
        if pass.used != reported {
            publish_load(&shared, &pass.used);
            reported = pass.used;
        }
    }
}

fn deliver(shared: &Shared, result: &PassResult, now: Instant) {
    let metrics = &shared.metrics;
    let mut routes = lock(&shared.routes);
    for emitted in &result.emitted {
        let Some(route) = routes.get_mut(&emitted.number) else { continue }; // its stream has ended
        // There is room for a whole answer; a stream that has ended meanwhile does not hear of it.
        let _ = route.steps.try_send(Step::of(emitted));
        if let Some(last) = route.last.replace(now) {
            metrics.between_tokens.observe((now - last).as_secs_f64());
        }
        if emitted.is_first {
            metrics.on_first_token(emitted.prompt_tokens, emitted.cached_tokens);
            metrics.first_token.observe((now - route.began).as_secs_f64());
        }
        if emitted.is_last {
            metrics.whole.observe((now - route.began).as_secs_f64());
        }
    }
    for number in &result.rejected {
        if let Some(route) = routes.get(number) {
            let _ = route.steps.try_send(Step::Rejected);
        }
    }
}

fn publish_load(shared: &Shared, used: &[usize]) {
    let snapshots = lock(&shared.snapshots);
    let Some(publisher) = snapshots.as_ref() else { return };
    let totals: Vec<usize> = lock(&shared.cores).iter().map(|core| core.pool.blocks()).collect();
    for (rank, (used, total)) in used.iter().zip(totals).enumerate() {
        let dp_rank = rank as u32;
        let snapshot = ComponentSnapshot {
            kv_used_blocks: *used as u64,
            kv_total_blocks: total as u64,
            gpu_cache_usage: *used as f32 / total.max(1) as f32,
            kv_cache_hit_rate: shared.metrics.hit_rate(),
            dp_rank,
        };
        publisher.publish(dp_rank, &snapshot);
    }
}

/// A request's place among the streams and in its rank; dropping it gives everything back.
struct Slot {
    shared: Arc<Shared>,
    number: u64,
    rank: usize,
    ticket: Ticket,
}

impl Drop for Slot {
    fn drop(&mut self) {
        lock(&self.shared.routes).remove(&self.number);
        if let Some(core) = lock(&self.shared.cores).get_mut(self.rank) {
            core.cancel(self.ticket);
        }
    }
}

/// The tasks of a started engine.
struct Running {
    shared: Arc<Shared>,
    tasks: [JoinHandle<()>; 2],
}

/// One worker of the mocker, with all its data-parallel ranks.
pub(crate) struct MockEngine {
    model: String,
    options: MockOptions,
    seed: u64,
    running: Mutex<Option<Running>>,
    is_closed: AtomicBool,
}

impl MockEngine {
    /// `seed`: of what this worker's drafts are accepted; the token ids follow from the seed of the options.
    pub(crate) fn new(model: impl Into<String>, options: MockOptions, seed: u64) -> Self {
        let model = model.into();
        Self { model, options, seed, running: Mutex::default(), is_closed: AtomicBool::new(false) }
    }

    fn shared(&self) -> Result<Arc<Shared>, DynamoError> {
        let running = lock(&self.running);
        let shared = running.as_ref().map(|running| Arc::clone(&running.shared));
        shared.ok_or_else(|| shutdown("the mock engine is not running"))
    }

    /// Returns how many tokens to generate. Fails where the request does not say.
    fn wanted(&self, request: &PreprocessedRequest) -> Result<usize, DynamoError> {
        if self.options.scheduler.role == Role::Prefill {
            return Ok(1);
        }
        let wanted = request.stop_conditions.max_tokens.ok_or_else(|| {
            invalid("stop_conditions.max_tokens: the mock engine needs max_tokens, for nothing else ends an answer")
        })?;
        Ok(wanted as usize)
    }

    fn rank(&self, shared: &Shared, request: &PreprocessedRequest) -> Result<usize, DynamoError> {
        let size = self.options.dp_size;
        match request.routing.as_ref().and_then(|routing| routing.dp_rank) {
            None => Ok(shared.next_rank.fetch_add(1, Ordering::Relaxed) % size),
            Some(rank) if (rank as usize) < size => Ok(rank as usize),
            Some(rank) => Err(invalid(format!("dp_rank {rank} is out of bounds for dp_size {size}"))),
        }
    }

    /// Returns the ids of an answer, the first `shown` of which came from another worker.
    fn output(
        &self,
        shared: &Shared,
        request: &PreprocessedRequest,
        id: &str,
        shown: usize,
        wanted: usize,
        room: usize,
    ) -> Output {
        let key = request.annotations.iter().find_map(|annotation| annotation.strip_prefix(REPLAY_ANNOTATION));
        let replay = key.and_then(|key| {
            let found = shared.trace.find(key);
            if found.is_none() && self.options.response_trace.is_some() {
                tracing::warn!("request {id}: the replay trace has no {key}; it gets random tokens");
            }
            found
        });
        let words = request.sampling_options.seed.map_or_else(|| id.to_owned(), |seed| seed.to_string());
        let prompt = &request.token_ids[..request.token_ids.len() - shown];
        let seed = seed_of(self.options.seed, &words, prompt);
        let mut output = Output::new(seed, shown + wanted.min(room), self.options.reasoning, replay);
        output.skip(shown);
        output
    }
}

#[async_trait]
impl LLMEngine for MockEngine {
    async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
        let options = &self.options;
        let scheduler = &options.scheduler;
        let trace = match options.response_trace.clone() {
            None => ResponseTrace::default(),
            Some(path) => {
                let read = tokio::task::spawn_blocking(move || ResponseTrace::read(&path)).await;
                read.map_err(|_| shutdown("reading the replay trace failed"))??
            }
        };
        tokio::time::sleep(options.startup).await;
        let core = |rank| Core::new(scheduler.clone(), options.timing, self.seed + rank as u64);
        let shared = Arc::new(Shared {
            model: self.model.clone(),
            cores: Mutex::new((0..options.dp_size).map(core).collect()),
            routes: Mutex::default(),
            arrived: Notify::new(),
            next_number: AtomicU64::new(0),
            next_rank: AtomicUsize::new(0),
            is_closed: AtomicBool::new(false),
            metrics: MockMetrics::default(),
            publishers: Mutex::default(),
            snapshots: Mutex::default(),
            trace,
        });
        let mut running = lock(&self.running);
        if running.is_some() || self.is_closed.load(Ordering::SeqCst) {
            return Err(shutdown("this engine was started or cleaned up before; make a new one"));
        }
        let (sender, receiver) = mpsc::channel(MAX_PASSES);
        let tasks =
            [tokio::spawn(schedule(Arc::clone(&shared), sender)), tokio::spawn(fan_out(Arc::clone(&shared), receiver))];
        *running = Some(Running { shared, tasks });
        let mut runtime_data = HashMap::new();
        if options.response_trace.is_some() {
            runtime_data.insert("output_replay_consumer".to_owned(), json!("true"));
        }
        Ok(EngineConfig {
            model: self.model.clone(),
            served_model_name: Some(self.model.clone()),
            context_length: scheduler.max_model_len.and_then(|length| u32::try_from(length).ok()),
            kv_cache_block_size: Some(scheduler.block_size as u32),
            total_kv_blocks: Some(scheduler.num_gpu_blocks as u64),
            max_num_seqs: Some(scheduler.max_num_seqs as u64),
            max_num_batched_tokens: Some(scheduler.max_num_batched_tokens as u64),
            data_parallel_size: Some(options.dp_size as u32),
            runtime_data,
            ..EngineConfig::default()
        })
    }

    async fn generate(
        &self,
        request: PreprocessedRequest,
        ctx: GenerateContext,
    ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError> {
        let shared = self.shared()?;
        if request.bootstrap_info.is_some() && self.options.scheduler.role == Role::Decode {
            return Err(invalid("bootstrap_info: meeting a prefill worker is not built in the mocker in Rust"));
        }
        let whole = request.token_ids.len();
        if whole == 0 {
            return Err(invalid("token_ids: the prompt is empty"));
        }
        let prompt_tokens = ctx.original_prompt_tokens().map_or(whole, |count| (count as usize).min(whole));
        let shown = whole - prompt_tokens;
        let wanted = self.wanted(&request)?;
        if wanted == 0 || ctx.is_stopped() {
            let ended = if ctx.is_stopped() { LLMEngineOutput::cancelled() } else { LLMEngineOutput::length() };
            let counts = usage(prompt_tokens as u32, shown as u32);
            return Ok(Box::pin(futures::stream::iter([Ok(ended.with_usage(counts))])));
        }
        let rank = self.rank(&shared, &request)?;
        let number = shared.next_number.fetch_add(1, Ordering::Relaxed);
        let room = lock(&shared.cores)[rank].output_room(whole);
        let output = self.output(&shared, &request, ctx.id(), shown, wanted, room);
        let (lora_name, cache_salt) =
            request.routing.map(|routing| (routing.lora_name, routing.cache_namespace)).unwrap_or_default();
        let wanted = Wanted {
            token_ids: request.token_ids,
            max_output: wanted,
            output,
            lora_name,
            cache_salt,
            prompt_arrives: request.prefill_result.is_some(),
        };
        // One step for each token at most: no step of the whole answer ever waits for room.
        let (steps, received) = mpsc::channel(wanted.max_output.min(room).max(1));
        let route = Route { steps, context: ctx.inner_arc(), began: Instant::now(), last: None };
        lock(&shared.routes).insert(number, route);
        let ticket = lock(&shared.cores)[rank].submit(number, wanted);
        let slot = Slot { shared: Arc::clone(&shared), number, rank, ticket };
        if shared.is_closed.load(Ordering::SeqCst) {
            ctx.stop_generating(); // the clean-up may have looked before this stream was there
        }
        shared.arrived.notify_one();
        let is_prefill = self.options.scheduler.role == Role::Prefill;
        let transfer = if is_prefill { self.options.transfer_time(whole) } else { Duration::ZERO };
        let answer = Answer { prompt_tokens, shown, cached: None, is_prefill, transfer };
        Ok(answer.stream(slot, received, ctx))
    }

    async fn cleanup(&self) -> Result<(), DynamoError> {
        self.is_closed.store(true, Ordering::SeqCst);
        if let Some(Running { shared, tasks }) = lock(&self.running).take() {
            shared.is_closed.store(true, Ordering::SeqCst);
            for route in lock(&shared.routes).values() {
                route.context.stop_generating(); // each stream ends with a chunk that says so
            }
            for task in tasks {
                task.abort();
            }
        }
        Ok(())
    }

    async fn setup_metrics(&self, ctx: MetricsCtx<'_>) -> Result<MetricsBindings, DynamoError> {
        let shared = self.shared()?;
        let scraped = Arc::clone(&shared);
        ctx.metrics.register_prometheus_expfmt_callback(Box::new(move || {
            scraped.metrics.text(&scraped.model, &lock(&scraped.cores))
        }));
        Ok(MetricsBindings {
            dp_ranks: (0..self.options.dp_size as u32).collect(),
            on_publisher_ready: Some(Box::new(move |publisher| *lock(&shared.snapshots) = Some(publisher))),
        })
    }

    async fn kv_event_sources(&self) -> Result<Vec<KvEventSource>, DynamoError> {
        if !self.options.has_kv_events() {
            return Ok(Vec::new());
        }
        let shared = self.shared()?;
        let source = |rank: usize| {
            let shared = Arc::clone(&shared);
            let on_ready = Box::new(move |publisher| {
                lock(&shared.publishers).insert(rank, publisher);
            });
            KvEventSource::Push { on_ready, dp_rank: rank as u32 }
        };
        Ok((0..self.options.dp_size).map(source).collect())
    }

    async fn health_check_payload(&self) -> Result<Option<Value>, DynamoError> {
        Ok(Some(json!({"token_ids": [1], "stop_conditions": {"max_tokens": 1, "ignore_eos": true}})))
    }
}

/// What one answer counts.
struct Answer {
    prompt_tokens: usize,
    /// Tokens of the answer so far, those of a worker before this one included.
    shown: usize,
    /// Prompt tokens that were cached, once that is known.
    cached: Option<usize>,
    is_prefill: bool,
    /// How long the prompt is under way to its decode worker.
    transfer: Duration,
}

impl Answer {
    fn usage(&self) -> CompletionUsage {
        let mut counts = usage(self.prompt_tokens as u32, self.shown as u32);
        counts.prompt_tokens_details = self.cached.map(|cached| PromptTokensDetails {
            cached_tokens: Some(cached.min(self.prompt_tokens) as u32),
            ..PromptTokensDetails::default()
        });
        counts
    }

    fn cancelled(&self) -> LLMEngineOutput {
        LLMEngineOutput::cancelled().with_usage(self.usage())
    }

    fn stream(
        mut self,
        slot: Slot,
        mut steps: mpsc::Receiver<Step>,
        ctx: GenerateContext,
    ) -> BoxStream<'static, Result<LLMEngineOutput, DynamoError>> {
        Box::pin(async_stream::stream! {
            let _slot = slot;
            let mut stopped = ctx.stopped();
            loop {
                let step = tokio::select! {
                    biased;
                    () = &mut stopped => {
                        yield Ok(self.cancelled());
                        return;
                    }
                    step = steps.recv() => step,
                };
                let emitted = match step {
                    Some(Step::Token(token)) => {
                        self.shown += 1;
                        yield Ok(chunk::token(token));
                        continue;
                    }
                    Some(Step::Tokens(emitted)) => emitted,
                    Some(Step::Rejected) => {
                        yield Err(invalid(REJECTED));
                        return;
                    }
                    None => {
                        yield Err(shutdown("the mock engine is shutting down"));
                        return;
                    }
                };
                let (mut tokens, mut last) = (emitted.tokens(), None);
                if let (true, Some((end, others))) = (emitted.is_last, tokens.split_last()) {
                    (tokens, last) = (others, Some(*end));
                }
                let is_first = self.cached.is_none();
                self.cached = Some(emitted.cached_tokens);
                for (number, token) in tokens.iter().enumerate() {
                    self.shown += 1;
                    let made = chunk::token(*token);
                    yield Ok(if is_first && number == 0 { made.with_usage(self.usage()) } else { made });
                }
                let Some(last) = last else { continue };
                if !self.transfer.is_zero() {
                    tokio::select! {
                        biased;
                        () = &mut stopped => {
                            yield Ok(self.cancelled());
                            return;
                        }
                        () = tokio::time::sleep(self.transfer) => {}
                    }
                }
                self.shown += 1;
                let mut ended = LLMEngineOutput::length().with_tokens(vec![last]).with_usage(self.usage());
                if self.is_prefill {
                    ended.disaggregated_params = Some(json!({"mocker": true}));
                }
                yield Ok(ended);
                return;
            }
        })
    }
}
