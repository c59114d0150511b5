//! TLS of the request plane, with a library that a program brings along.
//!
//! This crate has no cryptography of its own. A program whose operators set `DYN_TCP_TLS_*` depends on a crate that does,
//! such as `dynamo-backend-tls` (OpenSSL), and calls its `install()` before [`run`](crate::run).

use std::io;
use std::path::PathBuf;
use std::sync::OnceLock;

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::error::DynamoError;

/// A connection over TLS.
pub trait TlsIo: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> TlsIo for T {}

/// A connection over TLS, of any library.
pub type TlsStream = Box<dyn TlsIo>;

/// A file in PEM, and the setting that names it, for errors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFile {
    /// The variable.
    pub setting: &'static str,
    /// The file.
    pub path: PathBuf,
}

/// How a listener shows who it is, and what it asks of its callers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerTls {
    /// The certificate, with those between it and its authority.
    pub certificate: TlsFile,
    /// The key of the certificate.
    pub key: TlsFile,
    /// Callers must show a certificate of this authority; `None`: they show none.
    pub client_authority: Option<TlsFile>,
}

/// How a caller checks its peers, and what it shows them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallerTls {
    /// Who must have signed a peer's certificate; `None`: the authorities of the system.
    pub authority: Option<TlsFile>,
    /// The certificate to show, and its key.
    pub certificate: Option<(TlsFile, TlsFile)>,
    /// The name that a peer's certificate must have; `None`: the host that was called.
    pub server_name: Option<String>,
    /// Any certificate is accepted.
    pub is_insecure: bool,
}

/// Begins TLS on the connections of callers. TLS is 1.2 or newer.
#[async_trait]
pub trait TlsAcceptor: Send + Sync {
    /// Returns the connection once the caller has shown what it must. Is dropped when that takes too long.
    async fn accept(&self, socket: TcpStream) -> io::Result<TlsStream>;
}

/// Begins TLS on connections to others; likewise.
#[async_trait]
pub trait TlsConnector: Send + Sync {
    /// Returns the connection to `host` once the peer has shown what it must.
    async fn connect(&self, host: &str, socket: TcpStream) -> io::Result<TlsStream>;
}

/// A library for TLS.
///
/// Both methods fail, naming the setting, for files that cannot be used. Files that are replaced serve later connections.
pub trait TlsProvider: Send + Sync {
    /// Prepares a listener.
    fn acceptor(&self, settings: ListenerTls) -> Result<Box<dyn TlsAcceptor>, DynamoError>;

    /// Prepares a caller.
    fn connector(&self, settings: CallerTls) -> Result<Box<dyn TlsConnector>, DynamoError>;
}

static PROVIDER: OnceLock<Box<dyn TlsProvider>> = OnceLock::new();

/// Makes a library the one of this process, and returns whether it was the first.
pub fn install(provider: Box<dyn TlsProvider>) -> bool {
    PROVIDER.set(provider).is_ok()
}

pub(crate) fn provider() -> Option<&'static dyn TlsProvider> {
    PROVIDER.get().map(|provider| &**provider)
}
