//! The configuration of a mock engine as one JSON object: what `--extra-engine-args` reads and what the flags become.
//!
//! A mistake names the path of the member; an unknown member also lists the known ones.

use std::path::PathBuf;
use std::time::Duration;

use dynamo_backend_common::{BackendError, DynamoError, ErrorType};
use serde_json::{Map, Value, json};

use crate::output::ReasoningShape;
use crate::scheduler::{Backend, PreemptionMode, Role, SchedulePolicy, SchedulerOptions, SglangOptions};
use crate::timing::Timing;

const DEFAULT_ACCEPT_RATES: [f64; 5] = [0.85, 0.3, 0.0, 0.0, 0.0];
const MAX_RANKS: usize = 1024;
pub(crate) const AIS: &str = "external timing needs the package aisimulate, which is not public";

pub(crate) fn invalid(message: impl Into<String>) -> DynamoError {
    DynamoError::builder().error_type(ErrorType::Backend(BackendError::InvalidArgument)).message(message).build()
}

/// One mock engine.
#[derive(Clone, Debug, Default)]
pub(crate) struct MockOptions {
    pub(crate) scheduler: SchedulerOptions,
    pub(crate) timing: Timing,
    pub(crate) dp_size: usize,
    pub(crate) startup: Duration,
    /// 10^9 bytes a second; 0: handing a prompt over takes no time.
    pub(crate) transfer_bandwidth: f64,
    /// 0: not known, and no time.
    pub(crate) bytes_per_token: usize,
    /// Of the drafts that are accepted, and of the token ids.
    pub(crate) seed: u64,
    pub(crate) reasoning: Option<ReasoningShape>,
    pub(crate) response_trace: Option<PathBuf>,
    pub(crate) enable_local_indexer: bool,
}

impl MockOptions {
    /// Returns whether the engine publishes its blocks: a decode worker does not.
    pub(crate) fn has_kv_events(&self) -> bool {
        self.scheduler.enable_prefix_caching && self.scheduler.role != Role::Decode
    }

    /// Returns how long the keys and values of a prompt are under way between workers.
    pub(crate) fn transfer_time(&self, tokens: usize) -> Duration {
        if self.transfer_bandwidth == 0.0 {
            return Duration::ZERO;
        }
        let seconds = (tokens * self.bytes_per_token) as f64 / (self.transfer_bandwidth * 1e9);
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO)
    }
}

/// One object of the configuration, whose members are taken by name and type.
struct Section<'a> {
    values: &'a Map<String, Value>,
    path: &'static str,
}

/// Members whose meaning is not built here: `null`, or the value that changes nothing, is accepted.
const NOT_BUILT: [(&str, &str); 9] = [
    ("engine", "prefill_schedule_interval"),
    ("engine", "prefill_decode_interval"),
    ("engine", "kv_cache_groups"),
    ("engine", "kv_cache_capacity_bytes"),
    ("engine", "native_host_offload"),
    ("", "gpu_memory_utilization"),
    ("dynamo", "router_queue_policy"),
    ("dynamo", "zmq_kv_events_port"),
    ("dynamo", "zmq_replay_port"),
];

impl<'a> Section<'a> {
    fn new(value: &'a Value, path: &'static str, known: &[&str]) -> Result<Self, DynamoError> {
        static EMPTY: std::sync::OnceLock<Map<String, Value>> = std::sync::OnceLock::new();
        let values = match value {
            Value::Null => EMPTY.get_or_init(Map::new),
            Value::Object(values) => values,
            other => {
                let name = if path.is_empty() { "the configuration" } else { path };
                return Err(invalid(format!("{name} must be an object, got {}", shown(other))));
            }
        };
        let section = Self { values, path };
        for (name, value) in values {
            let place = section.place(name);
            if !known.contains(&name.as_str()) {
                return Err(invalid(format!("{place}: unknown field; known are {}", known.join(", "))));
            }
            let neutral = match name.as_str() {
                "prefill_schedule_interval" => json!(1),
                "prefill_decode_interval" => json!(0),
                _ => Value::Null,
            };
            let is_missing = NOT_BUILT.contains(&(path, name));
            if is_missing && !value.is_null() && *value != neutral {
                return Err(invalid(format!("{place} is not built in the mocker in Rust")));
            }
        }
        Ok(section)
    }

