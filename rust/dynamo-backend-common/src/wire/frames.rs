//! Frames: how bytes are cut into them, and what those of a caller hold.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// The first bytes of a connection.
pub(crate) const MAGIC: &[u8; 8] = b"\xffDYNMUX\n";
/// The highest version spoken here.
pub(crate) const VERSION: u64 = 1;
/// The bytes of a frame's head.
pub(crate) const HEADER_BYTES: usize = 12;
/// The largest payload of a frame.
pub(crate) const MAX_PAYLOAD: usize = 64 * 1024;
/// The flag of a last piece.
pub(crate) const END_FLAG: u8 = 1;
/// The credits of a stream whose caller names no other number.
pub(crate) const INITIAL_CREDITS: i64 = 1024;

pub(crate) mod kind {
    //! The kinds of frames.
    pub(crate) const HELLO: u8 = 1;
    pub(crate) const PING: u8 = 2;
    pub(crate) const PONG: u8 = 3;
    pub(crate) const GOAWAY: u8 = 4;
    pub(crate) const OPEN: u8 = 5;
    pub(crate) const BODY: u8 = 6;
    pub(crate) const CANCEL: u8 = 7;
    pub(crate) const CREDIT: u8 = 8;
    pub(crate) const ITEMS: u8 = 9;
    pub(crate) const ITEM_PART: u8 = 10;
    pub(crate) const ERROR: u8 = 11;
    pub(crate) const AUTH: u8 = 12;
}

/// The peer broke the wire: the connection cannot go on.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ProtocolError(pub(crate) String);

impl fmt::Display for ProtocolError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Makes a [`ProtocolError`].
pub(crate) fn broken(text: impl Into<String>) -> ProtocolError {
    ProtocolError(text.into())
}

/// One frame of a peer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Frame<'a> {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) payload: &'a [u8],
}

/// Cuts bytes into frames, however the bytes are split. Holds at most what was fed and not yet taken.
#[derive(Debug, Default)]
pub(crate) struct FrameDecoder {
    buffer: Vec<u8>,
    start: usize,
    magic_seen: usize,
}

impl FrameDecoder {
    /// Adds bytes. Fails where a connection begins with other bytes than the magic.
    pub(crate) fn feed(&mut self, mut data: &[u8]) -> Result<(), ProtocolError> {
        if self.magic_seen < MAGIC.len() {
            let taken = data.len().min(MAGIC.len() - self.magic_seen);
            if data[..taken] != MAGIC[self.magic_seen..self.magic_seen + taken] {
                return Err(broken("this connection does not start with the mux magic"));
            }
            self.magic_seen += taken;
            data = &data[taken..];
        }
        if self.start == self.buffer.len() {
            self.buffer.clear();
            self.start = 0;
            if self.buffer.capacity() > 4 * MAX_PAYLOAD {
                self.buffer.shrink_to(MAX_PAYLOAD);
            }
        } else if self.start > MAX_PAYLOAD {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(data);
        Ok(())
    }

    /// Takes the next whole frame; `None` when more bytes are needed. Fails for one over the limit.
    pub(crate) fn next(&mut self) -> Result<Option<Frame<'_>>, ProtocolError> {
        let rest = &self.buffer[self.start..];
        let Some((head, rest)) = rest.split_at_checked(HEADER_BYTES) else { return Ok(None) };
        let length = u32::from_be_bytes([head[0], head[1], head[2], head[3]]) as usize;
        if length > MAX_PAYLOAD {
            return Err(broken(format!("a frame of {length} bytes exceeds the limit of {MAX_PAYLOAD}")));
        }
        let Some(payload) = rest.get(..length) else { return Ok(None) };
        self.start += HEADER_BYTES + length;
        let stream = u32::from_be_bytes([head[8], head[9], head[10], head[11]]);
        Ok(Some(Frame { kind: head[4], flags: head[5], stream, payload }))
    }
}

/// Appends one frame.
pub(crate) fn put_frame(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    out.extend_from_slice(&head(kind, flags, stream, payload.len()));
    out.extend_from_slice(payload);
}

/// Returns the head of a frame.
pub(crate) fn head(kind: u8, flags: u8, stream: u32, length: usize) -> [u8; HEADER_BYTES] {
    let [a, b, c, d] = (length as u32).to_be_bytes();
    let [w, x, y, z] = stream.to_be_bytes();
    [a, b, c, d, kind, flags, 0, 0, w, x, y, z]
}

/// Which side speaks, and what it can do. Unknown members are ignored.
#[derive(Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct Hello {
    pub(crate) version: u64,
    pub(crate) capabilities: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) credits: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) auth: Option<String>,
    pub(crate) agent: String,
}

