//! What an engine publishes about its KV cache: snapshots, events, and the load that routers see.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use tokio::task::JoinHandle;

use crate::config::{DisaggregationMode, EngineConfig, WorkerConfig};
use crate::discovery::{self, Discovery};
use crate::environment::advertised;
use crate::error::{BackendError, DynamoError};
use crate::events::EventPublisher;
use crate::kv::engine_events::BlockHasher;
use crate::kv::ledger::Rank;
use crate::kv::recovery::{self, Recovery};
use crate::kv::zmq::EngineSubscription;
use crate::kv::{KvEventPublisher, KvEventSource, publisher};
use crate::load::{self, Load};
use crate::metrics::{ComponentSnapshot, EngineMetrics};
use crate::nats::NatsConnection;
use crate::place::Place;
use crate::plane::Front;
use crate::settings;

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

/// The publishers of one worker, from its start until they are dropped.
pub(crate) struct Publishing {
    place: Place,
    discovery: Arc<dyn Discovery>,
    /// Over which events leave; `None`: subscribers connect to each publisher.
    nats: Option<Arc<NatsConnection>>,
    publishers: Vec<KvEventPublisher>,
    tasks: Vec<JoinHandle<()>>,
}

impl Publishing {
    pub(crate) fn new(place: Place, discovery: Arc<dyn Discovery>, nats: Option<Arc<NatsConnection>>) -> Self {
        Self { place, discovery, nats, publishers: Vec::new(), tasks: Vec::new() }
    }

    /// Begins to report the load of an engine with KV blocks; `None` for another one.
    pub(crate) async fn report_load(
        &mut self,
        config: &WorkerConfig,
        engine: &EngineConfig,
    ) -> Result<Option<Arc<Load>>, DynamoError> {
        let mode = config.disaggregation_mode;
        let Some(block_size) = engine.kv_cache_block_size else { return Ok(None) };
        if mode == DisaggregationMode::Encode {
            return Ok(None);
        }
        let first = engine.data_parallel_start_rank.unwrap_or(0);
        let ranks = first..first.saturating_add(engine.data_parallel_size.unwrap_or(1));
        let load = Load::new(block_size, engine.total_kv_blocks, ranks, mode != DisaggregationMode::Decode);
        let events = self.open(load::TOPIC).await?;
        self.tasks.push(tokio::spawn(Arc::clone(&load).report(self.place.worker_id, events)));
        Ok(Some(load))
    }

    /// Makes a publisher for each source of KV events that the engine declared.
    pub(crate) async fn connect(
        &mut self,
        sources: Vec<KvEventSource>,
        block_size: Option<u32>,
        metrics: &EngineMetrics,
    ) -> Result<(), DynamoError> {
        if sources.is_empty() {
            return Ok(());
        }
        let Some(block_size) = block_size.filter(|size| *size > 0) else {
            tracing::warn!(
                "kv_event_sources() declared {} source(s), but EngineConfig.kv_cache_block_size is not set: no KV events are \
                 published and KV-aware routing goes by load",
                sources.len()
            );
            return Ok(());
        };
        for source in sources {
            let rank = Rank { worker_id: self.place.worker_id, dp_rank: source.dp_rank() };
            let publisher = KvEventPublisher::new(rank, block_size, self.open(publisher::TOPIC).await?);
            self.tasks.push(tokio::spawn(publisher.clone().repeat_last()));
            self.publishers.push(publisher.clone());
            match source {
                KvEventSource::Push { on_ready, .. } => on_ready(publisher),
                KvEventSource::Zmq { endpoint, topic, image_token_id, .. } => {
                    let hasher = BlockHasher { block_size, placeholder: image_token_id };
                    let made = EngineSubscription::new(endpoint, topic, hasher, publisher, metrics.kv_source());
                    let subscription = made.map_err(|why| {
                        let text = format!("kv publisher setup (dp_rank={}): {why}", rank.dp_rank);
                        DynamoError::backend(BackendError::CannotConnect, text)
                    })?;
                    self.tasks.push(tokio::spawn(subscription.run()));
                }
            }
        }
        Ok(())
    }

    /// Lets routers query missed KV events, once the worker serves.
    pub(crate) async fn serve_recovery(&self, front: &Front) -> Result<(), DynamoError> {
        for publisher in &self.publishers {
            let place = self.place.beside(recovery::endpoint_name(publisher.id()));
            front.serve(&place, Arc::new(Recovery(publisher.clone()))).await?;
            let target = front.record(&place);
            discovery::put(&self.discovery, place.instance_key(), target.to_string()).await?;
            let rank = publisher.rank().dp_rank;
            let (key, record) = self.place.event_source(publisher::TOPIC, publisher.id(), rank, target);
            discovery::put(&self.discovery, key, record.to_string()).await?;
        }
        Ok(())
    }

    /// Makes the publisher of a topic, and makes it known.
    async fn open(&self, topic: &'static str) -> Result<Arc<EventPublisher>, DynamoError> {
        let (events, transport) = match &self.nats {
            Some(connection) => {
                let prefix = self.place.subject_prefix();
                let events = EventPublisher::over_nats(Arc::clone(connection), &prefix, topic)?;
                (events, json!({"kind": "Nats", "config": {"subject_prefix": prefix}}))
            }
            None => {
                let host = settings::text("DYN_EVENT_PLANE_HOST");
                let host = host.unwrap_or_else(|| self.discovery.default_host().to_owned());
                let (events, address) = EventPublisher::listen(&host, topic).await?;
                let address = advertised(&address.ip().to_string(), address.port());
                (events, json!({"kind": "Zmq", "config": {"endpoint": format!("tcp://{address}")}}))
            }
        };
        let (key, record) = self.place.event_channel(topic, events.id(), &transport);
        discovery::put(&self.discovery, key, record.to_string()).await?;
        Ok(events)
    }
}

impl Drop for Publishing {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}
