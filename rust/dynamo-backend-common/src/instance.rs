//! The instance's record in discovery, and the controls of an engine that take it out and put it back.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use futures::FutureExt;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use crate::discovery::{self, Discovery};
use crate::engine::LLMEngine;
use crate::error::DynamoError;
use crate::health::Health;
use crate::status::Control;

/// Controls after which the worker must get no requests.
const PAUSING: [&str; 3] = ["pause_generation", "sleep", "release_memory_occupation"];
/// Controls after which it may get requests again.
const RESUMING: [&str; 3] = ["resume_generation", "wake_up", "resume_memory_occupation"];
const MAX_NAMES: usize = 256;

const STARTING: u8 = 0;
const SERVING: u8 = 1;
const LEAVING: u8 = 2;

/// One record that comes and goes.
pub(crate) struct Instance {
    discovery: Arc<dyn Discovery>,
    key: String,
    record: String,
    health: Health,
    phase: AtomicU8,
    /// The record is there.
    is_registered: AtomicBool,
    /// A control of the engine keeps the record away.
    is_paused: AtomicBool,
    /// An operator who drains the worker keeps it away.
    is_held_back: AtomicBool,
    /// Held while discovery is written and while a pausing or resuming control runs.
    exclusive: Mutex<()>,
}

impl Instance {
    pub(crate) fn new(discovery: Arc<dyn Discovery>, key: String, record: String, health: Health) -> Arc<Self> {
        Arc::new(Self {
            discovery,
            key,
            record,
            health,
            phase: AtomicU8::new(STARTING),
            is_registered: AtomicBool::default(),
            is_paused: AtomicBool::default(),
            is_held_back: AtomicBool::default(),
            exclusive: Mutex::default(),
        })
    }

    /// Publishes the record for the first time; controls are answered from then on.
    pub(crate) async fn publish(&self) -> Result<(), DynamoError> {
        let _held = self.exclusive.lock().await;
        self.write(true).await?;
        self.phase.store(SERVING, Ordering::SeqCst);
        Ok(())
    }

    /// Takes the record out for good.
    pub(crate) async fn leave(&self) -> Result<(), DynamoError> {
        // Before the lock: a control that waits for its engine is answered "shutting down" and writes nothing any more.
        self.phase.store(LEAVING, Ordering::SeqCst);
        self.write(false).await
    }

    /// Returns whether callers find this worker now.
    pub(crate) fn is_registered(&self) -> bool {
        self.is_registered.load(Ordering::SeqCst)
    }

    /// Takes the record out for an operator, or puts it back, unless a control of the engine keeps it away. After a failure
    /// everything is as before.
    pub(crate) async fn hold_back(&self, is_held_back: bool) -> Result<(), DynamoError> {
        let _held = self.exclusive.lock().await;
        self.is_held_back.store(is_held_back, Ordering::SeqCst);
        let outcome = self.adjust().await;
        if outcome.is_err() {
            self.is_held_back.store(!is_held_back, Ordering::SeqCst);
        }
        outcome
    }

    /// Takes the record out for a control, or puts it back, unless an operator keeps it away; likewise.
    async fn pause(&self, is_paused: bool) -> Result<(), DynamoError> {
        let before = self.is_paused.swap(is_paused, Ordering::SeqCst);
        let outcome = self.adjust().await;
        if outcome.is_err() {
            self.is_paused.store(before, Ordering::SeqCst);
        }
        outcome
    }

    /// Writes the record, or removes it, as those who keep it away want it.
    async fn adjust(&self) -> Result<(), DynamoError> {
        let is_kept_away = self.is_paused.load(Ordering::SeqCst) || self.is_held_back.load(Ordering::SeqCst);
        if self.refusal().is_some() {
            return Ok(()); // the worker begins, or leaves: others write
        }
        self.write(!is_kept_away).await
    }

