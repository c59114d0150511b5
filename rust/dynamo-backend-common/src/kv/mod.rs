//! KV blocks: their names, and what routers learn of the blocks that an engine holds.

pub(crate) mod engine_events;
pub(crate) mod hashing;
pub(crate) mod ledger;
pub(crate) mod publisher;
pub(crate) mod recovery;
pub(crate) mod zmq;

pub use hashing::{BlockNames, block_hashes, extend_sequence, sequence_hashes};
pub use ledger::{BlockChange, KvBlock, StorageTier};
pub use publisher::{KvEventPublisher, KvEventSource, OnPublisherReady, StoredBlocks};
