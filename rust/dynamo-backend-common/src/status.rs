//! The worker's own HTTP listener: health, metrics, controls of the engine, files of the model card.
//!
//! An operator's door: requests are small, few, and bounded in every way.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use futures::future::BoxFuture;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::admin::Admin;
use crate::error::{DynamoError, ErrorType};
use crate::health::Health;
use crate::metrics::EngineMetrics;
use crate::settings;

const MAX_HEAD_BYTES: usize = 16 * 1024;
const MAX_BODY_BYTES: usize = 1024 * 1024;
const MAX_CONNECTIONS: usize = 64;
/// How long one request may take to arrive.
const REQUEST_PATIENCE: Duration = Duration::from_secs(10);
const FILE_CHUNK_BYTES: usize = 256 * 1024;

/// Carries out a control: its path behind `/engine/`, and its body. `None`: there is no such control.
pub(crate) type Control =
    Arc<dyn Fn(String, Value) -> BoxFuture<'static, Option<Result<Value, DynamoError>>> + Send + Sync>;

/// What the listener answers from.
pub(crate) struct Status {
    health: Health,
    metrics: EngineMetrics,
    health_path: String,
    live_path: String,
    files: RwLock<HashMap<String, PathBuf>>,
    control: RwLock<Option<Control>>,
    admin: RwLock<Option<Arc<Admin>>>,
    is_local: bool,
    names: Names,
    /// Controls are answered on a port of their own.
    has_admin: bool,
}

/// Which of the listeners a request came to.
#[derive(Clone, Copy, PartialEq)]
enum Door {
    Status,
    /// The port of controls; whether only this machine reaches it.
    Admin {
        is_local: bool,
    },
}

struct Reply {
    status: u16,
    content_type: &'static str,
    body: Vec<u8>,
    file: Option<PathBuf>,
}

impl Reply {
    fn text(status: u16, text: &str) -> Self {
        Self { status, content_type: "text/plain; charset=utf-8", body: text.into(), file: None }
    }

    fn json(status: u16, value: &Value) -> Self {
        Self::text(status, &value.to_string())
    }
}

struct Request {
    method: String,
    path: String,
    host: String,
    origin: Option<String>,
    /// The form of any page could be this request: a body of a form, and no header that no form can have.
    is_form: bool,
    body: Vec<u8>,
    is_last: bool,
}

/// The names by which a listener is reached beside addresses and localhost.
#[derive(Default)]
struct Names {
    allowed: Vec<String>,
}

impl Names {
    fn from_env() -> Self {
        let given = settings::text("DYN_ALLOWED_HOSTS").unwrap_or_default().to_ascii_lowercase();
        Self { allowed: given.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect() }
    }

    /// Returns why a request may come from a page of another site, through the browser of somebody on this machine.
    ///
    /// An address of loopback is no protection from those: a browser sends what any page asks it to send, and a page whose name
    /// was made to resolve to 127.0.0.1 may even read the answer. A listener that is open to a network may have any name, unless
    /// names are given.
    fn cross_site_reason(&self, request: &Request, is_local: bool) -> Option<&'static str> {
        let is_named = |name: &str| self.allowed.iter().any(|allowed| allowed == name);
        let host = request.host.as_str();
        let origin = request.origin.as_deref().map(|origin| origin.split_once("://").map_or("", |(_, host)| host));
        if origin.is_some_and(|origin| origin.is_empty() || (origin != host && !is_named(name_in(origin)))) {
            return Some("its Origin is another site");
        }
        let has_any_name = is_named("*") || (self.allowed.is_empty() && !is_local);
        let name = name_in(host);
        // HTTP/1.0 has no Host, and browsers always send one; they resolve .localhost by themselves (RFC 6761).
        let is_of_this_machine = matches!(name, "" | "localhost")
            || name.ends_with(".localhost")
            || is_named(name)
            || name.parse::<std::net::IpAddr>().is_ok();
        (!has_any_name && !is_of_this_machine).then_some(
            "its Host is a name that is not known here. This port is reached by 127.0.0.1, [::1], localhost and the names in \
             DYN_ALLOWED_HOSTS",
        )
    }
}

