//! One NATS connection of a worker: reached at its start or refused with a clear error, kept afterwards whatever happens.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;

use super::settings::{NatsSettings, Server};
use super::wire::{self, Decoder, Info, MAX_LINE_BYTES, Message, Sent};
use crate::error::{DynamoError, ErrorType};
use crate::plane::{Incoming, Outgoing, Socket, lock};

/// Between attempts to get a lost server back, for as long as it takes.
const RECONNECT: Duration = Duration::from_millis(500);
const ATTEMPT: Duration = Duration::from_secs(1);
/// A server that vanished without a word is noticed after about two of these.
const PING: Duration = Duration::from_secs(10);
const UNANSWERED_PINGS: usize = 2;
/// For the last messages of a process that leaves.
const CLOSE: Duration = Duration::from_secs(1);
/// For the server to confirm a subscription.
const SUBSCRIBE: Duration = Duration::from_secs(5);
/// Messages on their way to the server; more are dropped, which shows as a gap.
const MAX_OUTBOX_MESSAGES: usize = 10_000;
const MAX_OUTBOX_BYTES: usize = 64 * 1024 * 1024;
const MAX_SUBSCRIPTIONS: usize = 1024;
/// What is written at once.
const BATCH_BYTES: usize = 64 * 1024;
const READ_BYTES: usize = 64 * 1024;

/// Receives the messages of a subscription; it must not wait.
pub(crate) type Deliver = Arc<dyn Fn(Message) + Send + Sync>;

struct Subscription {
    subject: String,
    group: &'static str,
    deliver: Deliver,
}

/// What leaves, in its order.
enum Outgoings {
    Bytes(Vec<u8>),
    /// A PING, whose PONG says that the server has read what was sent before.
    Flush(oneshot::Sender<()>),
}

#[derive(Default)]
struct State {
    outbox: VecDeque<Outgoings>,
    outbox_bytes: usize,
    has_dropped: bool,
    subscriptions: BTreeMap<u64, Subscription>,
    next_subscription: u64,
    /// A PING each that was written and not yet answered; `None`: of the keep-alive.
    pings: VecDeque<Option<oneshot::Sender<()>>>,
    /// What went wrong last: equal failures are logged once.
    last_error: String,
}

struct Shared {
    settings: NatsSettings,
    state: Mutex<State>,
    woken: Notify,
    is_connected: AtomicBool,
    max_payload: AtomicUsize,
}

/// A connection. Clones of the `Arc` share it; it ends with [`close`](Self::close) or when the last one is dropped.
pub(crate) struct NatsConnection {
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

impl fmt::Debug for NatsConnection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "NatsConnection {{ {} }}", self.shared.settings.address())
    }
}

impl Drop for NatsConnection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A server that took this process in.
struct Link {
    incoming: Incoming,
    outgoing: Outgoing,
    decoder: Decoder,
}

/// Why there is no server.
enum Failure {
    Lost(String),
    /// Trying again cannot help.
    Refused(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Lost(error.to_string())
    }
}

impl NatsConnection {
    /// Connects. Fails within the time of the settings, naming the address and `wanted_by`, the flag that needs NATS.
    pub(crate) async fn open(wanted_by: &str) -> Result<Arc<Self>, DynamoError> {
        let shared = Arc::new(Shared {
            settings: NatsSettings::from_env()?,
            state: Mutex::default(),
            woken: Notify::new(),
            is_connected: AtomicBool::new(false),
            max_payload: AtomicUsize::new(0),
        });
        let mut why = "no answer in time".to_owned();
        let connected = tokio::time::timeout(shared.settings.startup, async {
            loop {
                match shared.connect().await {
                    Ok(link) => return Ok(link),
                    Err(Failure::Refused(text)) => return Err(text),
                    Err(Failure::Lost(text)) => why = text,
                }
                tokio::time::sleep(RECONNECT.min(shared.settings.startup / 10)).await;
            }
        });
        let link = connected.await.unwrap_or(Err(why)).map_err(|why| {
            let address = shared.settings.address();
            let text = format!(
                "NATS at {address} cannot be used ({why}). Start one there, point NATS_SERVER at another, or leave out \
                 {wanted_by}"
            );
            DynamoError::top(ErrorType::CannotConnect, text)
        })?;
        let task = tokio::spawn(Arc::clone(&shared).keep(link));
        Ok(Arc::new(Self { shared, task }))
    }

