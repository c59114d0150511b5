//! The vectors that both implementations of the native wire must agree on: `rust/native-vectors.json`.

use serde_json::{Value, json};

use super::frames::{self, Control, ControlWord, Home, RequestDecoder, TwoPartDecoder};
use super::items::{self, Codec};
use crate::error::{BackendError, DynamoError, ErrorType};
use crate::output::{CompletionUsage, LLMEngineOutput};

fn bytes(hex: &Value) -> Vec<u8> {
    let text = hex.as_str().expect("hex");
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).expect("hex")).collect()
}

fn vectors(kind: &str) -> Vec<Value> {
    let all: Value = serde_json::from_str(include_str!("../../../../native-vectors.json")).expect("JSON");
    all[kind].as_array().expect("a list").clone()
}

fn codec(name: &Value) -> Codec {
    if name == "json" { Codec::Json } else { Codec::Msgpack }
}

#[test]
fn requests_mean_what_the_vectors_say() {
    for vector in vectors("requests") {
        let (name, means) = (&vector["name"], &vector["means"]);
        let mut decoder = RequestDecoder::new(1 << 20);
        decoder.feed(&bytes(&vector["bytes"]));
        let frame = decoder.next().expect("a frame").expect("a whole frame");
        assert_eq!(Value::from(frame.path), means["path"], "{name}");
        assert_eq!(json!(frame.headers), means["headers"], "{name}");
        let (header, body) = frames::read_payload(frame.payload).expect("a payload");
        let Control { id, codec: own, metadata, home } = frames::read_control(header).expect("a control message");
        let Home { host, port, subject } = home;
        assert_eq!(own, codec(&means["codec"]), "{name}");
        let read = json!([id, metadata, host, port, subject]);
        let told = json!([means["id"], means["metadata"], means["host"], means["port"], means["subject"]]);
        assert_eq!(read, told, "{name}");
        let read: Value = match own {
            Codec::Json => serde_json::from_slice(body).expect("JSON"),
            Codec::Msgpack => rmp_serde::from_slice(body).expect("msgpack"),
        };
        assert_eq!(read, means["body"], "{name}");
    }
}

#[test]
fn requests_that_cannot_be_answered_name_the_field() {
    for vector in vectors("refused") {
        let mut decoder = RequestDecoder::new(1 << 20);
        decoder.feed(&bytes(&vector["bytes"]));
        let frame = decoder.next().expect("a frame").expect("a whole frame");
        let (header, _) = frames::read_payload(frame.payload).expect("a payload");
        let error = frames::read_control(header).expect_err("a refusal");
        let field = vector["field"].as_str().expect("a field");
        assert!(error.0.contains(field), "{}: {error}", vector["name"]);
    }
}

#[test]
fn words_and_greetings_are_those_of_the_vectors() {
    for vector in vectors("words") {
        let mut decoder = TwoPartDecoder::new(16);
        decoder.feed(&bytes(&vector["bytes"]));
        let word = frames::read_control_word(decoder.next().expect("a frame").expect("a whole frame"));
        let expected = match vector["word"].as_str() {
            Some("stop") => Some(ControlWord::Stop),
            Some(_) => Some(ControlWord::Kill),
            None => None,
        };
        assert_eq!(word.ok(), expected);
    }
    for vector in vectors("acks") {
        assert_eq!(frames::ack(vector["text"].as_str().expect("a text")), bytes(&vector["bytes"]));
    }
    assert_eq!(frames::ACCEPTED.to_vec(), frames::ack(""));
    for vector in vectors("greetings") {
        let subject = vector["subject"].as_str().expect("a subject");
        assert_eq!(two_parts(&frames::greeting(subject)), two_parts(&bytes(&vector["bytes"])));
    }
}

/// The headers of frames, read: their members may stand in any order.
fn two_parts(bytes: &[u8]) -> Vec<Value> {
    let mut decoder = TwoPartDecoder::new(0);
    decoder.feed(bytes);
    let mut found = Vec::new();
    while let Some((header, _)) = decoder.next().expect("a frame") {
        found.push(serde_json::from_slice(header).expect("JSON"));
    }
    found
}