/// Returns a host without its port.
fn name_in(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    }
}

impl Status {
    pub(crate) fn new(health: Health, metrics: EngineMetrics, is_local: bool) -> Arc<Self> {
        let path = |name: &str, default: &str| settings::text(name).unwrap_or_else(|| default.to_owned());
        Arc::new(Self {
            health,
            metrics,
            health_path: path("DYN_SYSTEM_HEALTH_PATH", "/health"),
            live_path: path("DYN_SYSTEM_LIVE_PATH", "/live"),
            files: RwLock::default(),
            control: RwLock::default(),
            admin: RwLock::default(),
            is_local,
            names: Names::from_env(),
            has_admin: settings::integer("DYN_ADMIN_PORT", -1, -1) >= 0,
        })
    }

    /// Answers controls from now on.
    pub(crate) fn set_control(&self, control: Control) {
        *self.control.write().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(control);
    }

    /// Answers the Worker Admin API from now on.
    pub(crate) fn set_admin(&self, admin: Arc<Admin>) {
        *self.admin.write().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(admin);
        tracing::info!("registered worker Admin API routes under /engine");
    }

    /// Serves a file of the model card at this path.
    pub(crate) fn add_file(&self, path: String, file: PathBuf) {
        self.files.write().unwrap_or_else(std::sync::PoisonError::into_inner).insert(path, file);
    }

    /// Listens and returns the address. Fails, naming the setting, where the address is taken.
    pub(crate) async fn listen(self: &Arc<Self>, host: &str, port: u16) -> Result<SocketAddr, DynamoError> {
        let failed = |error: std::io::Error| {
            let text = format!(
                "the status server cannot listen on {host}:{port} ({error}); set DYN_SYSTEM_PORT to a free port, 0 for \
                 any, or -1 for none"
            );
            DynamoError::top(ErrorType::CannotConnect, text)
        };
        self.open((host, port), |_| Door::Status).await.map_err(failed)
    }

    /// Listens for controls on a port of their own; likewise.
    pub(crate) async fn listen_admin(self: &Arc<Self>, host: &str, port: u16) -> Result<SocketAddr, DynamoError> {
        let failed = |error: std::io::Error| {
            let text = format!(
                "the admin listener cannot listen on {host}:{port} ({error}); set DYN_ADMIN_PORT to a free port, or 0 for \
                 any"
            );
            DynamoError::top(ErrorType::CannotConnect, text)
        };
        self.open((host, port), |address| Door::Admin { is_local: address.ip().is_loopback() }).await.map_err(failed)
    }

    async fn open(
        self: &Arc<Self>,
        place: (&str, u16),
        door: impl FnOnce(SocketAddr) -> Door,
    ) -> std::io::Result<SocketAddr> {
        let listener = TcpListener::bind(place).await?;
        let address = listener.local_addr()?;
        let (status, door) = (Arc::clone(self), door(address));
        tokio::spawn(async move { status.accept(listener, door).await });
        Ok(address)
    }

    async fn accept(self: Arc<Self>, listener: TcpListener, door: Door) {
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let Ok((socket, _)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
            let status = Arc::clone(&self);
            tokio::spawn(async move {
                if let Err(error) = status.serve(socket, door).await {
                    tracing::debug!("a connection to the status server ended: {error}");
                }
                drop(place);
            });
        }
    }

    async fn serve(&self, mut socket: TcpStream, door: Door) -> std::io::Result<()> {
        let mut buffer = Vec::new();
        loop {
            let read = tokio::time::timeout(REQUEST_PATIENCE, read_request(&mut socket, &mut buffer)).await;
            let request = match read {
                Ok(Ok(Some(request))) => request,
                Ok(Ok(None)) | Err(_) => return Ok(()),
                Ok(Err(refusal)) => return write_reply(&mut socket, &refusal, false, true).await,
            };
            let reply = self.answer(&request, door).await;
            write_reply(&mut socket, &reply, request.method == "HEAD", request.is_last).await?;
            if request.is_last {
                return Ok(());
            }
        }
    }

