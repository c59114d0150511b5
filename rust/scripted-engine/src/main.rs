//! An engine that does what each request asks of it: the Rust twin of `tests/support/scripted_engine.py`, which describes
//! the scripts and the journal. The same end-to-end tests run over both.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context;
use async_trait::async_trait;
use dynamo_backend_common::engine::GenerateContext;
use dynamo_backend_common::{
    AsyncEngineContext, BackendError, DisaggregationMode, DynamoError, EngineConfig, ErrorType, LLMEngine,
    LLMEngineOutput, MetricsBindings, MetricsCtx, PreprocessedRequest, RuntimeConfig, TopLogprob, WorkerConfig, run,
};
use futures::stream::BoxStream;
use serde_json::{Value, json};

const DEFAULT_SCRIPT: &str = r#"[["say", "Hello"]]"#;

/// Where the engine writes down what happens to it: JSON lines, each in one write.
struct Journal {
    path: PathBuf,
    file: File,
    name: String,
    tokens: AtomicU64,
}

impl Journal {
    fn note(&self, event: &str, id: Option<&str>, tag: &str, more: &Value) {
        let at = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
        let at: f64 = at.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or_default();
        let mut line = json!({
            "event": event, "at": at, "worker": self.name, "pid": std::process::id(), "id": id, "tag": tag,
        });
        if let (Some(line), Some(more)) = (line.as_object_mut(), more.as_object()) {
            line.extend(more.clone());
        }
        // A test whose journal cannot be written fails by what is missing in it.
        let _ = (&self.file).write_all(format!("{line}\n").as_bytes());
    }

    /// Returns whether no worker came here before with this tag.
    fn is_first_here(&self, tag: &str) -> bool {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        OpenOptions::new().write(true).create_new(true).open(folder.join(format!("died-{tag}"))).is_ok()
    }
}

/// One request's place in the journal.
#[derive(Clone)]
struct Entry {
    journal: Arc<Journal>,
    ctx: GenerateContext,
    sent: Arc<AtomicU64>,
}

impl Entry {
    fn tag(&self) -> &str {
        self.ctx.metadata().get("tag").map_or("", String::as_str)
    }

    fn note(&self, event: &str, more: &Value) {
        self.journal.note(event, Some(self.ctx.id()), self.tag(), more);
    }

    fn note_sent(&self, event: &str) {
        self.note(event, &json!({"sent": self.sent.load(Ordering::SeqCst)}));
    }

    fn signal_itself(&self, name: &str) {
        self.note("die", &Value::Null);
        let (pid, name) = (std::process::id(), name.trim_start_matches("SIG"));
        // A stop takes effect a moment after it was sent: this thread waits for it in the program that sends it.
        let stops = format!("until grep -q '^State:.[TZ]' /proc/{pid}/status; do :; done");
        let wait = if name == "STOP" { stops } else { String::new() };
        // Nothing follows where it works, and a test that waits for the end says what is wrong where it does not.
        let _ = Command::new("sh").args(["-c", &format!("kill -s {name} {pid}; {wait}")]).status();
    }
}

/// Writes the last line of a request, however its stream ends.
struct Finally(Entry);

impl Drop for Finally {
    fn drop(&mut self) {
        self.0.note_sent("finally");
    }
}

struct ScriptedEngine {
    journal: Arc<Journal>,
    model: String,
    max_num_seqs: Option<u64>,
}

fn variable(name: &str) -> anyhow::Result<String> {
    std::env::var(name).with_context(|| format!("{name} is not set"))
}

fn failure(kind: &Value, message: &str) -> DynamoError {
    let backend = match kind.as_str() {
        Some("InvalidArgument") => BackendError::InvalidArgument,
        Some("CannotConnect") => BackendError::CannotConnect,
        Some("Disconnected") => BackendError::Disconnected,
        Some("ConnectionTimeout" | "TimeoutError") => BackendError::ConnectionTimeout,
        Some("ResponseTimeout") => BackendError::ResponseTimeout,
        Some("Cancelled") => BackendError::Cancelled,
        Some("EngineShutdown") => BackendError::EngineShutdown,
        Some("StreamIncomplete") => BackendError::StreamIncomplete,
        _ => BackendError::Unknown,
    };
    let kind_type = match kind.as_str() {
        Some("WorkerUnavailable") => ErrorType::WorkerUnavailable,
        Some("Overloaded") => ErrorType::WorkerOverloaded,
        _ => ErrorType::Backend(backend),
    };
    let (kind_type, message) = match kind.as_u64() {
        // The form in which an engine asserts a status of HTTP.
        Some(code) => {
            let of_caller = (400..500).contains(&code);
            let kind = if of_caller { BackendError::InvalidArgument } else { BackendError::Unknown };
            (ErrorType::Backend(kind), json!({"message": message, "code": code}).to_string())
        }
        None => (kind_type, message.to_owned()),
    };
    DynamoError::builder().error_type(kind_type).message(message).build()
}

