//! The TCP wire of ai-dynamo 1.6, sans-io: bytes in, values out.
//!
//! A caller sends request frames over a connection that it keeps, and gets one ACK each, in order. The answer travels over
//! a second connection, which the worker opens to the caller, as two-part frames:
//!
//! ```text
//! request     u16 path length, path | u16 headers length, JSON headers | u32 payload length, payload
//! ACK         u32 length, text                          empty: accepted
//! two-part    u64 header length, u64 data length, u64 checksum, header, data
//! ```
//!
//! All numbers are big-endian. The payload of a request is itself a two-part frame (JSON control message, body). A frame with
//! a header only is a control frame, one with data only is an item of the stream. The checksum is written as 0 and not
//! verified, as in 1.6.

pub(crate) mod errors;
pub(crate) mod frames;
pub(crate) mod items;

#[cfg(test)]
mod vectors;
