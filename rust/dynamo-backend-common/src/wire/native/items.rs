//! The items of a response stream, each a frame of its own.

use serde::Serialize;
use serde_json::Value;

use super::frames::PREFIX_BYTES;
use crate::error::DynamoError;
use crate::output::LLMEngineOutput;
use crate::wire::msgpack::{put_array, put_map, put_str, put_uint};

/// How requests and items are encoded, as the caller chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Codec {
    /// JSON texts.
    Json,
    /// MessagePack.
    Msgpack,
}

const FALSE: u8 = 0xc2;
const TRUE: u8 = 0xc3;

/// Appends one chunk, with this word as the end of its choice. Fails, leaving `out` as it was, for what cannot be encoded.
pub(crate) fn put_chunk(
    out: &mut Vec<u8>,
    codec: Codec,
    chunk: &LLMEngineOutput,
    index: u32,
    word: Option<&str>,
) -> Result<(), DynamoError> {
    put_item(out, |out| match codec {
        Codec::Msgpack => put_packed_chunk(out, chunk, index, word),
        Codec::Json => put_json_chunk(out, chunk, index, word),
    })
}

fn put_packed_chunk(
    out: &mut Vec<u8>,
    chunk: &LLMEngineOutput,
    index: u32,
    word: Option<&str>,
) -> Result<(), DynamoError> {
    begin_packed_item(out);
    put_map(out, 1);
    put_str(out, "data");
    let head = out.len();
    match chunk.extra() {
        Some(extra) => {
            let mut serializer = rmp_serde::Serializer::new(&mut *out).with_struct_map();
            extra.serialize(&mut serializer).map_err(|error| not_encodable(&error))?;
            // The members of a chunk are few: the head of their map is one byte, to which those that follow are added.
            out[head] += 2 + u8::from(word.is_some());
        }
        None => put_map(out, 2 + usize::from(word.is_some())),
    }
    put_str(out, "token_ids");
    put_array(out, chunk.token_ids.len());
    for id in &chunk.token_ids {
        put_uint(out, u64::from(*id));
    }
    put_str(out, "index");
    put_uint(out, u64::from(index));
    if let Some(word) = word {
        put_str(out, "finish_reason");
        put_str(out, word);
    }
    end_packed_item(out);
    Ok(())
}

fn put_json_chunk(
    out: &mut Vec<u8>,
    chunk: &LLMEngineOutput,
    index: u32,
    word: Option<&str>,
) -> Result<(), DynamoError> {
    out.extend_from_slice(br#"{"data":{"data":{"#);
    if let Some(extra) = chunk.extra() {
        let head = out.len();
        serde_json::to_writer(&mut *out, &extra).map_err(|error| not_encodable(&error))?;
        out.remove(head); // the brace is there already
        out.pop();
        out.push(b',');
    }
    let ids: Vec<String> = chunk.token_ids.iter().map(u32::to_string).collect();
    out.extend_from_slice(format!(r#""token_ids":[{}],"index":{index}"#, ids.join(",")).as_bytes());
    if let Some(word) = word {
        out.extend_from_slice(format!(r#","finish_reason":"{word}""#).as_bytes());
    }
    out.extend_from_slice(br#"}},"complete_final":false}"#);
    Ok(())
}

/// Appends an object, given in MessagePack. Fails, leaving `out` as it was, for what cannot be encoded.
pub(crate) fn put_object(out: &mut Vec<u8>, codec: Codec, object: &[u8]) -> Result<(), DynamoError> {
    put_item(out, |out| {
        match codec {
            Codec::Msgpack => {
                begin_packed_item(out);
                out.extend_from_slice(object);
                end_packed_item(out);
            }
            Codec::Json => {
                let value: Value = rmp_serde::from_slice(object).map_err(|error| not_encodable(&error))?;
                put_json_data(out, &value)?;
            }
        }
        Ok(())
    })
}

/// Appends the item that carries an error.
pub(crate) fn put_error(out: &mut Vec<u8>, codec: Codec, error: &DynamoError) {
    let item = serde_json::json!({"event": "error", "error": super::errors::record(error)});
    let put = put_item(out, |out| match codec {
        Codec::Msgpack => {
            let packed = rmp_serde::to_vec_named(&item).map_err(|error| not_encodable(&error))?;
            begin_packed_item(out);
            out.extend_from_slice(&packed);
            end_packed_item(out);
            Ok(())
        }
        Codec::Json => put_json_data(out, &item),
    });
    // A record is made of texts and maps, which can always be encoded.
    debug_assert!(put.is_ok());
}

/// Appends the item after which none follows.
pub(crate) fn put_final(out: &mut Vec<u8>, codec: Codec) {
    let put = put_item(out, |out| {
        match codec {
            Codec::Msgpack => {
                put_map(out, 1);
                put_str(out, "complete_final");
                out.push(TRUE);
            }
            Codec::Json => out.extend_from_slice(br#"{"complete_final":true}"#),
        }
        Ok(())
    });
    debug_assert!(put.is_ok());
}

fn put_json_data(out: &mut Vec<u8>, data: &Value) -> Result<(), DynamoError> {
    out.extend_from_slice(br#"{"data":"#);
    serde_json::to_writer(&mut *out, data).map_err(|error| not_encodable(&error))?;
    out.extend_from_slice(br#","complete_final":false}"#);
    Ok(())
}

fn begin_packed_item(out: &mut Vec<u8>) {
    put_map(out, 2);
    put_str(out, "data");
}

fn end_packed_item(out: &mut Vec<u8>) {
    put_str(out, "complete_final");
    out.push(FALSE);
}

/// Appends a frame with data only, which `write` encodes; takes it back where that fails.
fn put_item(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>) -> Result<(), DynamoError>) -> Result<(), DynamoError> {
    let start = out.len();
    out.resize(start + PREFIX_BYTES, 0);
    if let Err(error) = write(out) {
        out.truncate(start);
        return Err(error);
    }
    let length = (out.len() - start - PREFIX_BYTES) as u64;
    out[start + 8..start + 16].copy_from_slice(&length.to_be_bytes());
    Ok(())
}

fn not_encodable(error: &dyn std::error::Error) -> DynamoError {
    DynamoError::invalid(format!("the engine produced a value that cannot be encoded: {error}"))
}
