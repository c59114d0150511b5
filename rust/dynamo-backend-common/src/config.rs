//! What an engine reports about itself at its start, and how the operator wants it served.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde_json::Value;

use crate::error::DynamoError;

/// What the frontend sends to an engine. An [`LLMEngine`](crate::LLMEngine) takes tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ModelInput {
    /// The prompt as tokens.
    #[default]
    Tokens,
    /// The request as text.
    Text,
    /// Tensors.
    Tensor,
}

/// The part of a request that a worker serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DisaggregationMode {
    /// All of it.
    #[default]
    Aggregated,
    /// The prompt; its KV cache then goes to a decode worker.
    Prefill,
    /// The answer, from a prefill worker's KV cache on.
    Decode,
    /// Images and the like, for the workers that see the prompt.
    Encode,
}

impl DisaggregationMode {
    /// Returns the word of the command line.
    pub fn slug(self) -> &'static str {
        match self {
            Self::Aggregated => "agg",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Encode => "encode",
        }
    }

    pub(crate) fn role(self) -> &'static str {
        match self {
            Self::Aggregated => "aggregated",
            other => other.slug(),
        }
    }
}

impl fmt::Display for DisaggregationMode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.slug())
    }
}

impl FromStr for DisaggregationMode {
    type Err = DynamoError;

    fn from_str(text: &str) -> Result<Self, DynamoError> {
        match text.trim().to_ascii_lowercase().as_str() {
            "agg" | "aggregated" => Ok(Self::Aggregated),
            "prefill" => Ok(Self::Prefill),
            "decode" => Ok(Self::Decode),
            "encode" => Ok(Self::Encode),
            _ => Err(DynamoError::invalid(format!(
                "disaggregation mode {text:?} is none of agg, prefill, decode, encode"
            ))),
        }
    }
}

/// The figures of an engine that takes tokens, in the nested form of newer releases.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LlmRegistration {
    /// See [`EngineConfig::context_length`].
    pub context_length: Option<u32>,
    /// See [`EngineConfig::kv_cache_block_size`].
    pub kv_cache_block_size: Option<u32>,
    /// See [`EngineConfig::total_kv_blocks`].
    pub total_kv_blocks: Option<u64>,
    /// See [`EngineConfig::max_num_seqs`].
    pub max_num_seqs: Option<u64>,
    /// See [`EngineConfig::max_num_batched_tokens`].
    pub max_num_batched_tokens: Option<u64>,
    /// See [`EngineConfig::data_parallel_size`].
    pub data_parallel_size: Option<u32>,
    /// See [`EngineConfig::data_parallel_start_rank`].
    pub data_parallel_start_rank: Option<u32>,
    /// See [`EngineConfig::bootstrap_host`].
    pub bootstrap_host: Option<String>,
    /// See [`EngineConfig::bootstrap_port`].
    pub bootstrap_port: Option<u16>,
}

/// What [`start`](crate::LLMEngine::start) returns. A member that is `None` is not advertised.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineConfig {
    /// The model's name; not empty.
    pub model: String,
    /// The name that clients use, unless the operator sets one; `None`: `model`.
    pub served_model_name: Option<String>,
    /// The most tokens of prompt and answer together.
    pub context_length: Option<u32>,
    /// Tokens per KV block; `None`: the engine has no blocks, and is routed to without regard to its cache.
    pub kv_cache_block_size: Option<u32>,
    /// KV blocks of each data-parallel rank.
    pub total_kv_blocks: Option<u64>,
    /// The most requests that run at once.
    pub max_num_seqs: Option<u64>,
    /// The most tokens of one step.
    pub max_num_batched_tokens: Option<u64>,
    /// Data-parallel ranks that this worker hosts; `None`: one.
    pub data_parallel_size: Option<u32>,
    /// The first of them; `None`: 0.
    pub data_parallel_start_rank: Option<u32>,
    /// Where decode workers meet this prefill worker; advertised together with the port.
    pub bootstrap_host: Option<String>,
    /// The port of `bootstrap_host`.
    pub bootstrap_port: Option<u16>,
    /// What else the model card carries.
    pub runtime_data: HashMap<String, Value>,
    /// Further names of the model.
    pub model_aliases: Vec<String>,
    /// The same figures in the nested form; a flat member that is set wins.
    pub llm: Option<LlmRegistration>,
}

