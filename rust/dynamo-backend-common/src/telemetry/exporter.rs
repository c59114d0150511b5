//! Sends spans to a collector: OTLP over HTTP, from a thread of its own, in batches.
//!
//! A span that finds the queue full, or whose batch the collector does not take, is lost and counted. No request waits.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::otlp::{SpanRecord, export_request};
use super::settings::{ExportSettings, Sampler};
use crate::http;
use crate::plane::lock;

/// How long one batch may take, with all attempts.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The pauses before each further attempt to send a batch.
const RETRY_PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(2)];

#[derive(Debug, Default)]
struct Queue {
    spans: VecDeque<SpanRecord>,
    is_closing: bool,
    is_done: bool,
}

/// The way out of this process for spans.
#[derive(Debug)]
pub(crate) struct Exporter {
    settings: ExportSettings,
    queue: Mutex<Queue>,
    changed: Condvar,
    dropped: AtomicU64,
}

impl Exporter {
    /// Starts the thread. Fails where the system has none.
    pub(crate) fn start(settings: ExportSettings) -> std::io::Result<Arc<Self>> {
        let exporter = Self::new(settings);
        let running = Arc::clone(&exporter);
        std::thread::Builder::new().name("otlp".into()).spawn(move || running.run())?;
        Ok(exporter)
    }

    fn new(settings: ExportSettings) -> Arc<Self> {
        Arc::new(Self { settings, queue: Mutex::default(), changed: Condvar::new(), dropped: AtomicU64::new(0) })
    }

    pub(crate) fn sampler(&self) -> Sampler {
        self.settings.sampler
    }

    /// Returns how many spans were lost.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Queues a span that has ended.
    pub(crate) fn send(&self, span: SpanRecord) {
        let mut queue = lock(&self.queue);
        if queue.spans.len() >= self.settings.queue || queue.is_closing {
            drop(queue);
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        queue.spans.push_back(span);
        if queue.spans.len() == self.settings.batch {
            self.changed.notify_all();
        }
    }

    /// Sends what is queued and returns when that is done or `patience` is over.
    pub(crate) fn close(&self, patience: Duration) {
        let mut queue = lock(&self.queue);
        queue.is_closing = true;
        self.changed.notify_all();
        drop(self.wait(queue, patience, |queue| !queue.is_done));
    }

    fn wait<'a>(
        &self,
        queue: MutexGuard<'a, Queue>,
        patience: Duration,
        goes_on: impl Fn(&mut Queue) -> bool,
    ) -> MutexGuard<'a, Queue> {
        self.changed.wait_timeout_while(queue, patience, goes_on).unwrap_or_else(PoisonError::into_inner).0
    }

    fn run(&self) {
        let batch = self.settings.batch;
        let mut has_failed = false;
        loop {
            let queue = lock(&self.queue);
            let full_or_closing = |queue: &mut Queue| queue.spans.len() < batch && !queue.is_closing;
            let mut queue = self.wait(queue, self.settings.delay, full_or_closing);
            let count = queue.spans.len().min(batch);
            let spans: Vec<SpanRecord> = queue.spans.drain(..count).collect();
            if spans.is_empty() && queue.is_closing {
                queue.is_done = true;
                self.changed.notify_all();
                return;
            }
            drop(queue);
            if spans.is_empty() {
                continue;
            }
            match self.export(&spans) {
                Ok(()) => has_failed = false,
                Err(why) => {
                    self.dropped.fetch_add(spans.len() as u64, Ordering::Relaxed);
                    let text = format!("{} spans are lost: the collector at {}: {why}", spans.len(), self.place());
                    if std::mem::replace(&mut has_failed, true) {
                        tracing::debug!("{text}");
                    } else {
                        tracing::warn!("{text}");
                    }
                }
            }
        }
    }

    fn place(&self) -> String {
        format!("http://{}{}", self.settings.endpoint, self.settings.path)
    }

    /// Sends a batch, again where that may help; the error is what came last.
    fn export(&self, spans: &[SpanRecord]) -> Result<(), String> {
        let settings = &self.settings;
        let body = export_request(&settings.resource, spans);
        let headers = format!("Content-Type: application/x-protobuf\r\n{}", settings.headers);
        let ends_at = Instant::now() + TIMEOUT;
        let mut pauses = RETRY_PAUSES.iter();
        loop {
            let left = ends_at.saturating_duration_since(Instant::now());
            let why = match http::post(&settings.endpoint, &settings.path, &headers, &body, left) {
                Ok(answer) if matches!(answer.status, 200..=299) => return Ok(()),
                Ok(answer) if matches!(answer.status, 429 | 502..=504) => format!("HTTP status {}", answer.status),
                Ok(answer) => return Err(format!("HTTP status {}", answer.status)),
                Err(error) => error.to_string(),
            };
            let Some(pause) = pauses.next().filter(|pause| Instant::now() + **pause < ends_at) else { return Err(why) };
            if self.wait(lock(&self.queue), *pause, |queue| !queue.is_closing).is_closing {
                return Err(why); // the process does not outlast a collector that is away
            }
        }
    }
}

