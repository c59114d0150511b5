//! The KV events that engines publish on their own ZMQ sockets, read into plain values. No I/O.
//!
//! A payload is MessagePack `[time, [event, ...], dp_rank?]`. An event is a map with `type`, or an array that begins with it.
//! What an engine's newer version adds is ignored; what is not about this worker's own main cache is left out and counted.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::hashing::{BlockNames, block_hashes_with, with_pad_tokens};
use super::ledger::{BlockChange, KvBlock, StorageTier};
use crate::wire::msgpack;
use crate::wire::value::Raw;

const STORED_FIELDS: [&str; 13] = [
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "block_mm_infos",
    "group_idx",
    "kv_cache_spec_kind",
    "sliding_window",
];
const REMOVED_FIELDS: [&str; 5] = ["type", "block_hashes", "medium", "group_idx", "kv_cache_spec_kind"];
const MAIN_KINDS: [&str; 4] = ["", "full_attention", "mla_attention", "sink_full_attention"];
const SALT: &str = "dynamo-cache-salt:";
const MM_HASH_DIGITS: usize = 64;
/// Groups of layers in one engine.
const MAX_GROUPS: usize = 1024;
/// What the values of one payload may take in memory.
const MAX_DECODED_BYTES: usize = 256 * 1024 * 1024;

/// Blocks that an engine holds, which follow each other and `parent`.
#[derive(Debug, PartialEq)]
pub(crate) struct Stored {
    names: Vec<u64>,
    parent: Option<u64>,
    token_ids: Vec<u32>,
    block_size: usize,
    tier: StorageTier,
    lora_name: Option<String>,
    cache_salt: Option<String>,
    /// The media objects of each block; `None`: there are none.
    media: Option<Vec<Vec<u64>>>,
    /// One more token than the blocks hold.
    is_eagle: bool,
}

/// One event of an engine.
#[derive(Debug, PartialEq)]
pub(crate) enum EngineEvent {
    Stored(Box<Stored>),
    Removed(Vec<u64>, StorageTier),
    Cleared,
}

/// One payload: its events, and what of it was left out.
#[derive(Debug, Default)]
pub(crate) struct EngineBatch {
    pub(crate) events: Vec<EngineEvent>,
    /// Events that are not about this worker's main cache.
    pub(crate) filtered: u64,
    /// Events whose blocks name themselves as their parent, or come twice.
    pub(crate) suspicious: u64,
    /// Events that cannot be read, each with the reason.
    pub(crate) issues: Vec<String>,
}

/// Reads the payloads of one engine.
#[derive(Debug, Default)]
pub(crate) struct PayloadReader {
    /// Groups of layers whose blocks are not those of the main cache. Where an engine has several, a removal names only the
    /// group, and blocks of two groups may have the same hash.
    side_groups: BTreeSet<i128>,
}

impl PayloadReader {
    /// Reads one payload. Fails for what is none; an event that cannot be read is one of the `issues`.
    pub(crate) fn read(&mut self, payload: &[u8]) -> Result<EngineBatch, String> {
        msgpack::check_size(payload, MAX_DECODED_BYTES).map_err(|refusal| format!("not msgpack: {refusal:?}"))?;
        let found: Raw = rmp_serde::from_slice(payload).map_err(|error| format!("not msgpack: {error}"))?;
        let Some([_, Raw::List(events), ..]) = found.list() else {
            return Err("expected [time, [events], dp_rank]".to_owned());
        };
        let mut batch = EngineBatch::default();
        for (number, event) in events.iter().enumerate() {
            if let Err(why) = self.event(event, &mut batch) {
                batch.issues.push(format!("events[{number}]: {why}"));
            }
        }
        Ok(batch)
    }

    fn event(&mut self, raw: &Raw, batch: &mut EngineBatch) -> Result<(), String> {
        let members = Members::of(raw)?;
        let kind = members.text("type").unwrap_or_default();
        if kind == "AllBlocksCleared" {
            batch.events.push(EngineEvent::Cleared);
            return Ok(());
        }
        if !matches!(kind, "BlockStored" | "BlockRemoved") {
            return Err(format!("unknown event {kind:?}"));
        }
        let tier = tier(members.get("medium"));
        let is_beside = tier.is_some() && self.is_beside(kind, &members);
        let is_local = match members.get("locality") {
            None => true,
            Some(place) => matches!(place.text(), Some("" | "LOCAL")),
        };
        let Some(tier) = tier.filter(|_| !is_beside && is_local) else {
            batch.filtered += 1;
            return Ok(());
        };
        let names = members.list("block_hashes")?.iter().map(name).collect::<Result<Vec<u64>, String>>()?;
        if kind == "BlockRemoved" {
            batch.events.push(EngineEvent::Removed(names, tier));
            return Ok(());
        }
        let parent = members.get("parent_block_hash").map(name).transpose()?;
        let distinct: HashSet<u64> = names.iter().copied().collect();
        if parent.is_some_and(|parent| distinct.contains(&parent)) || distinct.len() < names.len() {
            batch.suspicious += 1;
            batch.events.push(EngineEvent::Removed(Vec::new(), tier));
            return Ok(());
        }
        batch.events.push(EngineEvent::Stored(Box::new(stored(&members, names, parent, tier)?)));
        Ok(())
    }

