//! Publishes to routers which KV blocks an engine holds, and which it gave up.
//!
//! Delivery is at most once. A lost event leaves a gap in the event ids; routers then ask [`Recovery`](super::recovery) for what
//! they missed. Behind the last event there is no next one, so the last one is published again after a silence.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use super::hashing::{BlockNames, block_hashes};
use super::ledger::{BlockChange, KvBlock, Ledger, MAX_BLOCKS_PER_EVENT, Rank, StorageTier};
use crate::error::DynamoError;
use crate::events::EventPublisher;
use crate::plane::lock;
use crate::wire::msgpack::put_array;

pub(crate) const TOPIC: &str = "kv-events";
const MAX_EVENTS_PER_MESSAGE: usize = 128;
/// The pauses before each repetition of the last event; the last pause again and again.
const REPEATS: [Duration; 4] =
    [Duration::from_millis(200), Duration::from_millis(300), Duration::from_millis(400), Duration::from_secs(10)];

/// Receives the publisher of a source.
pub type OnPublisherReady = Box<dyn FnOnce(KvEventPublisher) + Send>;

/// Where the KV events of one data-parallel rank come from.
pub enum KvEventSource {
    /// The engine publishes them on a ZMQ socket, as vLLM does.
    Zmq {
        /// The address of the socket.
        endpoint: String,
        /// The topic; empty: all.
        topic: String,
        /// The rank.
        dp_rank: u32,
        /// The token that stands for images in the prompt.
        image_token_id: Option<u32>,
    },
    /// The engine calls the publisher itself.
    Push {
        /// Receives the publisher, once, before the worker serves.
        on_ready: OnPublisherReady,
        /// The rank.
        dp_rank: u32,
    },
}

impl KvEventSource {
    /// Returns the rank.
    pub fn dp_rank(&self) -> u32 {
        match self {
            Self::Zmq { dp_rank, .. } | Self::Push { dp_rank, .. } => *dp_rank,
        }
    }
}

impl fmt::Debug for KvEventSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zmq { endpoint, dp_rank, .. } => write!(formatter, "Zmq {{ {endpoint}, dp_rank: {dp_rank} }}"),
            Self::Push { dp_rank, .. } => write!(formatter, "Push {{ dp_rank: {dp_rank} }}"),
        }
    }
}

/// Blocks that follow each other and `parent_hash`.
#[derive(Clone, Copy, Debug, Default)]
pub struct StoredBlocks<'a> {
    /// The tokens of all blocks in a row, a block size of them for each.
    pub token_ids: &'a [u32],
    /// The engine's own names of the blocks.
    pub block_hashes: &'a [u64],
    /// The engine's name of the block before; `None`: the first block begins a sequence.
    pub parent_hash: Option<u64>,
    /// What keeps blocks of equal tokens apart.
    pub names: BlockNames<'a>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    ledger: Mutex<Ledger>,
    events: Arc<EventPublisher>,
    block_size: u32,
    published: AtomicU64,
    repeats_wait: AtomicBool,
    woken: Notify,
}

/// Reports to routers which blocks one data-parallel rank of this worker holds. Any thread may call it, and no call waits.
/// Clones publish for the same rank.
#[derive(Clone, Debug)]
pub struct KvEventPublisher {
    shared: Arc<Shared>,
}

impl KvEventPublisher {
    pub(crate) fn new(rank: Rank, block_size: u32, events: Arc<EventPublisher>) -> Self {
        Self {
            shared: Arc::new(Shared {
                ledger: Mutex::new(Ledger::new(rank)),
                events,
                block_size,
                published: AtomicU64::new(0),
                repeats_wait: AtomicBool::new(true),
                woken: Notify::new(),
            }),
        }
    }

    /// Publishes blocks that the engine now holds. Fails where tokens and names do not fit together.
    pub fn publish_stored(&self, blocks: &StoredBlocks<'_>) -> Result<(), DynamoError> {
        let (count, size) = (blocks.block_hashes.len(), self.shared.block_size as usize);
        if blocks.token_ids.len() != count * size {
            return Err(DynamoError::invalid(format!(
                "{count} blocks of {size} tokens need {} token_ids, got {}",
                count * size,
                blocks.token_ids.len()
            )));
        }
        let contents = block_hashes(blocks.token_ids, self.shared.block_size, blocks.names);
        let named = blocks.block_hashes.iter().zip(contents);
        let whole: Vec<KvBlock> =
            named.map(|(block_hash, tokens_hash)| KvBlock { block_hash: *block_hash, tokens_hash }).collect();
        self.publish_changes([BlockChange::Stored { parent_hash: blocks.parent_hash, blocks: whole }]);
        Ok(())
    }

    /// Publishes the blocks that the engine no longer holds.
    pub fn publish_removed(&self, block_hashes: &[u64]) {
        self.publish_changes([BlockChange::Removed(block_hashes.to_vec())]);
    }