    async fn write(&self, is_there: bool) -> Result<(), DynamoError> {
        if is_there {
            discovery::put(&self.discovery, self.key.clone(), self.record.clone()).await?;
        } else {
            discovery::delete(&self.discovery, self.key.clone()).await?;
        }
        self.is_registered.store(is_there, Ordering::SeqCst);
        self.health.withdraw(!is_there);
        Ok(())
    }

    fn refusal(&self) -> Option<Value> {
        let phase = match self.phase.load(Ordering::SeqCst) {
            STARTING => "starting",
            SERVING => return None,
            _ => "shutting down",
        };
        Some(failed(format!("engine administrative routes are unavailable while the worker is {phase}")))
    }

    pub(crate) async fn control(&self, engine: &dyn LLMEngine, name: &str, body: Value) -> Result<Value, DynamoError> {
        if PAUSING.contains(&name) {
            let _held = self.exclusive.lock().await;
            if let Some(refusal) = self.refusal() {
                return Ok(refusal);
            }
            if let Err(error) = self.pause(true).await {
                return Ok(failed(format!(
                    "engine control {name}: the instance could not be unregistered, try again ({error})"
                )));
            }
            return engine.engine_control(name, body).await;
        }
        if RESUMING.contains(&name) {
            let _held = self.exclusive.lock().await;
            let answer = engine.engine_control(name, body).await?;
            if is_failure(&answer) || answer["is_sleeping"] == true {
                return Ok(answer);
            }
            if let Some(refusal) = self.refusal() {
                return Ok(refusal);
            }
            if let Err(error) = self.pause(false).await {
                return Ok(failed(format!(
                    "engine control {name} ran, but the instance could not be registered again; retry ({error})"
                )));
            }
            if self.refusal().is_some() {
                // The worker began to leave while the record was written.
                self.write(false).await?;
            }
            return Ok(answer);
        }
        engine.engine_control(name, body).await
    }
}

fn failed(message: String) -> Value {
    json!({"status": "error", "message": message})
}

fn is_failure(answer: &Value) -> bool {
    answer["success"] == false || answer["status"].as_str().is_some_and(|word| word.eq_ignore_ascii_case("error"))
}

/// Returns what answers the controls and updates that an engine supports. Fails for a name that is not valid.
pub(crate) fn controls(engine: &Arc<dyn LLMEngine>, instance: &Arc<Instance>) -> Result<Control, DynamoError> {
    let controls = checked("supported_controls", engine.supported_controls())?;
    let updates = checked("supported_updates", engine.supported_updates())?;
    let (engine, instance) = (Arc::clone(engine), Arc::clone(instance));
    Ok(Arc::new(move |path: String, body: Value| {
        let (kind, name) = path.split_once('/').unwrap_or_default();
        let known = match kind {
            "control" => controls.contains(name),
            "update" => updates.contains(name),
            _ => false,
        };
        let (kind, name) = (kind.to_owned(), name.to_owned());
        let (engine, instance) = (Arc::clone(&engine), Arc::clone(&instance));
        async move {
            if !known {
                return None;
            }
            if let Some(refusal) = instance.refusal() {
                return Some(Ok(refusal));
            }
            if !body.is_object() {
                return Some(Ok(failed(format!("engine {kind} request body must be a JSON object"))));
            }
            if kind == "update" {
                return Some(engine.engine_update(&name, body).await);
            }
            Some(instance.control(&*engine, &name, body).await)
        }
        .boxed()
    }))
}

fn checked(what: &str, names: Vec<String>) -> Result<BTreeSet<String>, DynamoError> {
    for name in &names {
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '_' | '.' | '-');
        if name.is_empty() || !name.chars().all(is_plain) {
            let text = format!("{what}(): {name:?} is not a route name (letters, digits and _ . - only)");
            return Err(DynamoError::invalid(text));
        }
    }
    if names.len() > MAX_NAMES {
        return Err(DynamoError::invalid(format!("{what}() returned {} names, at most {MAX_NAMES}", names.len())));
    }
    Ok(names.into_iter().collect())
}
