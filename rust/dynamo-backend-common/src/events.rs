//! The event plane: a publisher per topic. Subscribers connect to it over ZMTP 3.0 (the wire of ZeroMQ), or its messages
//! leave over NATS.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::tcp::OwnedReadHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, broadcast, mpsc};

use crate::error::{DynamoError, ErrorType};
use crate::nats::{self, NatsConnection};
use crate::wire::msgpack::{put_bin, put_str, put_uint};

/// Messages that a subscriber may fall behind; then it loses the oldest ones, which the numbers tell it.
const CAPACITY: usize = 4096;
const MAX_SUBSCRIBERS: usize = 256;
const MAX_FRAME_BYTES: usize = 8 * 1024;
const MAX_SUBSCRIPTIONS: usize = 64;
/// How long a subscriber may take to greet, and to take one message.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) const MORE: u8 = 1;
pub(crate) const LONG: u8 = 2;
pub(crate) const COMMAND: u8 = 4;

/// Publishes the messages of one topic.
#[derive(Debug)]
pub(crate) struct EventPublisher {
    id: u64,
    topic: &'static str,
    sequence: AtomicU64,
    outlet: Outlet,
}

/// Where the messages leave.
#[derive(Debug)]
enum Outlet {
    /// To whoever is connected.
    Zmq(broadcast::Sender<Arc<Vec<u8>>>),
    Nats {
        connection: Arc<NatsConnection>,
        subject: String,
    },
}

impl EventPublisher {
    /// Listens for subscribers and returns the publisher with its address.
    pub(crate) async fn listen(host: &str, topic: &'static str) -> Result<(Arc<Self>, SocketAddr), DynamoError> {
        let failed = |error: std::io::Error| {
            let text = format!("cannot listen for subscribers of {topic} on {host}: {error} (DYN_EVENT_PLANE_HOST)");
            DynamoError::top(ErrorType::CannotConnect, text)
        };
        let listener = TcpListener::bind((host, 0)).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let (sender, _) = broadcast::channel(CAPACITY);
        let publisher = Self::new(topic, Outlet::Zmq(sender.clone())).map_err(failed)?;
        tokio::spawn(accept(listener, sender, topic));
        Ok((publisher, address))
    }

    /// Returns a publisher over NATS; `prefix` is the subject of its scope.
    pub(crate) fn over_nats(
        connection: Arc<NatsConnection>,
        prefix: &str,
        topic: &'static str,
    ) -> Result<Arc<Self>, DynamoError> {
        let outlet = Outlet::Nats { connection, subject: nats::subject(&[prefix, topic]) };
        Self::new(topic, outlet)
            .map_err(|error| DynamoError::builder().message("the system has no random numbers").cause(error).build())
    }

    fn new(topic: &'static str, outlet: Outlet) -> std::io::Result<Arc<Self>> {
        let id = crate::random::worker_id()?;
        Ok(Arc::new(Self { id, topic, sequence: AtomicU64::new(0), outlet }))
    }

    /// Returns the id under which the publisher is known.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Sends one message, whose payload is MessagePack, to whoever subscribes now.
    pub(crate) fn publish(&self, payload: &[u8]) {
        let sequence = self.sequence.fetch_add(1, Ordering::SeqCst);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let envelope = self.envelope(sequence, now.as_millis() as u64, payload);
        match &self.outlet {
            // Fails without a subscriber, which is an ordinary state.
            Outlet::Zmq(sender) => drop(sender.send(Arc::new(message(&self.parts(sequence, &envelope))))),
            Outlet::Nats { connection, subject } => connection.publish(subject, &envelope),
        }
    }

    fn envelope(&self, sequence: u64, published_at: u64, payload: &[u8]) -> Vec<u8> {
        let mut envelope = vec![0x85];
        put_str(&mut envelope, "publisher_id");
        put_uint(&mut envelope, self.id);
        put_str(&mut envelope, "sequence");
        put_uint(&mut envelope, sequence);
        put_str(&mut envelope, "published_at");
        put_uint(&mut envelope, published_at);
        put_str(&mut envelope, "topic");
        put_str(&mut envelope, self.topic);
        put_str(&mut envelope, "payload");
        put_bin(&mut envelope, payload);
        envelope
    }

    fn parts(&self, sequence: u64, envelope: &[u8]) -> [Vec<u8>; 4] {
        let mut frame = vec![1];
        frame.extend_from_slice(&(envelope.len() as u32).to_be_bytes());
        frame.extend_from_slice(envelope);
        [self.topic.into(), self.id.to_be_bytes().into(), sequence.to_be_bytes().into(), frame]
    }
}

/// Writes a message of several parts.
fn message(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::new();
    for (number, part) in parts.iter().enumerate() {
        let more = if number + 1 < parts.len() { MORE } else { 0 };
        put_frame(&mut out, more, part);
    }
    out
}