    /// Returns whether an event is of a group of layers beside the main one; remembers the group by what it stores.
    fn is_beside(&mut self, kind: &str, members: &Members<'_>) -> bool {
        let layers = members.get("kv_cache_spec_kind");
        let is_beside = layers.is_some_and(|layers| !layers.text().is_some_and(|name| MAIN_KINDS.contains(&name)));
        let Some(group) = members.get("group_idx").and_then(Raw::whole) else { return is_beside };
        if kind == "BlockStored" && !is_beside {
            self.side_groups.remove(&group);
        } else if kind == "BlockStored" && self.side_groups.len() < MAX_GROUPS {
            self.side_groups.insert(group);
        } else if layers.is_none_or(|layers| layers.text() == Some("")) {
            return self.side_groups.contains(&group);
        }
        is_beside
    }
}

/// The members of one event, in either form; those that are nil are absent.
struct Members<'a>(Vec<(&'a str, &'a Raw)>);

impl<'a> Members<'a> {
    fn of(raw: &'a Raw) -> Result<Self, String> {
        let members: Vec<(&str, &Raw)> = match raw {
            Raw::Map(members) => members.iter().filter_map(|(key, value)| Some((key.text()?, value))).collect(),
            Raw::List(values) => {
                let kind = values.first().and_then(Raw::text);
                let names = match kind {
                    Some("BlockStored") => &STORED_FIELDS[..],
                    Some(_) => &REMOVED_FIELDS[..],
                    None => return Err("an array of an event begins with its type".to_owned()),
                };
                names.iter().copied().zip(values).collect()
            }
            other => {
                return Err(format!("an event is a map or an array that begins with its type, got {}", other.kind()));
            }
        };
        let members = Self(members.into_iter().filter(|(_, value)| **value != Raw::Nil).collect());
        if members.text("type").is_none() {
            return Err("an event needs a type".to_owned());
        }
        Ok(members)
    }

    fn get(&self, name: &str) -> Option<&'a Raw> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    fn text(&self, name: &str) -> Option<&'a str> {
        self.get(name).and_then(Raw::text)
    }

    fn list(&self, name: &str) -> Result<&'a [Raw], String> {
        let found = self.get(name).unwrap_or(&Raw::Nil);
        found.list().ok_or_else(|| format!("{name} must be a list, got {}", found.kind()))
    }
}

/// Returns the storage tier; `None` for an unknown medium. Media are in capitals: `gpu` is unknown.
fn tier(medium: Option<&Raw>) -> Option<StorageTier> {
    let Some(medium) = medium else { return Some(StorageTier::Device) };
    Some(match medium.text()? {
        "" | "GPU" | "DEVICE" => StorageTier::Device,
        "CPU" | "CPU_PINNED" | "CPU_TIER1" => StorageTier::HostPinned,
        "CPU_TIER2" | "DISK" | "NVME" | "STORAGE" => StorageTier::Disk,
        "EXTERNAL" | "NETWORK" | "REMOTE" | "SHARED" => StorageTier::External,
        _ => return None,
    })
}