    async fn answer(&self, request: &Request, door: Door) -> Reply {
        let is_local = match door {
            Door::Status => self.is_local,
            Door::Admin { is_local } => is_local,
        };
        if let Some(reason) = self.names.cross_site_reason(request, is_local) {
            let text = format!("this request may come from a page of another site: {reason}");
            return Reply::json(403, &json!({"error": "Forbidden", "message": text}));
        }
        if request.method == "POST" && request.is_form {
            let text = format!(
                "{} takes no form, as web pages of any site can send forms: send it with Content-Type application/json",
                request.path
            );
            return Reply::json(415, &json!({"error": "Unsupported Media Type", "message": text}));
        }
        if let Some(name) = request.path.strip_prefix("/engine/") {
            return match self.elsewhere(door) {
                Some(text) => {
                    let text = format!("this route is not here: {text}");
                    Reply::json(404, &json!({"error": "Route not found", "message": text}))
                }
                None if name == "status" => self.answer_status(&request.method),
                // An image of any page could be a GET.
                None if request.method != "POST" => Reply::text(405, "Method not allowed"),
                None => self.answer_control(name, &request.body).await,
            };
        }
        if door != Door::Status {
            return Reply::text(404, "Route not found");
        }
        let reply = self.read(&request.path);
        if reply.status != 404 && !matches!(request.method.as_str(), "GET" | "HEAD") {
            return Reply::text(405, "Method not allowed");
        }
        reply
    }

    /// Returns where controls are answered, if not at this door.
    fn elsewhere(&self, door: Door) -> Option<&'static str> {
        match door {
            Door::Admin { .. } => None,
            Door::Status if self.has_admin => Some("it is served on the admin port only (DYN_ADMIN_PORT)"),
            Door::Status if !self.is_local => Some(
                "engine routes are not served on a port that is open to a network. Set DYN_ADMIN_PORT (0: any free port), \
                 which serves them at 127.0.0.1",
            ),
            Door::Status => None,
        }
    }

    fn read(&self, path: &str) -> Reply {
        if path == self.health_path || path == self.live_path {
            let (is_ready, body) = self.health.body();
            return Reply::json(if is_ready { 200 } else { 503 }, &body);
        }
        if path == "/metrics" {
            return Reply::text(200, &self.metrics.expose());
        }
        if path.starts_with("/v1/metadata/") {
            let files = self.files.read().unwrap_or_else(std::sync::PoisonError::into_inner);
            return match files.get(path) {
                Some(file) => Reply {
                    status: 200,
                    content_type: "application/octet-stream",
                    body: Vec::new(),
                    file: Some(file.clone()),
                },
                None => Reply::text(404, "Not found"),
            };
        }
        Reply::text(404, "Route not found")
    }

    fn admin(&self) -> Option<Arc<Admin>> {
        self.admin.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    fn answer_status(&self, method: &str) -> Reply {
        match self.admin() {
            None => no_route("status"),
            Some(_) if !matches!(method, "GET" | "HEAD") => Reply::text(405, "Method not allowed"),
            Some(admin) => Reply::json(200, &admin.status()),
        }
    }

    async fn answer_control(&self, name: &str, body: &[u8]) -> Reply {
        let body = match body.trim_ascii() {
            [] => json!({}),
            text => match serde_json::from_slice(text) {
                Ok(value) => value,
                Err(error) => {
                    let text = error.to_string();
                    return Reply::json(400, &json!({"error": "Invalid JSON", "message": text}));
                }
            },
        };
        if let Some(admin) = self.admin()
            && let Some(answer) = admin.call(name, &body).await
        {
            return answer.map_or_else(|text| handler_error(name, &text), |status| Reply::json(200, &status));
        }
        let control = self.control.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let answer = match control {
            Some(control) => control(name.to_owned(), body).await,
            None => None,
        };
        match answer {
            Some(Ok(value)) => Reply::json(200, &value),
            Some(Err(error)) => handler_error(name, &error.to_string()),
            None => no_route(name),
        }
    }
}

fn handler_error(name: &str, text: &str) -> Reply {
    tracing::error!("engine route {name} failed: {text}");
    Reply::json(500, &json!({"error": "Handler error", "message": text}))
}

