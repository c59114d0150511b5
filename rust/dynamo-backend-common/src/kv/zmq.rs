//! KV events from an engine's own ZMQ socket: subscribe (ZMTP 3.0), read, publish.
//!
//! A message has three parts: topic, sequence (unsigned 64-bit, big-endian), payload (see `engine_events`).

use std::collections::HashSet;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use super::engine_events::{BlockHasher, EngineEvent, PayloadReader};
use super::publisher::KvEventPublisher;
use crate::events::{COMMAND, LONG, MORE, greet, pong, put_frame};
use crate::metrics::KvSourceMetrics;

/// The pauses before each further attempt to connect: the first, and the longest.
const RECONNECT: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// How long an engine may take to greet.
const PATIENCE: Duration = Duration::from_secs(10);
const MAX_MESSAGE_BYTES: usize = 64 * 1024 * 1024;
const MAX_PARTS: usize = 16;
const MAX_SIZE_WARNINGS: u32 = 3;

/// Where an engine publishes.
#[derive(Clone, Debug, PartialEq)]
enum Address {
    /// HOST:PORT.
    Tcp(String),
    /// The path of a socket.
    Ipc(String),
}

impl Address {
    /// Reads the address of a socket. Fails, saying what is wrong, for one that cannot be subscribed to.
    fn read(endpoint: &str) -> Result<Self, String> {
        if let Some(path) = endpoint.strip_prefix("ipc://") {
            return if path.is_empty() { Err("names no socket".into()) } else { Ok(Self::Ipc(path.to_owned())) };
        }
        let Some(rest) = endpoint.strip_prefix("tcp://") else {
            return Err("begins with neither tcp:// nor ipc://".into());
        };
        // How engines write where they bind; they run beside this worker.
        let own = rest.strip_prefix("*:").or_else(|| rest.strip_prefix("0.0.0.0:"));
        let address = own.map_or_else(|| rest.to_owned(), |port| format!("127.0.0.1:{port}"));
        match address.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(Self::Tcp(address)),
            _ => Err("is not tcp://HOST:PORT".into()),
        }
    }
}

/// A subscription to one engine, which connects again by itself.
pub(crate) struct EngineSubscription {
    endpoint: String,
    address: Address,
    topic: String,
    publisher: KvEventPublisher,
    hasher: BlockHasher,
    reader: PayloadReader,
    metrics: KvSourceMetrics,
    /// The sequence number after the last one seen.
    next: Option<u64>,
    warned: HashSet<&'static str>,
    size_warnings: u32,
}

impl EngineSubscription {
    /// Fails, saying what is wrong, for an address that cannot be subscribed to. `topic`: empty for all.
    pub(crate) fn new(
        endpoint: String,
        topic: String,
        hasher: BlockHasher,
        publisher: KvEventPublisher,
        metrics: KvSourceMetrics,
    ) -> Result<Self, String> {
        let address = Address::read(&endpoint).map_err(|why| format!("the endpoint {endpoint:?} {why}"))?;
        Ok(Self {
            endpoint,
            address,
            topic,
            publisher,
            hasher,
            reader: PayloadReader::default(),
            metrics,
            next: None,
            warned: HashSet::new(),
            size_warnings: 0,
        })
    }

