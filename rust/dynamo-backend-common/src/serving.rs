//! One request at the worker: call the engine, check its stream, watch for cancellation, end it promptly.
//!
//! This is the worker's half of the hot path. Per chunk: one step of the engine's stream and one append to the buffer of
//! the connection. No task, log line or allocation of ours happens per token.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{Instrument, Span};

use crate::config::DisaggregationMode;
use crate::context::{AsyncEngineContext, GenerateContext};
use crate::engine::LLMEngine;
use crate::error::{BackendError, DynamoError, ErrorType};
use crate::load::{Load, RunningRequest};
use crate::metrics::RequestMetrics;
use crate::output::{FinishReason, LLMEngineOutput};
use crate::plane::{Call, Handler, Server, Sink};
use crate::progress::{Progress, WatchedRequest};
use crate::raw::{Engine, RawEngine};
use crate::request::PreprocessedRequest;
use crate::telemetry::GenerateSpan;
use crate::wire::msgpack::{self, Refusal};

/// A killed request may end by itself for this long; then its stream is dropped where it stands, which frees its memory.
const KILL_GRACE: Duration = Duration::from_millis(50);
/// A stop is graceful; an engine that ignores one for this long is ended all the same.
const STOP_GRACE: Duration = Duration::from_secs(30);
/// How long an abort that was begun is waited for.
const ABORT_PATIENCE: Duration = Duration::from_secs(5);
/// An engine that never waits lets the others run after this many chunks.
const CHUNKS_PER_TURN: u32 = 64;
/// How long the validator waits for what an engine yields after its terminal item.
const VALIDATE_PATIENCE: Duration = Duration::from_secs(1);

type EngineStream = BoxStream<'static, Result<LLMEngineOutput, DynamoError>>;

/// Serves requests with an engine.
pub(crate) struct Serving {
    pub(crate) serving: Engine,
    /// The same, where it is told of a request that was given up.
    pub(crate) engine: Arc<dyn LLMEngine>,
    pub(crate) mode: DisaggregationMode,
    pub(crate) metrics: Arc<RequestMetrics>,
    pub(crate) server: Arc<Server>,
    pub(crate) progress: Arc<Progress>,
    /// The book of what runs; `None` for an engine without KV blocks.
    pub(crate) load: Option<Arc<Load>>,
    /// Hears of every request that was answered without an error.
    pub(crate) answered: Arc<dyn Fn() + Send + Sync>,
}

impl Handler for Serving {
    fn serve(self: Arc<Self>, call: Call) -> BoxFuture<'static, ()> {
        async move { self.serve_call(call).await }.boxed()
    }
}

/// A request, and the engine of its kind.
enum Asked {
    Tokens(Arc<dyn LLMEngine>, Box<PreprocessedRequest>),
    Raw(Arc<dyn RawEngine>, Value),
}

/// One request, where it is served.
struct Part<'a> {
    context: &'a GenerateContext,
    watched: &'a WatchedRequest,
    span: Option<&'a mut GenerateSpan>,
}

/// How a request ended.
#[derive(Debug)]
enum End {
    /// Its terminal chunk was sent.
    Done,
    /// The engine ended it because it was cancelled.
    Cancelled,
    /// Nobody reads any more.
    Gone,
    /// With an error, which its caller is to hear of.
    Failed(DynamoError),
}

impl Serving {
    async fn serve_call(&self, call: Call) {
        let timer = self.metrics.begin();
        let Call { body, context, controller, mut sink, deadline } = call;
        self.metrics.request_bytes.add(body.len() as u64);
        let watched = self.progress.enter();
        let limit = self.server.settings.max_decoded_bytes;
        let read = match &self.serving {
            Engine::Tokens(engine) => {
                read_request(&body, limit).map(|request| Asked::Tokens(Arc::clone(engine), Box::new(request)))
            }
            Engine::Raw(engine) => read_object(&body, limit).map(|request| Asked::Raw(Arc::clone(engine), request)),
        };
        let mut span = read.as_ref().ok().and_then(|request| match request {
            Asked::Tokens(_, request) => GenerateSpan::begin(&context, request, self.mode),
            Asked::Raw(..) => GenerateSpan::begin_raw(&context, self.mode),
        });
        let in_span = span.as_ref().map_or_else(Span::none, GenerateSpan::span);
        let (end, aborting) = match read {
            Ok(request) => {
                drop(body);
                let part = Part { context: &context, watched: &watched, span: span.as_mut() };
                self.run(request, part, &mut sink, deadline).await
            }
            Err(error) => (End::Failed(error), None),
        };
        match (&mut span, &end) {
            (Some(span), End::Failed(error)) => span.fail(error.error_type().name()),
            (Some(span), End::Done | End::Cancelled | End::Gone) => span.close(),
            (None, _) => {}
        }
        if controller.is_stopped() {
            self.metrics.cancellations.add(1);
        } else {
            watched.answered();
        }
        match end {
            End::Done => {
                sink.end(None);
                (self.answered)();
            }
            End::Gone | End::Cancelled => sink.end(None),
            End::Failed(error) => {
                self.metrics.errors.add(1);
                in_span.in_scope(|| log_failure(context.id(), &error));
                sink.end(Some(&error));
            }
        }
        self.metrics.response_bytes.add(sink.bytes());
        if let Some(abort) = aborting {
            settle(abort, context.id()).await;
        }
        drop(timer);
    }

