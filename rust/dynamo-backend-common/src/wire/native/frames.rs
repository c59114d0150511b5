//! Frames of both directions: how bytes are cut into them, and what those of a caller hold.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::json;

use super::items::Codec;
use crate::wire::frames::{ProtocolError, broken};

/// The bytes before the two parts of a frame.
pub(crate) const PREFIX_BYTES: usize = 24;
/// The largest header of a two-part frame.
pub(crate) const MAX_CONTROL_BYTES: usize = 128 * 1024;
/// What an accepted request is answered with.
pub(crate) const ACCEPTED: [u8; 4] = [0; 4];
/// A buffer that grew with a long message is given back down to this.
const KEPT_BYTES: usize = 64 * 1024;

/// Bytes of a connection from which frames are cut; holds at most what was fed and not yet taken.
#[derive(Debug, Default)]
struct Buffer {
    bytes: Vec<u8>,
    start: usize,
}

impl Buffer {
    fn feed(&mut self, data: &[u8]) {
        if self.start > 0 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        if self.bytes.is_empty() && self.bytes.capacity() > KEPT_BYTES {
            self.bytes.shrink_to(KEPT_BYTES);
        }
        self.bytes.extend_from_slice(data);
    }

    fn rest(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}

/// Returns the number of `width` bytes at `at`, and where it ends; `None` where bytes are missing.
fn number(bytes: &[u8], at: usize, width: usize) -> Option<(usize, usize)> {
    let end = at.checked_add(width)?;
    let number = bytes.get(at..end)?.iter().fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
    Some((usize::try_from(number).unwrap_or(usize::MAX), end))
}

// -- request frames ---------------------------------------------------------------------------------------------------

/// One request as it is framed: where to, with which headers, carrying what.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RequestFrame<'a> {
    pub(crate) path: &'a str,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) payload: &'a [u8],
}

/// Cuts bytes into request frames, however the bytes are split.
#[derive(Debug)]
pub(crate) struct RequestDecoder {
    buffer: Buffer,
    limit: usize,
}

impl RequestDecoder {
    /// Makes a decoder for frames of at most `limit` bytes.
    pub(crate) fn new(limit: usize) -> Self {
        Self { buffer: Buffer::default(), limit }
    }

    /// Adds bytes.
    pub(crate) fn feed(&mut self, data: &[u8]) {
        self.buffer.feed(data);
    }

    /// Returns how many bytes are held of a frame that is not complete.
    pub(crate) fn held_bytes(&self) -> usize {
        self.buffer.rest().len()
    }

    /// Takes the next whole frame; `None` when more bytes are needed. Fails for one that is not valid; then close.
    pub(crate) fn next(&mut self) -> Result<Option<RequestFrame<'_>>, ProtocolError> {
        let Some((path_end, headers_end, payload_at, end)) = Self::cut(self.buffer.rest()) else { return Ok(None) };
        if end > self.limit {
            return Err(broken(format!("message of {end} bytes exceeds the limit of {}", self.limit)));
        }
        if end > self.buffer.rest().len() {
            return Ok(None);
        }
        let frame = self.buffer.start;
        self.buffer.start += end;
        let bytes = &self.buffer.bytes[frame..frame + end];
        let path =
            std::str::from_utf8(&bytes[2..path_end]).map_err(|error| broken(format!("path is not UTF-8: {error}")))?;
        let headers = read_headers(&bytes[path_end + 2..headers_end])?;
        Ok(Some(RequestFrame { path, headers, payload: &bytes[payload_at..] }))
    }

    /// Returns where the parts of a frame end; `None` while its lengths are not all there.
    fn cut(bytes: &[u8]) -> Option<(usize, usize, usize, usize)> {
        let (path, path_at) = number(bytes, 0, 2)?;
        let (headers, headers_at) = number(bytes, path_at + path, 2)?;
        let headers_end = headers_at + headers;
        let (payload, payload_at) = number(bytes, headers_end, 4)?;
        Some((path_at + path, headers_end, payload_at, payload_at.saturating_add(payload)))
    }
}

fn read_headers(raw: &[u8]) -> Result<BTreeMap<String, String>, ProtocolError> {
    if raw.is_empty() {
        return Ok(BTreeMap::new()); // 1.6 tolerates a missing set
    }
    serde_json::from_slice(raw).map_err(|error| broken(format!("headers are not a JSON object of strings: {error}")))
}

/// Encodes an ACK that declines a request, with its reason.
pub(crate) fn ack(text: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(4 + text.len());
    out.extend_from_slice(&u32::try_from(text.len()).unwrap_or(u32::MAX).to_be_bytes());
    out.extend_from_slice(text.as_bytes());
    out
}

// -- two-part frames --------------------------------------------------------------------------------------------------

/// A frame's header and data.
pub(crate) type TwoPart<'a> = (&'a [u8], &'a [u8]);

/// Appends one two-part frame.
pub(crate) fn put_two_part(out: &mut Vec<u8>, header: &[u8], data: &[u8]) {
    for length in [header.len(), data.len(), 0] {
        out.extend_from_slice(&(length as u64).to_be_bytes());
    }
    out.extend_from_slice(header);
    out.extend_from_slice(data);
}

