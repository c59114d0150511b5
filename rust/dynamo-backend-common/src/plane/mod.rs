//! The request plane: a listener, its connections, and the sinks that requests answer through.

mod front;
mod listener;
mod mux;
mod native;
mod security;
mod server;
mod sink;
mod socket;

pub(crate) use front::Front;
pub(crate) use security::{Security, provider as tls_provider};
pub(crate) use server::{Call, Handler, Server, StreamPlace};
pub(crate) use sink::Sink;
pub(crate) use socket::{Incoming, Outgoing, Socket};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex whose holders cannot leave their data half-changed: each changes it with calls that do not fail.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
