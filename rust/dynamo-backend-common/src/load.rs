//! How busy this worker is, as routers and frontends read it: the records of the topic `kv_metrics`.
//!
//! A request holds the KV blocks of its prompt and of the tokens it got; prefixes that several requests share are counted
//! for each of them. Reports are sent on change, at most every 100 ms, and again every 2.5 s.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::events::EventPublisher;
use crate::plane::lock;
use crate::request::PreprocessedRequest;
use crate::wire::msgpack::{put_nil, put_str, put_uint};

pub(crate) const TOPIC: &str = "kv_metrics";
const INTERVAL: Duration = Duration::from_millis(100);
/// Unchanged loads are reported again after this time: a subscriber that comes late has no other way to them.
const REPEAT: Duration = Duration::from_millis(2500);
/// After so many intervals the tokens of running requests are counted again.
const RECOUNT_INTERVALS: u32 = 5;

/// The load of one data-parallel rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct RankLoad {
    active_decode_blocks: u64,
    active_prefill_tokens: u64,
    kv_used_blocks: Option<u64>,
}

#[derive(Debug)]
struct Entry {
    rank: u32,
    prompt_tokens: u64,
    waits_for_first: bool,
    tokens: Arc<AtomicU64>,
}

#[derive(Debug, Default)]
struct Book {
    running: HashMap<u64, Entry>,
    next: u64,
    used_blocks: BTreeMap<u32, u64>,
}

/// The running requests of one engine.
#[derive(Debug)]
pub(crate) struct Load {
    block_size: u64,
    total_blocks: Option<u64>,
    ranks: std::ops::Range<u32>,
    prefills: bool,
    book: Mutex<Book>,
    changed: Notify,
}

impl Load {
    /// `prefills`: whether this worker computes prompts itself.
    pub(crate) fn new(
        block_size: u32,
        total_blocks: Option<u64>,
        ranks: std::ops::Range<u32>,
        prefills: bool,
    ) -> Arc<Self> {
        let load = Self {
            block_size: u64::from(block_size.max(1)),
            total_blocks,
            ranks,
            prefills,
            book: Mutex::default(),
            changed: Notify::new(),
        };
        load.changed.notify_one(); // the first report, without load
        Arc::new(load)
    }

    /// Enters a request that is about to be served; it leaves when the guard is dropped.
    pub(crate) fn begin(self: &Arc<Self>, request: &PreprocessedRequest) -> RunningRequest {
        let chosen = request.routing.as_ref().and_then(|routing| routing.dp_rank);
        let mut book = lock(&self.book);
        let rank = chosen.filter(|rank| self.ranks.contains(rank)).unwrap_or_else(|| {
            let loads = self.count(&book);
            let least = loads.iter().min_by_key(|(_, load)| load.active_decode_blocks);
            least.map_or(self.ranks.start, |(rank, _)| *rank)
        });
        let tokens = Arc::new(AtomicU64::new(0));
        let number = book.next;
        book.next += 1;
        let prompt_tokens = request.token_ids.len() as u64;
        let entry = Entry { rank, prompt_tokens, waits_for_first: self.prefills, tokens: Arc::clone(&tokens) };
        book.running.insert(number, entry);
        drop(book);
        self.changed.notify_one();
        RunningRequest { load: Arc::clone(self), number, tokens }
    }

    /// Sets how many blocks the engine holds, with what it keeps for later prompts.
    pub(crate) fn set_used_blocks(&self, rank: u32, blocks: u64) {
        lock(&self.book).used_blocks.insert(rank, blocks);
        self.changed.notify_one();
    }

