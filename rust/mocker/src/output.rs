//! The token ids that a mock engine answers with: seeded by request.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::sync::Arc;

use dynamo_backend_common::DynamoError;
use dynamo_backend_common::kv::{BlockNames, block_hashes};
use serde_json::Value;

use crate::options::invalid;

const FIRST_ID: u32 = 1000;
const IDS: u64 = 1000;
const MAX_TRACE_ROWS: usize = 1_000_000;

/// A stream of numbers that follow from a seed (SplitMix64).
#[derive(Clone, Debug)]
pub(crate) struct Chance(u64);

impl Chance {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number from 0 to 1.
    pub(crate) fn part(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Returns the seed of an answer: the same one in every process, for the same prompt and the same words.
pub(crate) fn seed_of(engine: u64, request: &str, prompt: &[u32]) -> u64 {
    let of_prompt = block_hashes(prompt, prompt.len().max(1) as u32, BlockNames::default());
    let words = request.bytes().chain(engine.to_le_bytes());
    // FNV-1a: the standard library's hasher may change with its version.
    let of_words = words
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    of_prompt.first().copied().unwrap_or(0) ^ of_words
}

/// How answers begin with a thought: a start id, `ratio` of the tokens in all, an end id.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ReasoningShape {
    pub(crate) start_id: u32,
    pub(crate) end_id: u32,
    pub(crate) ratio: f64,
}

impl ReasoningShape {
    /// Returns how many of the tokens are the thought, both ids included.
    fn thinking_tokens(&self, output_tokens: usize) -> usize {
        let thinking = (output_tokens as f64 * self.ratio) as usize;
        if output_tokens < 2 || thinking == 0 { 0 } else { thinking.max(2) }
    }
}

/// The ids of one answer, without end.
#[derive(Debug)]
pub(crate) struct Output {
    chance: Chance,
    given: usize,
    replay: Option<Arc<Vec<u32>>>,
    shape: Option<(ReasoningShape, usize)>,
}

impl Output {
    /// `output_tokens`: how long the whole answer will be.
    pub(crate) fn new(
        seed: u64,
        output_tokens: usize,
        shape: Option<ReasoningShape>,
        replay: Option<Arc<Vec<u32>>>,
    ) -> Self {
        let shape = shape.map(|shape| (shape, shape.thinking_tokens(output_tokens)));
        Self { chance: Chance::new(seed), given: 0, replay, shape }
    }

    pub(crate) fn next_id(&mut self) -> u32 {
        self.given += 1;
        let recorded = self.replay.as_ref().and_then(|ids| ids.get(self.given - 1)).copied();
        if let Some(id) = recorded {
            return id;
        }
        let id = FIRST_ID + (self.chance.next() % IDS) as u32;
        match self.shape.filter(|_| self.replay.is_none()) {
            Some((shape, thinking)) if thinking > 0 && self.given == 1 => shape.start_id,
            Some((shape, thinking)) if thinking > 0 && self.given == thinking => shape.end_id,
            _ => id,
        }
    }

    /// Leaves ids out that another worker has sent.
    pub(crate) fn skip(&mut self, count: usize) {
        for _ in 0..count {
            self.next_id();
        }
    }
}

/// Answers by their keys, from a trace of one JSON object a line.
///
/// A row's key is its `request_id`, else `SESSION:TURN`, where the turn counts the rows of the session from 0, else the number of
/// its line from 0.
#[derive(Debug, Default)]
pub(crate) struct ResponseTrace(HashMap<String, Arc<Vec<u32>>>);

impl ResponseTrace {
    /// Reads a file; blocking. Fails, naming the line, for a row that is not right, or a second key.
    pub(crate) fn read(path: &Path) -> Result<Self, DynamoError> {
        let unreadable = |error: std::io::Error| {
            invalid(format!("response replay trace {} cannot be read: {error}", path.display()))
        };
        let mut rows = HashMap::new();
        let mut turns = HashMap::new();
        for (number, line) in BufReader::new(File::open(path).map_err(unreadable)?).lines().enumerate() {
            let line = line.map_err(unreadable)?;
            if line.trim().is_empty() {
                continue;
            }
            let wrong = |text: String| invalid(format!("{}, line {}: {text}", path.display(), number + 1));
            if rows.len() == MAX_TRACE_ROWS {
                return Err(wrong(format!("at most {MAX_TRACE_ROWS} rows")));
            }
            let (key, ids) = read_row(&line, number, &mut turns).map_err(wrong)?;
            if rows.insert(key.clone(), Arc::new(ids)).is_some() {
                return Err(wrong(format!("a second row with the key {key:?}")));
            }
        }
        Ok(Self(rows))
    }

