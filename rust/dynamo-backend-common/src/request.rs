//! What an engine is asked: the prompt as tokens, and how to go on from it. Absent members are `None` or empty, unknown
//! ones are ignored.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::telemetry::SpanIds;

/// The member that only requests of the health check have.
pub const HEALTH_CHECK_KEY: &str = "_HEALTH_CHECK";

/// Takes the default where the sender wrote null.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

/// One request, as the frontend prepared it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PreprocessedRequest {
    /// The name that the client asked for; a LoRA adapter has one of its own.
    #[serde(deserialize_with = "or_default")]
    pub model: String,
    /// The prompt.
    #[serde(deserialize_with = "token_ids")]
    pub token_ids: Vec<u32>,
    /// When to stop.
    #[serde(deserialize_with = "or_default")]
    pub stop_conditions: StopConditions,
    /// How to choose tokens.
    #[serde(deserialize_with = "or_default")]
    pub sampling_options: SamplingOptions,
    /// What to report beside the tokens.
    #[serde(deserialize_with = "or_default")]
    pub output_options: OutputOptions,
    /// The tokens that end an answer of this model.
    #[serde(deserialize_with = "or_default")]
    pub eos_token_ids: Vec<u32>,
    /// The checksum of the model card that the frontend used.
    pub mdc_sum: Option<String>,
    /// Wishes of the client: `name` or `name:value`.
    #[serde(deserialize_with = "or_default")]
    pub annotations: Vec<String>,
    /// When the client sent the request, in milliseconds since 1970.
    pub request_timestamp_ms: Option<f64>,
    /// How the request was routed.
    pub routing: Option<RoutingHints>,
    /// What the router notes for itself.
    pub router: Option<Value>,
    /// What the router was told to do differently for this request.
    pub router_config_override: Option<Value>,
    /// What the prefill worker handed over; on decode workers.
    pub prefill_result: Option<PrefillResult>,
    /// What the encode worker handed over.
    pub encoder_result: Option<Map<String, Value>>,
    /// Where prefill and decode worker meet.
    pub bootstrap_info: Option<BootstrapInfo>,
    /// Further arguments, as the client gave them.
    pub extra_args: Option<Value>,
    /// Images and the like, by kind.
    pub multi_modal_data: Option<Value>,
    /// What the client tells the processor of images and the like.
    pub mm_processor_kwargs: Option<Value>,
    /// The names that the client gave its images and the like.
    pub multi_modal_uuids: Option<Value>,
    /// How images and the like are read.
    pub media_io_kwargs: Option<Value>,
    /// What the router knows of images and the like.
    pub mm_routing_info: Option<Value>,
    /// The prompt as embeddings, a tensor in base64.
    pub prompt_embeds: Option<String>,
    /// The session or agent that the request is of.
    pub agent_context: Option<Value>,
    /// Requests with the same one may share what was made of their images.
    pub image_cache_scope: Option<Value>,
    /// What is expected of the KV cache for this prompt.
    pub kv_hint: Option<Value>,
    /// The seed of a guided answer.
    pub jail_seed: Option<Value>,
    /// What a prefill worker may give up once its blocks were read.
    pub staged_kv_cleanup: Option<Value>,
    /// The span of the worker that had the request before.
    #[serde(deserialize_with = "trace_link")]
    pub migration_link: Option<TraceLink>,
    /// Whether a guided answer begins only after the reasoning.
    #[serde(deserialize_with = "or_default")]
    pub require_reasoning: bool,
    /// Whether the health check sent this; the engine answers as cheaply as it can.
    #[serde(rename = "_HEALTH_CHECK", deserialize_with = "or_default", skip_serializing_if = "is_false")]
    pub is_probe: bool,
}

fn is_false(value: &bool) -> bool {
    !*value
}

impl PreprocessedRequest {
    /// Begins a request for tests and tools.
    pub fn builder() -> PreprocessedRequestBuilder {
        PreprocessedRequestBuilder(Self::default())
    }
}

/// Collects the parts of a [`PreprocessedRequest`].
#[derive(Clone, Debug)]
#[must_use]
pub struct PreprocessedRequestBuilder(PreprocessedRequest);

impl PreprocessedRequestBuilder {
    /// Sets the model's name.
    pub fn model(mut self, model: impl Into<String>) -> Self {
        self.0.model = model.into();
        self
    }

    /// Sets the prompt.
    pub fn token_ids(mut self, token_ids: Vec<u32>) -> Self {
        self.0.token_ids = token_ids;
        self
    }

    /// Sets when to stop.
    pub fn stop_conditions(mut self, stop: StopConditions) -> Self {
        self.0.stop_conditions = stop;
        self
    }

    /// Sets how tokens are chosen.
    pub fn sampling_options(mut self, sampling: SamplingOptions) -> Self {
        self.0.sampling_options = sampling;
        self
    }

