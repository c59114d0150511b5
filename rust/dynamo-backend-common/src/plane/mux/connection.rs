//! One accepted connection: frames in, requests out. A peer that breaks the wire loses its connection and nothing else.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tokio::io::AsyncReadExt;

use super::MuxSink;
use super::outgoing::Outgoing;
use super::sink::StreamState;
use crate::context::{AsyncEngineContext, Controller, GenerateContext};
use crate::error::{DynamoError, ErrorType};
use crate::plane::{Call, Incoming, Server, Sink, Socket, lock};
use crate::wire::frames::{
    self, END_FLAG, Frame, FrameDecoder, Hello, INITIAL_CREDITS, Open, ProtocolError, VERSION, broken, kind,
};
use crate::wire::secret;

const READ_BYTES: usize = 64 * 1024;
const CAPABILITIES: [&str; 3] = ["deadline", "credits", "fragments"];
/// Requests of one connection whose body is still arriving.
const MAX_HALF_SENT: usize = 1024;
/// How long the last bytes of a closing connection may take to leave.
const GOODBYE: std::time::Duration = std::time::Duration::from_secs(1);

/// What the streams of a connection share.
#[derive(Debug, Default)]
pub(crate) struct Connection {
    pub(crate) outgoing: Outgoing,
    streams: Mutex<HashMap<u32, Arc<StreamState>>>,
    count: AtomicU32,
}

impl Connection {
    /// Forgets a stream that has ended and returns whether it was known.
    pub(crate) fn forget(&self, stream: u32) -> bool {
        let found = lock(&self.streams).remove(&stream).is_some();
        if found {
            self.count.fetch_sub(1, Ordering::SeqCst);
        }
        found
    }

    fn find(&self, stream: u32) -> Option<Arc<StreamState>> {
        lock(&self.streams).get(&stream).cloned()
    }

    fn insert(&self, stream: u32, state: Arc<StreamState>) {
        lock(&self.streams).insert(stream, state);
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    fn len(&self) -> usize {
        self.count.load(Ordering::SeqCst) as usize
    }

    /// Asks the caller to open no more streams here.
    pub(crate) fn goaway(&self, reason: &str) {
        let mut frame = Vec::new();
        frames::put_frame(&mut frame, kind::GOAWAY, 0, 0, &frames::goaway_payload(reason));
        self.outgoing.control(&frame);
    }

    fn abandon_all(&self) {
        let streams: Vec<_> = lock(&self.streams).drain().collect();
        self.count.store(0, Ordering::SeqCst);
        for (_, state) in streams {
            state.abandon();
        }
    }
}

struct HalfSent {
    open: Open,
    body: Vec<u8>,
    began: Instant,
}

/// The reading half of a connection.
struct Reader {
    server: Arc<Server>,
    connection: Arc<Connection>,
    credits: i64,
    has_greeted: bool,
    has_proven: bool,
    nonces: (String, String),
    half_sent: HashMap<u32, HalfSent>,
    half_sent_bytes: usize,
}

/// Serves one connection until it is lost. `first` are bytes of it that were read already.
pub(crate) async fn serve(server: Arc<Server>, socket: Socket, first: &[u8]) {
    let (incoming, outgoing) = socket.split();
    let connection = Arc::new(Connection::default());
    let number = server.add_connection(Arc::clone(&connection));
    let stall = server.settings.write_stall;
    let writer = tokio::spawn({
        let connection = Arc::clone(&connection);
        async move { connection.outgoing.write_to(outgoing, stall).await }
    });
    let has_secret = server.security.secret.is_some();
    let mut reader = Reader {
        server: Arc::clone(&server),
        connection: Arc::clone(&connection),
        credits: INITIAL_CREDITS,
        has_greeted: false,
        has_proven: !has_secret,
        nonces: Default::default(),
        half_sent: HashMap::new(),
        half_sent_bytes: 0,
    };
    if let Err(error) = reader.run(incoming, first).await {
        tracing::warn!("closing a mux connection: {error}");
        server.metrics.refused.add(1);
        let mut frame = Vec::new();
        frames::put_frame(&mut frame, kind::ERROR, 0, 0, &frames::error_payload(&error.0));
        connection.outgoing.control(&frame);
    }
    connection.abandon_all();
    reader.give_back(reader.half_sent_bytes);
    connection.outgoing.leaving.set();
    if tokio::time::timeout(GOODBYE, writer).await.is_err() {
        connection.outgoing.lost.set();
    }
    server.remove_connection(number);
}

impl Reader {
    async fn run(&mut self, mut incoming: Incoming, first: &[u8]) -> Result<(), ProtocolError> {
        let server = Arc::clone(&self.server);
        let settings = &server.settings;
        let connection = Arc::clone(&self.connection);
        let mut decoder = FrameDecoder::default();
        decoder.feed(first)?;
        let mut buffer = vec![0; READ_BYTES];
        let shortest = settings.handshake.min(settings.message).min(settings.silence);
        let mut tick = tokio::time::interval((shortest / 4).min(std::time::Duration::from_secs(5)));
        let began = Instant::now();
        let mut heard = began;
        loop {
            while let Some(frame) = decoder.next()? {
                if !self.on_frame(&frame)? {
                    return Ok(());
                }
            }
            let read = tokio::select! {
                biased;
                read = incoming.read(&mut buffer) => read,
                () = connection.outgoing.lost.wait() => return Ok(()),
                () = connection.outgoing.leaving.wait() => return Ok(()),
                _ = tick.tick() => {
                    self.check_times(began, heard)?;
                    continue;
                }
            };
            let count = match read {
                Ok(0) | Err(_) => return Ok(()),
                Ok(count) => count,
            };
            heard = Instant::now();
            decoder.feed(&buffer[..count])?;
        }
    }

