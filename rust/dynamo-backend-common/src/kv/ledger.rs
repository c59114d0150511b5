//! What one publisher has published of its blocks, so that it can answer queries and publishes nothing twice.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::wire::msgpack::{put_array, put_map, put_nil, put_str, put_uint};

const MAX_EVENTS: usize = 4096;
/// Beyond it a dump is incomplete, which costs cache hits and no answer.
const MAX_BLOCKS: usize = 1_000_000;
/// The most blocks of one event.
pub(crate) const MAX_BLOCKS_PER_EVENT: usize = 128;

/// One block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvBlock {
    /// The engine's own name of the block, which parents and removals refer to.
    pub block_hash: u64,
    /// The hash of the block's own tokens, as [`block_hashes`](super::block_hashes) computes it.
    pub tokens_hash: u64,
}

/// Where an engine keeps a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum StorageTier {
    /// In the memory of the accelerator.
    #[default]
    Device,
    /// In the memory of the machine.
    HostPinned,
    /// On a disk of the machine.
    Disk,
    /// Elsewhere.
    External,
}

impl StorageTier {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::HostPinned => "host_pinned",
            Self::Disk => "disk",
            Self::External => "external",
        }
    }
}

/// A change of the blocks that an engine holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockChange {
    /// The engine holds these blocks, which follow each other and `parent_hash`.
    Stored {
        /// The engine's name of the block before; `None`: the first block begins a sequence.
        parent_hash: Option<u64>,
        /// The blocks, each after the one before.
        blocks: Vec<KvBlock>,
    },
    /// The engine no longer holds the blocks with these names.
    Removed(Vec<u64>),
    /// The engine holds nothing any more.
    Cleared,
}

impl BlockChange {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Cleared => put_str(out, "cleared"),
            Self::Removed(names) => {
                put_map(out, 1);
                put_str(out, "removed");
                put_map(out, 1);
                put_str(out, "block_hashes");
                put_array(out, names.len());
                for name in names {
                    put_uint(out, *name);
                }
            }
            Self::Stored { parent_hash, blocks } => {
                put_map(out, 1);
                put_str(out, "stored");
                put_map(out, 3);
                put_str(out, "parent_hash");
                match parent_hash {
                    Some(parent) => put_uint(out, *parent),
                    None => put_nil(out),
                }
                put_str(out, "start_position");
                put_nil(out);
                put_str(out, "blocks");
                put_array(out, blocks.len());
                for block in blocks {
                    put_map(out, 3);
                    put_str(out, "block_hash");
                    put_uint(out, block.block_hash);
                    put_str(out, "tokens_hash");
                    put_uint(out, block.tokens_hash);
                    put_str(out, "mm_extra_info");
                    put_nil(out);
                }
            }
        }
    }
}

/// Whose events a ledger numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rank {
    pub(crate) worker_id: u64,
    pub(crate) dp_rank: u32,
}

impl Rank {
    /// Writes one event as it is published.
    fn put(self, out: &mut Vec<u8>, event_id: u64, tier: StorageTier, data: &BlockChange) {
        put_map(out, 4);
        put_str(out, "worker_id");
        put_uint(out, self.worker_id);
        put_str(out, "storage_tier");
        put_str(out, tier.word());
        put_str(out, "residency_domain");
        put_str(out, "worker");
        put_str(out, "event");
        put_map(out, 3);
        put_str(out, "event_id");
        put_uint(out, event_id);
        put_str(out, "data");
        data.put(out);
        put_str(out, "dp_rank");
        put_uint(out, u64::from(self.dp_rank));
    }
}

#[derive(Debug)]
struct Held {
    tokens_hash: u64,
    parent: Option<u64>,
    /// How often the engine stored it.
    count: u32,
}

/// The blocks and the last events of one data-parallel rank. Events are kept as they are published, in MessagePack.
#[derive(Debug)]
pub(crate) struct Ledger {
    pub(crate) rank: Rank,
    events: VecDeque<Vec<u8>>,
    next_id: u64,
    tiers: BTreeMap<StorageTier, HashMap<u64, Held>>,
    /// How many blocks they hold together.
    blocks: usize,
    max_events: usize,
}

impl Ledger {
    pub(crate) fn new(rank: Rank) -> Self {
        // A last id of 0 in an answer says that nothing was published yet.
        Self { rank, events: VecDeque::new(), next_id: 1, tiers: BTreeMap::new(), blocks: 0, max_events: MAX_EVENTS }
    }

    /// Returns the newest event.
    pub(crate) fn last_event(&self) -> Option<&[u8]> {
        self.events.back().map(Vec::as_slice)
    }

