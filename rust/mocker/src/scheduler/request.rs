//! One request as the scheduler knows it: how many tokens it has, and the names of its blocks.

use std::collections::BTreeSet;

use dynamo_backend_common::kv::{BlockNames, block_hashes, extend_sequence, sequence_hashes};

use crate::output::Output;

/// What a request asks for.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) token_ids: Vec<u32>,
    /// Tokens to generate, at least 1; lowered to the room in the cache and in the model's context.
    pub(crate) max_output: usize,
    pub(crate) output: Output,
    pub(crate) lora_name: Option<String>,
    pub(crate) cache_salt: Option<String>,
    /// At a decode worker: the prompt was computed elsewhere, and takes blocks but no time here.
    pub(crate) prompt_arrives: bool,
}

#[derive(Debug)]
pub(crate) struct Request {
    /// Unique in the process.
    pub(crate) number: u64,
    pub(crate) prompt_tokens: usize,
    pub(crate) prompt_arrives: bool,
    /// Chained hashes of the complete blocks, those of the output included as they are named.
    pub(crate) identities: Vec<u64>,
    /// Hashes of the same blocks' own tokens, which KV events carry.
    pub(crate) content: Vec<u64>,
    /// Tokens behind the blocks in `identities`.
    tail: Vec<u32>,
    output: Output,
    lora_name: Option<String>,
    cache_salt: Option<String>,
    /// Tokens that exist: those of the prompt, and the generated ones.
    pub(crate) known: usize,
    /// Tokens whose keys and values are in the cache.
    pub(crate) computed: usize,
    /// The request ends when this many tokens are known.
    pub(crate) last: usize,
    /// Tokens that the last pass that took it in computes.
    pub(crate) scheduled: usize,
    /// Blocks it has, private ones included.
    pub(crate) held: usize,
    /// Blocks it has that have an identity.
    pub(crate) named: usize,
    /// Numbers of named blocks of which another request's copy counts as the cached one.
    pub(crate) duplicates: BTreeSet<usize>,
    /// Prompt tokens that its first admission found in the cache.
    pub(crate) cached_tokens: Option<usize>,
    /// Finished or cancelled; it holds nothing from the end of the pass on.
    pub(crate) is_over: bool,
}

impl Request {
    pub(crate) fn new(number: u64, wanted: Wanted, block_size: usize) -> Self {
        let names = BlockNames { lora_name: wanted.lora_name.as_deref(), cache_salt: wanted.cache_salt.as_deref() };
        let content = block_hashes(&wanted.token_ids, block_size as u32, names);
        let tail = wanted.token_ids[content.len() * block_size..].to_vec();
        let prompt_tokens = wanted.token_ids.len();
        Self {
            number,
            prompt_tokens,
            prompt_arrives: wanted.prompt_arrives,
            identities: sequence_hashes(&content),
            content,
            tail,
            output: wanted.output,
            lora_name: wanted.lora_name,
            cache_salt: wanted.cache_salt,
            known: prompt_tokens,
            computed: 0,
            last: prompt_tokens + wanted.max_output,
            scheduled: 0,
            held: 0,
            named: 0,
            duplicates: BTreeSet::new(),
            cached_tokens: None,
            is_over: false,
        }
    }

    /// Returns how many tokens were generated so far.
    pub(crate) fn generated(&self) -> usize {
        self.known - self.prompt_tokens
    }

    /// Makes the next token of the answer.
    pub(crate) fn make_token(&mut self) -> u32 {
        let token = self.output.next_id();
        self.tail.push(token);
        token
    }

    /// Appends identities until there are `count`; the tokens of those blocks are known.
    pub(crate) fn name_blocks(&mut self, count: usize, block_size: usize) {
        let missing = count.saturating_sub(self.identities.len());
        if missing == 0 {
            return;
        }
        let names = BlockNames { lora_name: self.lora_name.as_deref(), cache_salt: self.cache_salt.as_deref() };
        let tokens = missing * block_size;
        let own = block_hashes(&self.tail[..tokens], block_size as u32, names);
        self.identities.extend(extend_sequence(self.identities.last().copied(), &own));
        self.content.extend(own);
        self.tail.drain(..tokens);
    }
}