    fn check_times(&mut self, began: Instant, heard: Instant) -> Result<(), ProtocolError> {
        let settings = &self.server.settings;
        if !(self.has_greeted && self.has_proven) && began.elapsed() >= settings.handshake {
            let missing = if self.has_greeted { "AUTH" } else { "HELLO" };
            let limit = settings.handshake.as_secs_f64();
            return Err(broken(format!("no {missing} within {limit} s (DYN_TCP_HANDSHAKE_TIMEOUT_SECS)")));
        }
        if heard.elapsed() >= settings.silence {
            return Err(broken(format!("the caller was silent for {} s", settings.silence.as_secs_f64())));
        }
        let late: Vec<u32> = self
            .half_sent
            .iter()
            .filter(|(_, half)| half.began.elapsed() >= settings.message)
            .map(|(stream, _)| *stream)
            .collect();
        let limit = settings.message.as_secs_f64();
        for stream in late {
            let text = format!("the request did not arrive within {limit} s (DYN_TCP_MESSAGE_TIMEOUT_SECS)");
            self.forget_half_sent(stream);
            self.decline(stream, &DynamoError::invalid(text));
        }
        Ok(())
    }

    /// Handles one frame and returns whether the connection goes on.
    fn on_frame(&mut self, frame: &Frame<'_>) -> Result<bool, ProtocolError> {
        if !self.has_greeted {
            self.on_hello(frame)?;
            return Ok(true);
        }
        if !self.has_proven {
            return self.on_stranger(frame);
        }
        match frame.kind {
            kind::OPEN => self.on_open(frame)?,
            kind::BODY => self.on_body(frame)?,
            kind::CREDIT => {
                for (stream, amount) in frames::read_credit(frame.payload)? {
                    if let Some(state) = self.connection.find(stream) {
                        state.grant(amount);
                    }
                }
            }
            kind::CANCEL => self.on_cancel(frame)?,
            kind::PING => {
                if frame.payload.len() != 8 {
                    return Err(broken("PING carries 8 bytes"));
                }
                self.reply(kind::PONG, frame.payload);
            }
            kind::HELLO => return Err(broken("HELLO may be sent once")),
            kind::ERROR => {
                let text = String::from_utf8_lossy(&frame.payload[..frame.payload.len().min(200)]).into_owned();
                tracing::warn!("a caller reported a protocol error and leaves: {text:?}");
                return Ok(false);
            }
            _ => {} // a later version's frame: skipping it is what lets versions mix
        }
        Ok(true)
    }