fn ended(reason: &str) -> LLMEngineOutput {
    use dynamo_backend_common::FinishReason;
    let reason = match reason {
        "length" => FinishReason::Length,
        "eos" => FinishReason::EoS,
        "cancelled" | "abort" => FinishReason::Cancelled,
        "content_filter" => FinishReason::ContentFilter,
        "stop" => FinishReason::Stop,
        other => FinishReason::Error(other.trim_start_matches("error").trim_start_matches(": ").to_owned()),
    };
    LLMEngineOutput { finish_reason: Some(reason), ..LLMEngineOutput::default() }
}

fn token(id: u32, logprobs: Option<u32>) -> LLMEngineOutput {
    let mut chunk = dynamo_backend_common::chunk::token(id);
    if let Some(wanted) = logprobs {
        let top = (0..wanted.max(1)).map(|n| TopLogprob {
            rank: 1 + n,
            token_id: id + n,
            logprob: -0.5 * f64::from(n + 1),
            ..TopLogprob::default()
        });
        chunk.log_probs = Some(vec![-0.5]);
        chunk.top_logprobs = Some(vec![top.collect()]);
    }
    chunk
}

#[async_trait]
impl LLMEngine for ScriptedEngine {
    async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
        Ok(EngineConfig {
            model: self.model.clone(),
            context_length: Some(1_000_000),
            max_num_seqs: self.max_num_seqs,
            ..Default::default()
        })
    }

    async fn setup_metrics(&self, ctx: MetricsCtx<'_>) -> Result<MetricsBindings, DynamoError> {
        let journal = Arc::clone(&self.journal);
        ctx.metrics.register_prometheus_expfmt_callback(Box::new(move || {
            let count = journal.tokens.load(Ordering::Relaxed);
            format!("# TYPE scripted_tokens_total counter\nscripted_tokens_total {count}\n")
        }));
        Ok(MetricsBindings::default())
    }

    async fn generate(
        &self,
        request: PreprocessedRequest,
        ctx: GenerateContext,
    ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError> {
        let entry = Entry { journal: Arc::clone(&self.journal), ctx, sent: Arc::default() };
        let prompt = request.token_ids.len();
        let priority = request.routing.as_ref().and_then(|routing| routing.priority);
        let trace = entry.ctx.trace_headers();
        let trace = if trace.is_empty() { Value::Null } else { json!(trace) };
        entry.note("generate", &json!({"trace": trace, "prompt": prompt, "priority": priority}));
        let script = entry.ctx.metadata().get("script").map_or(DEFAULT_SCRIPT, String::as_str);
        let steps: Vec<Vec<Value>> =
            serde_json::from_str(script).map_err(|error| failure(&json!("Unknown"), &error.to_string()))?;
        let limit = u64::from(request.stop_conditions.max_tokens.filter(|limit| *limit > 0).unwrap_or(1_000_000_000));
        let logprobs = request.output_options.logprobs;
        let original = entry.ctx.original_prompt_tokens().map_or(prompt, |count| count as usize);
        let mut skipped = prompt.saturating_sub(original);
        let finally = Finally(entry.clone());
        Ok(Box::pin(async_stream::stream! {
            let _finally = finally;
            for step in steps {
                let verb = step[0].as_str().unwrap_or_default().to_owned();
                let text = step.get(1).and_then(Value::as_str).unwrap_or_default().to_owned();
                match verb.as_str() {
                    "say" | "flood" => {
                        let is_endless = verb == "flood";
                        let pace = step.get(2).and_then(Value::as_f64).unwrap_or(0.0);
                        let bytes = if is_endless { vec![b'x'] } else { text.into_bytes() };
                        let mut at = 0;
                        while is_endless || at < bytes.len() {
                            let id = u32::from(bytes[at % bytes.len()]);
                            at += 1;
                            if skipped > 0 {
                                skipped -= 1;
                                continue;
                            }
                            if pace > 0.0 {
                                tokio::time::sleep(Duration::from_secs_f64(pace)).await;
                            }
                            if entry.ctx.is_stopped() {
                                entry.note_sent("stopped");
                                yield Ok(LLMEngineOutput::cancelled());
                                return;
                            }
                            let sent = entry.sent.fetch_add(1, Ordering::SeqCst) + 1;
                            entry.journal.tokens.fetch_add(1, Ordering::Relaxed);
                            if sent == 1 {
                                entry.note("first", &Value::Null);
                            }
                            let mut chunk = token(id, logprobs);
                            if sent == limit {
                                chunk.finish_reason = ended("length").finish_reason;
                                yield Ok(chunk);
                                return;
                            }
                            yield Ok(chunk);
                        }
                    }
                    "wait" | "stick" => {
                        if verb == "stick" && !entry.journal.is_first_here(entry.tag()) {
                            continue;
                        }
                        entry.ctx.stopped().await;
                        entry.note_sent("stopped");
                        yield Ok(LLMEngineOutput::cancelled());
                        return;
                    }
                    "hang" => futures::future::pending().await,
                    "until" => {
                        while !Path::new(&text).exists() {
                            tokio::time::sleep(Duration::from_millis(10)).await;
                        }
                    }
                    "die" => {
                        if entry.journal.is_first_here(entry.tag()) {
                            entry.signal_itself(&text);
                        }
                    }
                    "perish" => entry.signal_itself(&text),
                    "raise" => {
                        let message = step.get(2).and_then(Value::as_str).unwrap_or_default();
                        yield Err(failure(&step[1], message));
                        return;
                    }
                    "end" => {
                        yield Ok(ended(&text));
                        return;
                    }
                    "return" => return,
                    other => {
                        yield Err(failure(&json!("Unknown"), &format!("the step {other:?} is not built here")));
                        return;
                    }
                }
            }
            yield Ok(LLMEngineOutput::stop());
        }))
    }

    async fn abort(&self, ctx: Arc<dyn AsyncEngineContext>) {
        // The tag is not part of a bare context; the request's own journal line has it.
        let tag = std::fs::read_to_string(&self.journal.path).unwrap_or_default();
        let tag = tag.lines().rev().find_map(|line| {
            let event: Value = serde_json::from_str(line).ok()?;
            (event["event"] == "generate" && event["id"] == ctx.id())
                .then(|| event["tag"].as_str().map(str::to_owned))?
        });
        self.journal.note("abort", Some(ctx.id()), &tag.unwrap_or_default(), &Value::Null);
    }

    async fn drain(&self) -> Result<(), DynamoError> {
        self.journal.note("drain", None, "", &Value::Null);
        Ok(())
    }

    async fn cleanup(&self) -> Result<(), DynamoError> {
        self.journal.note("cleanup", None, "", &Value::Null);
        Ok(())
    }
}