    fn place(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    fn raw(&self, name: &str) -> &'a Value {
        self.values.get(name).unwrap_or(&Value::Null)
    }

    fn wrong(&self, name: &str, what: &str) -> DynamoError {
        invalid(format!("{} must be {what}, got {}", self.place(name), shown(self.raw(name))))
    }

    fn integer(&self, name: &str, minimum: usize) -> Result<Option<usize>, DynamoError> {
        match self.raw(name) {
            Value::Null => Ok(None),
            value => match value.as_u64().and_then(|number| usize::try_from(number).ok()) {
                Some(number) if number >= minimum => Ok(Some(number)),
                _ => Err(self.wrong(name, &format!("an integer of at least {minimum}"))),
            },
        }
    }

    fn number(&self, name: &str) -> Result<Option<f64>, DynamoError> {
        match self.raw(name) {
            Value::Null => Ok(None),
            value => match value.as_f64().filter(|number| number.is_finite() && *number >= 0.0) {
                Some(number) => Ok(Some(number)),
                None => Err(self.wrong(name, "a finite number of at least 0")),
            },
        }
    }

    fn boolean(&self, name: &str, default: bool) -> Result<bool, DynamoError> {
        match self.raw(name) {
            Value::Null => Ok(default),
            value => value.as_bool().ok_or_else(|| self.wrong(name, "true or false")),
        }
    }

    fn one_of<T: Copy>(&self, name: &str, choices: &[(&str, T)]) -> Result<T, DynamoError> {
        let value = self.raw(name);
        let found = choices.iter().find(|(word, _)| value.as_str() == Some(word));
        match found.or(choices.first().filter(|_| value.is_null())) {
            Some((_, choice)) => Ok(*choice),
            None => {
                let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
                Err(self.wrong(name, &format!("one of {}", words.join(", "))))
            }
        }
    }
}

fn shown(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 60 { text } else { text.chars().take(60).chain("...".chars()).collect() }
}

const TOP: [&str; 6] =
    ["dp_size", "dynamo", "engine", "gpu_memory_utilization", "startup_time", "tensor_parallel_size"];
const DYNAMO: [&str; 8] = [
    "bootstrap_port",
    "enable_local_indexer",
    "handoff_session_timeout_ms",
    "reasoning",
    "response_replay_trace_path",
    "router_queue_policy",
    "zmq_kv_events_port",
    "zmq_replay_port",
];
const ENGINE: [&str; 30] = [
    "aic_mtp_seed",
    "aic_nextn",
    "aic_nextn_accept_rates",
    "backend",
    "block_size",
    "decode_speedup_ratio",
    "emit_kv_events",
    "emit_kv_token_ids",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "kv_bytes_per_token",
    "kv_cache_bytes_per_token",
    "kv_cache_capacity_bytes",
    "kv_cache_groups",
    "kv_transfer_bandwidth",
    "kv_transfer_bytes_per_token",
    "kv_transfer_timing_mode",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "native_host_offload",
    "num_gpu_blocks",
    "preemption_mode",
    "prefill_decode_interval",
    "prefill_schedule_interval",
    "sglang",
    "speedup_ratio",
    "timing_model",
    "trtllm",
    "worker_type",
];
const SGLANG: [&str; 5] = [
    "chunked_prefill_size",
    "clip_max_new_tokens",
    "max_prefill_tokens",
    "schedule_conservativeness",
    "schedule_policy",
];

