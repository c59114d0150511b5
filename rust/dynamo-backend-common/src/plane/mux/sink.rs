//! The worker's end of one answer on a `mux` connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use super::Connection;
use crate::context::Controller;
use crate::error::DynamoError;
use crate::output::LLMEngineOutput;
use crate::wire::items::Chunk;

/// The most credit of one stream: a caller may not make it buffer more than a million tokens.
pub(crate) const MAX_CREDIT: i64 = 1 << 20;

/// Bytes of an object that cost as much as a token.
const OBJECT_CREDIT_BYTES: usize = 64;

/// The part of a stream that its connection reads and writes.
#[derive(Debug)]
pub(crate) struct StreamState {
    pub(crate) controller: Arc<Controller>,
    credit: AtomicI64,
    granted: Notify,
    is_abandoned: AtomicBool,
}

impl StreamState {
    pub(crate) fn new(controller: Arc<Controller>, credit: i64) -> Self {
        Self {
            controller,
            credit: AtomicI64::new(credit.clamp(1, MAX_CREDIT)),
            granted: Notify::new(),
            is_abandoned: AtomicBool::new(false),
        }
    }

    /// Lets the stream send more.
    pub(crate) fn grant(&self, amount: i64) {
        let grown = |credit: i64| Some(credit.saturating_add(amount).min(MAX_CREDIT));
        // The closure always returns a value, so there is nothing to handle.
        let _ = self.credit.fetch_update(Ordering::SeqCst, Ordering::SeqCst, grown);
        self.granted.notify_waiters();
    }

    /// Ends the stream without a word: its caller has gone.
    pub(crate) fn abandon(&self) {
        use crate::context::AsyncEngineContext;
        self.is_abandoned.store(true, Ordering::SeqCst);
        self.controller.kill();
        self.granted.notify_waiters();
    }
}

/// Sends one answer, in order, within the credit of its stream.
#[derive(Debug)]
pub(crate) struct MuxSink {
    connection: Arc<Connection>,
    stream: u32,
    state: Arc<StreamState>,
    first: u64,
    others: Vec<(u32, u64)>,
    extra: Vec<u8>,
    has_ended: bool,
    bytes: u64,
}

impl MuxSink {
    pub(crate) fn new(connection: Arc<Connection>, stream: u32, state: Arc<StreamState>) -> Self {
        Self { connection, stream, state, first: 0, others: Vec::new(), extra: Vec::new(), has_ended: false, bytes: 0 }
    }

    /// Returns whether nothing is sent any more: the stream has ended, or its caller has gone.
    pub(crate) fn is_done(&self) -> bool {
        self.has_ended || self.state.is_abandoned.load(Ordering::SeqCst)
    }

    /// Returns how many tokens were sent, over all choices.
    pub(crate) fn total(&self) -> u64 {
        self.first + self.others.iter().map(|(_, count)| count).sum::<u64>()
    }

    /// Returns about how many bytes were sent.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Sends one chunk with this word as the end of its choice.
    pub(crate) fn send(&mut self, chunk: &LLMEngineOutput, index: u32, word: Option<&str>) -> Result<(), DynamoError> {
        self.extra.clear();
        if let Some(extra) = chunk.extra() {
            let mut serializer = rmp_serde::Serializer::new(&mut self.extra).with_struct_map();
            serde::Serialize::serialize(&extra, &mut serializer).map_err(|error| {
                DynamoError::invalid(format!("the engine produced a value that cannot be encoded: {error}"))
            })?;
        }
        if self.is_done() {
            return Ok(());
        }
        let count = chunk.token_ids.len() as u64;
        let sent = self.sent(index);
        let offset = *sent;
        *sent += count;
        self.state.credit.fetch_sub((count as i64).max(1), Ordering::SeqCst);
        let (stream, extra) = (self.stream, &self.extra);
        self.bytes += 10 * count + extra.len() as u64;
        self.connection.outgoing.add(|items| {
            items.chunk(&Chunk { stream, index, offset, token_ids: &chunk.token_ids, finish_reason: word, extra });
        });
        Ok(())
    }

    /// Sends an object, in MessagePack.
    pub(crate) fn send_object(&mut self, object: &[u8]) {
        if self.is_done() {
            return;
        }
        let cost = object.len() / OBJECT_CREDIT_BYTES + 1;
        self.state.credit.fetch_sub(cost as i64, Ordering::SeqCst);
        self.bytes += object.len() as u64;
        self.connection.outgoing.add(|items| items.object(self.stream, cost as u64, object));
    }

    fn sent(&mut self, index: u32) -> &mut u64 {
        if index == 0 {
            return &mut self.first;
        }
        let at = match self.others.iter().position(|(known, _)| *known == index) {
            Some(at) => at,
            None => {
                self.others.push((index, 0));
                self.others.len() - 1
            }
        };
        &mut self.others[at].1
    }

    /// Ends the stream, once: cleanly, or with an error.
    pub(crate) fn end(&mut self, error: Option<&DynamoError>) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        let is_wanted = self.connection.forget(self.stream);
        if !is_wanted || self.state.is_abandoned.load(Ordering::SeqCst) {
            return;
        }
        // A record is made of texts and maps, which can always be encoded.
        let record = error.and_then(|error| rmp_serde::to_vec_named(&error.record()).ok()).unwrap_or_default();
        let (stream, total) = (self.stream, self.total());
        self.connection.outgoing.add(|items| items.end(stream, total, &record));
    }

    /// Returns whether the next chunk may be sent now.
    pub(crate) fn has_credit(&self) -> bool {
        self.state.credit.load(Ordering::SeqCst) > 0 && self.connection.outgoing.has_room()
    }

    /// Returns once more may be sent or nothing is to be sent any more; `false` when the caller read nothing for too long.
    pub(crate) async fn wait_credit(&self, patience: Duration) -> bool {
        let wait = async {
            loop {
                // Both are made before the check, and hear of what happens after it.
                let (granted, drained) = (self.state.granted.notified(), self.connection.outgoing.drained());
                if self.is_done() || self.has_credit() {
                    return;
                }
                tokio::select! {
                    () = granted => {}
                    () = drained => {}
                }
            }
        };
        tokio::time::timeout(patience, wait).await.is_ok()
    }
}
