//! The listener of a process: accepts connections, admits requests, and knows what still runs.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::mux::Connection;
use super::native::CallHomePolicy;
use super::{Security, Sink, lock};
use crate::context::{AsyncEngineContext, Controller, GenerateContext};
use crate::error::{BackendError, DynamoError, ErrorType};
use crate::flag::Flag;
use crate::metrics::ListenerMetrics;
use crate::settings::ListenerSettings;

/// One request that was admitted.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) body: Vec<u8>,
    pub(crate) context: GenerateContext,
    pub(crate) controller: Arc<Controller>,
    pub(crate) sink: Sink,
    pub(crate) deadline: Option<Instant>,
}

/// Serves the requests of one path.
pub(crate) trait Handler: Send + Sync + 'static {
    /// Serves one request; whatever its caller should know goes through the sink.
    fn serve(self: Arc<Self>, call: Call) -> BoxFuture<'static, ()>;
}

/// A request's place in the worker, until it is dropped.
pub(crate) struct Admission {
    server: Arc<Server>,
    handler: Arc<dyn Handler>,
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.server.request_ended();
    }
}

impl Admission {
    /// Starts the request, or lets it wait for those that run.
    pub(crate) fn start(self, call: Call) {
        match Arc::clone(&self.server.places).try_acquire_owned() {
            Ok(running) => drop(tokio::spawn(async move { self.run(call, running).await })),
            Err(_) => drop(tokio::spawn(async move { self.wait(call).await })),
        }
    }

    async fn run(&self, call: Call, running: OwnedSemaphorePermit) {
        self.server.metrics.running.change(1);
        Arc::clone(&self.handler).serve(call).await;
        drop(running);
        self.server.metrics.running.change(-1);
    }