    fn reply(&self, kind: u8, payload: &[u8]) {
        let mut frame = Vec::with_capacity(frames::HEADER_BYTES + payload.len());
        frames::put_frame(&mut frame, kind, 0, 0, payload);
        self.connection.outgoing.control(&frame);
    }

    // -- greeting ------------------------------------------------------------------------------------------------

    fn on_hello(&mut self, frame: &Frame<'_>) -> Result<(), ProtocolError> {
        if frame.kind != kind::HELLO {
            return Err(broken(format!("the first frame must be HELLO, got kind {}", frame.kind)));
        }
        let hello = frames::read_hello(frame.payload)?;
        if hello.version < 1 {
            let text = format!("mux version {} is not spoken here; versions 1 to {VERSION} are", hello.version);
            return Err(broken(text));
        }
        let mut reply = Hello {
            version: hello.version.min(VERSION),
            capabilities: CAPABILITIES.map(String::from).to_vec(),
            agent: "dynamo-backend-common".into(),
            ..Hello::default()
        };
        if let Some(secret) = &self.server.security.secret {
            let Some(nonce) = hello.auth else {
                let text =
                    format!("this worker asks for the shared secret, and the caller has none ({})", secret::SETTING);
                return Err(broken(text));
            };
            if nonce.len() != secret::NONCE_CHARACTERS {
                let text = format!("a nonce of {} characters instead of {}", nonce.len(), secret::NONCE_CHARACTERS);
                return Err(broken(text));
            }
            let own = crate::random::hex_nonce().map_err(|error| broken(error.to_string()))?;
            reply.auth = Some(format!("{own}:{}", secret.prove(&nonce, &own)));
            reply.capabilities.push(secret::CAPABILITY.into());
            self.nonces = (nonce, own);
        }
        self.credits = hello.credits.unwrap_or(INITIAL_CREDITS);
        self.has_greeted = true;
        self.reply(kind::HELLO, &frames::hello_payload(&reply));
        Ok(())
    }

    fn on_stranger(&mut self, frame: &Frame<'_>) -> Result<bool, ProtocolError> {
        match (frame.kind, &self.server.security.secret) {
            (kind::ERROR, _) => return Ok(false),
            (kind::AUTH, Some(secret)) => {
                if !secret.is_known(frame.payload, &self.nonces.0, &self.nonces.1) {
                    let text = format!("the caller does not know the shared secret ({} differs)", secret::SETTING);
                    return Err(broken(text));
                }
                self.has_proven = true;
            }
            (kind::HELLO..=kind::CREDIT, _) => {
                let text = format!("the caller has not proven that it knows the shared secret ({})", secret::SETTING);
                return Err(broken(text));
            }
            _ => {}
        }
        Ok(true)
    }

    // -- requests ------------------------------------------------------------------------------------------------

    fn on_cancel(&mut self, frame: &Frame<'_>) -> Result<(), ProtocolError> {
        let kill = frames::read_cancel(frame.payload)?;
        self.forget_half_sent(frame.stream);
        if let Some(state) = self.connection.find(frame.stream) {
            if kill {
                self.connection.forget(frame.stream);
                state.abandon();
            } else {
                state.controller.stop_generating();
            }
        }
        Ok(())
    }

    fn on_open(&mut self, frame: &Frame<'_>) -> Result<(), ProtocolError> {
        let stream = frame.stream;
        let (open, body) = frames::read_open(frame.payload)?;
        if stream == 0 || self.connection.find(stream).is_some() || self.half_sent.contains_key(&stream) {
            return Err(broken(format!("stream id {stream} is reserved or in use")));
        }
        if self.connection.outgoing.is_overfull() {
            return Err(broken("the caller does not read its answers"));
        }
        match body {
            Some(body) => self.begin(stream, open, body.to_vec()),
            None => self.begin_half_sent(stream, open)?,
        }
        Ok(())
    }

