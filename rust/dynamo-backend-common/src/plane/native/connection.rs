//! One request connection of a native caller: frames in, ACKs out in the same order. And how a request begins, of such a
//! connection or of NATS.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::stream::{NativeSink, Stream};
use super::{GOODBYE, OVERLOADED, UNAVAILABLE, policy};
use crate::context::{Controller, GenerateContext};
use crate::error::{DynamoError, ErrorType};
use crate::plane::{Call, Server, Sink, Socket};
use crate::telemetry::TRACE_HEADERS;
use crate::wire::frames::ProtocolError;
use crate::wire::native::frames::{self, ACCEPTED, RequestDecoder, RequestFrame};
use crate::wire::native::items::Codec;

const READ_BYTES: usize = 64 * 1024;
/// Answer connections that are being opened for one request connection; further ones wait.
pub(super) const DIALS_AT_ONCE: usize = 64;
/// A header of our own callers: the prompt's length as the client sent it, of a request that has moved.
const PROMPT_TOKENS_HEADER: &str = "x-dynamo-prompt-tokens";

/// What the members of a JSON body take in memory at most, for each of its characters of this kind.
const OBJECT_BYTES: usize = 240;
const ARRAY_BYTES: usize = 72;
const VALUE_BYTES: usize = 60;

/// Where requests begin.
pub(super) struct Intake {
    pub(super) server: Arc<Server>,
    /// Of the caller; `None`: NATS does not say who it is.
    pub(super) address: Option<IpAddr>,
    pub(super) dials: Arc<Semaphore>,
}

/// One caller.
struct Caller {
    intake: Intake,
    /// Bytes of the half frame, as the server counts them.
    held: usize,
}

/// Serves one request connection until it is lost. `first` are bytes of it that were read already.
pub(crate) async fn serve(server: Arc<Server>, mut socket: Socket, address: IpAddr, first: &[u8]) {
    let dials = Arc::new(Semaphore::new(DIALS_AT_ONCE));
    let intake = Intake { server: Arc::clone(&server), address: Some(address), dials };
    let mut caller = Caller { intake, held: 0 };
    if let Err(text) = caller.run(&mut socket, first).await {
        tracing::warn!("closing a native request connection: {text}");
        server.metrics.refused.add(1);
        let goodbye = async {
            socket.write_all(&frames::ack(&text)).await?;
            socket.shutdown().await
        };
        // A caller that reads nothing any more misses why.
        let _ = tokio::time::timeout(GOODBYE, goodbye).await;
    }
    server.give_back_pending(caller.held);
}

impl Caller {
    /// Serves requests until the caller leaves; the error is what it is told before its connection is closed.
    async fn run(&mut self, socket: &mut Socket, first: &[u8]) -> Result<(), String> {
        let server = Arc::clone(&self.intake.server);
        let settings = &server.settings;
        let mut decoder = RequestDecoder::new(settings.max_message_bytes);
        decoder.feed(first);
        let mut buffer = vec![0; READ_BYTES];
        let (mut heard, mut began) = (Instant::now(), Instant::now());
        loop {
            let (acks, failure) = self.serve_all(&mut decoder);
            if !acks.is_empty() {
                let write = async {
                    socket.write_all(&acks).await?;
                    socket.flush().await
                };
                let written = tokio::time::timeout(settings.write_stall, write).await;
                if !matches!(written, Ok(Ok(()))) {
                    return Ok(()); // a caller that reads no ACK gets no more requests served
                }
            }
            if let Some(error) = failure {
                return Err(format!("Read error: {error}"));
            }
            if self.held == 0 || !acks.is_empty() {
                began = heard;
            }
            self.hold(decoder.held_bytes())?;
            let idle = heard.checked_add(settings.idle);
            let late = began.checked_add(settings.message).filter(|_| self.held > 0);
            let due = idle.into_iter().chain(late).min();
            let read = tokio::select! {
                biased;
                () = server.leaving.wait() => return Ok(()),
                read = socket.read(&mut buffer) => read,
                () = sleep_until(due) => {
                    if self.held == 0 {
                        return Ok(());
                    }
                    let limit = settings.message.as_secs_f64();
                    return Err(format!(
                        "{UNAVAILABLE} the request did not arrive within {limit} s (DYN_TCP_MESSAGE_TIMEOUT_SECS)"
                    ));
                }
            };
            match read {
                Ok(0) | Err(_) => return Ok(()), // its requests go on: their streams are connections of their own
                Ok(count) => decoder.feed(&buffer[..count]),
            }
            heard = Instant::now();
        }
    }

    /// Serves every frame that is complete; returns their ACKs, and why the connection cannot go on.
    fn serve_all(&self, decoder: &mut RequestDecoder) -> (Vec<u8>, Option<ProtocolError>) {
        let mut acks = Vec::new();
        loop {
            match decoder.next() {
                Ok(Some(frame)) => match self.intake.begin(&frame) {
                    Ok(()) => acks.extend_from_slice(&ACCEPTED),
                    Err(text) => acks.extend_from_slice(&frames::ack(&text)),
                },
                Ok(None) => return (acks, None),
                Err(error) => return (acks, Some(error)),
            }
        }
    }