fn no_route(name: &str) -> Reply {
    let text = format!("Route /engine/{name} not found");
    Reply::json(404, &json!({"error": "Route not found", "message": text}))
}

/// Reads one request; `None` when the peer has left.
async fn read_request<R: AsyncRead + Unpin>(socket: &mut R, buffer: &mut Vec<u8>) -> Result<Option<Request>, Reply> {
    let end = loop {
        if let Some(at) = buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break at + 4;
        }
        if buffer.len() > MAX_HEAD_BYTES {
            return Err(Reply::text(431, "The head of the request is too long"));
        }
        if !read_more(socket, buffer).await {
            return Ok(None);
        }
    };
    let head = String::from_utf8_lossy(&buffer[..end]).into_owned();
    let mut lines = head.split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(target), Some(version)) = (words.next(), words.next(), words.next()) else {
        return Err(Reply::text(400, "The request line is malformed"));
    };
    let mut is_last = version != "HTTP/1.1";
    let (mut length, mut host, mut origin, mut is_form, mut has_key) = (0, String::new(), None, false, false);
    for line in lines {
        let Some((name, value)) = line.split_once(':') else { continue };
        match name.trim().to_ascii_lowercase().as_str() {
            "content-length" => match value.trim().parse::<usize>() {
                Ok(number) if number <= MAX_BODY_BYTES => length = number,
                _ => return Err(Reply::text(413, "The body is too long")),
            },
            "transfer-encoding" => return Err(Reply::text(411, "A body needs a content-length here")),
            "host" => host = value.trim().to_ascii_lowercase(),
            "content-type" => {
                let kind = value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
                is_form =
                    matches!(kind.as_str(), "application/x-www-form-urlencoded" | "multipart/form-data" | "text/plain");
            }
            "authorization" | "x-api-key" => has_key = true,
            "origin" => origin = Some(value.trim().to_ascii_lowercase()),
            "connection" if value.trim().eq_ignore_ascii_case("close") => is_last = true,
            _ => {}
        }
    }
    while buffer.len() < end + length {
        if !read_more(socket, buffer).await {
            return Ok(None);
        }
    }
    let path = target.split('?').next().unwrap_or_default().to_owned();
    let body = buffer[end..end + length].to_vec();
    let is_form = is_form && !has_key;
    let request = Request { method: method.to_owned(), path, host, origin, is_form, body, is_last };
    buffer.drain(..end + length);
    Ok(Some(request))
}

async fn read_more<R: AsyncRead + Unpin>(socket: &mut R, buffer: &mut Vec<u8>) -> bool {
    let mut piece = [0; 4096];
    match socket.read(&mut piece).await {
        Ok(0) | Err(_) => false,
        Ok(count) => {
            buffer.extend_from_slice(&piece[..count]);
            true
        }
    }
}

