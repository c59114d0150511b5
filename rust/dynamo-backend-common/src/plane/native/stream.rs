//! One answer on the native wire: a connection of its own, opened by the worker to the caller.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Notify, Semaphore};

use super::GOODBYE;
use crate::context::{AsyncEngineContext, Controller};
use crate::error::DynamoError;
use crate::flag::Flag;
use crate::output::LLMEngineOutput;
use crate::plane::{Incoming, Outgoing, Server, Socket, StreamPlace, lock};
use crate::wire::native::frames::{self, ControlWord, Home, TwoPartDecoder};
use crate::wire::native::items::{self, Codec};

/// What a stream holds before its producer waits: the wire has no credits, so only its full socket shows a caller that does
/// not read.
const BUFFER_BYTES: usize = 64 * 1024;
/// How large a buffer is kept for what comes next.
const KEPT_BYTES: usize = 4 * 1024;
const READ_BYTES: usize = 512;
/// How long the caller has to close, after the last frame.
const LINGER: Duration = Duration::from_secs(10);
/// A native frontend closes as soon as it has read a finish reason: that is success. The engine has this long to end its
/// stream by itself.
const FINISHED_GRACE: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct Waiting {
    bytes: Vec<u8>,
    has_ended: bool,
}

/// The part of an answer that its connection and its sink share.
#[derive(Debug)]
pub(crate) struct Stream {
    controller: Arc<Controller>,
    codec: Codec,
    waiting: Mutex<Waiting>,
    ready: Notify,
    is_full: AtomicBool,
    drained: Notify,
    /// Set when the caller has gone: nothing is sent any more.
    gone: Flag,
    /// Every choice has its finish reason.
    is_answered: AtomicBool,
}

/// How writing an answer ended.
enum Written {
    All,
    Broken,
    Stalled,
}

impl Stream {
    pub(crate) fn new(controller: Arc<Controller>, codec: Codec) -> Self {
        Self {
            controller,
            codec,
            waiting: Mutex::default(),
            ready: Notify::new(),
            is_full: AtomicBool::new(false),
            drained: Notify::new(),
            gone: Flag::default(),
            is_answered: AtomicBool::new(false),
        }
    }

    /// Connects to the caller and sends it the answer. A caller that leaves before the end kills its request.
    pub(crate) async fn run(
        self: Arc<Self>,
        server: Arc<Server>,
        home: Home,
        dials: Arc<Semaphore>,
        place: StreamPlace,
    ) {
        match self.dial(&server, &home, &dials).await {
            Ok(socket) => {
                if self.send(&server, socket, &home.subject).await {
                    drop(place);
                    return;
                }
            }
            Err(error) => tracing::warn!(
                "cannot connect back to a caller at {}:{}: {error}; its request is killed",
                home.host,
                home.port
            ),
        }
        drop(place);
        self.gone.set();
        self.drained.notify_waiters();
        if self.is_answered.load(Ordering::SeqCst) {
            tokio::time::sleep(FINISHED_GRACE).await;
        }
        self.controller.kill();
    }

    async fn dial(&self, server: &Server, home: &Home, dials: &Semaphore) -> std::io::Result<Socket> {
        // The semaphore is never closed: without a permit there is only no limit.
        let _held = dials.acquire().await.ok();
        let connect = TcpStream::connect((home.host.as_str(), home.port));
        let socket = tokio::time::timeout(server.settings.connect_timeout, connect)
            .await
            .map_err(|_| std::io::Error::from(std::io::ErrorKind::TimedOut))??;
        socket.set_nodelay(true)?;
        let Some(connector) = &server.security.connector else { return Ok(Socket::Plain(socket)) };
        let begun = tokio::time::timeout(server.settings.tls_handshake, connector.connect(&home.host, socket)).await;
        begun.unwrap_or_else(|late| Err(late.into())).map(Socket::Tls)
    }

    /// Sends the answer and returns whether its caller stayed until the end.
    async fn send(&self, server: &Server, socket: Socket, subject: &str) -> bool {
        let (incoming, outgoing) = socket.split();
        let listen = self.listen(incoming);
        let write = self.write(outgoing, frames::greeting(subject), server.settings.write_stall);
        tokio::pin!(listen);
        tokio::pin!(write);
        tokio::select! {
            biased;
            written = &mut write => match written {
                Written::All => {
                    tokio::select! {
                        () = &mut listen => {}
                        () = server.leaving.wait() => {}
                        () = tokio::time::sleep(LINGER) => {}
                    }
                    return true;
                }
                Written::Broken => {}
                Written::Stalled => {
                    server.metrics.refused.add(1);
                    tracing::warn!("request {}: its caller reads nothing; its stream is dropped", self.controller.id());
                }
            },
            () = &mut listen => {
                if lock(&self.waiting).has_ended {
                    // What is left of it leaves if the caller still reads; it closed first all the same.
                    let _ = tokio::time::timeout(GOODBYE, write).await;
                    return true;
                }
            }
        }
        false
    }