/// Checks a configuration and returns what it says.
pub(crate) fn read_configuration(document: &Value) -> Result<MockOptions, DynamoError> {
    let top = Section::new(document, "", &TOP)?;
    let engine = Section::new(top.raw("engine"), "engine", &ENGINE)?;
    let dynamo = Section::new(top.raw("dynamo"), "dynamo", &DYNAMO)?;
    if dynamo.integer("bootstrap_port", 0)?.is_some() {
        return Err(invalid(
            "dynamo.bootstrap_port is not built in the mocker in Rust: without it a prompt is handed over in the answer",
        ));
    }
    top.integer("tensor_parallel_size", 1)?;
    engine.one_of("kv_transfer_timing_mode", &[("full_prompt", ()), ("destination_missing", ())])?;
    let scheduler = read_scheduler(&engine)?;
    if engine.boolean("emit_kv_token_ids", false)? && scheduler.backend == Backend::Sglang {
        return Err(invalid("engine.emit_kv_token_ids cannot be true for backend sglang"));
    }
    let dp_size = top.integer("dp_size", 1)?.unwrap_or(1);
    if dp_size > MAX_RANKS {
        return Err(invalid(format!("dp_size must be an integer from 1 to {MAX_RANKS}, got {dp_size}")));
    }
    let startup = top.number("startup_time")?.unwrap_or(0.0);
    let trace = match dynamo.raw("response_replay_trace_path") {
        Value::Null => None,
        Value::String(path) => Some(PathBuf::from(path)).filter(|path| !path.as_os_str().is_empty()),
        _ => return Err(dynamo.wrong("response_replay_trace_path", "a string")),
    };
    let bytes = engine.integer("kv_transfer_bytes_per_token", 0)?.or(engine.integer("kv_bytes_per_token", 0)?);
    Ok(MockOptions {
        scheduler,
        timing: read_timing(engine.raw("timing_model"))?,
        dp_size,
        startup: Duration::try_from_secs_f64(startup).map_err(|error| invalid(format!("startup_time: {error}")))?,
        transfer_bandwidth: engine.number("kv_transfer_bandwidth")?.unwrap_or(0.0),
        bytes_per_token: bytes.unwrap_or(0),
        seed: engine.integer("aic_mtp_seed", 0)?.unwrap_or(42) as u64,
        reasoning: read_reasoning(dynamo.raw("reasoning"))?,
        response_trace: trace,
        enable_local_indexer: dynamo.boolean("enable_local_indexer", true)?,
    })
}

fn read_scheduler(engine: &Section<'_>) -> Result<SchedulerOptions, DynamoError> {
    let backend = engine
        .one_of("backend", &[("vllm", Backend::Vllm), ("sglang", Backend::Sglang), ("trtllm", Backend::Trtllm)])?;
    let trtllm = Section::new(engine.raw("trtllm"), "engine.trtllm", &["capacity_scheduler_policy"])?;
    trtllm.one_of("capacity_scheduler_policy", &[("guaranteed_no_evict", ())])?;
    let base = SchedulerOptions::default();
    let default_block = match backend {
        Backend::Vllm => 64,
        Backend::Sglang => 1,
        Backend::Trtllm => 32,
    };
    let mut accept_rates = Vec::new();
    if let Some(drafts) = engine.integer("aic_nextn", 1)? {
        if drafts > DEFAULT_ACCEPT_RATES.len() {
            return Err(engine.wrong("aic_nextn", "an integer from 1 to 5"));
        }
        accept_rates = match engine.raw("aic_nextn_accept_rates") {
            Value::Null => DEFAULT_ACCEPT_RATES.to_vec(),
            rates => serde_json::from_value::<Vec<f64>>(rates.clone())
                .map_err(|_| engine.wrong("aic_nextn_accept_rates", "a list of numbers"))?,
        };
        accept_rates.resize(drafts, 0.0);
    }
    let options = SchedulerOptions {
        backend,
        role: engine.one_of(
            "worker_type",
            &[("aggregated", Role::Aggregated), ("prefill", Role::Prefill), ("decode", Role::Decode)],
        )?,
        num_gpu_blocks: engine.integer("num_gpu_blocks", 1)?.unwrap_or(base.num_gpu_blocks),
        block_size: engine.integer("block_size", 1)?.unwrap_or(default_block),
        max_model_len: engine.integer("max_model_len", 2)?,
        max_num_seqs: engine.integer("max_num_seqs", 1)?.unwrap_or(base.max_num_seqs),
        max_num_batched_tokens: engine.integer("max_num_batched_tokens", 1)?.unwrap_or(base.max_num_batched_tokens),
        enable_prefix_caching: engine.boolean("enable_prefix_caching", true)?,
        enable_chunked_prefill: engine.boolean("enable_chunked_prefill", true)?,
        preemption_mode: engine
            .one_of("preemption_mode", &[("lifo", PreemptionMode::Lifo), ("fifo", PreemptionMode::Fifo)])?,
        speedup_ratio: engine.number("speedup_ratio")?.unwrap_or(1.0),
        decode_speedup_ratio: engine.number("decode_speedup_ratio")?.unwrap_or(1.0),
        accept_rates,
        sglang: read_sglang(engine.raw("sglang"))?,
    };
    options.check()?;
    Ok(options)
}

