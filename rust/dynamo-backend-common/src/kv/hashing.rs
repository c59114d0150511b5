//! Names of KV blocks, the same in every process that computes them.
//!
//! A block hash covers the tokens of one block; a sequence hash also covers everything before it. Only whole blocks have names.

use std::collections::BTreeMap;

use crate::hash::xxh3::hash64;

const SEED: u64 = 1337;
const LORA_SEED: u64 = 0;
const SALT_SEED: u64 = 1;

/// What keeps blocks of equal tokens apart: the adapter and the tenant they were computed for.
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockNames<'a> {
    /// The adapter; empty is the same as none.
    pub lora_name: Option<&'a str>,
    /// The tenant's salt; empty is the same as none.
    pub cache_salt: Option<&'a str>,
}

impl BlockNames<'_> {
    fn seed(&self) -> u64 {
        let own = |name: Option<&str>, seed| {
            name.filter(|name| !name.is_empty()).map_or(0, |name| hash64(name.as_bytes(), seed))
        };
        SEED.wrapping_add(own(self.lora_name, LORA_SEED)).wrapping_add(own(self.cache_salt, SALT_SEED))
    }
}

/// Returns one hash for each whole block of `block_size` tokens; a shorter tail has none.
pub fn block_hashes(token_ids: &[u32], block_size: u32, names: BlockNames<'_>) -> Vec<u64> {
    block_hashes_with(token_ids, block_size, names, false, &BTreeMap::new())
}

/// As [`block_hashes`]. `is_eagle`: each block also covers the first token after it. `media`: the hashes of the objects that
/// touch a block, by its number.
pub(crate) fn block_hashes_with(
    token_ids: &[u32],
    block_size: u32,
    names: BlockNames<'_>,
    is_eagle: bool,
    media: &BTreeMap<usize, Vec<u64>>,
) -> Vec<u64> {
    let (size, seed, after) = (block_size.max(1) as usize, names.seed(), usize::from(is_eagle));
    let mut bytes = Vec::with_capacity((size + after) * 4);
    let whole = token_ids.len().saturating_sub(after) / size;
    (0..whole)
        .map(|number| {
            bytes.clear();
            let block = &token_ids[number * size..(number + 1) * size + after];
            bytes.extend(block.iter().flat_map(|token| token.to_le_bytes()));
            if let Some(objects) = media.get(&number) {
                let mut ordered = objects.clone();
                ordered.sort_unstable();
                bytes.extend(ordered.iter().flat_map(|object| object.to_le_bytes()));
            }
            hash64(&bytes, seed)
        })
        .collect()
}

/// Returns the tokens of one block with each run of the placeholder replaced by the pad token of the next object. Runs beyond
/// the last object get the pad token of the last one.
pub(crate) fn with_pad_tokens(block: &mut [u32], placeholder: u32, objects: &[u64]) {
    // Above the vocabulary of the models of today.
    let pad = |object: u64| 1_000_000 + (object & ((1 << 30) - 1)) as u32;
    let (mut run, mut is_in_run) = (0, false);
    for token in block {
        let is_place = *token == placeholder;
        run += usize::from(is_place && !is_in_run);
        is_in_run = is_place;
        if is_place && let Some(object) = objects.get(run - 1).or(objects.last()) {
            *token = pad(*object);
        }
    }
}

/// Chains block hashes: each result covers its block and all before it.
pub fn sequence_hashes(hashes: &[u64]) -> Vec<u64> {
    extend_sequence(None, hashes)
}

/// Chains the hashes of blocks that follow the block with the sequence hash `parent`; `None`: they begin a sequence.
pub fn extend_sequence(parent: Option<u64>, hashes: &[u64]) -> Vec<u64> {
    let mut before = parent;
    hashes
        .iter()
        .map(|own| {
            let chained = match before {
                None => *own,
                Some(before) => {
                    let mut pair = [0; 16];
                    pair[..8].copy_from_slice(&before.to_le_bytes());
                    pair[8..].copy_from_slice(&own.to_le_bytes());
                    hash64(&pair, SEED)
                }
            };
            before = Some(chained);
            chained
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn names_are_those_of_the_python_implementation() {
        let vectors: Value = serde_json::from_str(include_str!("../../../kv-vectors.json")).expect("JSON");
        for vector in vectors["hashes"].as_array().expect("a list") {
            let tokens: Vec<u32> = serde_json::from_value(vector["token_ids"].clone()).expect("tokens");
            let size = vector["block_size"].as_u64().expect("a size") as u32;
            let names =
                BlockNames { lora_name: vector["lora_name"].as_str(), cache_salt: vector["cache_salt"].as_str() };
            let blocks = block_hashes(&tokens, size, names);
            assert_eq!(serde_json::json!(blocks), vector["blocks"], "{}", vector["name"]);
            assert_eq!(serde_json::json!(sequence_hashes(&blocks)), vector["sequence"], "{}", vector["name"]);
        }
    }
}