    /// Obeys the words of the caller, and returns once it is gone or wants nothing more.
    async fn listen(&self, mut incoming: Incoming) {
        let mut decoder = TwoPartDecoder::new(0);
        let mut buffer = [0; READ_BYTES];
        loop {
            match incoming.read(&mut buffer).await {
                Ok(0) | Err(_) => return,
                Ok(count) => decoder.feed(&buffer[..count]),
            }
            loop {
                match decoder.next().and_then(|frame| frame.map(frames::read_control_word).transpose()) {
                    Ok(None) => break,
                    Ok(Some(ControlWord::Stop)) => self.controller.stop_generating(),
                    Ok(Some(ControlWord::Kill)) => return,
                    Err(error) => {
                        let id = self.controller.id();
                        tracing::warn!("request {id}: killed, its caller broke the response wire: {error}");
                        return;
                    }
                }
            }
        }
    }

    async fn write(&self, mut socket: Outgoing, mut out: Vec<u8>, stall: Duration) -> Written {
        loop {
            // Nearly always the socket takes all of it at once, without a timer.
            let sent = socket.write_now(&out);
            if sent < out.len() {
                let rest = async {
                    socket.write_all(&out[sent..]).await?;
                    socket.flush().await
                };
                match tokio::time::timeout(stall, rest).await {
                    Ok(Ok(())) => {}
                    Ok(Err(_)) => return Written::Broken,
                    Err(_) => return Written::Stalled,
                }
            }
            loop {
                let has_ended = self.take(&mut out);
                if !out.is_empty() {
                    break;
                }
                if has_ended {
                    return Written::All;
                }
                self.ready.notified().await;
                // An engine that is ready to go on makes more first: all of it leaves in one write.
                tokio::task::yield_now().await;
            }
        }
    }

    /// Takes what waits; returns whether the answer has ended with it.
    fn take(&self, out: &mut Vec<u8>) -> bool {
        out.clear();
        out.shrink_to(KEPT_BYTES);
        let mut waiting = lock(&self.waiting);
        std::mem::swap(&mut waiting.bytes, out);
        let has_ended = waiting.has_ended;
        drop(waiting);
        if self.is_full.swap(false, Ordering::AcqRel) {
            self.drained.notify_waiters();
        }
        has_ended
    }

    /// Adds frames and returns how many bytes they have.
    fn add(&self, write: impl FnOnce(&mut Waiting) -> Result<(), DynamoError>) -> Result<usize, DynamoError> {
        let mut waiting = lock(&self.waiting);
        let before = waiting.bytes.len();
        write(&mut waiting)?;
        let after = waiting.bytes.len();
        drop(waiting);
        if after >= BUFFER_BYTES {
            self.is_full.store(true, Ordering::Release);
        }
        self.ready.notify_one();
        Ok(after - before)
    }
}

/// Sends one answer, in order, while the socket of its caller takes it.
#[derive(Debug)]
pub(crate) struct NativeSink {
    stream: Arc<Stream>,
    finished_choices: u32,
    last_choice: u32,
    has_ended: bool,
    bytes: u64,
}

impl NativeSink {
    pub(crate) fn new(stream: Arc<Stream>) -> Self {
        Self { stream, finished_choices: 0, last_choice: 0, has_ended: false, bytes: 0 }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.has_ended || self.stream.gone.is_set()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn send(&mut self, chunk: &LLMEngineOutput, index: u32, word: Option<&str>) -> Result<(), DynamoError> {
        if self.is_done() {
            return Ok(());
        }
        self.last_choice = self.last_choice.max(index);
        if word.is_some() {
            self.finished_choices += 1;
            if self.finished_choices > self.last_choice {
                // Before the chunk leaves: a caller that has read it may close at once.
                self.stream.is_answered.store(true, Ordering::SeqCst);
            }
        }
        let codec = self.stream.codec;
        let added = self.stream.add(|waiting| items::put_chunk(&mut waiting.bytes, codec, chunk, index, word))?;
        self.bytes += added as u64;
        Ok(())
    }

    pub(crate) fn send_object(&mut self, object: &[u8]) -> Result<(), DynamoError> {
        if self.is_done() {
            return Ok(());
        }
        let codec = self.stream.codec;
        self.bytes += self.stream.add(|waiting| items::put_object(&mut waiting.bytes, codec, object))? as u64;
        Ok(())
    }

    pub(crate) fn end(&mut self, error: Option<&DynamoError>) {
        if std::mem::replace(&mut self.has_ended, true) || self.stream.gone.is_set() {
            return;
        }
        let codec = self.stream.codec;
        let ended = self.stream.add(|waiting| {
            if let Some(error) = error {
                items::put_error(&mut waiting.bytes, codec, error);
            }
            items::put_final(&mut waiting.bytes, codec);
            frames::put_sentinel(&mut waiting.bytes);
            waiting.has_ended = true;
            Ok(())
        });
        debug_assert!(ended.is_ok());
    }

    pub(crate) fn has_credit(&self) -> bool {
        !self.stream.is_full.load(Ordering::Acquire)
    }

    pub(crate) async fn wait_credit(&self, patience: Duration) -> bool {
        let wait = async {
            loop {
                let drained = self.stream.drained.notified();
                if self.is_done() || self.has_credit() {
                    return;
                }
                drained.await;
            }
        };
        tokio::time::timeout(patience, wait).await.is_ok()
    }
}
