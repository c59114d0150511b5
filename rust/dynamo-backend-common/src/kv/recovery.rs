//! Lost KV events can be requested again: from an endpoint beside each publisher, which a record names.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use serde::Deserialize;

use super::publisher::KvEventPublisher;
use crate::plane::{Call, Handler};
use crate::wire::msgpack::{put_map, put_str};

/// A router's query: everything of one rank from an event on, or all blocks that are held now.
#[derive(Debug, Deserialize)]
struct Query {
    worker_id: u64,
    #[serde(default)]
    dp_rank: u32,
    start_event_id: Option<u64>,
    end_event_id: Option<u64>,
}

/// Answers for one publisher.
pub(crate) struct Recovery(pub(crate) KvEventPublisher);

/// Returns the name of the endpoint that answers for a publisher.
pub(crate) fn endpoint_name(publisher_id: u64) -> String {
    format!("worker_kv_query_source_{publisher_id:x}")
}

impl Recovery {
    fn answer(&self, body: &[u8]) -> Vec<u8> {
        let query: Query = match rmp_serde::from_slice(body) {
            Ok(query) => query,
            Err(error) => return refusal(&format!("the query cannot be read: {error}")),
        };
        let rank = self.0.rank();
        if query.worker_id != rank.worker_id {
            let text = format!("worker_id mismatch: asked for {}, this is {}", query.worker_id, rank.worker_id);
            return refusal(&text);
        }
        if query.dp_rank != rank.dp_rank {
            return refusal(&format!("dp_rank mismatch: asked for {}, this is {}", query.dp_rank, rank.dp_rank));
        }
        self.0.answer(query.start_event_id, query.end_event_id)
    }
}

impl Handler for Recovery {
    fn serve(self: Arc<Self>, mut call: Call) -> BoxFuture<'static, ()> {
        async move {
            let sent = call.sink.send_object(&self.answer(&call.body));
            call.sink.end(sent.err().as_ref());
        }
        .boxed()
    }
}

fn refusal(text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    put_map(&mut out, 1);
    put_str(&mut out, "Error");
    put_str(&mut out, text);
    out
}