    /// Subscribes for ever.
    pub(crate) async fn run(mut self) {
        let mut pause = RECONNECT.0;
        loop {
            let ended = match self.address.clone() {
                Address::Tcp(address) => match TcpStream::connect(address).await {
                    Ok(socket) => self.follow(socket, &mut pause).await,
                    Err(error) => error,
                },
                Address::Ipc(path) => match UnixStream::connect(path).await {
                    Ok(socket) => self.follow(socket, &mut pause).await,
                    Err(error) => error,
                },
            };
            tracing::debug!("KV events of the engine at {}: {ended}; connecting again", self.endpoint);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RECONNECT.1);
        }
    }

    /// Reads one connection until it is lost, and returns why.
    async fn follow<S: AsyncRead + AsyncWrite + Unpin>(
        &mut self,
        mut socket: S,
        pause: &mut Duration,
    ) -> std::io::Error {
        let begin = async {
            greet(&mut socket, b"\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB").await?;
            let mut subscription = Vec::new();
            put_frame(&mut subscription, 0, &[&[1], self.topic.as_bytes()].concat());
            socket.write_all(&subscription).await
        };
        match tokio::time::timeout(PATIENCE, begin).await {
            Ok(Ok(())) => *pause = RECONNECT.0,
            Ok(Err(error)) => return error,
            Err(late) => return late.into(),
        }
        loop {
            match read_message(&mut socket).await {
                Ok(parts) => self.take(&parts),
                Err(error) => return error,
            }
        }
    }

    fn take(&mut self, parts: &[Vec<u8>]) {
        let [topic, sequence, payload] = parts else { return self.misshapen(parts.len()) };
        let Ok(sequence) = <[u8; 8]>::try_from(sequence.as_slice()) else { return self.misshapen(parts.len()) };
        if !self.topic.is_empty() && *topic != self.topic.as_bytes() {
            return; // a subscription matches beginnings
        }
        let Some(mut events) = self.in_sequence(u64::from_be_bytes(sequence)) else { return };
        match self.reader.read(payload) {
            Err(why) => {
                self.metrics.issues.add(1);
                self.warn("payload", &why);
            }
            Ok(batch) => {
                let issues = batch.issues.len() as u64;
                self.metrics.events.add(batch.events.len() as u64 + batch.filtered + issues);
                self.metrics.filtered.add(batch.filtered);
                self.metrics.suspicious.add(batch.suspicious);
                self.metrics.issues.add(issues);
                if let Some(why) = batch.issues.first() {
                    self.warn("event", why);
                }
                events.extend(batch.events);
            }
        }
        if self.publish(&events).is_err() {
            // One of them is broken: the others need not suffer for it.
            for event in &events {
                if let Err(why) = self.publish(std::slice::from_ref(event)) {
                    self.metrics.issues.add(1);
                    self.warn("parts", &why);
                }
            }
        }
    }

    fn publish(&mut self, events: &[EngineEvent]) -> Result<(), String> {
        let (changes, has_other_size) = self.hasher.changes(events)?;
        if has_other_size && self.size_warnings < MAX_SIZE_WARNINGS {
            self.size_warnings += 1;
            let (endpoint, size) = (&self.endpoint, self.hasher.block_size);
            tracing::warn!(
                "KV events of the engine at {endpoint}: a KV block of another size is not published, this worker \
                 registered blocks of {size}"
            );
        }
        self.publisher.publish_in_tiers(changes);
        Ok(())
    }

    /// Checks a sequence number; returns the events to publish before its message, or `None` for an old one.
    fn in_sequence(&mut self, sequence: u64) -> Option<Vec<EngineEvent>> {
        let expected = self.next;
        if sequence > 0 && expected == sequence.checked_add(1) {
            return None; // the last one again
        }
        self.next = Some(sequence.saturating_add(1));
        match expected {
            Some(expected) if sequence < expected => {
                // Its first messages may have been sent before this socket was connected again.
                tracing::warn!("the engine at {} begins again: its blocks are forgotten", self.endpoint);
                self.metrics.engine_drops.add(sequence);
                return Some(vec![EngineEvent::Cleared]);
            }
            Some(expected) if sequence > expected => {
                let lost = sequence - expected;
                self.metrics.engine_drops.add(lost);
                self.warn("gap", &format!("{lost} message(s) lost; blocks they named stay unknown or stale"));
            }
            _ => {}
        }
        Some(Vec::new())
    }

    fn misshapen(&mut self, parts: usize) {
        self.metrics.issues.add(1);
        self.warn("shape", &format!("a message of {parts} parts instead of topic, sequence and payload"));
    }

    /// Logs trouble: once as a warning for each kind; the metrics count every one.
    fn warn(&mut self, kind: &'static str, text: &str) {
        if self.warned.insert(kind) {
            tracing::warn!("KV events of the engine at {}: {text}", self.endpoint);
        } else {
            tracing::debug!("KV events of the engine at {}: {text}", self.endpoint);
        }
    }
}

/// Reads one message; answers what the engine asks meanwhile.
async fn read_message<S: AsyncRead + AsyncWrite + Unpin>(socket: &mut S) -> std::io::Result<Vec<Vec<u8>>> {
    let (mut parts, mut total) = (Vec::new(), 0);
    loop {
        let flags = socket.read_u8().await?;
        let length = if flags & LONG == 0 { u64::from(socket.read_u8().await?) } else { socket.read_u64().await? };
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        total += length.min(MAX_MESSAGE_BYTES + 1);
        if total > MAX_MESSAGE_BYTES || parts.len() >= MAX_PARTS {
            return Err(std::io::Error::other(format!("a message of more than {MAX_MESSAGE_BYTES} bytes")));
        }
        // The bytes make the room for themselves: an announcement alone takes none.
        let mut part = Vec::new();
        (&mut *socket).take(length as u64).read_to_end(&mut part).await?;
        if part.len() < length {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        if flags & COMMAND != 0 {
            total -= length;
            if let Some(answer) = pong(&part) {
                socket.write_all(&answer).await?;
            }
            continue;
        }
        parts.push(part);
        if flags & MORE == 0 {
            return Ok(parts);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_where_engines_bind() {
        let of = Address::read;
        assert_eq!(of("tcp://*:5557"), Ok(Address::Tcp("127.0.0.1:5557".into())));
        assert_eq!(of("tcp://0.0.0.0:1"), Ok(Address::Tcp("127.0.0.1:1".into())));
        assert_eq!(of("tcp://host:9"), Ok(Address::Tcp("host:9".into())));
        assert_eq!(of("ipc:///tmp/x"), Ok(Address::Ipc("/tmp/x".into())));
        for wrong in ["", "inproc://x", "tcp://host", "tcp://:1", "tcp://host:x", "ipc://"] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
    }

    #[tokio::test]
    async fn messages_are_read_and_questions_answered() {
        let (mut ours, mut theirs) = tokio::io::duplex(1024);
        let mut bytes = Vec::new();
        put_frame(&mut bytes, MORE, b"topic");
        put_frame(&mut bytes, COMMAND, b"\x04PING\x00\x0aabc");
        put_frame(&mut bytes, 0, &[7; 300]);
        theirs.write_all(&bytes).await.expect("room");
        let parts = read_message(&mut ours).await.expect("a message");
        assert_eq!(parts, [b"topic".to_vec(), vec![7; 300]]);
        let mut answer = [0; 10];
        theirs.read_exact(&mut answer).await.expect("an answer");
        assert_eq!(&answer, b"\x04\x08\x04PONGabc");
        theirs.write_all(&[LONG, 0, 0, 0, 1, 0, 0, 0, 0]).await.expect("room");
        assert!(read_message(&mut ours).await.is_err_and(|error| error.to_string().contains("more than")));
    }
}