/// Cuts bytes into two-part frames, however the bytes are split.
#[derive(Debug)]
pub(crate) struct TwoPartDecoder {
    buffer: Buffer,
    max_data: usize,
}

impl TwoPartDecoder {
    /// Makes a decoder for frames with at most `max_data` bytes of data.
    pub(crate) fn new(max_data: usize) -> Self {
        Self { buffer: Buffer::default(), max_data }
    }

    /// Adds bytes.
    pub(crate) fn feed(&mut self, data: &[u8]) {
        self.buffer.feed(data);
    }

    /// Takes the next whole frame; `None` when more bytes are needed. Fails for one over a limit; then close.
    pub(crate) fn next(&mut self) -> Result<Option<TwoPart<'_>>, ProtocolError> {
        let Some((header_end, end)) = cut_two_part(self.buffer.rest(), self.max_data)? else { return Ok(None) };
        let start = self.buffer.start;
        let Some(frame) = self.buffer.bytes.get(start..start + end) else { return Ok(None) };
        self.buffer.start += end;
        Ok(Some((&frame[PREFIX_BYTES..header_end], &frame[header_end..])))
    }
}

/// Returns where header and data of a frame end, once its prefix is there.
fn cut_two_part(bytes: &[u8], max_data: usize) -> Result<Option<(usize, usize)>, ProtocolError> {
    let (Some((header, _)), Some((data, _)), true) =
        (number(bytes, 0, 8), number(bytes, 8, 8), bytes.len() >= PREFIX_BYTES)
    else {
        return Ok(None);
    };
    if header > MAX_CONTROL_BYTES || data > max_data {
        return Err(broken(format!(
            "frame with {header} bytes of header and {data} of data exceeds the limits of {MAX_CONTROL_BYTES} and \
             {max_data}"
        )));
    }
    let header_end = PREFIX_BYTES + header;
    Ok(Some((header_end, header_end + data)))
}

/// Reads the two-part frame that fills a request's payload exactly.
pub(crate) fn read_payload(payload: &[u8]) -> Result<TwoPart<'_>, ProtocolError> {
    match cut_two_part(payload, payload.len())? {
        Some((header_end, end)) if end == payload.len() => {
            Ok((&payload[PREFIX_BYTES..header_end], &payload[header_end..]))
        }
        _ => Err(broken(format!("payload of {} bytes is not one two-part frame", payload.len()))),
    }
}

// -- the control message of a request ---------------------------------------------------------------------------------

/// How an answer finds its way back; `info` is a JSON text whose shape depends on `transport`.
#[derive(Debug, Deserialize)]
struct ConnectionInfo {
    transport: String,
    info: String,
}

#[derive(Debug, Deserialize)]
struct CallHomeInfo {
    address: String,
    subject: String,
    context: String,
    stream_type: String,
}

#[derive(Debug, Deserialize)]
struct ControlMessage {
    id: String,
    request_type: String,
    #[serde(rename = "response_type")]
    _response_type: String,
    connection_info: ConnectionInfo,
    #[serde(default)]
    payload_codec: Option<String>,
    #[serde(default)]
    metadata: Option<BTreeMap<String, String>>,
}

/// Where a caller awaits an answer, and under which name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Home {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) subject: String,
}

/// What the control message of a request says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Control {
    pub(crate) id: String,
    pub(crate) codec: Codec,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) home: Home,
}

/// Reads the control message of a request. Fails, naming the field, for one that is not valid here.
pub(crate) fn read_control(header: &[u8]) -> Result<Control, ProtocolError> {
    let message: ControlMessage =
        serde_json::from_slice(header).map_err(|error| broken(format!("control message: {error}")))?;
    if message.request_type != "single_in" {
        let kind = &message.request_type;
        return Err(broken(format!("request_type {kind:?} is not supported by a worker in Rust; use single_in")));
    }
    let codec = match message.payload_codec.as_deref() {
        None | Some("json") => Codec::Json,
        Some("msgpack") => Codec::Msgpack,
        Some(other) => return Err(broken(format!("payload_codec {other:?} is neither json nor msgpack"))),
    };
    let home = read_home(&message)?;
    Ok(Control { id: message.id, codec, metadata: message.metadata.unwrap_or_default(), home })
}

fn read_home(message: &ControlMessage) -> Result<Home, ProtocolError> {
    let connection = &message.connection_info;
    if connection.transport != "tcp_server" {
        let transport = &connection.transport;
        return Err(broken(format!("response transport {transport:?} is not supported; use the tcp response plane")));
    }
    let info: CallHomeInfo =
        serde_json::from_str(&connection.info).map_err(|error| broken(format!("connection_info.info: {error}")))?;
    if info.context != message.id {
        let text = format!("connection_info names context {:?}, the request is {:?}", info.context, message.id);
        return Err(broken(text));
    }
    if info.stream_type != "response" {
        let text = format!("connection_info.stream_type is {:?}, expected \"response\"", info.stream_type);
        return Err(broken(text));
    }
    let (host, port) = host_and_port(&info.address)
        .ok_or_else(|| broken(format!("call-home address {:?} is not HOST:PORT", info.address)))?;
    Ok(Home { host, port, subject: info.subject })
}