    /// Sets what is reported beside the tokens.
    pub fn output_options(mut self, output: OutputOptions) -> Self {
        self.0.output_options = output;
        self
    }

    /// Sets the result of the prefill worker.
    pub fn prefill_result(mut self, result: PrefillResult) -> Self {
        self.0.prefill_result = Some(result);
        self
    }

    /// Returns the request.
    pub fn build(self) -> PreprocessedRequest {
        self.0
    }
}

/// When an answer ends.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StopConditions {
    /// The most tokens to make; the engine keeps it, the frontend does not cut.
    pub max_tokens: Option<u32>,
    /// Stop strings.
    pub stop: Option<Vec<String>>,
    /// Stop tokens, which are not part of the answer.
    pub stop_token_ids: Option<Vec<u32>>,
    /// Stop tokens that are part of the answer.
    pub stop_token_ids_visible: Option<Vec<u32>>,
    /// Stop tokens of the system (the end of a text), not part of the answer.
    pub stop_token_ids_hidden: Option<Vec<u32>>,
    /// The fewest tokens before a stop counts.
    pub min_tokens: Option<u32>,
    /// Whether the end of a text does not end the answer.
    pub ignore_eos: Option<bool>,
    /// The most tokens of reasoning.
    pub max_thinking_tokens: Option<u32>,
}

/// How tokens are chosen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SamplingOptions {
    /// Number of answers.
    pub n: Option<u8>,
    /// Number of answers to choose the best from.
    pub best_of: Option<u8>,
    /// Penalty of tokens that are there already, -2 to 2.
    pub presence_penalty: Option<f32>,
    /// Penalty by how often a token is there already, -2 to 2.
    pub frequency_penalty: Option<f32>,
    /// Factor against repetition; 1 is none.
    pub repetition_penalty: Option<f32>,
    /// 0: always the likeliest token.
    pub temperature: Option<f32>,
    /// The probability mass that tokens are drawn from, above 0 to 1.
    pub top_p: Option<f32>,
    /// The number of tokens that one is drawn from; -1: all.
    pub top_k: Option<i32>,
    /// The least probability, relative to the likeliest token, 0 to 1.
    pub min_p: Option<f32>,
    /// Whether to search beams.
    pub use_beam_search: Option<bool>,
    /// How a beam's length counts.
    pub length_penalty: Option<f32>,
    /// The seed of the draws.
    pub seed: Option<i64>,
    /// Whether a stop string is part of the answer.
    pub include_stop_str_in_output: Option<bool>,
    /// The form that the answer must have.
    pub guided_decoding: Option<GuidedDecodingOptions>,
}

/// The form of an answer: at most one of the first five members is set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuidedDecodingOptions {
    /// A JSON schema.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub json: Option<Value>,
    /// A regular expression.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub regex: Option<String>,
    /// One of these texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub choice: Option<Vec<String>>,
    /// A grammar in EBNF.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grammar: Option<String>,
    /// A structural tag.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub structural_tag: Option<Value>,
    /// What counts as white space in JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub whitespace_pattern: Option<String>,
    /// Which implementation the client wishes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
}

/// What is reported beside the tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OutputOptions {
    /// The number of candidates per place; 0: only the chosen token; `None`: no log probabilities.
    pub logprobs: Option<u32>,
    /// The same for the prompt.
    pub prompt_logprobs: Option<u32>,
    /// Whether special tokens have no text.
    pub skip_special_tokens: Option<bool>,
    /// Whether the client wants its prompt as the template wrote it.
    pub formatted_prompt: Option<bool>,
    /// Whether tokens are reported as `token_id:N`.
    pub return_tokens_as_token_ids: Option<bool>,
}

/// How a request was routed, and how it may be.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RoutingHints {
    /// The worker that the client named.
    pub backend_instance_id: Option<u64>,
    /// The prefill worker.
    pub prefill_worker_id: Option<u64>,
    /// The decode worker.
    pub decode_worker_id: Option<u64>,
    /// The data-parallel rank.
    pub dp_rank: Option<u32>,
    /// The data-parallel rank of the prefill worker.
    pub prefill_dp_rank: Option<u32>,
    /// How long the answer may become.
    pub expected_output_tokens: Option<u32>,
    /// The adapter.
    pub lora_name: Option<String>,
    /// Keeps the cached prefixes of one tenant from another's.
    #[serde(alias = "cache_salt")]
    pub cache_namespace: Option<String>,
    /// Seconds by which the request counts as older than it is.
    pub priority_jump: Option<f64>,
    /// The priority of its queue.
    pub strict_priority: Option<u32>,
    /// The priority in the engine.
    pub priority: Option<i32>,
    /// The workers that may serve it.
    pub allowed_worker_ids: Option<BTreeSet<u64>>,
    /// Taints that a worker must have, or should.
    pub routing_constraints: Option<Value>,
}