    /// Runs a request. The engine's stream has ended when this returns; an abort of it may still run.
    async fn run(
        &self,
        request: Asked,
        part: Part<'_>,
        sink: &mut Sink,
        deadline: Option<Instant>,
    ) -> (End, Option<JoinHandle<()>>) {
        let (context, mut aborting) = (part.context, None);
        let span = part.span.as_ref().map_or_else(Span::none, |span| span.span());
        let end = {
            let watch = self.watch(context, deadline, &mut aborting);
            tokio::pin!(watch);
            let pump = AssertUnwindSafe(self.pump(request, part, sink).instrument(span)).catch_unwind();
            tokio::pin!(pump);
            tokio::select! {
                biased;
                end = &mut pump => end.unwrap_or_else(|panic| End::Failed(of_panic(&panic))),
                end = &mut watch => {
                    context.kill(); // what the engine still holds of it hears of the end
                    end
                }
            }
        };
        // An engine that saw the cancellation first has ended its stream before the watch could act.
        let is_deferred = self.mode == DisaggregationMode::Decode && !context.has_first_token();
        let is_cut_short = matches!(end, End::Cancelled | End::Gone | End::Failed(_)) && context.is_stopped();
        if aborting.is_none() && is_cut_short && !is_deferred {
            aborting = Some(self.begin_abort(context));
        }
        (end, aborting)
    }

    fn begin_abort(&self, context: &GenerateContext) -> JoinHandle<()> {
        tracing::debug!("request {} was cancelled; calling abort()", context.id());
        let (engine, inner) = (Arc::clone(&self.engine), context.inner_arc());
        tokio::spawn(async move { engine.abort(inner).await })
    }

    /// Returns how a request that its caller gave up, or that ran out of time, is to end by force.
    async fn watch(
        &self,
        context: &GenerateContext,
        deadline: Option<Instant>,
        aborting: &mut Option<JoinHandle<()>>,
    ) -> End {
        let late = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let cancelled = async {
            context.stopped().await;
            if self.mode == DisaggregationMode::Decode {
                context.first_token().await; // the prefill peer's KV transfer needs a receiver until then
            }
            *aborting = Some(self.begin_abort(context));
            tokio::select! {
                () = tokio::time::sleep(STOP_GRACE) => {}
                () = context.killed() => tokio::time::sleep(KILL_GRACE).await,
            }
        };
        tokio::select! {
            biased;
            () = self.server.cut.wait() => {
                End::Failed(DynamoError::backend(BackendError::EngineShutdown, "the worker is shutting down"))
            }
            () = late => {
                let text = "the request's deadline passed";
                End::Failed(DynamoError::backend(BackendError::ResponseTimeout, text))
            }
            () = cancelled => End::Failed(DynamoError::backend(BackendError::Cancelled, "request cancelled")),
        }
    }

    async fn pump(&self, request: Asked, part: Part<'_>, sink: &mut Sink) -> End {
        let (engine, request) = match request {
            Asked::Tokens(engine, request) => (engine, *request),
            Asked::Raw(engine, request) => {
                let relayed = self.relay_objects(&*engine, request, sink, part).await;
                return relayed.unwrap_or_else(End::Failed);
            }
        };
        let choices = u32::from(request.sampling_options.n.unwrap_or(1)).max(1);
        let running = self.load.as_ref().map(|load| load.begin(&request));
        let mut stream = match engine.generate(request, part.context.clone()).await {
            Ok(stream) => stream,
            Err(error) => {
                if let Some(span) = part.span {
                    span.fail("setup_failed");
                }
                return End::Failed(error);
            }
        };
        let relayed = self.relay(&mut stream, choices, sink, part, running.as_ref());
        match relayed.await {
            Ok(end) => end,
            Err(error) => End::Failed(error),
        }
    }