/// Reads the name of a block: a number of 64 bits with or without a sign, or a digest, whose last 8 bytes count.
fn name(value: &Raw) -> Result<u64, String> {
    match value {
        Raw::Bytes(digest) => {
            let last = &digest[digest.len().saturating_sub(8)..];
            Ok(last.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
        }
        Raw::Whole(number) => unsigned(*number),
        other => Err(format!("a block hash must be a whole number, got {}", other.kind())),
    }
}

fn unsigned(number: i128) -> Result<u64, String> {
    if (i128::from(i64::MIN)..=i128::from(u64::MAX)).contains(&number) {
        Ok(number as u64)
    } else {
        Err(format!("{number} does not fit into 64 bits"))
    }
}

fn stored(members: &Members<'_>, names: Vec<u64>, parent: Option<u64>, tier: StorageTier) -> Result<Stored, String> {
    let size = members.get("block_size").unwrap_or(&Raw::Nil);
    let block_size = size.whole().and_then(|size| usize::try_from(size).ok()).filter(|size| *size > 0);
    let block_size = block_size.ok_or_else(|| format!("block_size must be a positive whole number, got {size:?}"))?;
    let (token_ids, is_eagle) = tokens(members.list("token_ids")?)?;
    let (mut cache_salt, mut media) = extra_keys(members.get("extra_keys"), names.len());
    if let Some(own) = members.text("cache_salt").filter(|salt| !salt.is_empty()) {
        cache_salt = Some(own.strip_prefix(SALT).unwrap_or(own).to_owned());
    }
    if let Some(given) = members.get("block_mm_infos").and_then(Raw::list)
        && given.iter().any(|info| matches!(info, Raw::Map(members) if !members.is_empty()))
    {
        media = Some(given.iter().map(mm_info).collect());
    }
    let lora_name = match (members.get("lora_name"), members.get("lora_id")) {
        (Some(Raw::Text(lora)), _) => Some(lora.clone()),
        (Some(other), _) => return Err(format!("lora_name must be a text, got {}", other.kind())),
        (None, Some(Raw::Whole(id))) => Some(id.to_string()),
        (None, Some(Raw::Text(id))) => Some(id.clone()),
        (None, _) => None,
    };
    Ok(Stored { names, parent, token_ids, block_size, tier, lora_name, cache_salt, media, is_eagle })
}

/// Reads token ids, plain or as pairs (each token and the one after it).
fn tokens(values: &[Raw]) -> Result<(Vec<u32>, bool), String> {
    if !matches!(values.first(), Some(Raw::List(_))) {
        return Ok((values.iter().map(token).collect::<Result<_, _>>()?, false));
    }
    let mut found = Vec::with_capacity(values.len() + 1);
    let mut last = None;
    for value in values {
        let Some([first, second]) = value.list() else {
            return Err("token_ids mix plain ids and pairs".to_owned());
        };
        found.push(token(first)?);
        last = Some(second);
    }
    found.extend(last.map(token).transpose()?);
    Ok((found, true))
}

fn token(value: &Raw) -> Result<u32, String> {
    let id = value.whole().and_then(|number| u32::try_from(number).ok());
    id.ok_or_else(|| format!("a token id must be an unsigned 32-bit integer, got {value:?}"))
}

/// Returns the cache salt and the media by block of `extra_keys`: a list of keys for each block, or nil.
fn extra_keys(keys: Option<&Raw>, blocks: usize) -> (Option<String>, Option<Vec<Vec<u64>>>) {
    let Some(entries) = keys.and_then(Raw::list) else { return (None, None) };
    let (mut salt, mut media) = (None, vec![Vec::new(); blocks]);
    for (objects, entry) in media.iter_mut().zip(entries) {
        let one = std::slice::from_ref(entry);
        for key in entry.list().unwrap_or(one) {
            let text = match key {
                Raw::List(parts) => parts.first().and_then(Raw::text),
                other => other.text(),
            };
            let Some(text) = text else { continue };
            match text.strip_prefix(SALT) {
                Some("") => {}
                Some(own) => salt = Some(own.to_owned()),
                None => objects.extend(mm_hash(text)),
            }
        }
    }
    let has_media = media.iter().any(|objects| !objects.is_empty());
    (salt, has_media.then_some(media))
}

/// Returns the first 16 digits of a 64-digit hexadecimal id; `None` for any other text.
fn mm_hash(text: &str) -> Option<u64> {
    let is_id = text.len() == MM_HASH_DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_id { u64::from_str_radix(&text[..16], 16).ok() } else { None }
}

fn mm_info(info: &Raw) -> Vec<u64> {
    let objects = info.get("mm_objects").and_then(Raw::list).unwrap_or_default();
    let hash = |object: &Raw| match object.get("mm_hash")? {
        Raw::Text(text) => mm_hash(text),
        Raw::Whole(number) => unsigned(*number).ok(),
        _ => None,
    };
    objects.iter().filter_map(hash).collect()
}

/// Makes of the blocks of an engine those that routers know: hashed, and of the size that the worker registered.
#[derive(Debug)]
pub(crate) struct BlockHasher {
    pub(crate) block_size: u32,
    /// The token that stands for images in the engine's prompts.
    pub(crate) placeholder: Option<u32>,
}

impl BlockHasher {
    /// Returns the changes to publish for the events, each in its tier, and whether blocks of another size were left out.
    /// Fails for a stored event whose parts do not fit together.
    pub(crate) fn changes(&self, events: &[EngineEvent]) -> Result<(Vec<(StorageTier, BlockChange)>, bool), String> {
        let (mut changes, mut has_other_size) = (Vec::new(), false);
        for event in events {
            match event {
                EngineEvent::Cleared => changes.push((StorageTier::Device, BlockChange::Cleared)),
                EngineEvent::Removed(names, tier) => changes.push((*tier, BlockChange::Removed(names.clone()))),
                EngineEvent::Stored(stored) => {
                    let blocks = self.blocks(stored)?;
                    if !blocks.is_empty() {
                        changes.push((stored.tier, BlockChange::Stored { parent_hash: stored.parent, blocks }));
                    } else if !stored.names.is_empty() {
                        has_other_size = true;
                    }
                }
            }
        }
        Ok((changes, has_other_size))
    }

    fn blocks(&self, stored: &Stored) -> Result<Vec<KvBlock>, String> {
        let (count, after) = (stored.names.len(), usize::from(stored.is_eagle));
        let needed = count.saturating_mul(stored.block_size).saturating_add(after);
        if needed > stored.token_ids.len() {
            return Err(format!("the blocks need {needed} token_ids, got {}", stored.token_ids.len()));
        }
        if stored.media.as_ref().is_some_and(|media| media.len() != count) {
            return Err(format!("{count} block_hashes but {:?} block_mm_infos", stored.media.as_ref().map(Vec::len)));
        }
        if stored.block_size != self.block_size as usize {
            return Ok(Vec::new());
        }
        let mut tokens = stored.token_ids[..needed].to_vec();
        let objects = stored.media.iter().flatten().cloned().enumerate();
        let mut media: BTreeMap<usize, Vec<u64>> = objects.filter(|(_, objects)| !objects.is_empty()).collect();
        if let Some(placeholder) = self.placeholder {
            for (number, objects) in std::mem::take(&mut media) {
                let block = &mut tokens[number * stored.block_size..(number + 1) * stored.block_size];
                with_pad_tokens(block, placeholder, &objects);
            }
        }
        let names = BlockNames { lora_name: stored.lora_name.as_deref(), cache_salt: stored.cache_salt.as_deref() };
        let hashes = block_hashes_with(&tokens, self.block_size, names, stored.is_eagle, &media);
        let named = stored.names.iter().zip(hashes);
        Ok(named.map(|(block_hash, tokens_hash)| KvBlock { block_hash: *block_hash, tokens_hash }).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::ledger::{Ledger, Rank};
    use serde_json::{Value, json};

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.chars().map(|digit| digit.to_digit(16).expect("a digit") as u8).collect();
        digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
    }

    #[test]
    fn engines_are_understood_as_by_the_python_implementation() {
        let vectors: Value = serde_json::from_str(include_str!("../../../kv-vectors.json")).expect("JSON");
        for vector in vectors["engine_events"].as_array().expect("a list") {
            let placeholder = vector["image_token_id"].as_u64().map(|token| token as u32);
            let hasher = BlockHasher { block_size: 4, placeholder };
            let mut reader = PayloadReader::default();
            let mut ledger = Ledger::new(Rank { worker_id: 7, dp_rank: 0 });
            let mut events = Vec::new();
            let (mut filtered, mut suspicious, mut issues) = (0, 0, 0);
            for payload in vector["payloads"].as_array().expect("a list") {
                let batch = reader.read(&bytes(payload.as_str().expect("hex"))).expect("a payload");
                (filtered, suspicious) = (filtered + batch.filtered, suspicious + batch.suspicious);
                issues += batch.issues.len();
                for (tier, change) in hasher.changes(&batch.events).expect("changes").0 {
                    let event = ledger.add(tier, change).map(rmp_serde::from_slice::<Value>);
                    events.extend(event.map(|event| event.expect("msgpack")));
                }
            }
            assert_eq!(json!(events), vector["events"], "{}", vector["name"]);
            assert_eq!(
                json!([filtered, suspicious, issues]),
                json!([vector["filtered"], vector["suspicious"], vector["issues"]])
            );
        }
    }

    #[test]
    fn strangers_bytes_never_panic() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let mut reader = PayloadReader::default();
        let hasher = BlockHasher { block_size: 4, placeholder: Some(3) };
        for _ in 0..20_000 {
            let length = (next() % 64) as usize;
            let mut payload = b"\x92\x00\x91\x95\xabBlockStored".to_vec();
            payload.extend((0..length).map(|_| next() as u8));
            if let Ok(batch) = reader.read(&payload) {
                let _ = hasher.changes(&batch.events);
            }
        }
        assert!(reader.read(b"\x91\x00").is_err());
    }
}