impl EngineConfig {
    /// Returns the configuration with the figures of `llm` in the flat members.
    pub(crate) fn flat(mut self) -> Self {
        if let Some(llm) = self.llm.take() {
            self.context_length = self.context_length.or(llm.context_length);
            self.kv_cache_block_size = self.kv_cache_block_size.or(llm.kv_cache_block_size);
            self.total_kv_blocks = self.total_kv_blocks.or(llm.total_kv_blocks);
            self.max_num_seqs = self.max_num_seqs.or(llm.max_num_seqs);
            self.max_num_batched_tokens = self.max_num_batched_tokens.or(llm.max_num_batched_tokens);
            self.data_parallel_size = self.data_parallel_size.or(llm.data_parallel_size);
            self.data_parallel_start_rank = self.data_parallel_start_rank.or(llm.data_parallel_start_rank);
            self.bootstrap_host = self.bootstrap_host.or(llm.bootstrap_host);
            self.bootstrap_port = self.bootstrap_port.or(llm.bootstrap_port);
        }
        self
    }
}

/// Whether frontends make structural tags for tool calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StructuralTagMode {
    /// They do not.
    #[default]
    Off,
    /// They do.
    On,
}

/// For which requests a structural tag is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StructuralTagScope {
    /// For those whose tools ask for it.
    #[default]
    Auto,
    /// For all that have tools.
    Always,
}

/// How closely a structural tag keeps to the schema of a tool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StructuralTagSchema {
    /// As the tool says.
    #[default]
    Auto,
    /// Always closely.
    Strict,
}

/// Which ways of the cluster a worker uses. `None`: what the environment names, else the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeConfig {
    /// `file` (one machine).
    pub discovery_backend: Option<String>,
    /// `tcp` or `nats`.
    pub request_plane: Option<String>,
    /// `zmq` or `nats`.
    pub event_plane: Option<String>,
}

/// How the operator wants an engine served. The defaults are those of the flags.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerConfig {
    /// The first part of the endpoint's name.
    pub namespace: String,
    /// The second part.
    pub component: String,
    /// The last part.
    pub endpoint: String,
    /// The APIs of the model, in one list with commas: `chat`, `completions` and others.
    pub endpoint_types: String,
    /// A directory with the model's files, or a mere name; empty: a card without files.
    pub model_name: String,
    /// The name that clients use; it wins over the engine's.
    pub served_model_name: Option<String>,
    /// What the engine takes; only `Tokens` can be served.
    pub model_input: ModelInput,
    /// A chat template in place of the model's own.
    pub custom_jinja_template: Option<PathBuf>,
    /// The format of the model's tool calls, which the frontend takes apart.
    pub tool_call_parser: Option<String>,
    /// The format of the model's reasoning.
    pub reasoning_parser: Option<String>,
    /// Whether tools are left out of the prompt for `tool_choice: none`.
    pub exclude_tools_when_tool_choice_none: bool,
    /// Whether routers may ask this worker which blocks it holds; without effect until KV events are built.
    pub enable_local_indexer: bool,
    /// Whether loads are published.
    pub enable_kv_routing: bool,
    /// Labels that every metric of the endpoint gets.
    pub metrics_labels: Vec<(String, String)>,
    /// The part of a request that this worker serves.
    pub disaggregation_mode: DisaggregationMode,
    /// The request of the health check; it wins over the engine's.
    pub health_check_payload: Option<Value>,
    /// Whether frontends make structural tags.
    pub structural_tag_mode: StructuralTagMode,
    /// For which requests.
    pub structural_tag_scope: StructuralTagScope,
    /// How closely.
    pub structural_tag_schema: StructuralTagSchema,
    /// Which ways of the cluster to use.
    pub runtime: RuntimeConfig,
    /// Whether images and the like go to an encode worker first.
    pub route_to_encoder: bool,
    /// Whether the model reasons unless a request says otherwise: `enabled` or `disabled`.
    pub default_thinking_mode: Option<String>,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self {
            namespace: "dynamo".into(),
            component: "backend".into(),
            endpoint: "generate".into(),
            endpoint_types: "chat,completions".into(),
            model_name: String::new(),
            served_model_name: None,
            model_input: ModelInput::Tokens,
            custom_jinja_template: None,
            tool_call_parser: None,
            reasoning_parser: None,
            exclude_tools_when_tool_choice_none: true,
            enable_local_indexer: true,
            enable_kv_routing: true,
            metrics_labels: Vec::new(),
            disaggregation_mode: DisaggregationMode::Aggregated,
            health_check_payload: None,
            structural_tag_mode: StructuralTagMode::Off,
            structural_tag_scope: StructuralTagScope::Auto,
            structural_tag_schema: StructuralTagSchema::Auto,
            runtime: RuntimeConfig::default(),
            route_to_encoder: false,
            default_thinking_mode: None,
        }
    }
}

/// Names of APIs and what the model card calls them.
const SURFACES: [(&[&str], &str); 7] = [
    (&["chat"], "Chat"),
    (&["completions"], "Completions"),
    (&["embedding", "embeddings"], "Embedding"),
    (&["tensor"], "TensorBased"),
    (&["image", "images"], "Images"),
    (&["audio", "audios"], "Audios"),
    (&["video", "videos"], "Videos"),
];