    /// Sends a message as soon as there is a server, or drops it where there is no room. Never waits.
    pub(crate) fn publish(&self, subject: &str, payload: &[u8]) {
        let limit = self.shared.max_payload.load(Ordering::Relaxed);
        if payload.len() > limit {
            let bytes = payload.len();
            tracing::debug!("a message of {bytes} bytes for {subject} is over the server's limit of {limit}; dropped");
            return;
        }
        let mut bytes = Vec::with_capacity(payload.len() + subject.len() + 16);
        wire::put_message(&mut bytes, subject, payload);
        let mut state = lock(&self.shared.state);
        if state.outbox.len() >= MAX_OUTBOX_MESSAGES || state.outbox_bytes + bytes.len() > MAX_OUTBOX_BYTES {
            if !std::mem::replace(&mut state.has_dropped, true) {
                tracing::warn!("NATS does not take what leaves; further messages are dropped until it does");
            }
            return;
        }
        state.outbox_bytes += bytes.len();
        state.outbox.push_back(Outgoings::Bytes(bytes));
        drop(state);
        self.shared.woken.notify_one();
    }

    /// Takes a share of the messages of a subject, from the time that this returns, or that a lost server is back.
    pub(crate) async fn subscribe(
        &self,
        subject: String,
        group: &'static str,
        deliver: Deliver,
    ) -> Result<(), DynamoError> {
        self.shared.add(Subscription { subject: subject.clone(), group, deliver })?;
        if !self.flush(SUBSCRIBE).await {
            tracing::warn!("NATS: {subject} is not known to be served yet");
        }
        Ok(())
    }

    /// Returns whether the server has read by then what left before.
    async fn flush(&self, patience: Duration) -> bool {
        let (done, flushed) = oneshot::channel();
        lock(&self.shared.state).outbox.push_back(Outgoings::Flush(done));
        self.shared.woken.notify_one();
        matches!(tokio::time::timeout(patience, flushed).await, Ok(Ok(())))
    }

    /// Leaves, once what waits is sent or a second has passed.
    pub(crate) async fn close(&self) {
        if self.shared.is_connected.load(Ordering::SeqCst) && !self.flush(CLOSE).await {
            tracing::debug!("NATS: the last messages were not sent");
        }
        self.task.abort();
    }
}

impl Shared {
    /// Begins a subscription, which comes back with each new connection.
    fn add(&self, subscription: Subscription) -> Result<(), DynamoError> {
        let mut state = lock(&self.state);
        if state.subscriptions.len() >= MAX_SUBSCRIPTIONS {
            return Err(DynamoError::invalid(format!("more than {MAX_SUBSCRIPTIONS} subjects of one worker")));
        }
        state.next_subscription += 1;
        let number = state.next_subscription;
        let line = wire::subscribe(number, &subscription.subject, subscription.group);
        state.outbox_bytes += line.len();
        state.outbox.push_back(Outgoings::Bytes(line.into_bytes()));
        state.subscriptions.insert(number, subscription);
        Ok(())
    }

