//! The vectors that both implementations of the wire must agree on: `rust/wire-vectors.json`.

use serde_json::Value;

use super::frames::{self, FrameDecoder};
use super::items::{Chunk, ItemBatch};

fn bytes(hex: &Value) -> Vec<u8> {
    let text = hex.as_str().expect("hex");
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).expect("hex")).collect()
}

fn vectors() -> Value {
    serde_json::from_str(include_str!("../../../wire-vectors.json")).expect("JSON")
}

#[test]
fn what_a_caller_sends_is_read() {
    for vector in vectors()["caller"].as_array().expect("a list") {
        let name = &vector["name"];
        let mut decoder = FrameDecoder::default();
        let fed = decoder.feed(frames::MAGIC).and_then(|()| decoder.feed(&bytes(&vector["bytes"])));
        fed.expect("fed");
        let frame = decoder.next().expect("a frame").expect("a whole frame");
        assert_eq!(Value::from(frame.kind), vector["kind"], "{name}");
        assert_eq!(Value::from(frame.flags), vector["flags"], "{name}");
        assert_eq!(Value::from(frame.stream), vector["stream"], "{name}");
        let means = &vector["means"];
        match frame.kind {
            frames::kind::HELLO => {
                let hello = frames::read_hello(frame.payload).expect("HELLO");
                assert_eq!(Value::from(hello.version), means["version"], "{name}");
                let credits = hello.credits.unwrap_or(frames::INITIAL_CREDITS);
                assert_eq!(Value::from(credits), means["credits"], "{name}");
            }
            frames::kind::OPEN => {
                let (open, body) = frames::read_open(frame.payload).expect("OPEN");
                assert_eq!(Value::from(open.path.as_str()), means["path"], "{name}");
                assert_eq!(Value::from(open.id.as_str()), means["id"], "{name}");
                assert_eq!(Value::from(open.deadline_ms), means["deadline_ms"], "{name}");
                assert_eq!(Value::from(open.prompt_tokens), means["prompt_tokens"], "{name}");
                assert_eq!(Value::from(open.size), means["size"], "{name}");
                assert_eq!(serde_json::json!(open.metadata.unwrap_or_default()), means["metadata"], "{name}");
                assert_eq!(body.is_none(), means["body"].is_null(), "{name}");
                if let Some(body) = body {
                    let request: Value = rmp_serde::from_slice(body).expect("a body");
                    assert_eq!(request, means["body"], "{name}");
                }
            }
            frames::kind::CREDIT => {
                let credits = frames::read_credit(frame.payload).expect("CREDIT");
                assert_eq!(serde_json::json!(credits), means["credits"], "{name}");
            }
            frames::kind::CANCEL => {
                let kill = frames::read_cancel(frame.payload).expect("CANCEL");
                assert_eq!(Value::from(kill), means["kill"], "{name}");
            }
            _ => assert_eq!(frame.payload, bytes(&means["payload"]), "{name}"),
        }
    }
}

#[test]
fn what_a_worker_sends_is_what_the_vectors_say() {
    for vector in vectors()["worker"].as_array().expect("a list") {
        let name = &vector["name"];
        let mut batch = ItemBatch::default();
        for item in vector["items"].as_array().expect("a list") {
            let stream = item[0].as_u64().expect("a stream") as u32;
            let extra = match &item[5] {
                Value::Null => Vec::new(),
                extra => rmp_serde::to_vec_named(extra).expect("msgpack"),
            };
            let count = item[2].as_u64().expect("an offset");
            if item[1] == -2 {
                batch.end(stream, count, &extra);
                continue;
            }
            let ids: Vec<u32> =
                item[3].as_array().expect("tokens").iter().filter_map(Value::as_u64).map(|id| id as u32).collect();
            batch.chunk(&Chunk {
                stream,
                index: item[1].as_u64().expect("an index") as u32,
                offset: count,
                token_ids: &ids,
                finish_reason: item[4].as_str(),
                extra: &extra,
            });
        }
        let mut sent = Vec::new();
        batch.take(&mut sent);
        assert_eq!(sent, bytes(&vector["bytes"]), "{name}");
    }
}