/// What a prefill worker handed over.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PrefillResult {
    /// The terminal chunk's `disaggregated_params`.
    pub disaggregated_params: Value,
    /// What the tokens of the prompt were.
    pub prompt_tokens_details: Option<Value>,
    #[serde(flatten)]
    #[doc(hidden)]
    pub other: BTreeMap<String, Value>,
}

/// Where a prefill and a decode worker meet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BootstrapInfo {
    /// The prefill worker's address.
    pub bootstrap_host: String,
    /// Its port.
    pub bootstrap_port: u16,
    /// The number both sides name.
    pub bootstrap_room: u64,
    /// The id of the hand-off.
    pub handoff_id: Option<String>,
}

/// One span, as the worker that made it names it to the next one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceLink {
    /// 32 hexadecimal digits.
    pub trace_id: String,
    /// 16 hexadecimal digits.
    pub span_id: String,
}

impl TraceLink {
    pub(crate) fn of(ids: SpanIds) -> Self {
        Self { trace_id: format!("{:032x}", ids.trace_id), span_id: format!("{:016x}", ids.span_id) }
    }

    /// Returns the ids; `None` where they are not valid.
    pub(crate) fn ids(&self) -> Option<(u128, u64)> {
        let ids = SpanIds::read(&format!("00-{}-{}-01", self.trace_id, self.span_id))?;
        Some((ids.trace_id, ids.span_id))
    }
}

/// Reads a link; one that is not valid is none, for it is no part of what the client asked.
fn trace_link<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<TraceLink>, D::Error> {
    Ok(Option::<Value>::deserialize(deserializer)?.and_then(|value| serde_json::from_value(value).ok()))
}

/// Reads tokens from a list, or from packed little-endian 32-bit numbers.
fn token_ids<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u32>, D::Error> {
    struct Tokens;

    impl<'de> Visitor<'de> for Tokens {
        type Value = Vec<u32>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("a list of unsigned 32-bit integers")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<u32>, A::Error> {
            // What the sender announces is not believed beyond a page: it may announce 4 billion.
            let mut ids = Vec::with_capacity(items.size_hint().unwrap_or(0).min(1024));
            while let Some(id) =
                items.next_element().map_err(|error| de::Error::custom(format!("token_ids: {error}")))?
            {
                ids.push(id);
            }
            Ok(ids)
        }

        fn visit_bytes<E: de::Error>(self, packed: &[u8]) -> Result<Vec<u32>, E> {
            let words = packed.chunks_exact(4);
            if !words.remainder().is_empty() {
                return Err(E::invalid_length(packed.len(), &"a multiple of four bytes"));
            }
            Ok(words.map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect())
        }
    }
    deserializer.deserialize_any(Tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(value: Value) -> Result<PreprocessedRequest, rmp_serde::decode::Error> {
        rmp_serde::from_slice(&rmp_serde::to_vec_named(&value).expect("msgpack"))
    }

    #[test]
    fn nulls_are_defaults_and_unknown_members_are_ignored() {
        let request = read(json!({
            "token_ids": [1, 70000], "model": null, "annotations": null, "eos_token_ids": null, "routing": {},
            "stop_conditions": {"max_tokens": 5, "stop": null, "later": [1]}, "sampling_options": null, "new": {"a": 1},
            "output_options": {"logprobs": null}, "migration_link": {"trace_id": 7},
        }))
        .expect("a request");
        assert_eq!(request.token_ids, [1, 70000]);
        assert_eq!(request.stop_conditions.max_tokens, Some(5));
        assert_eq!(request.routing, Some(RoutingHints::default()));
        assert!(!request.is_probe);
    }

    #[test]
    fn whole_numbers_are_taken_where_fractions_are_meant() {
        let request = read(json!({"token_ids": [], "sampling_options": {"temperature": 0, "top_p": 0.5, "n": 2}}));
        let sampling = request.expect("a request").sampling_options;
        assert_eq!((sampling.temperature, sampling.top_p, sampling.n), (Some(0.0), Some(0.5), Some(2)));
    }

    #[test]
    fn a_probe_is_marked() {
        assert!(read(json!({"token_ids": [1], "_HEALTH_CHECK": true})).expect("a request").is_probe);
    }

    #[test]
    fn tokens_may_be_packed() {
        let body = [&[0x81, 0xa9][..], b"token_ids", &[0xc4, 8, 1, 0, 0, 0, 0, 1, 0, 0]].concat();
        let request: PreprocessedRequest = rmp_serde::from_slice(&body).expect("a request");
        assert_eq!(request.token_ids, [1, 256]);
    }

    #[test]
    fn wrong_tokens_are_an_error() {
        assert!(read(json!({"token_ids": [-1]})).is_err());
        assert!(read(json!({"token_ids": "abc"})).is_err());
    }
}