    /// Keeps a server for ever.
    async fn keep(self: Arc<Self>, mut link: Link) {
        loop {
            self.is_connected.store(true, Ordering::SeqCst);
            let why = self.serve(link).await;
            self.is_connected.store(false, Ordering::SeqCst);
            let address = self.settings.address();
            tracing::warn!("lost connection to NATS at {address} ({why}); reconnecting");
            let lost = {
                let mut state = lock(&self.state);
                state.last_error = why;
                std::mem::take(&mut state.pings)
            };
            drop(lost); // those who wait for an answer of it wait in vain
            link = loop {
                match self.connect().await {
                    Ok(link) => break link,
                    Err(Failure::Lost(why) | Failure::Refused(why)) => {
                        let mut state = lock(&self.state);
                        if state.last_error != why {
                            tracing::warn!("NATS at {address}: {why}");
                            state.last_error = why;
                        }
                    }
                }
                tokio::time::sleep(RECONNECT).await;
            };
            tracing::info!("NATS at {address} is back");
        }
    }

    /// Connects to the first server that takes this process in.
    async fn connect(&self) -> Result<Link, Failure> {
        let mut failure = Failure::Lost("no server is named".to_owned());
        for server in &self.settings.servers {
            failure = match tokio::time::timeout(ATTEMPT, self.connect_to(server)).await {
                Ok(Ok(link)) => return Ok(link),
                Ok(Err(failure)) => failure,
                Err(_) => Failure::Lost(format!("no answer within {} s", ATTEMPT.as_secs())),
            };
        }
        Err(failure)
    }

    async fn connect_to(&self, server: &Server) -> Result<Link, Failure> {
        let mut socket = TcpStream::connect((server.host.as_str(), server.port)).await?;
        socket.set_nodelay(true)?;
        let info = read_info(&mut socket).await?;
        let socket = match &self.settings.tls {
            Some(connector) => Socket::Tls(connector.connect(&server.host, socket).await?),
            None if info.tls_required => {
                let text = "it requires TLS: set NATS_TLS_CA_CERT_PATH, or tls:// in NATS_SERVER";
                return Err(Failure::Refused(text.to_owned()));
            }
            None => Socket::Plain(socket),
        };
        self.max_payload.store(info.max_payload, Ordering::Relaxed);
        let (mut incoming, mut outgoing) = socket.split();
        let greeting = format!("CONNECT {}\r\nPING\r\n", self.settings.greeting(server));
        outgoing.write_all(greeting.as_bytes()).await?;
        outgoing.flush().await?;
        let (mut decoder, mut buffer) = (Decoder::default(), vec![0; READ_BYTES]);
        loop {
            match decoder.next().map_err(|error| Failure::Lost(error.0))? {
                Some(Sent::Pong) => return Ok(Link { incoming, outgoing, decoder }),
                Some(Sent::Error(text)) if text.to_ascii_lowercase().contains("authorization") => {
                    return Err(Failure::Refused(text));
                }
                Some(Sent::Error(text)) => return Err(Failure::Lost(text)),
                Some(_) => {}
                None => read(&mut incoming, &mut buffer, &mut decoder).await?,
            }
        }
    }

    /// Serves a connection until it is lost; returns why.
    async fn serve(&self, link: Link) -> String {
        let Link { mut incoming, mut outgoing, decoder } = link;
        let pong = Notify::new();
        let ended = tokio::select! {
            ended = self.receive(&mut incoming, decoder, &pong) => ended,
            ended = self.send(&mut outgoing, &pong) => ended,
        };
        match ended {
            Err(Failure::Lost(why) | Failure::Refused(why)) => why,
            Ok(never) => match never {},
        }
    }