fn read_sglang(value: &Value) -> Result<SglangOptions, DynamoError> {
    let sglang = Section::new(value, "engine.sglang", &SGLANG)?;
    let base = SglangOptions::default();
    Ok(SglangOptions {
        schedule_policy: sglang
            .one_of("schedule_policy", &[("fifo", SchedulePolicy::Fifo), ("lpm", SchedulePolicy::Lpm)])?,
        max_prefill_tokens: sglang.integer("max_prefill_tokens", 1)?.unwrap_or(base.max_prefill_tokens),
        chunked_prefill_size: sglang.integer("chunked_prefill_size", 1)?.unwrap_or(base.chunked_prefill_size),
        clip_max_new_tokens: sglang.integer("clip_max_new_tokens", 1)?.unwrap_or(base.clip_max_new_tokens),
        schedule_conservativeness: sglang
            .number("schedule_conservativeness")?
            .unwrap_or(base.schedule_conservativeness),
    })
}

fn read_timing(model: &Value) -> Result<Timing, DynamoError> {
    let path = "engine.timing_model";
    match model.get("type").and_then(Value::as_str).filter(|_| model.is_object()) {
        None if model.is_null() => Ok(Timing::Polynomial),
        Some("polynomial") => Section::new(model, path, &["type"]).map(|_| Timing::Polynomial),
        Some("fixed") => {
            let fixed = Section::new(model, path, &["type", "prefill_ms", "decode_ms"])?;
            let needed = |name: &str| fixed.number(name)?.ok_or_else(|| invalid(format!("{path}.{name} is missing")));
            Ok(Timing::Fixed { prefill_ms: needed("prefill_ms")?, decode_ms: needed("decode_ms")? })
        }
        Some("external") => match model.get("provider").and_then(Value::as_str) {
            Some("dynamo_profile") => Err(invalid(format!(
                "{path}: timing from a profile is not built in the mocker in Rust: use python -m dynamo.mocker"
            ))),
            provider => Err(invalid(format!("{path}.provider must be dynamo_profile, got {provider:?}; {AIS}"))),
        },
        kind => Err(invalid(format!("{path}.type must be polynomial, fixed or external, got {kind:?}"))),
    }
}

