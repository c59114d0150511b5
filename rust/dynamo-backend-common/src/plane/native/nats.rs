//! Requests that arrive as messages of NATS. Answers leave over TCP, as they do on the rest of the native wire.

use std::sync::Arc;

use tokio::sync::Semaphore;

use super::connection::{DIALS_AT_ONCE, Intake};
use crate::nats::{Message, NatsConnection};
use crate::plane::Server;
use crate::wire::native::frames::RequestFrame;

/// Takes requests in.
pub(crate) struct NatsIntake(Arc<Intake>);

impl NatsIntake {
    pub(crate) fn new(server: Arc<Server>) -> Self {
        Self(Arc::new(Intake { server, address: None, dials: Arc::new(Semaphore::new(DIALS_AT_ONCE)) }))
    }

    /// Returns what takes the messages of a path. Each is answered at once: with nothing, or why it was declined.
    pub(crate) fn deliver(&self, connection: Arc<NatsConnection>, path: String) -> Arc<dyn Fn(Message) + Send + Sync> {
        let intake = Arc::clone(&self.0);
        // Weak: the connection holds what takes its messages.
        let connection = Arc::downgrade(&connection);
        Arc::new(move |message| {
            let Message { reply, headers, payload, .. } = message;
            let declined = intake.begin(&RequestFrame { path: &path, headers, payload: &payload }).err();
            if let (Some(reply), Some(connection)) = (reply, connection.upgrade()) {
                connection.publish(&reply, declined.unwrap_or_default().as_bytes());
            }
        })
    }
}