fn chunk(item: &Value) -> LLMEngineOutput {
    let member = |name: &str| item.get(name).cloned().unwrap_or(Value::Null);
    LLMEngineOutput {
        token_ids: serde_json::from_value(member("token_ids")).expect("token_ids"),
        text: serde_json::from_value(member("text")).expect("text"),
        tokens: serde_json::from_value(member("tokens")).expect("tokens"),
        log_probs: serde_json::from_value(member("log_probs")).expect("log_probs"),
        top_logprobs: serde_json::from_value(member("top_logprobs")).expect("top_logprobs"),
        completion_usage: serde_json::from_value::<Option<CompletionUsage>>(member("completion_usage")).expect("usage"),
        ..LLMEngineOutput::default()
    }
}

#[test]
fn streams_are_those_of_the_vectors() {
    for vector in vectors("streams") {
        let codec = codec(&vector["codec"]);
        let mut sent = Vec::new();
        for item in vector["items"].as_array().expect("items") {
            let index = item["index"].as_u64().unwrap_or(0) as u32;
            let word = item["finish_reason"].as_str();
            items::put_chunk(&mut sent, codec, &chunk(item), index, word).expect("a chunk");
        }
        items::put_final(&mut sent, codec);
        frames::put_sentinel(&mut sent);
        assert_eq!(sent, bytes(&vector["bytes"]), "{} {}", vector["name"], vector["codec"]);
    }
}

fn kind(name: &Value) -> ErrorType {
    let kinds = [
        ErrorType::Backend(BackendError::InvalidArgument),
        ErrorType::Backend(BackendError::CannotConnect),
        ErrorType::Backend(BackendError::EngineShutdown),
        ErrorType::Backend(BackendError::StreamIncomplete),
        ErrorType::Backend(BackendError::Cancelled),
        ErrorType::Backend(BackendError::ResponseTimeout),
        ErrorType::Backend(BackendError::Disconnected),
        ErrorType::Backend(BackendError::ConnectionTimeout),
        ErrorType::Backend(BackendError::Unknown),
        ErrorType::WorkerOverloaded,
        ErrorType::WorkerUnavailable,
    ];
    let of = |kind: &ErrorType| match kind {
        ErrorType::Backend(_) => json!({"Backend": kind.name()}),
        _ => json!(kind.name()),
    };
    kinds.into_iter().find(|kind| of(kind) == *name).expect("a kind")
}

#[test]
fn errors_have_the_records_of_the_vectors() {
    // The message of an asserted status is JSON, whose members may stand in any order.
    let read = |mut record: Value| {
        if let Ok(message) = serde_json::from_str::<Value>(record["message"].as_str().expect("a message")) {
            record["message"] = message;
        }
        record
    };
    for vector in vectors("errors") {
        let message = vector["message"].as_str().expect("a message");
        let error = DynamoError::builder().error_type(kind(&vector["kind"])).message(message).build();
        assert_eq!(read(super::errors::record(&error)), read(vector["record"].clone()));
        for codec in [Codec::Json, Codec::Msgpack] {
            let mut sent = Vec::new();
            items::put_error(&mut sent, codec, &error);
            let mut decoder = TwoPartDecoder::new(4096);
            decoder.feed(&sent);
            let (_, data) = decoder.next().expect("a frame").expect("a whole frame");
            let item: Value = match codec {
                Codec::Json => serde_json::from_slice(data).expect("JSON"),
                Codec::Msgpack => rmp_serde::from_slice(data).expect("msgpack"),
            };
            assert_eq!(item["complete_final"], false);
            assert_eq!(item["data"]["event"], "error");
            assert_eq!(read(item["data"]["error"].clone()), read(vector["record"].clone()));
        }
    }
}

#[test]
fn an_object_travels_as_it_is() {
    let object = rmp_serde::to_vec_named(&json!({"Events": [1, 2]})).expect("msgpack");
    for codec in [Codec::Json, Codec::Msgpack] {
        let mut sent = Vec::new();
        items::put_object(&mut sent, codec, &object).expect("an object");
        let mut decoder = TwoPartDecoder::new(4096);
        decoder.feed(&sent);
        let (_, data) = decoder.next().expect("a frame").expect("a whole frame");
        let item: Value = match codec {
            Codec::Json => serde_json::from_slice(data).expect("JSON"),
            Codec::Msgpack => rmp_serde::from_slice(data).expect("msgpack"),
        };
        assert_eq!(item, json!({"data": {"Events": [1, 2]}, "complete_final": false}));
    }
}