    fn count(&self, book: &Book) -> BTreeMap<u32, RankLoad> {
        let mut loads: BTreeMap<u32, RankLoad> = self.ranks.clone().map(|rank| (rank, RankLoad::default())).collect();
        for entry in book.running.values() {
            let load = loads.entry(entry.rank).or_default();
            let tokens = entry.prompt_tokens + entry.tokens.load(Ordering::Relaxed);
            load.active_decode_blocks += tokens.div_ceil(self.block_size);
            load.active_prefill_tokens += if entry.waits_for_first { entry.prompt_tokens } else { 0 };
        }
        for (rank, load) in &mut loads {
            load.active_decode_blocks = load.active_decode_blocks.min(self.total_blocks.unwrap_or(u64::MAX));
            load.kv_used_blocks = book.used_blocks.get(rank).copied();
        }
        loads
    }

    /// Reports for ever.
    pub(crate) async fn report(self: Arc<Self>, worker_id: u64, publisher: Arc<EventPublisher>) {
        let mut sent = BTreeMap::new();
        let mut intervals = 0;
        let mut reported_at = Instant::now();
        loop {
            let is_busy = !lock(&self.book).running.is_empty();
            if is_busy {
                // Also without a change: requests grow while they run.
                intervals += 1;
                if intervals < RECOUNT_INTERVALS {
                    if tokio::time::timeout(INTERVAL, self.changed.notified()).await.is_err() {
                        continue;
                    }
                } else {
                    intervals = 0;
                }
            } else {
                let _ = tokio::time::timeout(REPEAT, self.changed.notified()).await;
            }
            let is_due = reported_at.elapsed() >= REPEAT;
            if is_due {
                reported_at = Instant::now();
            }
            let loads = self.count(&lock(&self.book));
            for (rank, load) in &loads {
                if is_due || sent.get(rank) != Some(load) {
                    publisher.publish(&payload(worker_id, *rank, load));
                }
            }
            sent = loads;
            tokio::time::sleep(INTERVAL).await;
        }
    }
}

fn payload(worker_id: u64, rank: u32, load: &RankLoad) -> Vec<u8> {
    let mut out = vec![0x85];
    for (name, value) in [
        ("worker_id", Some(worker_id)),
        ("dp_rank", Some(u64::from(rank))),
        ("active_decode_blocks", Some(load.active_decode_blocks)),
        ("active_prefill_tokens", Some(load.active_prefill_tokens)),
        ("kv_used_blocks", load.kv_used_blocks),
    ] {
        put_str(&mut out, name);
        match value {
            Some(value) => put_uint(&mut out, value),
            None => put_nil(&mut out),
        }
    }
    out
}

/// One request in the book.
#[derive(Debug)]
pub(crate) struct RunningRequest {
    load: Arc<Load>,
    number: u64,
    tokens: Arc<AtomicU64>,
}

impl RunningRequest {
    /// Counts tokens that the request got.
    pub(crate) fn add(&self, tokens: usize) {
        let before = self.tokens.fetch_add(tokens as u64, Ordering::Relaxed);
        if before == 0 && tokens > 0 {
            if let Some(entry) = lock(&self.load.book).running.get_mut(&self.number) {
                entry.waits_for_first = false;
            }
            self.load.changed.notify_one();
        }
    }
}

impl Drop for RunningRequest {
    fn drop(&mut self) {
        lock(&self.load.book).running.remove(&self.number);
        self.load.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_counts_with_its_prompt_and_its_tokens() {
        let load = Load::new(16, Some(5), 0..2, true);
        let request = |count: u32| PreprocessedRequest::builder().token_ids((0..count).collect()).build();
        let first = load.begin(&request(17));
        let second = load.begin(&request(1));
        let of = |rank: u32| load.count(&lock(&load.book))[&rank];
        assert_eq!((of(0).active_decode_blocks, of(0).active_prefill_tokens), (2, 17));
        assert_eq!(of(1).active_decode_blocks, 1);
        first.add(16);
        assert_eq!((of(0).active_decode_blocks, of(0).active_prefill_tokens), (3, 0));
        first.add(1000);
        assert_eq!(of(0).active_decode_blocks, 5);
        load.set_used_blocks(1, 4);
        assert_eq!(of(1).kv_used_blocks, Some(4));
        drop((first, second));
        assert_eq!(of(0), RankLoad::default());
    }
}