#[cfg(test)]
fn settings(endpoint: String, queue: usize) -> ExportSettings {
    ExportSettings {
        endpoint,
        path: "/v1/traces".into(),
        headers: "x-key: k\r\n".into(),
        resource: vec![("service.name".into(), "test".into())],
        sampler: Sampler::ALWAYS,
        delay: Duration::from_millis(1),
        queue,
        batch: queue,
    }
}

#[cfg(test)]
impl Exporter {
    /// Makes one that sends nothing.
    pub(crate) fn idle() -> Arc<Self> {
        Self::new(settings(String::new(), 100))
    }

    /// Takes what was queued.
    pub(crate) fn take(&self) -> Vec<SpanRecord> {
        lock(&self.queue).spans.drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::context::SpanIds;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    fn span(number: u64) -> SpanRecord {
        let ids = SpanIds { trace_id: 1, span_id: number + 1, is_sampled: true };
        SpanRecord::begin(format!("span {number}").into(), ids, None)
    }

    /// Takes one batch and returns its bytes as text, head and body.
    fn take(listener: &TcpListener) -> String {
        let (mut socket, _) = listener.accept().expect("a batch");
        let (mut whole, mut piece) = (Vec::new(), [0; 4096]);
        loop {
            let text = String::from_utf8_lossy(&whole).into_owned();
            if let Some((head, _)) = text.split_once("\r\n\r\n") {
                let length = head.split("Content-Length: ").nth(1).and_then(|rest| rest.lines().next());
                let length: usize = length.expect("a length").parse().expect("a number");
                if whole.len() >= head.len() + 4 + length {
                    socket.write_all(b"HTTP/1.1 200 OK\r\n\r\n").expect("an answer");
                    return text;
                }
            }
            let count = socket.read(&mut piece).expect("bytes");
            whole.extend_from_slice(&piece[..count]);
        }
    }

    #[test]
    fn what_is_queued_leaves_before_the_end() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let collector = std::thread::spawn(move || {
            let mut seen = String::new();
            while !(seen.contains("span 0") && seen.contains("span 1")) {
                seen += &take(&listener);
            }
            seen
        });
        let exporter = Exporter::start(settings(address, 8)).expect("a thread");
        exporter.send(span(0));
        exporter.send(span(1));
        exporter.close(Duration::from_secs(60));
        let seen = collector.join().expect("a collector");
        for part in ["POST /v1/traces HTTP/1.1", "x-key: k", "service.name"] {
            assert!(seen.contains(part), "{part} is not in {seen}");
        }
        assert_eq!(exporter.dropped(), 0);
        exporter.send(span(2));
        assert_eq!(exporter.dropped(), 1);
    }

    #[test]
    fn spans_beyond_the_queue_and_of_a_lost_collector_are_counted() {
        let nobody = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
        let mut settings = settings(nobody.to_string(), 4);
        settings.delay = Duration::from_secs(3600);
        settings.batch = 100;
        let exporter = Exporter::start(settings).expect("a thread");
        for number in 0..7 {
            exporter.send(span(number));
        }
        assert_eq!(exporter.dropped(), 3);
        exporter.close(Duration::from_secs(60));
        assert_eq!(exporter.dropped(), 7);
    }
}