async fn write_reply(socket: &mut TcpStream, reply: &Reply, is_head: bool, is_last: bool) -> std::io::Result<()> {
    let file = match &reply.file {
        Some(path) => match std::fs::File::open(path).and_then(|file| Ok((file.metadata()?.len(), file))) {
            Ok(found) => Some(found),
            Err(error) => {
                tracing::warn!("model card file {} cannot be read: {error}; answering 404", path.display());
                let missing = Reply::text(404, "Not found");
                return Box::pin(write_reply(socket, &missing, is_head, is_last)).await;
            }
        },
        None => None,
    };
    let length = file.as_ref().map_or(reply.body.len() as u64, |(length, _)| *length);
    let (status, kind) = (reply.status, reply.content_type);
    let connection = if is_last { "close" } else { "keep-alive" };
    let phrase = match status {
        200 => "OK",
        400 => "Bad Request",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        415 => "Unsupported Media Type",
        503 => "Service Unavailable",
        _ => "Error",
    };
    let head = format!(
        "HTTP/1.1 {status} {phrase}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\nconnection: {connection}\r\n\r\n"
    );
    socket.write_all(head.as_bytes()).await?;
    if is_head {
        return Ok(());
    }
    socket.write_all(&reply.body).await?;
    if let Some((mut left, mut file)) = file {
        use std::io::Read;
        let mut chunk = vec![0; FILE_CHUNK_BYTES];
        while left > 0 {
            let count = file.read(&mut chunk)?;
            if count == 0 {
                return Err(std::io::Error::other("a model card file became shorter while it was sent"));
            }
            let count = count.min(usize::try_from(left).unwrap_or(count));
            left -= count as u64;
            socket.write_all(&chunk[..count]).await?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(bytes: &[u8]) -> Result<Option<Request>, u16> {
        let mut rest = bytes;
        read_request(&mut rest, &mut Vec::new()).await.map_err(|reply| reply.status)
    }

    #[tokio::test]
    async fn requests_are_read_within_their_bounds() {
        let request = read(b"POST /engine/x?a=b HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}").await.expect("read");
        let request = request.expect("a request");
        assert_eq!((request.path.as_str(), &request.body[..], request.is_last), ("/engine/x", &b"{}"[..], false));
        assert!(read(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n").await.expect("read").expect("one").is_last);
        assert!(read(b"GET / HT").await.expect("read").is_none());
        assert_eq!(read(b"GET /\r\n\r\n").await.err(), Some(400));
        assert_eq!(read(b"POST / HTTP/1.1\r\ncontent-length: 99999999\r\n\r\n").await.err(), Some(413));
        assert_eq!(read(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n").await.err(), Some(411));
        assert_eq!(read(&[b'a'; 40_000]).await.err(), Some(431));
    }

    #[tokio::test]
    async fn pages_of_other_sites_are_recognised() {
        for (headers, is_ours) in [
            ("Host: 127.0.0.1:9", true),
            ("Host: [::1]:9", true),
            ("Host: LocalHost", true),
            ("", true),
            ("Host: 127.0.0.1:9\r\nOrigin: http://127.0.0.1:9", true),
            ("Host: 127.0.0.1:9\r\nOrigin: http://evil.example", false),
            ("Host: 127.0.0.1:9\r\nOrigin: null", false),
            ("Host: evil.example:9", false),
            ("Host: evil.example\r\nOrigin: http://evil.example", false),
        ] {
            let head = format!("POST /engine/x HTTP/1.1\r\n{headers}\r\n\r\n");
            let request = read(head.as_bytes()).await.expect("read").expect("a request");
            assert_eq!(Names::default().cross_site_reason(&request, true).is_none(), is_ours, "{headers}");
        }
    }

    #[tokio::test]
    async fn names_that_are_allowed_are_the_only_ones() {
        for (allowed, is_local, headers, is_ours) in [
            ("api.example", true, "Host: api.example:9", true),
            ("api.example", true, "Host: 127.0.0.1:9\r\nOrigin: https://api.example", true),
            ("api.example", true, "Host: evil.example", false),
            ("api.example", false, "Host: evil.example", false),
            ("*", true, "Host: evil.example", true),
            ("*", true, "Host: localhost\r\nOrigin: http://evil.example", false),
            ("", false, "Host: worker.cluster", true),
            ("", false, "Host: worker.cluster\r\nOrigin: http://evil.example", false),
        ] {
            let head = format!("POST /engine/x HTTP/1.1\r\n{headers}\r\n\r\n");
            let request = read(head.as_bytes()).await.expect("read").expect("a request");
            let allowed = allowed.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
            let names = Names { allowed };
            assert_eq!(names.cross_site_reason(&request, is_local).is_none(), is_ours, "{headers}");
        }
    }

    #[tokio::test]
    async fn what_the_form_of_any_page_could_send_is_a_form() {
        for (headers, is_form) in [
            ("Content-Type: application/json", false),
            ("Content-Type: text/plain; charset=UTF-8", true),
            ("Content-Type: application/x-www-form-urlencoded", true),
            ("Content-Type: multipart/form-data; boundary=x", true),
            ("Content-Type: text/plain\r\nAuthorization: Bearer x", false),
            ("", false),
        ] {
            let head = format!("POST /engine/x HTTP/1.1\r\n{headers}\r\n\r\n");
            assert_eq!(read(head.as_bytes()).await.expect("read").expect("one").is_form, is_form, "{headers}");
        }
    }
}
