//! Figures of a worker, in the text form that Prometheus reads, under the names of the Python workers.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::plane::lock;
use crate::progress::Progress;
use crate::telemetry;

/// A number that only grows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counter(Arc<AtomicU64>);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that goes up and down.
#[derive(Clone, Debug, Default)]
pub struct Gauge(Arc<AtomicU64>);

impl Gauge {
    /// Sets the number.
    pub fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Ordering::Relaxed);
    }

    /// Changes the number by a whole one.
    pub(crate) fn change(&self, by: i64) {
        let changed = |bits: u64| Some((f64::from_bits(bits) + by as f64).to_bits());
        // The closure always returns a value, so there is nothing to handle.
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, changed);
    }

    /// Returns the number.
    pub fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Ordering::Relaxed))
    }
}

/// Upper bounds of a request's duration, in seconds.
const DURATION_BOUNDS: [f64; 17] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0];

#[derive(Debug, Default)]
struct Histogram {
    counts: [AtomicU64; DURATION_BOUNDS.len() + 1],
    sum_micros: AtomicU64,
}

impl Histogram {
    fn observe(&self, value: Duration) {
        let seconds = value.as_secs_f64();
        let bucket = DURATION_BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(DURATION_BOUNDS.len());
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_micros.fetch_add(value.as_micros() as u64, Ordering::Relaxed);
    }
}

/// What becomes of the KV events that an engine publishes on a ZMQ socket of its own.
#[derive(Clone, Debug, Default)]
pub(crate) struct KvSourceMetrics {
    pub(crate) events: Counter,
    pub(crate) filtered: Counter,
    pub(crate) issues: Counter,
    pub(crate) suspicious: Counter,
    pub(crate) engine_drops: Counter,
}

impl KvSourceMetrics {
    fn families(&self) -> [(&'static str, &'static str, &Counter); 5] {
        [
            ("zmq_events", "KV events read from engines", &self.events),
            (
                "zmq_filtered_events",
                "KV events left out: not of this worker's own main cache, or of an unknown medium",
                &self.filtered,
            ),
            ("zmq_conversion_issues", "Messages and KV events of engines that cannot be read", &self.issues),
            (
                "zmq_suspicious_events",
                "KV events whose blocks contradict each other; published as empty removals",
                &self.suspicious,
            ),
            (
                "engines_dropped_events",
                "Messages of engines that were lost on their way to the worker",
                &self.engine_drops,
            ),
        ]
    }
}

/// What the listener counts.
#[derive(Clone, Debug, Default)]
pub(crate) struct ListenerMetrics {
    /// Requests that run.
    pub(crate) running: Gauge,
    /// Requests that wait for a place.
    pub(crate) queued: Gauge,
    /// Places of each, once the listener is there.
    pub(crate) run_limit: Gauge,
    pub(crate) queue_limit: Gauge,
    /// Connections and requests that broke a limit or the wire.
    pub(crate) refused: Counter,
    /// Requests that found engine and queue full.
    pub(crate) rejected: Counter,
}

/// What the requests of one endpoint were.
#[derive(Debug, Default)]
pub(crate) struct RequestMetrics {
    pub(crate) requests: Counter,
    pub(crate) request_bytes: Counter,
    pub(crate) response_bytes: Counter,
    pub(crate) cancellations: Counter,
    pub(crate) errors: Counter,
    inflight: AtomicI64,
    durations: Histogram,
}

impl RequestMetrics {
    /// Counts a request that begins; the time until the guard is dropped is its duration.
    pub(crate) fn begin(self: &Arc<Self>) -> RequestTimer {
        self.requests.add(1);
        self.inflight.fetch_add(1, Ordering::Relaxed);
        RequestTimer { metrics: Arc::clone(self), began: Instant::now() }
    }
}

/// Measures one request.
pub(crate) struct RequestTimer {
    metrics: Arc<RequestMetrics>,
    began: Instant,
}

impl Drop for RequestTimer {
    fn drop(&mut self) {
        self.metrics.inflight.fetch_sub(1, Ordering::Relaxed);
        self.metrics.durations.observe(self.began.elapsed());
    }
}

/// The times of an engine's life, in seconds.
#[derive(Clone, Debug, Default)]
pub struct LifecycleGauges {
    /// What `start()` took.
    pub model_load_time_seconds: Gauge,
    /// What the drain took; 0 before its end.
    pub drain_time_seconds: Gauge,
    /// What `cleanup()` took; 0 before its end.
    pub cleanup_time_seconds: Gauge,
}

