//! The members of a request, and what becomes of each: for engines that report what they ignore.
//!
//! ```
//! use dynamo_backend_common::PreprocessedRequest;
//! use dynamo_backend_common::schema::{FieldStatus, REQUEST_FIELDS};
//!
//! let request = PreprocessedRequest::builder().token_ids(vec![1, 2]).build();
//! let set: Vec<&str> = REQUEST_FIELDS.iter().filter(|field| (field.is_set)(&request)).map(|field| field.name).collect();
//! assert_eq!(set, ["token_ids"]);
//! assert_eq!(REQUEST_FIELDS[0].status, FieldStatus::Supported);
//! ```

use crate::request::{HEALTH_CHECK_KEY, OutputOptions, PreprocessedRequest, SamplingOptions, StopConditions};

/// What this system does with a member of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldStatus {
    /// The frontend, the router or the worker acts on it.
    Supported,
    /// It is handed to the engine as it came.
    Forwarded,
}

impl FieldStatus {
    /// Returns the word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Supported => "supported",
            Self::Forwarded => "forwarded",
        }
    }
}

/// One member of [`PreprocessedRequest`].
#[derive(Clone, Copy, Debug)]
pub struct FieldDescriptor {
    /// Its name on the wire.
    pub name: &'static str,
    /// What becomes of it.
    pub status: FieldStatus,
    /// Whether a request has it.
    pub is_set: fn(&PreprocessedRequest) -> bool,
}

const fn field(name: &'static str, status: FieldStatus, is_set: fn(&PreprocessedRequest) -> bool) -> FieldDescriptor {
    FieldDescriptor { name, status, is_set }
}

use FieldStatus::{Forwarded, Supported};

/// Every member of a request.
pub const REQUEST_FIELDS: [FieldDescriptor; 30] = [
    field("model", Supported, |request| !request.model.is_empty()),
    field("token_ids", Supported, |request| !request.token_ids.is_empty()),
    field("stop_conditions", Supported, |request| request.stop_conditions != StopConditions::default()),
    field("sampling_options", Supported, |request| request.sampling_options != SamplingOptions::default()),
    field("output_options", Supported, |request| request.output_options != OutputOptions::default()),
    field("eos_token_ids", Supported, |request| !request.eos_token_ids.is_empty()),
    field("mdc_sum", Supported, |request| request.mdc_sum.is_some()),
    field("annotations", Supported, |request| !request.annotations.is_empty()),
    field("request_timestamp_ms", Supported, |request| request.request_timestamp_ms.is_some()),
    field("routing", Supported, |request| request.routing.is_some()),
    field("router", Supported, |request| request.router.is_some()),
    field("prefill_result", Supported, |request| request.prefill_result.is_some()),
    field("bootstrap_info", Supported, |request| request.bootstrap_info.is_some()),
    field("migration_link", Supported, |request| request.migration_link.is_some()),
    field("encoder_result", Supported, |request| request.encoder_result.is_some()),
    field(HEALTH_CHECK_KEY, Supported, |request| request.is_probe),
    field("require_reasoning", Forwarded, |request| request.require_reasoning),
    field("prompt_embeds", Forwarded, |request| request.prompt_embeds.is_some()),
    field("multi_modal_data", Forwarded, |request| request.multi_modal_data.is_some()),
    field("multi_modal_uuids", Forwarded, |request| request.multi_modal_uuids.is_some()),
    field("mm_routing_info", Forwarded, |request| request.mm_routing_info.is_some()),
    field("mm_processor_kwargs", Forwarded, |request| request.mm_processor_kwargs.is_some()),
    field("media_io_kwargs", Forwarded, |request| request.media_io_kwargs.is_some()),
    field("router_config_override", Forwarded, |request| request.router_config_override.is_some()),
    field("agent_context", Forwarded, |request| request.agent_context.is_some()),
    field("image_cache_scope", Forwarded, |request| request.image_cache_scope.is_some()),
    field("kv_hint", Forwarded, |request| request.kv_hint.is_some()),
    field("jail_seed", Forwarded, |request| request.jail_seed.is_some()),
    field("staged_kv_cleanup", Forwarded, |request| request.staged_kv_cleanup.is_some()),
    field("extra_args", Forwarded, |request| request.extra_args.is_some()),
];

/// Returns the name of each member of a request with `supported` or `forwarded`.
pub fn list_request_fields() -> Vec<(&'static str, &'static str)> {
    REQUEST_FIELDS.iter().map(|field| (field.name, field.status.word())).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::{Value, json};

    use super::*;

    /// A value for each member that has a form of its own; the others take any object.
    fn filled() -> Value {
        let mut request = json!({
            "model": "m", "token_ids": [1], "stop_conditions": {"max_tokens": 1}, "sampling_options": {"n": 2},
            "output_options": {"logprobs": 0}, "eos_token_ids": [2], "mdc_sum": "a", "annotations": ["a"],
            "request_timestamp_ms": 1.5, "prompt_embeds": "AA==", "migration_link": {"trace_id": "a", "span_id": "b"},
            "require_reasoning": true, HEALTH_CHECK_KEY: true,
        });
        for field in &REQUEST_FIELDS {
            if request.get(field.name).is_none() {
                request[field.name] = json!({});
            }
        }
        request
    }

    #[test]
    fn every_member_is_classified_once() {
        let request = PreprocessedRequest { is_probe: true, ..PreprocessedRequest::default() };
        let value = serde_json::to_value(request).expect("JSON");
        let members: BTreeSet<&str> = value.as_object().expect("an object").keys().map(String::as_str).collect();
        let classified: BTreeSet<&str> = REQUEST_FIELDS.iter().map(|field| field.name).collect();
        assert_eq!(classified, members);
        assert_eq!(classified.len(), REQUEST_FIELDS.len());
        assert!(list_request_fields().contains(&("extra_args", "forwarded")));
    }

    #[test]
    fn each_member_is_seen_where_it_is_set_and_nowhere_else() {
        let filled = filled();
        let whole: PreprocessedRequest = serde_json::from_value(filled.clone()).expect("a request");
        assert!(REQUEST_FIELDS.iter().all(|field| (field.is_set)(&whole)));
        for field in &REQUEST_FIELDS {
            let one = json!({"token_ids": [], field.name: filled[field.name]});
            let request: PreprocessedRequest = serde_json::from_value(one).expect("a request");
            let set: Vec<&str> =
                REQUEST_FIELDS.iter().filter(|other| (other.is_set)(&request)).map(|other| other.name).collect();
            assert_eq!(set, [field.name]);
        }
    }
}
