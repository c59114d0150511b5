//! What the environment of a worker asks for: what cannot be had ends the start, and how others reach its listeners.

use crate::config::WorkerConfig;
use crate::error::DynamoError;
use crate::plane::Security;
use crate::settings;
use crate::telemetry::ExportSettings;

/// An address that only this machine reaches.
pub(crate) const LOOPBACK: &str = "127.0.0.1";

/// Which planes of a worker go over NATS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Planes {
    pub(crate) requests_over_nats: bool,
    pub(crate) events_over_nats: bool,
}

impl Planes {
    /// Fails for a plane that is not built.
    pub(crate) fn of(config: &WorkerConfig) -> Result<Self, DynamoError> {
        let is_nats = |name: &str, own: &Option<String>, variable: &str, other: &str| {
            let chosen = own.clone().or_else(|| settings::text(variable));
            match chosen.as_deref() {
                Some("nats") => Ok(true),
                Some(plane) if plane != other => {
                    let text = format!("{name} {plane:?} is not built into the Rust SDK: use {other} or nats");
                    Err(DynamoError::invalid(text))
                }
                _ => Ok(false),
            }
        };
        let runtime = &config.runtime;
        Ok(Self {
            requests_over_nats: is_nats("request_plane", &runtime.request_plane, "DYN_REQUEST_PLANE", "tcp")?,
            events_over_nats: is_nats("event_plane", &runtime.event_plane, "DYN_EVENT_PLANE", "zmq")?,
        })
    }

    /// Returns the flag that needs NATS.
    pub(crate) fn wanted_by(self) -> Option<&'static str> {
        if self.requests_over_nats {
            Some("--request-plane nats (DYN_REQUEST_PLANE)")
        } else {
            self.events_over_nats.then_some("--event-plane nats (DYN_EVENT_PLANE)")
        }
    }
}

/// Refuses what the operator set and this SDK cannot do: going on without it would be worse than not starting.
pub(crate) fn check(config: &WorkerConfig) -> Result<(), DynamoError> {
    Planes::of(config)?;
    Security::check()?;
    ExportSettings::from_env()?;
    if settings::text("DYN_CHAOS").is_some() {
        let text = "DYN_CHAOS is set, and the Rust SDK injects no faults: unset it for this worker";
        return Err(DynamoError::invalid(text));
    }
    if settings::integer("DYN_ADMIN_PORT", -1, -1) >= 0 && settings::integer("DYN_SYSTEM_PORT", -1, -1) < 0 {
        let text = "DYN_ADMIN_PORT is set, and DYN_SYSTEM_PORT is not: set it, too (0: any free port)";
        return Err(DynamoError::invalid(text));
    }
    Ok(())
}

/// Returns HOST:PORT as others reach it.
pub(crate) fn advertised(host: &str, port: u16) -> String {
    let host = if matches!(host, "0.0.0.0" | "::") { own_address() } else { host.to_owned() };
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Returns the address that the route to other machines uses; loopback where there is none.
fn own_address() -> String {
    // A datagram socket that is connected sends nothing, and learns its own address. No packet may be sent to that network.
    let found = std::net::UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.connect("192.0.2.1:9")?;
        socket.local_addr()
    });
    found.map_or_else(|_| LOOPBACK.to_owned(), |address| address.ip().to_string())
}