    /// Publishes the loss of all blocks.
    pub fn publish_cleared(&self) {
        self.publish_changes([BlockChange::Cleared]);
    }

    /// Publishes changes in order: of an engine that computes the hashes of block contents itself.
    pub fn publish_changes(&self, changes: impl IntoIterator<Item = BlockChange>) {
        self.publish_in_tiers(changes.into_iter().map(|change| (StorageTier::Device, change)));
    }

    /// Publishes changes in order, each in its tier; likewise.
    pub fn publish_in_tiers(&self, changes: impl IntoIterator<Item = (StorageTier, BlockChange)>) {
        // The lock holds the order of event ids and messages together.
        let mut ledger = lock(&self.shared.ledger);
        let (mut message, mut count) = (Vec::new(), 0);
        let pieces = |(tier, change)| pieces(change).into_iter().map(move |piece| (tier, piece));
        for (tier, piece) in changes.into_iter().flat_map(pieces) {
            let Some(event) = ledger.add(tier, piece) else { continue };
            message.extend_from_slice(event);
            count += 1;
            if count == MAX_EVENTS_PER_MESSAGE {
                self.send(count, &message);
                message.clear();
                count = 0;
            }
        }
        if count > 0 {
            self.send(count, &message);
        }
    }

    fn send(&self, count: usize, events: &[u8]) {
        let mut payload = Vec::with_capacity(events.len() + 3);
        put_array(&mut payload, count);
        payload.extend_from_slice(events);
        self.shared.events.publish(&payload);
        self.shared.published.fetch_add(1, Ordering::SeqCst);
        if self.shared.repeats_wait.swap(false, Ordering::SeqCst) {
            self.shared.woken.notify_one();
        }
    }

    /// Returns the id under which the publisher is known.
    pub(crate) fn id(&self) -> u64 {
        self.shared.events.id()
    }

    pub(crate) fn rank(&self) -> Rank {
        lock(&self.shared.ledger).rank
    }

    /// Returns the answer for a router that missed events.
    pub(crate) fn answer(&self, start: Option<u64>, end: Option<u64>) -> Vec<u8> {
        lock(&self.shared.ledger).answer(start, end)
    }

    /// Publishes the last event again after each silence, for ever: whoever lost it, and all before it, sees so within a
    /// second.
    pub(crate) async fn repeat_last(self) {
        let shared = &self.shared;
        let mut step = 0;
        loop {
            let before = shared.published.load(Ordering::SeqCst);
            if step == 0 {
                if before == 0 {
                    shared.woken.notified().await; // nothing is repeated before the first event
                }
                tokio::time::sleep(REPEATS[0]).await;
            } else {
                shared.repeats_wait.store(true, Ordering::SeqCst);
                tokio::select! {
                    () = shared.woken.notified() => {}
                    () = tokio::time::sleep(REPEATS[step]) => {}
                }
                shared.repeats_wait.store(false, Ordering::SeqCst);
            }
            if shared.published.load(Ordering::SeqCst) != before {
                step = 0; // there was something new meanwhile
                continue;
            }
            let ledger = lock(&shared.ledger);
            if let Some(event) = ledger.last_event() {
                let mut payload = vec![0x91];
                payload.extend_from_slice(event);
                shared.events.publish(&payload);
            }
            step = (step + 1).min(REPEATS.len() - 1);
        }
    }
}

/// Returns a change in pieces of at most 128 blocks.
fn pieces(change: BlockChange) -> Vec<BlockChange> {
    match change {
        BlockChange::Removed(names) if names.len() > MAX_BLOCKS_PER_EVENT => {
            names.chunks(MAX_BLOCKS_PER_EVENT).map(|piece| BlockChange::Removed(piece.to_vec())).collect()
        }
        BlockChange::Stored { parent_hash, blocks } if blocks.len() > MAX_BLOCKS_PER_EVENT => {
            let mut parent_hash = parent_hash;
            let piece = |piece: &[KvBlock]| {
                let made = BlockChange::Stored { parent_hash, blocks: piece.to_vec() };
                parent_hash = piece.last().map(|block| block.block_hash);
                made
            };
            blocks.chunks(MAX_BLOCKS_PER_EVENT).map(piece).collect()
        }
        other => vec![other],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_changes_go_in_pieces_that_follow_each_other() {
        let blocks = (1..=300).map(|n| KvBlock { block_hash: n, tokens_hash: n }).collect();
        let made = pieces(BlockChange::Stored { parent_hash: Some(9), blocks });
        let parents: Vec<_> = made
            .iter()
            .map(|piece| match piece {
                BlockChange::Stored { parent_hash, blocks } => (*parent_hash, blocks.len()),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(parents, [(Some(9), 128), (Some(128), 128), (Some(256), 44)]);
        assert_eq!(pieces(BlockChange::Removed((0..129).collect())).len(), 2);
    }
}