/// The head of a request.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub(crate) struct Open {
    pub(crate) path: String,
    pub(crate) id: String,
    #[serde(default)]
    pub(crate) deadline_ms: Option<i64>,
    #[serde(default)]
    pub(crate) prompt_tokens: Option<u32>,
    #[serde(default)]
    pub(crate) metadata: Option<BTreeMap<String, String>>,
    #[serde(default)]
    pub(crate) trace: Option<BTreeMap<String, String>>,
    #[serde(default)]
    pub(crate) size: u64,
}

#[derive(Serialize)]
struct Text<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
}

fn pack<T: Serialize>(value: &T) -> Vec<u8> {
    // These values are maps of texts and numbers, and a vector takes any number of bytes: this cannot fail.
    rmp_serde::to_vec_named(value).unwrap_or_default()
}

fn unpack<'a, T: Deserialize<'a>>(what: &str, payload: &'a [u8]) -> Result<T, ProtocolError> {
    rmp_serde::from_slice(payload).map_err(|error| broken(format!("{what}: {error}")))
}

/// Reads HELLO.
pub(crate) fn read_hello(payload: &[u8]) -> Result<Hello, ProtocolError> {
    unpack("HELLO", payload)
}

/// Encodes HELLO.
pub(crate) fn hello_payload(hello: &Hello) -> Vec<u8> {
    pack(hello)
}

/// Reads OPEN: the head, and the body unless it follows in pieces.
pub(crate) fn read_open(payload: &[u8]) -> Result<(Open, Option<&[u8]>), ProtocolError> {
    unpack("OPEN", payload)
}

/// Reads CREDIT: streams and what they may send more.
pub(crate) fn read_credit(payload: &[u8]) -> Result<Vec<(u32, i64)>, ProtocolError> {
    let credits: Vec<(u32, i64)> = unpack("CREDIT", payload)?;
    if credits.iter().any(|(_, amount)| *amount < 0) {
        return Err(broken("credits may not be negative"));
    }
    Ok(credits)
}

/// Reads CANCEL: whether it is a kill.
pub(crate) fn read_cancel(payload: &[u8]) -> Result<bool, ProtocolError> {
    match payload {
        [0] => Ok(false),
        [1] => Ok(true),
        _ => Err(broken("CANCEL carries one byte, 0 or 1")),
    }
}

/// Encodes ERROR.
pub(crate) fn error_payload(message: &str) -> Vec<u8> {
    pack(&Text { message: Some(message), reason: None })
}

/// Encodes GOAWAY.
pub(crate) fn goaway_payload(reason: &str) -> Vec<u8> {
    pack(&Text { message: None, reason: Some(reason) })
}

#[cfg(test)]
mod tests {
    use super::*;

    type Found = (u8, u8, u32, Vec<u8>);

    fn frames(bytes: &[u8], piece: usize) -> Result<Vec<Found>, ProtocolError> {
        let mut decoder = FrameDecoder::default();
        let mut found = Vec::new();
        for part in bytes.chunks(piece) {
            decoder.feed(part)?;
            while let Some(frame) = decoder.next()? {
                found.push((frame.kind, frame.flags, frame.stream, frame.payload.to_vec()));
            }
        }
        Ok(found)
    }

    #[test]
    fn frames_are_the_same_however_their_bytes_are_split() {
        let mut bytes = MAGIC.to_vec();
        put_frame(&mut bytes, kind::HELLO, 0, 0, b"abc");
        put_frame(&mut bytes, kind::BODY, END_FLAG, 7, &[9; MAX_PAYLOAD]);
        put_frame(&mut bytes, kind::PING, 0, 0, b"");
        let whole = frames(&bytes, bytes.len()).expect("frames");
        assert_eq!(whole.len(), 3);
        for piece in [1, 7, 4096, MAX_PAYLOAD] {
            assert_eq!(frames(&bytes, piece).expect("frames"), whole);
        }
    }

    #[test]
    fn another_preface_and_a_frame_over_the_limit_are_refused() {
        assert!(frames(b"GET / HTTP/1.1", 3).is_err());
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&[0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]);
        assert!(frames(&bytes, 5).is_err());
    }

    #[test]
    fn strangers_bytes_never_panic() {
        // A simple generator: the run is the same every time, and wide enough to reach every branch.
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for _ in 0..20_000 {
            let length = (next() % 64) as usize;
            let bytes: Vec<u8> = (0..length).map(|_| next() as u8).collect();
            let _ = read_hello(&bytes);
            let _ = read_open(&bytes);
            let _ = read_credit(&bytes);
            let _ = read_cancel(&bytes);
            let _ = crate::wire::msgpack::check_size(&bytes, 4096);
            let _ = rmp_serde::from_slice::<crate::PreprocessedRequest>(&bytes);
            let _ = frames(&[MAGIC, &bytes[..]].concat(), 5);
        }
    }
}
