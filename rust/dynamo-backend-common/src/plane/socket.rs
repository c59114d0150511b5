//! One connection, plain or over TLS.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use crate::tls::TlsStream;

/// A connection.
pub(crate) enum Socket {
    Plain(TcpStream),
    Tls(TlsStream),
}

/// The half that is read.
pub(crate) enum Incoming {
    Plain(OwnedReadHalf),
    Tls(ReadHalf<TlsStream>),
}

/// The half that is written.
pub(crate) enum Outgoing {
    Plain(OwnedWriteHalf),
    Tls(WriteHalf<TlsStream>),
}

impl Socket {
    pub(crate) fn split(self) -> (Incoming, Outgoing) {
        match self {
            Self::Plain(socket) => {
                let (incoming, outgoing) = socket.into_split();
                (Incoming::Plain(incoming), Outgoing::Plain(outgoing))
            }
            Self::Tls(stream) => {
                let (incoming, outgoing) = tokio::io::split(stream);
                (Incoming::Tls(incoming), Outgoing::Tls(outgoing))
            }
        }
    }
}

impl Outgoing {
    /// Writes what the socket takes at once, and returns how much that is.
    pub(crate) fn write_now(&self, bytes: &[u8]) -> usize {
        match self {
            Self::Plain(socket) => socket.try_write(bytes).unwrap_or(0),
            Self::Tls(_) => 0,
        }
    }
}

/// Calls the same method of whichever connection it is.
macro_rules! each {
    ($connection:expr, $method:ident $(, $argument:expr)*) => {
        match $connection.get_mut() {
            Self::Plain(socket) => Pin::new(socket).$method($($argument),*),
            Self::Tls(stream) => Pin::new(stream).$method($($argument),*),
        }
    };
}

macro_rules! readable {
    ($kind:ty) => {
        impl AsyncRead for $kind {
            fn poll_read(
                self: Pin<&mut Self>,
                context: &mut Context<'_>,
                buffer: &mut ReadBuf<'_>,
            ) -> Poll<io::Result<()>> {
                each!(self, poll_read, context, buffer)
            }
        }
    };
}

macro_rules! writable {
    ($kind:ty) => {
        impl AsyncWrite for $kind {
            fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
                each!(self, poll_write, context, bytes)
            }

            fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
                each!(self, poll_flush, context)
            }

            fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
                each!(self, poll_shutdown, context)
            }
        }
    };
}

readable!(Socket);
readable!(Incoming);
writable!(Socket);
writable!(Outgoing);