    pub(crate) fn find(&self, key: &str) -> Option<Arc<Vec<u32>>> {
        self.0.get(key).cloned()
    }
}

fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn read_row(line: &str, number: usize, turns: &mut HashMap<String, usize>) -> Result<(String, Vec<u32>), String> {
    let row: Value = serde_json::from_str(line).map_err(|error| format!("not JSON: {error}"))?;
    let Some(row) = row.as_object() else { return Err("expected an object".into()) };
    let ids = row.get("output_token_ids").and_then(|ids| serde_json::from_value::<Vec<u32>>(ids.clone()).ok());
    let Some(ids) = ids.filter(|ids| !ids.is_empty()) else {
        return Err("output_token_ids must be a list of token ids".into());
    };
    let expected = row.get("output_length").or_else(|| row.get("output_tokens"));
    if expected.is_some_and(|expected| expected.as_u64() != Some(ids.len() as u64)) {
        return Err(format!("output_length differs from the {} output_token_ids", ids.len()));
    }
    let session = row.get("session_id").filter(|session| !session.is_null()).map(shown);
    let turn = turns.entry(session.clone().unwrap_or_default()).or_default();
    let this_turn = *turn;
    *turn += 1;
    let key = match (row.get("request_id").filter(|id| !id.is_null()), session) {
        (Some(id), _) => shown(id),
        (None, Some(session)) => format!("{session}:{this_turn}"),
        (None, None) => number.to_string(),
    };
    Ok((key, ids))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(mut output: Output, count: usize) -> Vec<u32> {
        (0..count).map(|_| output.next_id()).collect()
    }

    #[test]
    fn ids_follow_from_prompt_and_seed_and_can_be_continued() {
        let seed = seed_of(42, "r", &[1, 2, 3]);
        let whole = ids(Output::new(seed, 10, None, None), 10);
        assert!(whole.iter().all(|id| (1000..2000).contains(id)));
        let mut rest = Output::new(seed, 10, None, None);
        rest.skip(4);
        assert_eq!(ids(rest, 6), whole[4..]);
        for other in [seed_of(43, "r", &[1, 2, 3]), seed_of(42, "s", &[1, 2, 3]), seed_of(42, "r", &[1, 2])] {
            assert_ne!(ids(Output::new(other, 10, None, None), 10), whole);
        }
    }

    #[test]
    fn a_thought_has_its_ids_in_their_places() {
        let shape = ReasoningShape { start_id: 7, end_id: 8, ratio: 0.5 };
        let made = ids(Output::new(1, 10, Some(shape), None), 10);
        assert_eq!((made[0], made[4]), (7, 8));
        assert!(made[5..].iter().all(|id| *id >= 1000));
        assert_eq!(ids(Output::new(1, 1, Some(shape), None), 1)[0] / 1000, 1);
    }

    #[test]
    fn rows_have_keys_and_wrong_rows_are_named() {
        let mut turns = HashMap::new();
        let mut read = |line: &str, number| read_row(line, number, &mut turns);
        assert_eq!(read(r#"{"output_token_ids": [1], "session_id": "s"}"#, 0).expect("a row").0, "s:0");
        assert_eq!(read(r#"{"output_token_ids": [1], "session_id": "s"}"#, 1).expect("a row").0, "s:1");
        assert_eq!(read(r#"{"output_token_ids": [1], "request_id": 5}"#, 2).expect("a row").0, "5");
        assert_eq!(read(r#"{"output_token_ids": [1, 2], "output_length": 2}"#, 3).expect("a row").0, "3");
        for wrong in ["[]", "x", r#"{"output_token_ids": []}"#, r#"{"output_token_ids": [1], "output_length": 2}"#] {
            assert!(read(wrong, 4).is_err(), "{wrong}");
        }
    }
}