    /// Sends on what the engine yields, until its end.
    async fn relay(
        &self,
        stream: &mut EngineStream,
        choices: u32,
        sink: &mut Sink,
        part: Part<'_>,
        running: Option<&RunningRequest>,
    ) -> Result<End, DynamoError> {
        let Part { context, watched, mut span } = part;
        let (mut open_choices, mut burst) = (choices, 0);
        while let Some(item) = stream.next().await {
            let mut chunk = match item {
                Ok(chunk) => chunk,
                Err(error) => {
                    self.check_silence(stream).await?;
                    return Err(error);
                }
            };
            let index = chunk.index.unwrap_or(0);
            if index >= choices {
                let text = format!("invalid choice index {index}: this request has {choices} choice(s)");
                return Err(DynamoError::backend(BackendError::Unknown, text));
            }
            if !chunk.token_ids.is_empty() && !context.has_first_token() {
                context.notify_first_token();
            }
            watched.add();
            if let Some(span) = &mut span {
                span.on_chunk(&mut chunk);
            }
            if let Some(running) = running {
                running.add(chunk.token_ids.len());
            }
            match &chunk.finish_reason {
                None => sink.send(&chunk, index, None)?,
                Some(reason) => {
                    self.check_terminal(&chunk, reason, context)?;
                    open_choices -= 1;
                    if open_choices == 0 {
                        if let Some(span) = &mut span {
                            span.finish(reason, context.is_stopped());
                        }
                        self.check_silence(stream).await?;
                    }
                    if let FinishReason::Error(text) = reason {
                        if !chunk.token_ids.is_empty() {
                            sink.send(&chunk, index, None)?;
                        }
                        return Err(DynamoError::backend(BackendError::Unknown, text.clone()));
                    }
                    sink.send(&chunk, index, reason.word())?;
                    if open_choices == 0 {
                        let is_cancelled = *reason == FinishReason::Cancelled;
                        return Ok(if is_cancelled { End::Cancelled } else { End::Done });
                    }
                }
            }
            let is_deferred = self.mode == DisaggregationMode::Decode && !context.has_first_token();
            if sink.is_done() && !is_deferred {
                return Ok(End::Gone);
            }
            burst += 1;
            if burst == CHUNKS_PER_TURN {
                burst = 0;
                tokio::task::yield_now().await;
            }
            if !sink.has_credit() {
                self.wait_credit(context, sink, watched).await?;
            }
        }
        if open_choices < choices {
            return Ok(End::Done); // an engine without n > 1 of its own: the choices it did make are whole
        }
        if context.is_stopped() {
            sink.send(&LLMEngineOutput::cancelled(), 0, FinishReason::Cancelled.word())?;
            return Ok(End::Cancelled);
        }
        let text = "the engine's stream ended without a terminal chunk (one with a finish reason)";
        Err(DynamoError::backend(BackendError::StreamIncomplete, text))
    }

    async fn wait_credit(
        &self,
        context: &GenerateContext,
        sink: &Sink,
        watched: &WatchedRequest,
    ) -> Result<(), DynamoError> {
        watched.hold_back(true);
        let is_read = sink.wait_credit(self.server.settings.credit_stall).await;
        watched.hold_back(false);
        if is_read {
            return Ok(());
        }
        context.kill();
        let text = "the caller did not read its stream for longer than DYN_TCP_CREDIT_STALL_SECS allows";
        Err(DynamoError::backend(BackendError::Cancelled, text))
    }

    /// Sends on the objects of a raw engine, until its stream ends.
    async fn relay_objects(
        &self,
        engine: &dyn RawEngine,
        request: Value,
        sink: &mut Sink,
        Part { context, watched, .. }: Part<'_>,
    ) -> Result<End, DynamoError> {
        let mut stream = engine.generate(request, context.clone()).await?;
        let mut burst = 0;
        while let Some(item) = stream.next().await {
            let object = rmp_serde::to_vec_named(&json!({"data": item?})).map_err(|error| {
                DynamoError::backend(BackendError::Unknown, format!("the engine's object cannot be encoded: {error}"))
            })?;
            sink.send_object(&object)?;
            watched.add();
            if sink.is_done() {
                return Ok(End::Gone);
            }
            burst += 1;
            if burst == CHUNKS_PER_TURN {
                burst = 0;
                tokio::task::yield_now().await;
            }
            if !sink.has_credit() {
                self.wait_credit(context, sink, watched).await?;
            }
        }
        Ok(if context.is_stopped() { End::Cancelled } else { End::Done })
    }

