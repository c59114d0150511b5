//! Whether this worker can serve: what probes read, and the canary that keeps it honest.

use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use futures::StreamExt;
use serde_json::{Value, json};

use crate::context::{AsyncEngineContext, Controller, GenerateContext};
use crate::engine::LLMEngine;
use crate::metrics::ListenerMetrics;
use crate::output::FinishReason;
use crate::plane::lock;
use crate::progress::Progress;
use crate::raw::Engine;
use crate::request::{HEALTH_CHECK_KEY, PreprocessedRequest};
use crate::settings;

#[derive(Debug)]
struct State {
    reason: Option<&'static str>,
    /// Its record is out of discovery: it takes no requests, however those end that it still has.
    is_withdrawn: bool,
    has_canary: bool,
    endpoint: Option<String>,
    last_answer: Instant,
}

impl State {
    /// Begins anew, as an endpoint that serves from now on.
    fn begin(&mut self) {
        self.last_answer = Instant::now();
        if self.reason != Some(LEAVING) {
            self.reason = self.has_canary.then_some(UNSEEN);
        }
    }

    /// Returns why the endpoint is not ready.
    fn reason(&self) -> Option<&'static str> {
        match self.reason {
            Some(LEAVING) => Some(LEAVING),
            _ if self.is_withdrawn => Some(PAUSED),
            reason => reason,
        }
    }
}

/// The readiness of a worker. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Health {
    began: Instant,
    state: Arc<Mutex<State>>,
    progress: Arc<Progress>,
    listener: ListenerMetrics,
}

const STARTING: &str = "no endpoint is served yet";
const UNSEEN: &str = "the health check has not seen it answer yet";
const FAILED: &str = "the health check failed";
const LEAVING: &str = "the process is shutting down";
const PAUSED: &str = "it takes no requests now";

impl Health {
    /// `listener` is where requests are counted that run or wait.
    pub(crate) fn new(listener: ListenerMetrics) -> Self {
        let began = Instant::now();
        let state = State {
            reason: Some(STARTING),
            is_withdrawn: false,
            has_canary: false,
            endpoint: None,
            last_answer: began,
        };
        let progress = Progress::new(settings::float("DYN_HEALTH_PROGRESS_TIMEOUT_SECS", 300.0, 0.0));
        Self { began, state: Arc::new(Mutex::new(state)), progress, listener }
    }

    /// Returns the watch over running requests.
    pub(crate) fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Lists the endpoint as serving; with a canary only once that has seen it answer.
    pub(crate) fn serving(&self, endpoint: &str, has_canary: bool) {
        let mut state = lock(&self.state);
        state.endpoint = Some(endpoint.to_owned());
        state.has_canary = has_canary;
        state.begin();
    }

    /// Reports the endpoint as out of service, or as back: ready, or as soon as the canary has seen it answer.
    pub(crate) fn withdraw(&self, is_withdrawn: bool) {
        let mut state = lock(&self.state);
        if std::mem::replace(&mut state.is_withdrawn, is_withdrawn) && !is_withdrawn {
            state.begin();
        }
    }

    /// Reports not ready from here on.
    pub(crate) fn begin_shutdown(&self) {
        lock(&self.state).reason = Some(LEAVING);
    }

    /// Notes that a request was answered: a busy engine needs no canary.
    pub(crate) fn answered(&self) {
        self.judge(true);
    }

    fn judge(&self, is_well: bool) {
        let mut state = lock(&self.state);
        if is_well {
            state.last_answer = Instant::now();
        }
        if matches!(state.reason, None | Some(UNSEEN | FAILED)) {
            state.reason = (!is_well).then_some(FAILED);
        }
    }

    fn since_last_answer(&self) -> Duration {
        lock(&self.state).last_answer.elapsed()
    }

    /// Returns the answer of `/health`, and whether it is a good one.
    pub(crate) fn body(&self) -> (bool, Value) {
        let state = lock(&self.state);
        let own = state.reason();
        let reason = match own {
            Some(LEAVING) => Some(LEAVING.to_owned()),
            own => self.progress.trouble().or(own.map(str::to_owned)),
        };
        let is_ready = reason.is_none();
        let word = if is_ready { "ready" } else { "notready" };
        let uptime = self.began.elapsed();
        let mut body = json!({
            "status": word,
            "uptime": {"secs": uptime.as_secs(), "nanos": uptime.subsec_nanos()},
            "endpoints": {},
        });
        if let Some(endpoint) = &state.endpoint {
            body["endpoints"][endpoint] = json!(if own.is_none() { "ready" } else { "notready" });
        }
        if let Some(reason) = reason {
            body["reason"] = json!(reason);
        }
        let (running, silent, longest) = self.progress.silence();
        let queued = self.listener.queued.get();
        if running > 0 || queued > 0.0 {
            body["load"] = json!({
                "running": running, "queued": queued as u64, "silent_seconds": silent, "longest_silence_seconds": longest,
            });
        }
        (is_ready, body)
    }
}