fn main() -> anyhow::Result<()> {
    let model = variable("SCRIPTED_MODEL")?;
    let path = PathBuf::from(variable("SCRIPTED_JOURNAL")?);
    let file = OpenOptions::new().create(true).append(true).open(&path)?;
    let name = variable("SCRIPTED_NAME")?;
    let max_num_seqs = std::env::var("SCRIPTED_MAX_NUM_SEQS").ok().and_then(|text| text.parse().ok());
    let mode: DisaggregationMode = std::env::var("SCRIPTED_ROLE").unwrap_or_else(|_| "agg".to_owned()).parse()?;
    let component = if mode == DisaggregationMode::Prefill { format!("{model}-prefill") } else { model.clone() };
    let config = WorkerConfig {
        namespace: "e2e".into(),
        component,
        model_name: model.clone(),
        served_model_name: Some(model.clone()),
        tool_call_parser: std::env::var("SCRIPTED_TOOL_PARSER").ok(),
        reasoning_parser: std::env::var("SCRIPTED_REASONING_PARSER").ok(),
        disaggregation_mode: mode,
        runtime: RuntimeConfig { discovery_backend: std::env::var("SCRIPTED_DISCOVERY").ok(), ..Default::default() },
        ..WorkerConfig::default()
    };
    let journal = Arc::new(Journal { path, file, name, tokens: AtomicU64::new(0) });
    run(Arc::new(ScriptedEngine { journal, model, max_num_seqs }), config)
}
