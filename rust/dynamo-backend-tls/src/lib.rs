//! TLS of the request plane for engines in Rust, with OpenSSL.
//!
//! A program calls [`install`] first in its `main`; `DYN_TCP_TLS_*` then mean what they mean to a worker in Python.
//!
//! ```no_run
//! dynamo_backend_tls::install();
//! // dynamo_backend_common::run(engine, config)
//! ```

mod watched;

use std::io;
use std::net::IpAddr;
use std::pin::Pin;

use async_trait::async_trait;
use dynamo_backend_common::tls::{CallerTls, ListenerTls, TlsAcceptor, TlsConnector, TlsFile, TlsProvider, TlsStream};
use dynamo_backend_common::{BackendError, DynamoError, ErrorType};
use openssl::error::ErrorStack;
use openssl::ssl::{
    Ssl, SslContext, SslContextBuilder, SslFiletype, SslMethod, SslSessionCacheMode, SslVerifyMode, SslVersion,
};
use tokio::net::TcpStream;
use tokio_openssl::SslStream;

use watched::Watched;

/// Makes OpenSSL the library for TLS of this process, and returns whether there was none before.
pub fn install() -> bool {
    dynamo_backend_common::tls::install(Box::new(OpenSsl))
}

/// OpenSSL.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenSsl;

impl TlsProvider for OpenSsl {
    fn acceptor(&self, settings: ListenerTls) -> Result<Box<dyn TlsAcceptor>, DynamoError> {
        let files = [Some(&settings.certificate), Some(&settings.key), settings.client_authority.as_ref()];
        let files = files.into_iter().flatten().cloned().collect();
        Ok(Box::new(Acceptor(Watched::new(files, move || listener_context(&settings))?)))
    }

    fn connector(&self, settings: CallerTls) -> Result<Box<dyn TlsConnector>, DynamoError> {
        let shown = settings.certificate.iter().flat_map(|(certificate, key)| [certificate, key]);
        let files = settings.authority.iter().chain(shown).cloned().collect();
        let (server_name, is_insecure) = (settings.server_name.clone(), settings.is_insecure);
        let contexts = Watched::new(files, move || caller_context(&settings))?;
        Ok(Box::new(Connector { contexts, server_name, is_insecure }))
    }
}

struct Acceptor(Watched<SslContext>);

#[async_trait]
impl TlsAcceptor for Acceptor {
    async fn accept(&self, socket: TcpStream) -> io::Result<TlsStream> {
        let mut stream = SslStream::new(Ssl::new(&self.0.current())?, socket)?;
        Pin::new(&mut stream).accept().await.map_err(io::Error::other)?;
        Ok(Box::new(stream))
    }
}

struct Connector {
    contexts: Watched<SslContext>,
    server_name: Option<String>,
    is_insecure: bool,
}

#[async_trait]
impl TlsConnector for Connector {
    async fn connect(&self, host: &str, socket: TcpStream) -> io::Result<TlsStream> {
        let mut ssl = Ssl::new(&self.contexts.current())?;
        let name = self.server_name.as_deref().unwrap_or(host);
        match name.parse::<IpAddr>() {
            Ok(address) if !self.is_insecure => ssl.param_mut().set_ip(address)?,
            Ok(_) => {}
            Err(_) => {
                ssl.set_hostname(name)?;
                if !self.is_insecure {
                    ssl.param_mut().set_host(name)?;
                }
            }
        }
        let mut stream = SslStream::new(ssl, socket)?;
        Pin::new(&mut stream).connect().await.map_err(io::Error::other)?;
        Ok(Box::new(stream))
    }
}

fn listener_context(settings: &ListenerTls) -> Result<SslContext, DynamoError> {
    let mut builder = context(SslMethod::tls_server())?;
    load_pair(&mut builder, &settings.certificate, &settings.key)?;
    if let Some(authority) = &settings.client_authority {
        builder.set_verify(SslVerifyMode::PEER | SslVerifyMode::FAIL_IF_NO_PEER_CERT);
        load_authority(&mut builder, authority)?;
    }
    Ok(builder.build())
}

fn caller_context(settings: &CallerTls) -> Result<SslContext, DynamoError> {
    let mut builder = context(SslMethod::tls_client())?;
    if settings.is_insecure {
        builder.set_verify(SslVerifyMode::NONE);
    } else {
        builder.set_verify(SslVerifyMode::PEER);
        match &settings.authority {
            Some(authority) => load_authority(&mut builder, authority)?,
            None => builder.set_default_verify_paths().map_err(|error| unusable("the system's authorities", &error))?,
        }
    }
    if let Some((certificate, key)) = &settings.certificate {
        load_pair(&mut builder, certificate, key)?;
    }
    Ok(builder.build())
}

fn context(method: SslMethod) -> Result<SslContextBuilder, DynamoError> {
    let failed = |error: ErrorStack| unusable("OpenSSL", &error);
    let mut builder = SslContextBuilder::new(method).map_err(failed)?;
    builder.set_min_proto_version(Some(SslVersion::TLS1_2)).map_err(failed)?;
    // A connection lasts as long as its processes, so there is nothing to resume.
    builder.set_session_cache_mode(SslSessionCacheMode::OFF);
    Ok(builder)
}

fn load_pair(builder: &mut SslContextBuilder, certificate: &TlsFile, key: &TlsFile) -> Result<(), DynamoError> {
    check_readable(certificate)?;
    check_readable(key)?;
    let mut load = || {
        builder.set_certificate_chain_file(&certificate.path)?;
        builder.set_private_key_file(&key.path, SslFiletype::PEM)?;
        builder.check_private_key()
    };
    load().map_err(|error| {
        invalid(format!(
            "{}, {}: {} and {} are no certificate and its key: {error}",
            certificate.setting,
            key.setting,
            certificate.path.display(),
            key.path.display()
        ))
    })
}

fn load_authority(builder: &mut SslContextBuilder, file: &TlsFile) -> Result<(), DynamoError> {
    check_readable(file)?;
    builder
        .set_ca_file(&file.path)
        .map_err(|error| invalid(format!("{}: {} holds no certificate: {error}", file.setting, file.path.display())))
}

fn check_readable(file: &TlsFile) -> Result<(), DynamoError> {
    let opened = std::fs::File::open(&file.path);
    let failed = |error| invalid(format!("{}: cannot read {}: {error}", file.setting, file.path.display()));
    opened.map(drop).map_err(failed)
}

fn invalid(text: String) -> DynamoError {
    DynamoError::builder().error_type(ErrorType::Backend(BackendError::InvalidArgument)).message(text).build()
}

fn unusable(what: &str, error: &ErrorStack) -> DynamoError {
    invalid(format!("TLS: {what} cannot be used: {error}"))
}
