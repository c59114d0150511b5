//! The wire of ai-dynamo 1.6: requests arrive on one connection, each answer leaves on a connection of its own.

mod connection;
mod nats;
mod policy;
mod stream;

pub(crate) use connection::serve;
pub(crate) use nats::NatsIntake;
pub(crate) use policy::CallHomePolicy;
pub(crate) use stream::NativeSink;

/// The beginning of an ACK that a caller of 1.6 reads as an overload.
pub(crate) const OVERLOADED: &str = "Server overloaded:";
/// The beginning of an ACK that a caller of 1.6 reads as a worker that does not serve.
pub(crate) const UNAVAILABLE: &str = "Server unavailable:";
/// How long the last bytes of a closing connection may take to leave.
const GOODBYE: std::time::Duration = std::time::Duration::from_secs(1);