    /// Books one change and returns it as an event to publish; `None` when there is nothing to publish.
    ///
    /// A block that was stored several times is removed when it was removed as often.
    pub(crate) fn add(&mut self, tier: StorageTier, change: BlockChange) -> Option<&[u8]> {
        let change = match change {
            BlockChange::Cleared => {
                self.tiers.clear();
                self.blocks = 0;
                BlockChange::Cleared
            }
            BlockChange::Stored { parent_hash, blocks } => {
                self.store(tier, parent_hash, &blocks);
                BlockChange::Stored { parent_hash, blocks }
            }
            BlockChange::Removed(mut names) => {
                let was_empty = names.is_empty();
                names.retain(|name| self.remove(tier, *name));
                if names.is_empty() && !was_empty {
                    return None;
                }
                BlockChange::Removed(names)
            }
        };
        if self.events.len() >= self.max_events {
            self.events.pop_front();
        }
        let mut event = Vec::new();
        self.rank.put(&mut event, self.next_id, tier, &change);
        self.next_id += 1;
        self.events.push_back(event);
        self.last_event()
    }

    fn store(&mut self, tier: StorageTier, parent: Option<u64>, blocks: &[KvBlock]) {
        let held = self.tiers.entry(tier).or_default();
        let mut parent = parent;
        for block in blocks {
            if let Some(known) = held.get_mut(&block.block_hash) {
                known.count += 1;
            } else if self.blocks < MAX_BLOCKS {
                held.insert(block.block_hash, Held { tokens_hash: block.tokens_hash, parent, count: 1 });
                self.blocks += 1;
            }
            parent = Some(block.block_hash);
        }
    }

    /// Removes a block and returns whether routers should forget it.
    fn remove(&mut self, tier: StorageTier, name: u64) -> bool {
        let Some(held) = self.tiers.get_mut(&tier) else { return true };
        let Some(known) = held.get_mut(&name) else {
            return true; // stored before our time, or beyond what is tracked: routers judge
        };
        known.count -= 1;
        if known.count > 0 {
            return false;
        }
        held.remove(&name);
        self.blocks -= 1;
        true
    }

    // -- queries -------------------------------------------------------------------------------------------------

    /// Returns the answer to a query: the events from `start` on, or a dump (`start` is `None` or too old). `end` is the last
    /// event known to the caller.
    pub(crate) fn answer(&self, start: Option<u64>, end: Option<u64>) -> Vec<u8> {
        let newest = self.next_id - 1;
        let mut out = Vec::new();
        put_map(&mut out, 1);
        let Some(start) = start else {
            self.put_dump(&mut out);
            return out;
        };
        if let Some(end) = end.filter(|end| start > *end) {
            put_str(&mut out, "InvalidRange");
            put_members(&mut out, &[("start_id", start), ("end_id", end)]);
            return out;
        }
        if start > newest {
            put_str(&mut out, "TooNew");
            let upto = end.unwrap_or(newest);
            let members = [("requested_start", start), ("requested_end", upto), ("newest_available", newest)];
            put_members(&mut out, &members);
            return out;
        }
        let oldest = self.next_id - self.events.len() as u64;
        if start < oldest {
            self.put_dump(&mut out);
            return out;
        }
        let skipped = usize::try_from(start - oldest).unwrap_or(usize::MAX);
        put_str(&mut out, "Events");
        put_map(&mut out, 2);
        put_str(&mut out, "events");
        put_array(&mut out, self.events.len() - skipped);
        for event in self.events.iter().skip(skipped) {
            out.extend_from_slice(event);
        }
        put_str(&mut out, "last_event_id");
        put_uint(&mut out, newest);
        out
    }

    fn put_dump(&self, out: &mut Vec<u8>) {
        let runs: Vec<(StorageTier, BlockChange)> =
            self.tiers.iter().flat_map(|(tier, held)| runs(held).into_iter().map(|run| (*tier, run))).collect();
        put_str(out, "TreeDump");
        put_map(out, 3);
        put_str(out, "events");
        put_array(out, runs.len());
        for (number, (tier, run)) in runs.iter().enumerate() {
            self.rank.put(out, number as u64, *tier, run);
        }
        put_str(out, "last_event_id");
        put_uint(out, self.next_id - 1);
        put_str(out, "reset_scope");
        put_str(out, "all");
    }
}

/// Returns every block of a tier once, in runs without a branch, each after its parent.
fn runs(held: &HashMap<u64, Held>) -> Vec<BlockChange> {
    let mut children: HashMap<Option<u64>, Vec<u64>> = HashMap::new();
    for (name, entry) in held {
        let parent = entry.parent.filter(|parent| held.contains_key(parent));
        children.entry(parent).or_default().push(*name);
    }
    let mut waiting: VecDeque<u64> = children.get(&None).into_iter().flatten().copied().collect();
    let mut runs = Vec::new();
    while let Some(first) = waiting.pop_front() {
        let parent_hash = held.get(&first).and_then(|entry| entry.parent);
        let (mut blocks, mut name) = (Vec::new(), first);
        loop {
            let tokens_hash = held.get(&name).map_or(0, |entry| entry.tokens_hash);
            blocks.push(KvBlock { block_hash: name, tokens_hash });
            let after = children.get(&Some(name)).map_or(&[][..], Vec::as_slice);
            match after {
                [only] if blocks.len() < MAX_BLOCKS_PER_EVENT => name = *only,
                _ => {
                    waiting.extend(after);
                    break;
                }
            }
        }
        runs.push(BlockChange::Stored { parent_hash, blocks });
    }
    runs
}

