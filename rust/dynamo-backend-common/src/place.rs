//! Where an endpoint is: the keys and records that name it in discovery, and the path that requests name.

use serde_json::{Value, json};

use crate::config::WorkerConfig;
use crate::nats;

/// One endpoint of one worker.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) namespace: String,
    pub(crate) component: String,
    pub(crate) endpoint: String,
    pub(crate) worker_id: u64,
}

impl Place {
    pub(crate) fn new(config: &WorkerConfig, worker_id: u64) -> Self {
        let (namespace, component) = (config.namespace.clone(), config.component.clone());
        Self { namespace, component, endpoint: config.endpoint.clone(), worker_id }
    }

    /// Returns another endpoint of the same worker.
    pub(crate) fn beside(&self, endpoint: String) -> Self {
        Self { endpoint, ..self.clone() }
    }

    fn path(&self) -> String {
        format!("{}/{}/{}/{:x}", self.namespace, self.component, self.endpoint, self.worker_id)
    }

    /// Returns the path that requests name.
    pub(crate) fn route(&self) -> String {
        format!("{:x}/{}/{}/{}", self.worker_id, self.namespace, self.component, self.endpoint)
    }

    pub(crate) fn instance_key(&self) -> String {
        format!("v1/instances/{}", self.path())
    }

    pub(crate) fn model_key(&self) -> String {
        format!("v1/mdc/{}", self.path())
    }

    /// Returns the members that every record of the endpoint has, and more of them.
    fn record(&self, more: Value) -> Value {
        let mut record = json!({
            "namespace": self.namespace, "component": self.component, "endpoint": self.endpoint,
            "instance_id": self.worker_id,
        });
        if let (Some(record), Value::Object(more)) = (record.as_object_mut(), more) {
            record.extend(more);
        }
        record
    }

    /// Returns the record by which callers find the endpoint, at `transport`; `mux` is the version of that wire there.
    pub(crate) fn instance_record(&self, transport: Value, mux: Option<u64>) -> Value {
        let mut members = json!({
            "type": "Endpoint", "transport": transport, "device_type": device_type(), "request_plane_codec": "msgpack",
        });
        if let Some(version) = mux {
            members["mux"] = json!(version);
        }
        self.record(members)
    }

    /// Returns the subject of requests over NATS.
    pub(crate) fn request_subject(&self) -> String {
        let scope = format!("{}_{}", self.namespace, self.component).to_lowercase();
        let plain =
            |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || matches!(letter, '_' | '-');
        let slug: String = scope.chars().map(|letter| if plain(letter) { letter } else { '_' }).collect();
        let slug = slug.trim_start_matches('_');
        let slug = if slug.is_empty() { "dynamo" } else { slug };
        nats::subject(&[slug, &format!("{}-{:x}", self.endpoint, self.worker_id)])
    }

    pub(crate) fn model_record(&self, card: &Value) -> Value {
        self.record(json!({"type": "Model", "card_json": card}))
    }

    // -- events --------------------------------------------------------------------------------------------------

    fn names(&self) -> Value {
        json!({"namespace": self.namespace, "component": self.component, "name": self.endpoint})
    }

    fn scope(&self) -> Value {
        json!({"kind": "endpoint", "endpoint": self.names()})
    }

    /// Returns the beginning of the subjects of events over NATS.
    pub(crate) fn subject_prefix(&self) -> String {
        format!("namespace.{}.component.{}.endpoint.{}", self.namespace, self.component, self.endpoint)
    }

    fn event_key(&self, bucket: &str, topic: &str, publisher_id: u64) -> String {
        let parts =
            ["namespace", &self.namespace, "component", &self.component, "endpoint", &self.endpoint, "topic", topic];
        let parts: Vec<String> = parts.iter().map(|part| encode_segment(part)).collect();
        format!("v1/{bucket}/{}/{publisher_id:x}", parts.join("/"))
    }

    /// Returns the key and the record by which subscribers find a publisher.
    pub(crate) fn event_channel(&self, topic: &str, publisher_id: u64, transport: &Value) -> (String, Value) {
        let record = json!({
            "type": "EventChannel", "scope": self.scope(), "topic": topic, "instance_id": publisher_id,
            "transport": transport,
        });
        (self.event_key("event_channels", topic, publisher_id), record)
    }

    /// Returns the key and the record by which routers find who answers for lost events of a rank.
    pub(crate) fn event_source(&self, topic: &str, publisher_id: u64, dp_rank: u32, target: Value) -> (String, Value) {
        let mut target = target;
        if let Some(target) = target.as_object_mut() {
            target.remove("type");
        }
        let record = json!({
            "type": "EventSource", "scope": self.scope(), "topic": topic, "publisher_id": publisher_id,
            "metadata": {
                "kv_state_endpoint": self.names(), "publisher_id": publisher_id,
                "worker": {"worker_id": self.worker_id, "dp_rank": dp_rank}, "recovery_target": target,
            },
        });
        (self.event_key("event_sources", topic, publisher_id), record)
    }
}

fn device_type() -> &'static str {
    let none = ["", "-1", "none", "void"];
    let hides = |name: &str, words: &[&str]| std::env::var(name).is_ok_and(|value| words.contains(&value.trim()));
    if hides("CUDA_VISIBLE_DEVICES", &none) || hides("NVIDIA_VISIBLE_DEVICES", &none[2..]) { "cpu" } else { "cuda" }
}

/// Writes a path with every byte that may not stand in a URL percent-encoded.
pub(crate) fn encode_path(path: &str) -> String {
    let mut text = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'/' | b'-' | b'.' | b'_' | b'~') {
            text.push(char::from(byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}

/// Writes one segment of a key of the event plane.
fn encode_segment(part: &str) -> String {
    encode_path(part).replace('/', "%2F").replace('.', "%2E").replace('~', "%7E")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_name_the_endpoint_and_segments_are_encoded() {
        let config = WorkerConfig { component: "a.b".into(), ..WorkerConfig::default() };
        let place = Place::new(&config, 0x1f);
        assert_eq!(place.instance_key(), "v1/instances/dynamo/a.b/generate/1f");
        assert_eq!(place.route(), "1f/dynamo/a.b/generate");
        let (key, record) = place.event_channel("kv_metrics", 7, &json!({"kind": "Zmq"}));
        assert_eq!(key, "v1/event_channels/namespace/dynamo/component/a%2Eb/endpoint/generate/topic/kv_metrics/7");
        assert_eq!(record["transport"]["kind"], "Zmq");
        let (key, record) = place.event_source("kv-events", 7, 1, json!({"type": "Endpoint", "instance_id": 31}));
        assert!(key.starts_with("v1/event_sources/"));
        assert_eq!(record["metadata"]["recovery_target"], json!({"instance_id": 31}));
    }

    #[test]
    fn a_subject_is_the_slug_of_the_names_and_the_endpoint_of_one_instance() {
        for (namespace, component, endpoint, worker_id, subject) in [
            ("wirens", "pyw", "gen", 0x2040_a1f8_376e_9f29, "wirens_pyw.gen-2040a1f8376e9f29"),
            ("My.Space", "Comp", "ep", 1, "my_space_comp.ep-1"),
            ("_a", "b", "ep", 1, "a_b.ep-1"),
        ] {
            let config =
                WorkerConfig { namespace: namespace.into(), component: component.into(), ..WorkerConfig::default() };
            let place = Place { endpoint: endpoint.into(), ..Place::new(&config, worker_id) };
            assert_eq!(place.request_subject(), subject);
        }
    }
}