    /// Keeps account of a frame that is still arriving.
    fn hold(&mut self, bytes: usize) -> Result<(), String> {
        let before = std::mem::take(&mut self.held);
        let server = &self.intake.server;
        server.give_back_pending(before);
        if bytes > server.settings.connection_pending_bytes || !server.take_pending(bytes) {
            return Err(format!(
                "{OVERLOADED} the requests under way exceed DYN_TCP_PENDING_BODIES_LIMIT_MB (of one connection: \
                 DYN_TCP_CONNECTION_BODIES_LIMIT_MB)"
            ));
        }
        self.held = bytes;
        Ok(())
    }
}

impl Intake {
    /// Starts one request; the error is the text of the ACK that declines it. Over NATS only the text of a malformed one is
    /// read, so that the others are declined where their answer is awaited.
    pub(super) fn begin(&self, frame: &RequestFrame<'_>) -> Result<(), String> {
        let server = &self.server;
        let malformed = |error: ProtocolError| {
            tracing::warn!("declined a native request for {:?}: {error}", frame.path);
            format!("{UNAVAILABLE} malformed request: {error}")
        };
        let (header, body) = frames::read_payload(frame.payload).map_err(malformed)?;
        let control = frames::read_control(header).map_err(malformed)?;
        let host = &control.home.host;
        if !server.call_home.permits(host, self.address) {
            server.metrics.refused.add(1);
            let setting = policy::SETTING;
            let caller = self.address.map_or_else(|| "NATS".to_owned(), |address| address.to_string());
            return Err(malformed(ProtocolError(format!(
                "it asks for its answer at {host}, and it came from {caller}; {setting} allows further networks"
            ))));
        }
        let body = match control.codec {
            Codec::Msgpack => body.to_vec(),
            Codec::Json => packed(body, server.settings.max_decoded_bytes).map_err(malformed)?,
        };
        let limit = server.settings.max_streams;
        let Some(place) = server.take_stream() else {
            server.metrics.refused.add(1);
            return Err(format!("{OVERLOADED} more than {limit} answers on their way (DYN_TCP_MAX_STREAMS)"));
        };
        let admission = server.admit(frame.path);
        if let (Err(error), Some(_)) = (&admission, self.address) {
            return Err(declined(error));
        }
        let controller = Controller::new(control.id);
        let stream = Arc::new(Stream::new(Arc::clone(&controller), control.codec));
        let mut sink = Sink::Native(NativeSink::new(Arc::clone(&stream)));
        // The handler starts meanwhile: the sink holds what it makes.
        tokio::spawn(stream.run(Arc::clone(server), control.home, Arc::clone(&self.dials), place));
        let admission = match admission {
            Ok(admission) => admission,
            Err(error) => {
                sink.end(Some(&error));
                return Ok(());
            }
        };
        let headers = &frame.headers;
        let trace = TRACE_HEADERS.iter().filter_map(|name| headers.get_key_value(*name));
        let trace: BTreeMap<String, String> = trace.map(|(name, value)| (name.clone(), value.clone())).collect();
        let prompt_tokens = headers.get(PROMPT_TOKENS_HEADER).and_then(|count| count.parse().ok());
        let context = GenerateContext::of_request(controller.clone(), control.metadata, trace, prompt_tokens);
        admission.start(Call { body, context, controller, sink, deadline: None });
        Ok(())
    }
}

async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

/// Returns a JSON body in MessagePack, which the rest of a worker reads. Fails for one that would take too much memory.
fn packed(body: &[u8], limit: usize) -> Result<Vec<u8>, ProtocolError> {
    let count = |wanted: u8| body.iter().filter(|byte| **byte == wanted).count();
    let values = (count(b',') + 1) * VALUE_BYTES;
    let size = count(b'{') * OBJECT_BYTES + count(b'[') * ARRAY_BYTES + values + body.len() * 2;
    if size > limit {
        let text =
            format!("body of {} bytes takes more than {limit} once decoded (DYN_TCP_MAX_DECODED_MB)", body.len());
        return Err(ProtocolError(text));
    }
    let value: Value =
        serde_json::from_slice(body).map_err(|error| ProtocolError(format!("body is not json: {error}")))?;
    rmp_serde::to_vec_named(&value).map_err(|error| ProtocolError(format!("body: {error}")))
}

fn declined(error: &DynamoError) -> String {
    let text = error.message();
    if text.starts_with(OVERLOADED) || text.starts_with(UNAVAILABLE) {
        return text.to_owned();
    }
    let prefix = if error.error_type() == ErrorType::WorkerOverloaded { OVERLOADED } else { UNAVAILABLE };
    format!("{prefix} {text}")
}