fn put_members(out: &mut Vec<u8>, members: &[(&str, u64)]) {
    put_map(out, members.len());
    for (name, value) in members {
        put_str(out, name);
        put_uint(out, *value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn ledger() -> Ledger {
        Ledger::new(Rank { worker_id: 7, dp_rank: 1 })
    }

    fn stored(parent_hash: Option<u64>, names: &[u64]) -> BlockChange {
        let blocks = names.iter().map(|name| KvBlock { block_hash: *name, tokens_hash: name * 10 }).collect();
        BlockChange::Stored { parent_hash, blocks }
    }

    fn read(bytes: &[u8]) -> Value {
        rmp_serde::from_slice(bytes).expect("msgpack")
    }

    #[test]
    fn an_event_has_the_published_shape() {
        let mut ledger = ledger();
        let event = read(ledger.add(StorageTier::Device, stored(Some(3), &[4])).expect("an event"));
        assert_eq!(
            event,
            json!({
                "worker_id": 7, "storage_tier": "device", "residency_domain": "worker",
                "event": {
                    "event_id": 1, "dp_rank": 1,
                    "data": {"stored": {
                        "parent_hash": 3, "start_position": null,
                        "blocks": [{"block_hash": 4, "tokens_hash": 40, "mm_extra_info": null}],
                    }},
                },
            })
        );
        let event = read(ledger.add(StorageTier::Device, BlockChange::Cleared).expect("an event"));
        assert_eq!(event["event"]["data"], "cleared");
    }

    #[test]
    fn a_block_is_held_in_each_tier_on_its_own() {
        let mut ledger = ledger();
        ledger.add(StorageTier::Device, stored(None, &[1, 2]));
        let event = read(ledger.add(StorageTier::HostPinned, stored(None, &[1])).expect("an event"));
        assert_eq!(event["storage_tier"], "host_pinned");
        ledger.add(StorageTier::Device, BlockChange::Removed(vec![1, 2]));
        let dump = read(&ledger.answer(None, None));
        let tiers: Vec<&Value> =
            dump["TreeDump"]["events"].as_array().expect("a list").iter().map(|event| &event["storage_tier"]).collect();
        assert_eq!(tiers, ["host_pinned"]);
        ledger.add(StorageTier::Device, BlockChange::Cleared);
        assert_eq!(ledger.blocks, 0);
        assert_eq!(read(&ledger.answer(None, None))["TreeDump"]["events"], json!([]));
    }

    #[test]
    fn a_block_stored_twice_is_removed_with_the_second_removal() {
        let mut ledger = ledger();
        ledger.add(StorageTier::Device, stored(None, &[1]));
        ledger.add(StorageTier::Device, stored(None, &[1, 2]));
        assert!(ledger.add(StorageTier::Device, BlockChange::Removed(vec![1])).is_none());
        let event = read(ledger.add(StorageTier::Device, BlockChange::Removed(vec![1, 2, 9])).expect("an event"));
        assert_eq!(event["event"]["data"]["removed"]["block_hashes"], json!([1, 2, 9]));
        assert_eq!(event["event"]["event_id"], 3);
    }

    #[test]
    fn answers_are_events_or_dumps_or_refusals() {
        let mut ledger = ledger();
        ledger.max_events = 2;
        for name in 1..=3 {
            ledger.add(StorageTier::Device, stored(if name == 1 { None } else { Some(name - 1) }, &[name]));
        }
        ledger.add(StorageTier::Device, stored(Some(2), &[30]));
        let events = read(&ledger.answer(Some(4), None));
        assert_eq!(events["Events"]["last_event_id"], 4);
        assert_eq!(events["Events"]["events"][0]["event"]["event_id"], 4);
        let dump = read(&ledger.answer(Some(1), None));
        assert_eq!(dump, read(&ledger.answer(None, None)));
        let runs = dump["TreeDump"]["events"].as_array().expect("a list");
        assert_eq!(runs[0]["event"]["data"]["stored"]["blocks"].as_array().map(Vec::len), Some(2));
        assert_eq!(runs.len(), 3);
        assert_eq!(runs[1]["event"]["data"]["stored"]["parent_hash"], 2);
        assert_eq!(
            read(&ledger.answer(Some(9), None)),
            json!({"TooNew": {"requested_start": 9, "requested_end": 4, "newest_available": 4}})
        );
        assert_eq!(read(&ledger.answer(Some(5), Some(2))), json!({"InvalidRange": {"start_id": 5, "end_id": 2}}));
    }
}
