//! How requests reach this worker: at a listener of its own, or as messages of NATS.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::native::NatsIntake;
use super::{Handler, Server};
use crate::environment::advertised;
use crate::error::DynamoError;
use crate::nats::NatsConnection;
use crate::place::Place;
use crate::wire::frames::VERSION;

/// The workers of one instance share its requests, should there ever be two.
const GROUP: &str = "q";

/// The way in of one worker.
pub(crate) struct Front {
    server: Arc<Server>,
    way: Way,
}

enum Way {
    /// HOST:PORT, as others reach it.
    Tcp(String),
    Nats(Arc<NatsConnection>, NatsIntake),
}

impl Front {
    /// Opens the way in: over NATS where there is a connection, else at a listener, which is returned.
    pub(crate) async fn open(
        server: Arc<Server>,
        nats: Option<Arc<NatsConnection>>,
        default_host: &str,
    ) -> Result<(Self, Option<TcpListener>), DynamoError> {
        if let Some(connection) = nats {
            let intake = NatsIntake::new(Arc::clone(&server));
            return Ok((Self { server, way: Way::Nats(connection, intake) }, None));
        }
        let (listener, address) = server.bind(default_host).await?;
        if !address.ip().is_loopback() && server.security.secret.is_none() && server.security.acceptor.is_none() {
            tracing::warn!(
                "anybody who reaches this worker can send it requests: neither DYN_TCP_SECRET_PATH nor \
                 DYN_TCP_TLS_CERT_PATH is set (docs/security.md)"
            );
        }
        let host = advertised(&address.ip().to_string(), address.port());
        Ok((Self { server, way: Way::Tcp(host) }, Some(listener)))
    }

    /// Returns the server behind it.
    pub(crate) fn server(&self) -> &Arc<Server> {
        &self.server
    }

    /// Serves an endpoint from now on.
    pub(crate) async fn serve(&self, place: &Place, handler: Arc<dyn Handler>) -> Result<(), DynamoError> {
        let route = place.route();
        self.server.register(&route, handler);
        let Way::Nats(connection, intake) = &self.way else { return Ok(()) };
        connection.subscribe(place.request_subject(), GROUP, intake.deliver(Arc::clone(connection), route)).await
    }

    /// Returns where the endpoint is called.
    pub(crate) fn address(&self, place: &Place) -> String {
        match &self.way {
            Way::Tcp(host) => format!("{host}/{}", place.route()),
            Way::Nats(..) => place.request_subject(),
        }
    }

    /// Returns the record by which callers find the endpoint.
    pub(crate) fn record(&self, place: &Place) -> Value {
        let address = self.address(place);
        match &self.way {
            Way::Tcp(_) => place.instance_record(json!({"tcp": address}), Some(VERSION)),
            Way::Nats(..) => place.instance_record(json!({"nats_tcp": address}), None),
        }
    }
}