/// How full the KV cache of one data-parallel rank is.
#[derive(Clone, Debug, Default)]
pub struct ComponentGauges {
    /// KV blocks of the rank.
    pub total_blocks: Gauge,
    /// The used part of the cache, 0 to 1.
    pub gpu_cache_usage: Gauge,
    hit_rate: Arc<Mutex<Option<f32>>>,
}

/// An engine's report about the KV cache of one data-parallel rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ComponentSnapshot {
    /// Blocks in use.
    pub kv_used_blocks: u64,
    /// Blocks there are.
    pub kv_total_blocks: u64,
    /// The used part of the cache, 0 to 1.
    pub gpu_cache_usage: f32,
    /// The part of the prompt blocks that the cache held, 0 to 1; `None`: not measured.
    pub kv_cache_hit_rate: Option<f32>,
    /// The rank.
    pub dp_rank: u32,
}

/// Returns the text of further metrics, whenever they are read.
pub type ExpositionCallback = Box<dyn Fn() -> String + Send + Sync>;

/// An engine's access to the metrics of its worker. Clones share everything.
#[derive(Clone, Default)]
pub struct EngineMetrics {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    labels: Mutex<Vec<(String, String)>>,
    request_labels: Mutex<Vec<(String, String)>>,
    callbacks: Mutex<Vec<ExpositionCallback>>,
    lifecycle: LifecycleGauges,
    ranks: Mutex<BTreeMap<u32, ComponentGauges>>,
    requests: Arc<RequestMetrics>,
    listener: ListenerMetrics,
    kv_source: Mutex<Option<KvSourceMetrics>>,
    began: Mutex<Option<Instant>>,
    progress: Mutex<Option<Arc<Progress>>>,
}

impl std::fmt::Debug for EngineMetrics {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("EngineMetrics")
    }
}

/// How many engine callbacks are kept.
const MAX_CALLBACKS: usize = 64;

impl EngineMetrics {
    /// Returns the labels that name the worker and its model, which an engine's own metrics should carry.
    pub fn auto_labels(&self) -> Vec<(String, String)> {
        lock(&self.shared.labels).clone()
    }

    /// Adds text in the form of Prometheus to what `/metrics` answers. At most 64 callbacks are kept.
    pub fn register_prometheus_expfmt_callback(&self, callback: ExpositionCallback) {
        let mut callbacks = lock(&self.shared.callbacks);
        if callbacks.len() < MAX_CALLBACKS {
            callbacks.push(callback);
        } else {
            tracing::warn!("more than {MAX_CALLBACKS} metrics callbacks; this one is left out");
        }
    }

    /// Returns the gauges of the engine's life.
    pub fn lifecycle(&self) -> &LifecycleGauges {
        &self.shared.lifecycle
    }

    pub(crate) fn requests(&self) -> &Arc<RequestMetrics> {
        &self.shared.requests
    }

    pub(crate) fn listener(&self) -> &ListenerMetrics {
        &self.shared.listener
    }

    /// Exposes what becomes of the events of ZMQ sockets from now on.
    pub(crate) fn kv_source(&self) -> KvSourceMetrics {
        lock(&self.shared.kv_source).get_or_insert_with(KvSourceMetrics::default).clone()
    }

    /// Exposes the silence of running requests.
    pub(crate) fn watch(&self, progress: &Arc<Progress>) {
        *lock(&self.shared.progress) = Some(Arc::clone(progress));
    }

    /// Sets the labels of the worker; empty values give no label.
    pub(crate) fn name(&self, endpoint: &[(&str, &str)], model: &[(&str, &str)], own: &[(String, String)]) {
        let filled = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            let pairs = pairs.iter().filter(|(_, value)| !value.is_empty());
            pairs.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let endpoint = filled(endpoint);
        let mut request_labels = endpoint.clone();
        request_labels.extend(own.iter().cloned());
        *lock(&self.shared.request_labels) = request_labels;
        *lock(&self.shared.labels) = [endpoint, filled(model)].concat();
        *lock(&self.shared.began) = Some(Instant::now());
    }

    /// Declares a rank: its gauges are there from now on, at 0.
    pub(crate) fn declare_rank(&self, rank: u32) {
        lock(&self.shared.ranks).entry(rank).or_default();
    }

    /// Writes the gauges of a rank and returns whether the engine declared it.
    pub(crate) fn publish(&self, rank: u32, snapshot: &ComponentSnapshot) -> bool {
        let ranks = lock(&self.shared.ranks);
        let Some(gauges) = ranks.get(&rank) else { return false };
        gauges.total_blocks.set(snapshot.kv_total_blocks as f64);
        gauges.gpu_cache_usage.set(f64::from(snapshot.gpu_cache_usage));
        if snapshot.kv_cache_hit_rate.is_some() {
            *lock(&gauges.hit_rate) = snapshot.kv_cache_hit_rate;
        }
        true
    }