    async fn receive(
        &self,
        incoming: &mut Incoming,
        mut decoder: Decoder,
        pong: &Notify,
    ) -> Result<std::convert::Infallible, Failure> {
        let mut buffer = vec![0; READ_BYTES];
        let mut since_turn = 0;
        loop {
            match decoder.next().map_err(|error| Failure::Lost(error.0))? {
                Some(Sent::Message(message)) => {
                    let known = lock(&self.state)
                        .subscriptions
                        .get(&message.subscription)
                        .map(|each| Arc::clone(&each.deliver));
                    if let Some(deliver) = known {
                        deliver(message);
                    }
                }
                Some(Sent::Ping) => pong.notify_one(),
                Some(Sent::Pong) => {
                    if let Some(Some(waiting)) = lock(&self.state).pings.pop_front() {
                        let _ = waiting.send(()); // fails where it no longer waits
                    }
                }
                Some(Sent::Error(text)) => tracing::warn!("NATS: {text}"),
                Some(Sent::Info(info)) => self.max_payload.store(info.max_payload, Ordering::Relaxed),
                None => {
                    since_turn = 0;
                    read(incoming, &mut buffer, &mut decoder).await?;
                }
            }
            since_turn += 1;
            if since_turn % 64 == 0 {
                tokio::task::yield_now().await; // a burst of requests lets those that run go on
            }
        }
    }

    async fn send(&self, outgoing: &mut Outgoing, pong: &Notify) -> Result<std::convert::Infallible, Failure> {
        let mut batch: Vec<u8> = Vec::new();
        for (number, each) in &lock(&self.state).subscriptions {
            batch.extend_from_slice(wire::subscribe(*number, &each.subject, each.group).as_bytes());
        }
        let mut ping = tokio::time::interval_at(tokio::time::Instant::now() + PING, PING);
        loop {
            self.take(&mut batch);
            if batch.is_empty() {
                tokio::select! {
                    () = self.woken.notified() => {}
                    () = pong.notified() => batch.extend_from_slice(b"PONG\r\n"),
                    _ = ping.tick() => {
                        let mut state = lock(&self.state);
                        if state.pings.len() >= UNANSWERED_PINGS {
                            return Err(Failure::Lost("it answers no PING".to_owned()));
                        }
                        state.pings.push_back(None);
                        drop(state);
                        batch.extend_from_slice(b"PING\r\n");
                    }
                }
                continue;
            }
            let write = async {
                outgoing.write_all(&batch).await?;
                outgoing.flush().await
            };
            match tokio::time::timeout(PING * 2, write).await {
                Ok(written) => written?,
                Err(_) => return Err(Failure::Lost("it takes nothing".to_owned())),
            }
            batch.clear();
            batch.shrink_to(BATCH_BYTES);
        }
    }

    /// Takes the next batch of what leaves.
    fn take(&self, batch: &mut Vec<u8>) {
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        while batch.len() < BATCH_BYTES {
            match state.outbox.pop_front() {
                None => {
                    state.has_dropped = false;
                    return;
                }
                Some(Outgoings::Bytes(bytes)) => {
                    state.outbox_bytes = state.outbox_bytes.saturating_sub(bytes.len());
                    batch.extend_from_slice(&bytes);
                }
                Some(Outgoings::Flush(done)) => {
                    batch.extend_from_slice(b"PING\r\n");
                    state.pings.push_back(Some(done));
                }
            }
        }
    }
}

async fn read(incoming: &mut Incoming, buffer: &mut [u8], decoder: &mut Decoder) -> Result<(), Failure> {
    match incoming.read(buffer).await? {
        0 => Err(Failure::Lost("it closed the connection".to_owned())),
        count => {
            decoder.feed(&buffer[..count]);
            Ok(())
        }
    }
}

/// Reads the first line, and not a byte behind it: those may be of TLS.
async fn read_info(socket: &mut TcpStream) -> Result<Info, Failure> {
    let mut line = Vec::new();
    while !line.ends_with(b"\r\n") {
        if line.len() >= MAX_LINE_BYTES {
            return Err(Failure::Lost("it does not speak NATS".to_owned()));
        }
        line.push(socket.read_u8().await?);
    }
    let text = String::from_utf8_lossy(&line);
    let info = text.strip_prefix("INFO ").ok_or_else(|| Failure::Lost("it does not speak NATS".to_owned()))?;
    wire::read_info(info.trim()).map_err(|error| Failure::Lost(error.0))
}
