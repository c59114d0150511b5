//! The text protocol of NATS, the client's side of it: bytes in, what the server sent out.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Deserialize;

/// The longest line of control; INFO of a large cluster is the longest one.
pub(super) const MAX_LINE_BYTES: usize = 64 * 1024;
/// What a server may permit a message to have at most.
const MAX_MESSAGE_BYTES: usize = 64 * 1024 * 1024;
/// A buffer that grew with a long message is given back down to this.
const KEPT_BYTES: usize = 64 * 1024;

/// A message of a subscription.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Message {
    /// The number of the subscription.
    pub(super) subscription: u64,
    /// The subject of the answer, where one is awaited.
    pub(crate) reply: Option<String>,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) payload: Vec<u8>,
}

/// What a server says of itself.
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct Info {
    pub(super) tls_required: bool,
    pub(super) max_payload: usize,
}

/// What a server sent.
#[derive(Debug, PartialEq)]
pub(super) enum Sent {
    Message(Message),
    Info(Info),
    Ping,
    Pong,
    /// What the server declines; some of these it ends the connection with.
    Error(String),
}

/// What is not NATS.
#[derive(Debug, PartialEq)]
pub(super) struct Broken(pub(super) String);

/// Cuts bytes into what the server sent, however they are split.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    bytes: Vec<u8>,
    start: usize,
}

/// The numbers of a message's line.
struct Head {
    subscription: u64,
    reply: Option<String>,
    header_bytes: usize,
    total_bytes: usize,
}

impl Decoder {
    pub(super) fn feed(&mut self, data: &[u8]) {
        self.bytes.drain(..std::mem::take(&mut self.start));
        if self.bytes.is_empty() {
            self.bytes.shrink_to(KEPT_BYTES);
        }
        self.bytes.extend_from_slice(data);
    }

    /// Takes the next whole thing; `None` when more bytes are needed. Fails for what is not NATS; then close.
    pub(super) fn next(&mut self) -> Result<Option<Sent>, Broken> {
        loop {
            let rest = &self.bytes[self.start..];
            let Some(end) = rest.windows(2).position(|two| two == b"\r\n") else {
                return if rest.len() > MAX_LINE_BYTES { Err(broken("a line is too long")) } else { Ok(None) };
            };
            let line = std::str::from_utf8(&rest[..end]).map_err(|_| broken("a line is not UTF-8"))?;
            let (verb, words) = line.split_once([' ', '\t']).unwrap_or((line, ""));
            let sent = match verb.to_ascii_uppercase().as_str() {
                "MSG" | "HMSG" => {
                    let head = read_head(words, verb.len() == 4)?;
                    let (from, to) = (end + 2, end + 2 + head.total_bytes);
                    let Some(body) = rest.get(from..to + 2) else { return Ok(None) };
                    let message = read_message(head, body)?;
                    self.start += to + 2;
                    return Ok(Some(Sent::Message(message)));
                }
                "INFO" => Sent::Info(read_info(words)?),
                "PING" => Sent::Ping,
                "PONG" => Sent::Pong,
                "-ERR" => Sent::Error(words.trim().trim_matches('\'').to_owned()),
                "+OK" => {
                    self.start += end + 2;
                    continue;
                }
                other => return Err(broken(format!("{other:?} is not an operation of NATS"))),
            };
            self.start += end + 2;
            return Ok(Some(sent));
        }
    }
}

fn broken(text: impl Into<String>) -> Broken {
    Broken(text.into())
}

/// Reads the members of INFO that matter here.
pub(super) fn read_info(json: &str) -> Result<Info, Broken> {
    serde_json::from_str(json).map_err(|error| broken(format!("INFO is not valid: {error}")))
}

fn read_head(words: &str, has_headers: bool) -> Result<Head, Broken> {
    let words: Vec<&str> = words.split_ascii_whitespace().collect();
    let numbers = if has_headers { 2 } else { 1 };
    let number = |at: usize| words.get(at).and_then(|word| word.parse::<usize>().ok());
    let last = words.len().checked_sub(1).filter(|last| (numbers + 1..numbers + 3).contains(last));
    let read = last.and_then(|last| {
        let total_bytes = number(last)?;
        let header_bytes = if has_headers { number(last - 1)? } else { 0 };
        let reply = (last == numbers + 2).then(|| words[2].to_owned());
        Some(Head { subscription: number(1)? as u64, reply, header_bytes, total_bytes })
    });
    match read {
        Some(head) if head.header_bytes <= head.total_bytes && head.total_bytes <= MAX_MESSAGE_BYTES => Ok(head),
        _ => Err(broken("the line of a message is not valid")),
    }
}