    /// Returns everything in the text form of Prometheus.
    pub(crate) fn expose(&self) -> String {
        let shared = &self.shared;
        let labels = lock(&shared.request_labels).clone();
        let of_model = lock(&shared.labels).clone();
        let mut page = Page::default();
        let requests = &shared.requests;
        page.family("dynamo_component_cancellation_total", "counter", "Requests that were cancelled");
        page.sample("dynamo_component_cancellation_total", &labels, requests.cancellations.get() as f64);
        page.family("dynamo_component_cleanup_time_seconds", "gauge", "Seconds `cleanup()` took; 0 before its end");
        let lifecycle = &shared.lifecycle;
        page.sample("dynamo_component_cleanup_time_seconds", &of_model, lifecycle.cleanup_time_seconds.get());
        page.family("dynamo_component_drain_time_seconds", "gauge", "Seconds the drain phase took; 0 before its end");
        page.sample("dynamo_component_drain_time_seconds", &of_model, lifecycle.drain_time_seconds.get());
        page.family("dynamo_component_errors_total", "counter", "Requests that ended with an error");
        let error_labels = with(&labels, "error_type", "generate");
        page.sample("dynamo_component_errors_total", &error_labels, requests.errors.get() as f64);
        self.expose_ranks(&mut page, &of_model);
        page.family("dynamo_component_inflight_requests", "gauge", "Requests that run");
        let inflight = requests.inflight.load(Ordering::Relaxed);
        page.sample("dynamo_component_inflight_requests", &labels, inflight as f64);
        page.family("dynamo_component_model_load_time_seconds", "gauge", "Seconds the engine's `start()` took");
        page.sample("dynamo_component_model_load_time_seconds", &of_model, lifecycle.model_load_time_seconds.get());
        for (name, help, counter) in [
            ("dynamo_component_request_bytes_total", "Bytes of requests", &requests.request_bytes),
            ("dynamo_component_requests_total", "Requests", &requests.requests),
            ("dynamo_component_response_bytes_total", "Bytes of answers", &requests.response_bytes),
        ] {
            page.family(name, "counter", help);
            page.sample(name, &labels, counter.get() as f64);
        }
        page.histogram("dynamo_component_request_duration_seconds", &labels, &requests.durations);
        page.family("dynamo_component_uptime_seconds", "gauge", "Seconds since the worker began");
        let uptime = lock(&shared.began).map_or(0.0, |began| began.elapsed().as_secs_f64());
        page.sample("dynamo_component_uptime_seconds", &labels, uptime);
        let listener = &shared.listener;
        for (name, help, gauge) in [
            ("dynamo_engine_request", "Requests that run", &listener.running),
            ("dynamo_request_queue", "Requests that wait for a place", &listener.queued),
            ("dynamo_work_handler_pool_active_tasks", "Requests that run", &listener.running),
            ("dynamo_work_handler_pool_capacity", "Requests that may run at once", &listener.run_limit),
            ("dynamo_work_handler_queue_capacity", "Requests that may wait", &listener.queue_limit),
            ("dynamo_work_handler_queue_depth", "Requests that wait for a place", &listener.queued),
        ] {
            page.family(name, "gauge", help);
            page.sample(name, &[], gauge.get());
        }
        let (_, silent, longest) = lock(&shared.progress).as_ref().map_or((0, 0, 0), |progress| progress.silence());
        for (name, help, seconds) in [
            (
                "dynamo_work_handler_longest_silence_seconds",
                "How long the request that has been silent for longest had no token",
                longest,
            ),
            (
                "dynamo_work_handler_silence_seconds",
                "For how long no running request of the engine has had a token, although one had room for it",
                silent,
            ),
        ] {
            page.family(name, "gauge", help);
            page.sample(name, &[], seconds as f64);
        }
        if let Some(source) = &*lock(&shared.kv_source) {
            for (name, help, counter) in source.families() {
                let name = format!("dynamo_component_kv_publisher_{name}_total");
                page.family(&name, "counter", help);
                page.sample(&name, &labels, counter.get() as f64);
            }
        }
        page.family(
            "dynamo_work_handler_enqueue_rejected_total",
            "counter",
            "Requests that found engine and queue full",
        );
        page.sample("dynamo_work_handler_enqueue_rejected_total", &[], listener.rejected.get() as f64);
        page.family("dynamo_rejection_request_total", "counter", "Requests that found engine and queue full");
        page.sample("dynamo_rejection_request_total", &[], shared.listener.rejected.get() as f64);
        if let Some(dropped) = telemetry::dropped() {
            let name = "dynamo_component_spans_dropped_total";
            page.family(name, "counter", "Spans that no collector of traces got");
            page.sample(name, &labels, dropped as f64);
        }
        page.family("dynamo_transport_tcp_errors_total", "counter", "Connections that broke the wire or a limit");
        page.sample("dynamo_transport_tcp_errors_total", &[], shared.listener.refused.get() as f64);
        for callback in lock(&shared.callbacks).iter() {
            page.text.push_str(&callback());
            if !page.text.ends_with('\n') {
                page.text.push('\n');
            }
        }
        page.text
    }