fn host_and_port(address: &str) -> Option<(String, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let is_plain = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port: u16 = port.parse().ok().filter(|port| is_plain && *port > 0)?;
    let host = host.strip_prefix('[').unwrap_or(host);
    let host = host.strip_suffix(']').unwrap_or(host);
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

// -- the response stream ----------------------------------------------------------------------------------------------

/// Encodes what a response stream begins with: which stream it is, and that it was set up.
pub(crate) fn greeting(subject: &str) -> Vec<u8> {
    let mut out = Vec::new();
    let handshake = json!({"subject": subject, "stream_type": "response"}).to_string();
    put_two_part(&mut out, handshake.as_bytes(), b"");
    put_two_part(&mut out, br#"{"error":null}"#, b"");
    out
}

/// Appends the last frame of a response stream.
pub(crate) fn put_sentinel(out: &mut Vec<u8>) {
    put_two_part(out, br#""sentinel""#, b"");
}

/// What a caller may send on a response stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ControlWord {
    /// The request is to end gracefully.
    Stop,
    /// Nobody reads the rest.
    Kill,
}

/// Reads a frame of a caller on a response stream. Fails for anything but stop and kill.
pub(crate) fn read_control_word((header, data): TwoPart<'_>) -> Result<ControlWord, ProtocolError> {
    let word = serde_json::from_slice::<String>(header).unwrap_or_default();
    match (word.as_str(), data) {
        ("stop", b"") => Ok(ControlWord::Stop),
        ("kill", b"") => Ok(ControlWord::Kill),
        _ => Err(broken("a caller may send only stop or kill on a response stream")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(path: &[u8], headers: &[u8], payload: &[u8]) -> Vec<u8> {
        let mut out = (path.len() as u16).to_be_bytes().to_vec();
        out.extend_from_slice(path);
        out.extend_from_slice(&(headers.len() as u16).to_be_bytes());
        out.extend_from_slice(headers);
        out.extend_from_slice(&(payload.len() as u32).to_be_bytes());
        out.extend_from_slice(payload);
        out
    }

    type Found = (String, usize, Vec<u8>);

    fn requests(bytes: &[u8], piece: usize, limit: usize) -> Result<Vec<Found>, ProtocolError> {
        let mut decoder = RequestDecoder::new(limit);
        let mut found = Vec::new();
        for part in bytes.chunks(piece) {
            decoder.feed(part);
            while let Some(frame) = decoder.next()? {
                found.push((frame.path.to_owned(), frame.headers.len(), frame.payload.to_vec()));
            }
        }
        assert!(decoder.held_bytes() <= bytes.len());
        Ok(found)
    }

    #[test]
    fn requests_are_the_same_however_their_bytes_are_split() {
        let first = request(b"1/a/b/c", br#"{"x":"y"}"#, &[7; 300]);
        let bytes = [first, request(b"p", b"", b"")].concat();
        let whole = requests(&bytes, bytes.len(), 400).expect("requests");
        assert_eq!(whole, [("1/a/b/c".into(), 1, vec![7; 300]), ("p".into(), 0, Vec::new())]);
        for piece in [1, 2, 3, 50] {
            assert_eq!(requests(&bytes, piece, 400).expect("requests"), whole);
        }
    }

    #[test]
    fn requests_over_the_limit_and_with_bad_parts_are_refused() {
        assert!(requests(&request(b"p", b"", &[0; 100]), 9, 100).is_err());
        assert!(requests(&request(b"\xff\xfe", b"", b""), 9, 100).is_err());
        assert!(requests(&request(b"p", b"[1]", b""), 9, 100).is_err());
        assert!(requests(&request(b"p", br#"{"a":1}"#, b""), 9, 100).is_err());
    }

    #[test]
    fn an_address_is_host_and_port() {
        assert_eq!(host_and_port("10.0.0.1:80"), Some(("10.0.0.1".into(), 80)));
        assert_eq!(host_and_port("[::1]:65535"), Some(("::1".into(), 65535)));
        for wrong in ["", "host", "host:", ":80", "host:0", "host:65536", "host:+8", "host: 8", "[]:1"] {
            assert_eq!(host_and_port(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn strangers_bytes_never_panic() {
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for round in 0..20_000 {
            let length = (next() % 64) as usize;
            let mut bytes: Vec<u8> = (0..length).map(|_| next() as u8).collect();
            if round % 2 == 0 {
                // Small lengths, so that frames are complete and their parts are looked at.
                bytes.iter_mut().for_each(|byte| *byte &= if next() % 3 == 0 { 0x0f } else { 0 });
            }
            let _ = requests(&bytes, 5, 1000);
            let _ = read_payload(&bytes);
            let _ = read_control(&bytes);
            let mut decoder = TwoPartDecoder::new(16);
            decoder.feed(&bytes);
            while let Ok(Some(frame)) = decoder.next() {
                let _ = read_control_word(frame);
            }
        }
    }
}