impl WorkerConfig {
    /// Returns whether routers may ask for the KV events that they missed: decode and encode workers publish none.
    pub(crate) fn has_local_indexer(&self) -> bool {
        let mode = self.disaggregation_mode;
        self.enable_local_indexer && matches!(mode, DisaggregationMode::Aggregated | DisaggregationMode::Prefill)
    }

    /// Returns the first thing that makes this configuration unusable, before anything was touched.
    ///
    /// `is_raw`: for a `RawEngine`.
    pub(crate) fn check(&self, is_raw: bool) -> Result<(), DynamoError> {
        if is_raw == (self.model_input == ModelInput::Tokens) {
            let (wanted, kind) = if is_raw { ("Text or Tensor", "a RawEngine") } else { ("Tokens", "an LLMEngine") };
            let text = format!("model_input must be {wanted} for {kind}, got {:?}", self.model_input);
            return Err(DynamoError::invalid(text));
        }
        if !is_raw && self.endpoint_types.split(',').any(|word| word.trim().to_ascii_lowercase().starts_with("embed")) {
            let text = "endpoint_types: an LLMEngine in Rust makes no embeddings";
            return Err(DynamoError::invalid(text));
        }
        let mode = self.disaggregation_mode;
        if self.route_to_encoder && matches!(mode, DisaggregationMode::Decode | DisaggregationMode::Encode) {
            let text = format!("route_to_encoder is for agg and prefill workers, this one is {mode}");
            return Err(DynamoError::invalid(text));
        }
        for (name, value) in
            [("namespace", &self.namespace), ("component", &self.component), ("endpoint", &self.endpoint)]
        {
            if value.is_empty() || value.contains(['.', '/']) {
                let text = format!("{name} must be a word without dots and slashes, got {value:?}");
                return Err(DynamoError::invalid(text));
            }
        }
        Ok(())
    }

    /// Returns the card's `model_type`. Fails for a word that names no API.
    pub(crate) fn model_type(&self) -> Result<String, DynamoError> {
        let mut found = Vec::new();
        for word in self.endpoint_types.split(',').map(|word| word.trim().to_ascii_lowercase()) {
            let surface = SURFACES.iter().find(|(words, _)| words.contains(&word.as_str()));
            match surface {
                Some((_, name)) if found.contains(name) => {}
                Some((_, name)) => found.push(*name),
                None => {
                    return Err(DynamoError::invalid(format!("endpoint_types: unknown endpoint type {word:?}")));
                }
            }
        }
        found.sort_by_key(|name| SURFACES.iter().position(|(_, known)| known == name));
        Ok(match self.disaggregation_mode {
            DisaggregationMode::Prefill => "Prefill".into(),
            DisaggregationMode::Encode => String::new(),
            _ => found.join(" | "),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_the_figures_register_alike() {
        let nested = EngineConfig {
            model: "m".into(),
            context_length: Some(1),
            llm: Some(LlmRegistration { context_length: Some(8), total_kv_blocks: Some(9), ..Default::default() }),
            ..Default::default()
        };
        let flat = nested.flat();
        assert_eq!((flat.context_length, flat.total_kv_blocks), (Some(1), Some(9)));
        assert!(flat.llm.is_none());
    }

    #[test]
    fn a_wrong_setting_is_named() {
        let of = |change: fn(&mut WorkerConfig)| {
            let mut config = WorkerConfig::default();
            change(&mut config);
            config.check(false).expect_err("wrong").to_string()
        };
        assert!(of(|c| c.model_input = ModelInput::Text).contains("model_input"));
        assert!(of(|c| c.endpoint_types = "chat, Embeddings".into()).contains("endpoint_types"));
        let raw = |model_input| WorkerConfig { model_input, ..Default::default() }.check(true);
        assert!(raw(ModelInput::Tokens).expect_err("wrong").to_string().contains("Text or Tensor"));
        assert_eq!(raw(ModelInput::Tensor), Ok(()));
        assert!(of(|c| c.component = "a.b".into()).contains("component"));
        assert!(
            of(|c| {
                c.route_to_encoder = true;
                c.disaggregation_mode = DisaggregationMode::Decode;
            })
            .contains("route_to_encoder")
        );
    }

    #[test]
    fn endpoint_types_become_the_card_s_model_type() {
        let of = |types: &str| WorkerConfig { endpoint_types: types.into(), ..Default::default() }.model_type();
        assert_eq!(of(" Completions, chat").expect("known"), "Chat | Completions");
        assert!(of("chat,prefill").expect_err("unknown").to_string().contains("prefill"));
        assert!(of("").is_err());
    }
}