/// Writes one frame.
pub(crate) fn put_frame(out: &mut Vec<u8>, flags: u8, part: &[u8]) {
    match u8::try_from(part.len()) {
        Ok(length) => out.extend_from_slice(&[flags, length]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend_from_slice(&(part.len() as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(part);
}

async fn accept(listener: TcpListener, sender: broadcast::Sender<Arc<Vec<u8>>>, topic: &'static str) {
    let places = Arc::new(Semaphore::new(MAX_SUBSCRIBERS));
    loop {
        let Ok((socket, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
        let sender = sender.clone();
        tokio::spawn(async move {
            if let Err(error) = serve(socket, &sender, topic).await {
                tracing::debug!("a subscriber of {topic} left: {error}");
            }
            drop(place);
        });
    }
}

/// What a subscriber sends.
enum Wish {
    Begin(Vec<u8>),
    End(Vec<u8>),
    Answer(Vec<u8>),
}

/// Exchanges greetings with a peer and sends it the command `ready`.
pub(crate) async fn greet<S: AsyncRead + AsyncWrite + Unpin>(socket: &mut S, ready: &[u8]) -> std::io::Result<()> {
    let mut greeting = [0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3; // version 3.0
    greeting[12..16].copy_from_slice(b"NULL");
    socket.write_all(&greeting).await?;
    let mut theirs = [0; 64];
    socket.read_exact(&mut theirs).await?;
    if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 || theirs[12..17] != *b"NULL\0" {
        return Err(std::io::Error::other("it does not speak ZMTP 3 without security"));
    }
    let mut frame = Vec::new();
    put_frame(&mut frame, COMMAND, ready);
    socket.write_all(&frame).await
}

/// Returns the frame that answers a command, if it is PING.
pub(crate) fn pong(command: &[u8]) -> Option<Vec<u8>> {
    let context = command.strip_prefix(b"\x04PING")?.get(2..)?;
    let mut answer = Vec::new();
    put_frame(&mut answer, COMMAND, &[b"\x04PONG", context].concat());
    Some(answer)
}

async fn serve(socket: TcpStream, sender: &broadcast::Sender<Arc<Vec<u8>>>, topic: &str) -> std::io::Result<()> {
    let mut socket = socket;
    let greet = greet(&mut socket, b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB");
    tokio::time::timeout(PATIENCE, greet).await??;
    let (mut incoming, mut outgoing) = socket.into_split();
    let mut events = sender.subscribe();
    let (wishes, mut wished) = mpsc::channel(16);
    let reader = tokio::spawn(async move { read_wishes(&mut incoming, &wishes).await });
    let mut prefixes: Vec<Vec<u8>> = Vec::new();
    let outcome = loop {
        let bytes = tokio::select! {
            wish = wished.recv() => match wish {
                None => break Ok(()),
                Some(Wish::Begin(prefix)) if prefixes.len() < MAX_SUBSCRIPTIONS => {
                    prefixes.push(prefix);
                    continue;
                }
                Some(Wish::Begin(_)) => break Err(std::io::Error::other("too many subscriptions")),
                Some(Wish::End(prefix)) => {
                    if let Some(at) = prefixes.iter().position(|known| *known == prefix) {
                        prefixes.swap_remove(at);
                    }
                    continue;
                }
                Some(Wish::Answer(frame)) => Arc::new(frame),
            },
            event = events.recv() => match event {
                Ok(event) if prefixes.iter().any(|prefix| topic.as_bytes().starts_with(prefix)) => event,
                Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => continue,
                Err(broadcast::error::RecvError::Closed) => break Ok(()),
            },
        };
        match tokio::time::timeout(PATIENCE, outgoing.write_all(&bytes)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => break Err(error),
            Err(late) => break Err(late.into()),
        }
    };
    reader.abort();
    outcome
}

async fn read_wishes(incoming: &mut OwnedReadHalf, wishes: &mpsc::Sender<Wish>) -> std::io::Result<()> {
    loop {
        let flags = incoming.read_u8().await?;
        let length = if flags & LONG == 0 { u64::from(incoming.read_u8().await?) } else { incoming.read_u64().await? };
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > MAX_FRAME_BYTES {
            return Err(std::io::Error::other("a frame of a subscriber is too long"));
        }
        let mut body = vec![0; length];
        incoming.read_exact(&mut body).await?;
        let Some(wish) = read_wish(flags, &body) else { continue };
        if wishes.send(wish).await.is_err() {
            return Ok(());
        }
    }
}

fn read_wish(flags: u8, body: &[u8]) -> Option<Wish> {
    if flags & COMMAND == 0 {
        return match body.split_first()? {
            (1, prefix) => Some(Wish::Begin(prefix.to_vec())),
            (0, prefix) => Some(Wish::End(prefix.to_vec())),
            _ => None,
        };
    }
    if let Some(answer) = pong(body) {
        return Some(Wish::Answer(answer));
    }
    let begin = body.strip_prefix(b"\x09SUBSCRIBE").map(|prefix| Wish::Begin(prefix.to_vec()));
    begin.or_else(|| body.strip_prefix(b"\x06CANCEL").map(|prefix| Wish::End(prefix.to_vec())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wishes_are_read_in_both_versions() {
        assert!(matches!(read_wish(0, b"\x01kv"), Some(Wish::Begin(prefix)) if prefix == b"kv"));
        assert!(matches!(read_wish(0, b"\x00kv"), Some(Wish::End(prefix)) if prefix == b"kv"));
        assert!(matches!(read_wish(COMMAND, b"\x09SUBSCRIBEkv"), Some(Wish::Begin(prefix)) if prefix == b"kv"));
        assert!(matches!(read_wish(COMMAND, b"\x06CANCELkv"), Some(Wish::End(prefix)) if prefix == b"kv"));
        let answer = read_wish(COMMAND, b"\x04PING\x00\x0aabc");
        assert!(matches!(answer, Some(Wish::Answer(frame)) if frame == b"\x04\x08\x04PONGabc"));
        assert!(read_wish(COMMAND, b"\x05READY").is_none());
        assert!(read_wish(0, b"").is_none());
    }

    #[test]
    fn long_parts_have_long_heads() {
        let written = message(&[b"a".to_vec(), vec![7; 300]]);
        assert_eq!(written[..3], [MORE, 1, b'a']);
        assert_eq!(written[3..12], [LONG, 0, 0, 0, 0, 0, 0, 1, 44]);
        assert_eq!(written.len(), 12 + 300);
    }
}