    fn expose_ranks(&self, page: &mut Page, labels: &[(String, String)]) {
        let ranks = lock(&self.shared.ranks);
        if ranks.is_empty() {
            return;
        }
        page.family(
            "dynamo_component_gpu_cache_usage_percent",
            "gauge",
            "Used part of the KV cache, 0 to 1 (despite its name)",
        );
        let of_rank = |rank: &u32| with(labels, "dp_rank", &rank.to_string());
        for (rank, gauges) in ranks.iter() {
            page.sample("dynamo_component_gpu_cache_usage_percent", &of_rank(rank), gauges.gpu_cache_usage.get());
        }
        page.family(
            "dynamo_component_kv_cache_hit_rate",
            "gauge",
            "Part of the prompt blocks that the KV cache held, 0 to 1; there from the first measurement on",
        );
        for (rank, gauges) in ranks.iter() {
            if let Some(rate) = *lock(&gauges.hit_rate) {
                page.sample("dynamo_component_kv_cache_hit_rate", &of_rank(rank), f64::from(rate));
            }
        }
        page.family("dynamo_component_total_blocks", "gauge", "KV blocks the engine has");
        for (rank, gauges) in ranks.iter() {
            page.sample("dynamo_component_total_blocks", &of_rank(rank), gauges.total_blocks.get());
        }
    }
}

fn with(labels: &[(String, String)], name: &str, value: &str) -> Vec<(String, String)> {
    [labels, &[(name.to_owned(), value.to_owned())]].concat()
}

#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a text cannot fail, here and below.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(String, String)], value: f64) {
        self.text.push_str(name);
        if !labels.is_empty() {
            self.text.push('{');
            for (number, (name, value)) in labels.iter().enumerate() {
                let comma = if number > 0 { "," } else { "" };
                let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
                let _ = write!(self.text, "{comma}{name}=\"{value}\"");
            }
            self.text.push('}');
        }
        let _ = writeln!(self.text, " {value}");
    }

    fn histogram(&mut self, name: &str, labels: &[(String, String)], histogram: &Histogram) {
        self.family(name, "histogram", "Seconds from a request's start to the end of its answer");
        let bucket = format!("{name}_bucket");
        let mut total = 0;
        for (number, count) in histogram.counts.iter().enumerate() {
            total += count.load(Ordering::Relaxed);
            let bound = DURATION_BOUNDS.get(number).map_or_else(|| "+Inf".to_owned(), f64::to_string);
            self.sample(&bucket, &with(labels, "le", &bound), total as f64);
        }
        let sum = histogram.sum_micros.load(Ordering::Relaxed) as f64 / 1e6;
        self.sample(&format!("{name}_sum"), labels, sum);
        self.sample(&format!("{name}_count"), labels, total as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_labels_buckets_and_what_the_engine_adds() {
        let metrics = EngineMetrics::default();
        metrics.name(&[("dynamo_namespace", "n"), ("worker_id", "1f")], &[("model", "a\"b"), ("model_name", "")], &[]);
        metrics.declare_rank(0);
        let snapshot = ComponentSnapshot { kv_total_blocks: 9, gpu_cache_usage: 0.5, ..Default::default() };
        assert!(metrics.publish(0, &snapshot));
        assert!(!metrics.publish(7, &snapshot));
        drop(metrics.requests().begin());
        metrics.register_prometheus_expfmt_callback(Box::new(|| "mine 1".into()));
        let page = metrics.expose();
        for line in [
            "dynamo_component_requests_total{dynamo_namespace=\"n\",worker_id=\"1f\"} 1",
            "dynamo_component_total_blocks{dynamo_namespace=\"n\",worker_id=\"1f\",model=\"a\\\"b\",dp_rank=\"0\"} 9",
            "dynamo_component_request_duration_seconds_bucket{dynamo_namespace=\"n\",worker_id=\"1f\",le=\"+Inf\"} 1",
            "mine 1",
        ] {
            assert!(page.lines().any(|found| found == line), "{line} is not in\n{page}");
        }
        assert!(!page.contains("kv_cache_hit_rate{"));
    }
}