/// Returns the request of the health check: the operator's, the environment's, or the engine's.
pub(crate) async fn payload(configured: Option<&Value>, engine: &dyn LLMEngine) -> Option<Value> {
    let (origin, found) = if let Some(value) = configured {
        ("WorkerConfig.health_check_payload", Some(value.clone()))
    } else if let Some(text) = settings::text("DYN_HEALTH_CHECK_PAYLOAD") {
        ("DYN_HEALTH_CHECK_PAYLOAD", read(&text))
    } else {
        let own = engine.health_check_payload().await.unwrap_or_else(|error| {
            tracing::warn!("health_check_payload() failed; serving without a canary: {error}");
            None
        });
        ("health_check_payload()", own)
    };
    match found {
        Some(Value::Object(mut payload)) => {
            payload.insert(HEALTH_CHECK_KEY.into(), json!(true));
            Some(Value::Object(payload))
        }
        Some(_) => {
            tracing::warn!("{origin} is not a JSON object; serving without a canary");
            None
        }
        None => None,
    }
}

fn read(text: &str) -> Option<Value> {
    let text = match text.strip_prefix('@') {
        Some(path) => std::fs::read_to_string(path).map_err(|error| error.to_string()),
        None => Ok(text.to_owned()),
    };
    let value = text.and_then(|text| serde_json::from_str(&text).map_err(|error| error.to_string()));
    value.map_err(|error| tracing::warn!("DYN_HEALTH_CHECK_PAYLOAD cannot be read: {error}")).ok()
}

/// Asks an idle engine for one small answer, again and again. Runs for ever.
pub(crate) async fn canary(engine: Engine, payload: Value, health: Health) {
    let wait = Duration::from_secs_f64(settings::float("DYN_CANARY_WAIT_TIME", 10.0, 0.01));
    let patience = Duration::from_secs_f64(settings::float("DYN_HEALTH_CHECK_REQUEST_TIMEOUT", 3.0, 0.01));
    loop {
        let idle = health.since_last_answer();
        if idle < wait {
            tokio::time::sleep(wait - idle).await;
            continue;
        }
        let controller = Controller::new("health-check");
        let context = GenerateContext::from(controller.clone() as Arc<dyn AsyncEngineContext>);
        let probe = tokio::time::timeout(patience, probe(&engine, &payload, context)).await;
        controller.kill();
        let is_well = match probe {
            Ok(Ok(())) => true,
            Ok(Err(reason)) => {
                tracing::warn!("the health check failed: {reason}");
                false
            }
            Err(_) => {
                tracing::warn!("the health check had no answer within {} s", patience.as_secs_f64());
                false
            }
        };
        health.judge(is_well);
        if !is_well {
            tokio::time::sleep(wait).await;
        }
    }
}

async fn probe(engine: &Engine, payload: &Value, context: GenerateContext) -> Result<(), String> {
    let first = match engine {
        Engine::Tokens(engine) => {
            let request: PreprocessedRequest = serde_json::from_value(payload.clone())
                .map_err(|error| format!("its request is not valid: {error}"))?;
            let mut stream = engine.generate(request, context).await.map_err(|error| error.to_string())?;
            stream.next().await.map(|item| item.map(|chunk| chunk.finish_reason))
        }
        Engine::Raw(engine) => {
            let mut stream = engine.generate(payload.clone(), context).await.map_err(|error| error.to_string())?;
            stream.next().await.map(|item| item.map(|_| None))
        }
    };
    match first {
        None => Err("the stream was empty".to_owned()),
        Some(Err(error)) => Err(error.to_string()),
        Some(Ok(Some(FinishReason::Error(text)))) => Err(text),
        Some(Ok(_)) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(health: &Health) -> Value {
        let (is_ready, body) = health.body();
        assert_eq!((is_ready, &body["endpoints"]["generate"]), (body.get("reason").is_none(), &body["status"]));
        body["reason"].clone()
    }

    #[test]
    fn an_endpoint_that_takes_no_requests_is_not_ready_whatever_is_observed_of_it() {
        let health = Health::new(ListenerMetrics::default());
        health.serving("generate", true);
        assert_eq!(reason(&health), UNSEEN);
        health.answered();
        assert_eq!(reason(&health), Value::Null);
        health.withdraw(true);
        for is_well in [true, false, true] {
            health.judge(is_well); // the end of a request that still ran, or a probe
            assert_eq!(reason(&health), PAUSED);
        }
        health.withdraw(false);
        assert_eq!(reason(&health), UNSEEN);
        health.withdraw(false);
        health.judge(true);
        assert_eq!(reason(&health), Value::Null);
    }

    #[test]
    fn a_worker_that_leaves_does_not_come_back() {
        let health = Health::new(ListenerMetrics::default());
        health.serving("generate", false);
        health.begin_shutdown();
        health.withdraw(true);
        health.withdraw(false);
        health.answered();
        assert_eq!(reason(&health), LEAVING);
    }
}
