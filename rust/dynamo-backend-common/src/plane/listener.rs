//! Accepts connections, and gives each to the wire that its first bytes speak.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::native::UNAVAILABLE;
use super::server::ConnectionPlace;
use super::{Server, Socket, mux, native};
use crate::wire::frames::MAGIC;
use crate::wire::native::frames::ack;
use crate::wire::secret;

/// How long accepting waits after the system had no socket to give.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(50);
const FIRST_BYTES: usize = 1024;
/// The beginning of TLS; on the native wire it would be a path of 5,635 bytes.
const TLS_BEGINS: &[u8] = b"\x16\x03";
/// How long a declined caller may take to read why.
const GOODBYE: Duration = Duration::from_secs(1);

impl Server {
    /// Accepts connections for ever.
    pub(crate) async fn accept(self: Arc<Self>, listener: TcpListener) {
        loop {
            match listener.accept().await {
                Ok((socket, _)) => {
                    let Some(place) = self.take_connection() else {
                        self.metrics.refused.add(1);
                        continue; // dropping the socket closes it
                    };
                    tokio::spawn(serve(Arc::clone(&self), socket, place));
                }
                Err(error) => {
                    tracing::warn!("accepting a connection failed: {error}; trying again");
                    tokio::time::sleep(ACCEPT_BACKOFF).await;
                }
            }
        }
    }
}

async fn serve(server: Arc<Server>, socket: TcpStream, _place: ConnectionPlace) {
    // Fails for a socket that is closed already; reading finds that out.
    let _ = socket.set_nodelay(true);
    let Ok(caller) = socket.peer_addr().map(|address| address.ip()) else { return };
    let begun = tokio::select! {
        begun = begin(&server, socket) => begun,
        () = server.leaving.wait() => return,
    };
    let mut socket = match begun {
        Ok(socket) => socket,
        Err(why) => {
            server.metrics.refused.add(1);
            tracing::debug!("a caller at {caller} was declined: {why}");
            return;
        }
    };
    let mut first = Vec::new();
    let sniffed = tokio::select! {
        sniffed = tokio::time::timeout(server.settings.handshake, sniff(&mut socket, &mut first)) => sniffed,
        () = server.leaving.wait() => return,
    };
    match sniffed {
        Ok(true) => {}
        Ok(false) => return,
        Err(_) => return server.metrics.refused.add(1),
    }
    if first.starts_with(MAGIC) {
        return mux::serve(server, socket, &first).await;
    }
    if server.security.secret.is_some() && !server.security.knows_callers {
        server.metrics.refused.add(1);
        let setting = secret::SETTING;
        let text = format!(
            "{UNAVAILABLE} this worker asks for the shared secret ({setting}), which the native wire has no place for"
        );
        let goodbye = async {
            socket.write_all(&ack(&text)).await?;
            socket.flush().await
        };
        // A caller that reads nothing misses why.
        let _ = tokio::time::timeout(GOODBYE, goodbye).await;
    } else if first.starts_with(TLS_BEGINS) {
        server.metrics.refused.add(1);
        tracing::warn!("a caller began with TLS, and this worker has no certificate (DYN_TCP_TLS_CERT_PATH)");
    } else {
        native::serve(server, socket, caller, &first).await;
    }
}

/// Begins TLS where this worker has a certificate.
async fn begin(server: &Server, socket: TcpStream) -> std::io::Result<Socket> {
    let Some(acceptor) = &server.security.acceptor else { return Ok(Socket::Plain(socket)) };
    let Ok(_place) = server.handshakes.try_acquire() else {
        return Err(std::io::Error::other("too many TLS handshakes at once (DYN_TCP_MAX_UNAUTHENTICATED)"));
    };
    let begun = tokio::time::timeout(server.settings.tls_handshake, acceptor.accept(socket)).await;
    begun.unwrap_or_else(|late| Err(late.into())).map(Socket::Tls)
}

/// Reads until it is plain which wire the caller speaks; `false` when it left before. The magic of `mux` begins with 0xFF:
/// on the native wire that would be a path of more than 65,000 bytes.
async fn sniff(socket: &mut Socket, first: &mut Vec<u8>) -> bool {
    let mut buffer = [0; FIRST_BYTES];
    loop {
        match socket.read(&mut buffer).await {
            Ok(0) | Err(_) => return false,
            Ok(count) => first.extend_from_slice(&buffer[..count]),
        }
        if first.len() >= MAGIC.len() || !MAGIC.starts_with(first) {
            return true;
        }
    }
}