/// `body` is headers, payload and the end of the line.
fn read_message(head: Head, body: &[u8]) -> Result<Message, Broken> {
    let Some(body) = body.strip_suffix(b"\r\n") else { return Err(broken("a message has another length")) };
    let (headers, payload) = body.split_at(head.header_bytes);
    let headers = String::from_utf8_lossy(headers);
    // The first line is the version, with a status that only servers send.
    let pairs = headers.split("\r\n").skip(1).filter_map(|line| line.split_once(':'));
    let headers = pairs.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect();
    Ok(Message { subscription: head.subscription, reply: head.reply, headers, payload: payload.to_vec() })
}

/// Appends a message without headers.
pub(super) fn put_message(out: &mut Vec<u8>, subject: &str, payload: &[u8]) {
    out.extend_from_slice(format!("PUB {subject} {}\r\n", payload.len()).as_bytes());
    out.extend_from_slice(payload);
    out.extend_from_slice(b"\r\n");
}

/// Returns the line that begins a subscription; one of a group takes its messages in turns with the others.
pub(super) fn subscribe(number: u64, subject: &str, group: &str) -> String {
    let mut line = format!("SUB {subject}");
    if !group.is_empty() {
        let _ = write!(line, " {group}");
    }
    let _ = write!(line, " {number}\r\n");
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIRE: &[u8] = b"INFO {\"max_payload\":1024,\"x\":1}\r\nPING\r\n+OK\r\nMSG a.b 7 3\r\nx\r\n\r\n\
        HMSG a 8 inbox.1 29 31\r\nNATS/1.0\r\nrequest-id: a:b\r\n\r\n\xffz\r\npong\r\n-ERR 'Permissions Violation'\r\n";

    fn drain(decoder: &mut Decoder) -> Vec<Sent> {
        std::iter::from_fn(|| decoder.next().expect("NATS")).collect()
    }

    #[test]
    fn what_a_server_sends_survives_any_split() {
        let plain = Message { subscription: 7, payload: b"x\r\n".to_vec(), ..Message::default() };
        let headed = Message {
            subscription: 8,
            reply: Some("inbox.1".into()),
            headers: [("request-id".to_owned(), "a:b".to_owned())].into(),
            payload: b"\xffz".to_vec(),
        };
        let whole = || {
            let info = Info { max_payload: 1024, tls_required: false };
            let error = Sent::Error("Permissions Violation".into());
            let copy = |message: &Message| {
                Sent::Message(Message {
                    reply: message.reply.clone(),
                    headers: message.headers.clone(),
                    payload: message.payload.clone(),
                    ..*message
                })
            };
            vec![Sent::Info(info), Sent::Ping, copy(&plain), copy(&headed), Sent::Pong, error]
        };
        for cut in 0..=WIRE.len() {
            let mut decoder = Decoder::default();
            decoder.feed(&WIRE[..cut]);
            let mut found = drain(&mut decoder);
            decoder.feed(&WIRE[cut..]);
            found.extend(drain(&mut decoder));
            assert_eq!(found, whole(), "{cut}");
        }
    }

    #[test]
    fn what_is_not_nats_ends_the_connection() {
        let next = |bytes: &[u8]| {
            let mut decoder = Decoder::default();
            decoder.feed(bytes);
            decoder.next()
        };
        for wrong in [
            &b"HTTP/1.1 400\r\n"[..],
            b"MSG a 1\r\n",
            b"MSG a x 1\r\n",
            b"MSG a 1 b c 1\r\n",
            b"MSG a 1 99999999999\r\n",
            b"HMSG a 1 9 3\r\n",
            b"MSG a 1 1\r\nabc\r\n",
            b"INFO {\r\n",
            b"\xff\r\n",
        ] {
            assert!(next(wrong).is_err(), "{}", wrong.escape_ascii());
        }
        assert_eq!(next(&vec![b'x'; MAX_LINE_BYTES]), Ok(None));
        assert!(next(&vec![b'x'; MAX_LINE_BYTES + 1]).is_err());
    }

    #[test]
    fn what_is_sent_has_its_lengths() {
        let mut out = subscribe(3, "a.b", "q").into_bytes();
        out.extend(subscribe(4, "c", "").into_bytes());
        put_message(&mut out, "a", b"\x00\r\n");
        assert_eq!(out, b"SUB a.b q 3\r\nSUB c 4\r\nPUB a 3\r\n\x00\r\n\r\n");
    }
}