    fn check_terminal(
        &self,
        chunk: &LLMEngineOutput,
        reason: &FinishReason,
        context: &GenerateContext,
    ) -> Result<(), DynamoError> {
        if *reason == FinishReason::Cancelled && !context.is_stopped() {
            let text = "the engine cancelled a request that nobody had cancelled";
            return Err(DynamoError::backend(BackendError::EngineShutdown, text));
        }
        let is_exempt = matches!(reason, FinishReason::Cancelled | FinishReason::Error(_));
        if self.mode == DisaggregationMode::Encode && !is_exempt && chunk.encoder_result.is_none() {
            return Err(violation("Encode-mode contract violation: the terminal chunk has no encoder_result"));
        }
        Ok(())
    }

    /// Fails where the engine yields something after its terminal item. Debug builds wait for it, release builds look once.
    async fn check_silence(&self, stream: &mut EngineStream) -> Result<(), DynamoError> {
        let next = if cfg!(debug_assertions) {
            tokio::time::timeout(VALIDATE_PATIENCE, stream.next()).await.ok()
        } else {
            stream.next().now_or_never()
        };
        match next {
            Some(Some(_)) => Err(violation("item yielded after terminal item")),
            _ => Ok(()),
        }
    }
}

/// Panics in debug builds, where a broken engine should be noticed at once; else makes the request's error.
#[allow(clippy::panic)]
fn violation(text: &str) -> DynamoError {
    if cfg!(debug_assertions) {
        panic!("{text}");
    }
    tracing::error!("{text}");
    DynamoError::backend(BackendError::Unknown, text)
}

fn of_panic(panic: &(dyn std::any::Any + Send)) -> DynamoError {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message");
    DynamoError::backend(BackendError::Unknown, format!("the engine panicked: {text}"))
}

async fn settle(abort: JoinHandle<()>, id: &str) {
    match tokio::time::timeout(ABORT_PATIENCE, abort).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!("abort of request {id} failed: {error}"),
        Err(_) => tracing::warn!("abort of request {id} did not return in {} s", ABORT_PATIENCE.as_secs()),
    }
}

fn log_failure(id: &str, error: &DynamoError) {
    match error.error_type() {
        ErrorType::Backend(BackendError::InvalidArgument | BackendError::Cancelled) => {
            tracing::debug!(request_id = id, "request {id}: {error}");
        }
        _ => tracing::error!(request_id = id, "request {id}: {error}"),
    }
}

/// Reads the body of a request. Fails, naming what is wrong, for one that is not valid or takes too much memory.
fn read_request(body: &[u8], limit: usize) -> Result<PreprocessedRequest, DynamoError> {
    if !check_size(body, limit)? {
        return Err(DynamoError::invalid("the request has no token_ids"));
    }
    rmp_serde::from_slice(body).map_err(|error| DynamoError::invalid(format!("the request is not valid: {error}")))
}

/// Reads the body of a request for a raw engine; likewise.
fn read_object(body: &[u8], limit: usize) -> Result<Value, DynamoError> {
    check_size(body, limit)?;
    let request: Value = rmp_serde::from_slice(body)
        .map_err(|error| DynamoError::invalid(format!("the request is not valid: {error}")))?;
    if request.is_object() { Ok(request) } else { Err(DynamoError::invalid("the request must be an object")) }
}

/// Returns whether a body has a prompt. Fails, naming what is wrong, for one that takes too much memory.
fn check_size(body: &[u8], limit: usize) -> Result<bool, DynamoError> {
    msgpack::check_size(body, limit).map_err(|refusal| {
        DynamoError::invalid(match refusal {
            Refusal::TooLarge => format!(
                "the request body of {} bytes takes more than {limit} once decoded (DYN_TCP_MAX_DECODED_MB)",
                body.len()
            ),
            Refusal::TooDeep => "the request body nests too deep".to_owned(),
            Refusal::Malformed => "the request body is not msgpack".to_owned(),
        })
    })
}