fn read_reasoning(value: &Value) -> Result<Option<ReasoningShape>, DynamoError> {
    if value.is_null() {
        return Ok(None);
    }
    let names = ["end_thinking_token_id", "start_thinking_token_id", "thinking_ratio"];
    let shape = Section::new(value, "reasoning", &names)?;
    let id = |name: &str| match shape.integer(name, 0)?.map(u32::try_from) {
        Some(Ok(id)) => Ok(id),
        Some(Err(_)) => Err(shape.wrong(name, "a token id")),
        None => Err(invalid(format!("reasoning.{name} is missing"))),
    };
    let ratio = shape.number("thinking_ratio")?.ok_or_else(|| invalid("reasoning.thinking_ratio is missing"))?;
    if ratio > 1.0 {
        return Err(shape.wrong("thinking_ratio", "in 0..1"));
    }
    Ok(Some(ReasoningShape { start_id: id("start_thinking_token_id")?, end_id: id("end_thinking_token_id")?, ratio }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(document: Value) -> String {
        read_configuration(&document).err().map(|error| error.message().to_owned()).unwrap_or_default()
    }

    #[test]
    fn an_empty_configuration_is_the_default() {
        let options = read_configuration(&json!({})).expect("options");
        assert_eq!(options.scheduler, SchedulerOptions::default());
        assert_eq!((options.dp_size, options.seed, options.timing), (1, 42, Timing::Polynomial));
    }

    #[test]
    fn members_reach_the_scheduler() {
        let options = read_configuration(&json!({
            "engine": {
                "backend": "sglang", "block_size": 16, "aic_nextn": 2, "timing_model": {"type": "fixed", "prefill_ms": 2, "decode_ms": 1},
                "sglang": {"schedule_policy": "lpm"}, "prefill_schedule_interval": 1,
            },
            "dp_size": 2, "dynamo": {"reasoning": {"start_thinking_token_id": 1, "end_thinking_token_id": 2, "thinking_ratio": 0.5}},
        }))
        .expect("options");
        assert_eq!(options.scheduler.accept_rates, [0.85, 0.3]);
        assert_eq!(options.scheduler.sglang.schedule_policy, SchedulePolicy::Lpm);
        assert_eq!(options.timing, Timing::Fixed { prefill_ms: 2.0, decode_ms: 1.0 });
        assert!(options.reasoning.is_some());
    }

    #[test]
    fn a_mistake_names_its_path() {
        for (document, words) in [
            (json!([]), "the configuration must be an object"),
            (json!({"engine": {"zzz": 1}}), "engine.zzz: unknown field; known are aic_mtp_seed"),
            (json!({"engine": {"block_size": 1}}), "engine.block_size must be an integer of at least 2"),
            (json!({"engine": {"num_gpu_blocks": "x"}}), "engine.num_gpu_blocks must be an integer of at least 1"),
            (json!({"engine": {"backend": "x"}}), "engine.backend must be one of vllm, sglang, trtllm"),
            (json!({"engine": {"kv_cache_groups": []}}), "engine.kv_cache_groups is not built"),
            (json!({"engine": {"prefill_schedule_interval": 2}}), "engine.prefill_schedule_interval is not built"),
            (json!({"engine": {"timing_model": {"type": "fixed", "prefill_ms": 1}}}), "decode_ms is missing"),
            (json!({"engine": {"speedup_ratio": -1}}), "engine.speedup_ratio must be a finite number"),
            (json!({"engine": {"aic_nextn": 1, "decode_speedup_ratio": 2}}), "engine.decode_speedup_ratio must be 1"),
            (json!({"engine": {"backend": "trtllm", "worker_type": "prefill"}}), "engine.worker_type"),
            (json!({"dynamo": {"bootstrap_port": 1}}), "dynamo.bootstrap_port is not built"),
            (json!({"dynamo": {"zmq_kv_events_port": 1}}), "dynamo.zmq_kv_events_port is not built"),
            (json!({"dynamo": {"reasoning": {"thinking_ratio": 0.5}}}), "reasoning.start_thinking_token_id is missing"),
        ] {
            let text = refusal(document.clone());
            assert!(text.contains(words), "{document}: {text:?}");
        }
    }
}