    /// Waits for a place, in the order of arrival, unless the request ends before it was started.
    async fn wait(&self, mut call: Call) {
        let server = &self.server;
        let late = async {
            match call.deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        server.metrics.queued.change(1);
        let never_started = tokio::select! {
            biased;
            () = server.cut.wait() => DynamoError::backend(BackendError::EngineShutdown, "the worker is shutting down"),
            () = call.controller.stopped() => {
                DynamoError::backend(BackendError::Cancelled, "cancelled before the request was started")
            }
            () = late => DynamoError::backend(BackendError::ResponseTimeout, "the request's deadline passed"),
            Ok(running) = Arc::clone(&server.places).acquire_owned() => {
                server.metrics.queued.change(-1);
                self.run(call, running).await;
                return;
            }
        };
        server.metrics.queued.change(-1);
        call.sink.end(Some(&never_started));
    }
}

/// The place of an answer that has a connection of its own.
pub(crate) struct StreamPlace(Arc<Server>);

impl Drop for StreamPlace {
    fn drop(&mut self) {
        self.0.native_streams.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The place of a caller's connection.
pub(crate) struct ConnectionPlace(Arc<Server>);

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        self.0.open_connections.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What all connections share.
pub(crate) struct Server {
    pub(crate) settings: ListenerSettings,
    pub(crate) security: Security,
    /// Places for TLS handshakes that have not ended.
    pub(crate) handshakes: Semaphore,
    pub(crate) metrics: ListenerMetrics,
    /// Set when the streams that still run are to end with `EngineShutdown`.
    pub(crate) cut: Flag,
    /// Set when connections are to close.
    pub(crate) leaving: Flag,
    pub(crate) call_home: CallHomePolicy,
    handlers: RwLock<HashMap<String, Arc<dyn Handler>>>,
    connections: Mutex<HashMap<u64, Arc<Connection>>>,
    next_connection: AtomicU64,
    /// Connections of callers, over both wires.
    open_connections: AtomicUsize,
    /// Answers that have a connection of their own.
    native_streams: AtomicUsize,
    pending_bytes: AtomicUsize,
    places: Arc<Semaphore>,
    open_requests: AtomicUsize,
    idle: Notify,
    is_closed: AtomicBool,
    /// An operator has drained this worker; the process lives on.
    is_drained: AtomicBool,
}

impl Server {
    pub(crate) fn new(settings: ListenerSettings, metrics: ListenerMetrics) -> Result<Arc<Self>, DynamoError> {
        let security = Security::new(&settings)?;
        let handshakes = Semaphore::new(settings.max_handshakes);
        let call_home = CallHomePolicy::new(&settings.call_home_networks)?;
        let places = Arc::new(Semaphore::new(settings.run_limit));
        metrics.run_limit.set(settings.run_limit as f64);
        metrics.queue_limit.set(settings.queue_limit as f64);
        Ok(Arc::new(Self {
            settings,
            security,
            handshakes,
            metrics,
            cut: Flag::default(),
            leaving: Flag::default(),
            call_home,
            handlers: RwLock::default(),
            connections: Mutex::default(),
            next_connection: AtomicU64::new(0),
            open_connections: AtomicUsize::new(0),
            native_streams: AtomicUsize::new(0),
            pending_bytes: AtomicUsize::new(0),
            places,
            open_requests: AtomicUsize::new(0),
            idle: Notify::new(),
            is_closed: AtomicBool::new(false),
            is_drained: AtomicBool::new(false),
        }))
    }

    /// Binds the listener and returns it with its address.
    pub(crate) async fn bind(&self, default_host: &str) -> Result<(TcpListener, SocketAddr), DynamoError> {
        let host = self.settings.host.as_deref().unwrap_or(default_host);
        let port = self.settings.port;
        let failed = |error: std::io::Error| {
            let text =
                format!("cannot listen for requests on {host}:{port}: {error} (DYN_TCP_RPC_HOST, DYN_TCP_RPC_PORT)");
            DynamoError::top(ErrorType::CannotConnect, text)
        };
        let address = tokio::net::lookup_host((host, port))
            .await
            .map_err(failed)?
            .next()
            .ok_or_else(|| failed(std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address")))?;
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }.map_err(failed)?;
        socket.set_reuseaddr(true).map_err(failed)?;
        socket.bind(address).map_err(failed)?;
        let listener = socket.listen(self.settings.backlog).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok((listener, address))
    }

    pub(crate) fn add_connection(&self, connection: Arc<Connection>) -> u64 {
        let number = self.next_connection.fetch_add(1, Ordering::Relaxed);
        lock(&self.connections).insert(number, connection);
        number
    }

    pub(crate) fn remove_connection(&self, number: u64) {
        lock(&self.connections).remove(&number);
    }

    /// Takes room for a piece of a body that is still arriving; `false` when there is none.
    pub(crate) fn take_pending(&self, bytes: usize) -> bool {
        let before = self.pending_bytes.fetch_add(bytes, Ordering::SeqCst);
        if before + bytes > self.settings.pending_bytes {
            self.pending_bytes.fetch_sub(bytes, Ordering::SeqCst);
            return false;
        }
        true
    }

    pub(crate) fn give_back_pending(&self, bytes: usize) {
        self.pending_bytes.fetch_sub(bytes, Ordering::SeqCst);
    }

    /// Serves a path from now on.
    pub(crate) fn register(&self, path: &str, handler: Arc<dyn Handler>) {
        let mut handlers = self.handlers.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        handlers.insert(path.to_owned(), handler);
    }

    /// Returns a place in the worker for a request of this path, or why it is declined.
    pub(crate) fn admit(self: &Arc<Self>, path: &str) -> Result<Admission, DynamoError> {
        let declined = |text: String| DynamoError::top(ErrorType::WorkerUnavailable, text);
        if self.is_closed.load(Ordering::SeqCst) {
            return Err(declined("Server unavailable: worker is shutting down".into()));
        }
        let handlers = self.handlers.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Some(handler) = handlers.get(path).cloned() else {
            return Err(declined(format!("Server unavailable: unknown endpoint {path}")));
        };
        drop(handlers);
        let limit = self.settings.run_limit + self.settings.queue_limit;
        let before = self.open_requests.fetch_add(1, Ordering::SeqCst);
        let admission = Admission { server: Arc::clone(self), handler };
        // After the request was counted: who closes admission and then counts misses none.
        if self.is_admission_closed() {
            return Err(declined("Server unavailable: worker is not accepting new requests".into()));
        }
        if before >= limit {
            self.metrics.rejected.add(1);
            return Err(DynamoError::top(ErrorType::WorkerOverloaded, "Server overloaded: worker at capacity"));
        }
        Ok(admission)
    }

    /// Takes a place for an answer with a connection of its own; `None` when there are too many.
    pub(crate) fn take_stream(self: &Arc<Self>) -> Option<StreamPlace> {
        let place = StreamPlace(Arc::clone(self));
        (self.native_streams.fetch_add(1, Ordering::SeqCst) < self.settings.max_streams).then_some(place)
    }

    /// Takes a place for a connection; `None` when there are too many.
    pub(crate) fn take_connection(self: &Arc<Self>) -> Option<ConnectionPlace> {
        let place = ConnectionPlace(Arc::clone(self));
        (self.open_connections.fetch_add(1, Ordering::SeqCst) < self.settings.max_connections).then_some(place)
    }

    fn request_ended(&self) {
        if self.open_requests.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.idle.notify_waiters();
        }
    }

    /// Returns how many requests run or wait.
    pub(crate) fn open_requests(&self) -> usize {
        self.open_requests.load(Ordering::SeqCst)
    }

    /// Declines requests, or takes them again: until then or the end of the process.
    pub(crate) fn close_admission(&self, is_closed: bool) {
        self.is_drained.store(is_closed, Ordering::SeqCst);
    }

    pub(crate) fn is_admission_closed(&self) -> bool {
        self.is_drained.load(Ordering::SeqCst)
    }

    /// Returns the next time that the last request has ended, from this call on.
    pub(crate) fn idle(&self) -> Notified<'_> {
        self.idle.notified()
    }

    /// Returns whether all requests have ended by then.
    pub(crate) async fn wait_idle(&self, patience: Duration) -> bool {
        let wait = async {
            loop {
                let idle = self.idle.notified();
                if self.open_requests() == 0 {
                    return;
                }
                idle.await;
            }
        };
        tokio::time::timeout(patience, wait).await.is_ok()
    }

    /// Asks every caller to open no more streams here.
    pub(crate) fn goaway(&self, reason: &str) {
        for connection in lock(&self.connections).values() {
            connection.goaway(reason);
        }
    }

    /// Declines every new request.
    pub(crate) fn stop_accepting(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
    }

    /// Returns whether no connection is open.
    fn is_silent(&self) -> bool {
        self.open_connections.load(Ordering::SeqCst) == 0 && self.native_streams.load(Ordering::SeqCst) == 0
    }

    /// Closes every connection once what waits for it is sent, and returns when that is done or a second has passed.
    pub(crate) async fn close(&self) {
        self.stop_accepting();
        self.leaving.set();
        for connection in lock(&self.connections).values() {
            connection.outgoing.leaving.set();
        }
        let closed = async {
            while !self.is_silent() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        // A caller that does not read its last bytes by then loses them with the process.
        let _ = tokio::time::timeout(Duration::from_secs(1), closed).await;
    }
}
