//! The `mux` wire: one connection carries all requests of a caller.

mod connection;
mod outgoing;
mod sink;

pub(crate) use connection::{Connection, serve};
pub(crate) use sink::MuxSink;
