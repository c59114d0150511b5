//! What an engine publishes about its KV cache: snapshots for the gauges and for the load that routers see.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::load::Load;
use crate::metrics::{ComponentSnapshot, EngineMetrics};

/// Receives the publisher of snapshots.
pub type OnSnapshotPublisherReady = Box<dyn FnOnce(SnapshotPublisher) + Send>;

/// Publishes how full the KV cache is; any thread may do so. Clones publish for the same worker.
#[derive(Debug)]
pub struct SnapshotPublisher {
    metrics: EngineMetrics,
    load: Option<Arc<Load>>,
    has_complained: AtomicBool,
}

impl SnapshotPublisher {
    pub(crate) fn new(metrics: EngineMetrics, load: Option<Arc<Load>>) -> Self {
        Self { metrics, load, has_complained: AtomicBool::new(false) }
    }

    /// Publishes the snapshot of one rank; one that the engine did not declare is dropped, with one warning.
    pub fn publish(&self, dp_rank: u32, snapshot: &ComponentSnapshot) {
        if self.metrics.publish(dp_rank, snapshot) {
            if let Some(load) = &self.load {
                load.set_used_blocks(dp_rank, snapshot.kv_used_blocks);
            }
        } else if !self.has_complained.swap(true, Ordering::Relaxed) {
            tracing::warn!("a snapshot for rank {dp_rank} was dropped: setup_metrics() did not declare it");
        }
    }
}