    fn begin_half_sent(&mut self, stream: u32, open: Open) -> Result<(), ProtocolError> {
        let limit = self.server.settings.max_message_bytes as u64;
        if open.size > limit {
            let text = format!(
                "the request body of {} bytes exceeds the limit of {limit} (DYN_TCP_MAX_MESSAGE_SIZE)",
                open.size
            );
            self.decline(stream, &DynamoError::invalid(text));
            return Ok(());
        }
        if self.half_sent.len() >= MAX_HALF_SENT {
            return Err(broken(format!("more than {MAX_HALF_SENT} requests are half sent")));
        }
        self.half_sent.insert(stream, HalfSent { open, body: Vec::new(), began: Instant::now() });
        Ok(())
    }

    fn on_body(&mut self, frame: &Frame<'_>) -> Result<(), ProtocolError> {
        let stream = frame.stream;
        let count = frame.payload.len();
        let Some(half) = self.half_sent.get_mut(&stream) else {
            return Ok(()); // declined or cancelled meanwhile: the rest of its body is of no interest
        };
        let settings = &self.server.settings;
        let is_room = self.half_sent_bytes + count <= settings.connection_pending_bytes;
        if !is_room || !self.server.take_pending(count) {
            self.forget_half_sent(stream);
            let text = "Server overloaded: the requests under way exceed DYN_TCP_PENDING_BODIES_LIMIT_MB (of one \
                        connection: DYN_TCP_CONNECTION_BODIES_LIMIT_MB)";
            self.decline(stream, &DynamoError::top(ErrorType::WorkerOverloaded, text));
            return Ok(());
        }
        self.half_sent_bytes += count;
        half.body.extend_from_slice(frame.payload);
        let (received, announced) = (half.body.len() as u64, half.open.size);
        if received > announced {
            return Err(broken(format!("stream {stream} sent more than the {announced} bytes it announced")));
        }
        if frame.flags & END_FLAG == 0 {
            return Ok(());
        }
        if received != announced {
            return Err(broken(format!("stream {stream} sent fewer bytes than it announced")));
        }
        if let Some(half) = self.forget_half_sent(stream) {
            self.begin(stream, half.open, half.body);
        }
        Ok(())
    }

    fn forget_half_sent(&mut self, stream: u32) -> Option<HalfSent> {
        let half = self.half_sent.remove(&stream)?;
        self.half_sent_bytes -= half.body.len();
        self.give_back(half.body.len());
        Some(half)
    }

    fn give_back(&self, bytes: usize) {
        self.server.give_back_pending(bytes);
    }

    fn begin(&mut self, stream: u32, open: Open, body: Vec<u8>) {
        let limit = self.server.settings.max_streams;
        if self.connection.len() >= limit {
            let text = format!("Server overloaded: more than {limit} streams on one connection (DYN_TCP_MAX_STREAMS)");
            self.decline(stream, &DynamoError::top(ErrorType::WorkerOverloaded, text));
            return;
        }
        let admission = match self.server.admit(&open.path) {
            Ok(admission) => admission,
            Err(error) => return self.decline(stream, &error),
        };
        let controller = Controller::new(open.id);
        let state = Arc::new(StreamState::new(Arc::clone(&controller), self.credits));
        self.connection.insert(stream, Arc::clone(&state));
        let sink = Sink::Mux(MuxSink::new(Arc::clone(&self.connection), stream, state));
        let deadline = open.deadline_ms.map(|left| {
            tokio::time::Instant::now() + std::time::Duration::from_millis(u64::try_from(left).unwrap_or(0))
        });
        let context = GenerateContext::of_request(
            controller.clone(),
            open.metadata.unwrap_or_default(),
            open.trace.unwrap_or_default(),
            open.prompt_tokens,
        );
        admission.start(Call { body, context, controller, sink, deadline });
    }

    fn decline(&self, stream: u32, error: &DynamoError) {
        // A record is made of texts and maps, which can always be encoded.
        let record = rmp_serde::to_vec_named(&error.record()).unwrap_or_default();
        self.connection.outgoing.add(|items| items.end(stream, 0, &record));
    }
}
