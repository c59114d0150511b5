//! BLAKE3, unkeyed: the hash of a model card's files. Portable and streaming; a tokenizer of 10 MB takes some 20 ms.

const OUT_BYTES: usize = 32;
const BLOCK_BYTES: usize = 64;
const CHUNK_BYTES: usize = 1024;
const CHUNK_START: u32 = 1;
const CHUNK_END: u32 = 2;
const PARENT: u32 = 4;
const ROOT: u32 = 8;
const INITIAL: [u32; 8] =
    [0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19];
const PERMUTATION: [usize; 16] = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8];

fn mix(state: &mut [u32; 16], at: [usize; 4], x: u32, y: u32) {
    let [a, b, c, d] = at;
    state[a] = state[a].wrapping_add(state[b]).wrapping_add(x);
    state[d] = (state[d] ^ state[a]).rotate_right(16);
    state[c] = state[c].wrapping_add(state[d]);
    state[b] = (state[b] ^ state[c]).rotate_right(12);
    state[a] = state[a].wrapping_add(state[b]).wrapping_add(y);
    state[d] = (state[d] ^ state[a]).rotate_right(8);
    state[c] = state[c].wrapping_add(state[d]);
    state[b] = (state[b] ^ state[c]).rotate_right(7);
}

fn compress(chain: &[u32; 8], block: &[u32; 16], counter: u64, length: u32, flags: u32) -> [u32; 8] {
    let mut state = [0u32; 16];
    state[..8].copy_from_slice(chain);
    state[8..12].copy_from_slice(&INITIAL[..4]);
    state[12] = counter as u32;
    state[13] = (counter >> 32) as u32;
    state[14] = length;
    state[15] = flags;
    let mut words = *block;
    for round in 0..7 {
        mix(&mut state, [0, 4, 8, 12], words[0], words[1]);
        mix(&mut state, [1, 5, 9, 13], words[2], words[3]);
        mix(&mut state, [2, 6, 10, 14], words[4], words[5]);
        mix(&mut state, [3, 7, 11, 15], words[6], words[7]);
        mix(&mut state, [0, 5, 10, 15], words[8], words[9]);
        mix(&mut state, [1, 6, 11, 12], words[10], words[11]);
        mix(&mut state, [2, 7, 8, 13], words[12], words[13]);
        mix(&mut state, [3, 4, 9, 14], words[14], words[15]);
        if round < 6 {
            words = PERMUTATION.map(|from| words[from]);
        }
    }
    let mut out = [0u32; 8];
    for (i, word) in out.iter_mut().enumerate() {
        *word = state[i] ^ state[i + 8];
    }
    out
}

fn words_of(block: &[u8; BLOCK_BYTES]) -> [u32; 16] {
    let mut words = [0u32; 16];
    for (word, bytes) in words.iter_mut().zip(block.chunks_exact(4)) {
        *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    words
}

/// The last compression of a chunk or of a parent, which takes another flag where it is the root.
struct Output {
    chain: [u32; 8],
    block: [u32; 16],
    counter: u64,
    length: u32,
    flags: u32,
}

impl Output {
    fn chaining_value(&self) -> [u32; 8] {
        compress(&self.chain, &self.block, self.counter, self.length, self.flags)
    }

    fn root(&self) -> [u8; OUT_BYTES] {
        let words = compress(&self.chain, &self.block, 0, self.length, self.flags | ROOT);
        let mut out = [0; OUT_BYTES];
        for (bytes, word) in out.chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        out
    }
}

fn parent(left: [u32; 8], right: [u32; 8]) -> Output {
    let mut block = [0u32; 16];
    block[..8].copy_from_slice(&left);
    block[8..].copy_from_slice(&right);
    Output { chain: INITIAL, block, counter: 0, length: BLOCK_BYTES as u32, flags: PARENT }
}

struct Chunk {
    chain: [u32; 8],
    counter: u64,
    block: [u8; BLOCK_BYTES],
    block_length: usize,
    blocks_done: usize,
}

impl Chunk {
    fn new(counter: u64) -> Self {
        Self { chain: INITIAL, counter, block: [0; BLOCK_BYTES], block_length: 0, blocks_done: 0 }
    }

    fn length(&self) -> usize {
        self.blocks_done * BLOCK_BYTES + self.block_length
    }

    fn start_flag(&self) -> u32 {
        if self.blocks_done == 0 { CHUNK_START } else { 0 }
    }

    fn update(&mut self, mut input: &[u8]) {
        while !input.is_empty() {
            if self.block_length == BLOCK_BYTES {
                let words = words_of(&self.block);
                let flags = self.start_flag();
                self.chain = compress(&self.chain, &words, self.counter, BLOCK_BYTES as u32, flags);
                self.blocks_done += 1;
                self.block = [0; BLOCK_BYTES];
                self.block_length = 0;
            }
            let taken = input.len().min(BLOCK_BYTES - self.block_length);
            self.block[self.block_length..self.block_length + taken].copy_from_slice(&input[..taken]);
            self.block_length += taken;
            input = &input[taken..];
        }
    }

    fn output(&self) -> Output {
        Output {
            chain: self.chain,
            block: words_of(&self.block),
            counter: self.counter,
            length: self.block_length as u32,
            flags: self.start_flag() | CHUNK_END,
        }
    }
}

/// Hashes a stream of bytes.
pub(crate) struct Hasher {
    chunk: Chunk,
    stack: Vec<[u32; 8]>,
}

impl Hasher {
    /// Begins an empty message.
    pub(crate) fn new() -> Self {
        Self { chunk: Chunk::new(0), stack: Vec::new() }
    }

    /// Adds bytes to the message.
    pub(crate) fn update(&mut self, mut input: &[u8]) {
        while !input.is_empty() {
            if self.chunk.length() == CHUNK_BYTES {
                let value = self.chunk.output().chaining_value();
                let done = self.chunk.counter + 1;
                self.push(value, done);
                self.chunk = Chunk::new(done);
            }
            let taken = input.len().min(CHUNK_BYTES - self.chunk.length());
            self.chunk.update(&input[..taken]);
            input = &input[taken..];
        }
    }

    /// Merges finished subtrees: the stack then holds one value for each 1 bit of the number of chunks.
    fn push(&mut self, mut value: [u32; 8], mut chunks: u64) {
        while chunks & 1 == 0 {
            let Some(left) = self.stack.pop() else { break };
            value = parent(left, value).chaining_value();
            chunks >>= 1;
        }
        self.stack.push(value);
    }

    /// Returns the hash of everything added.
    pub(crate) fn finish(&self) -> [u8; OUT_BYTES] {
        let mut output = self.chunk.output();
        for left in self.stack.iter().rev() {
            output = parent(*left, output.chaining_value());
        }
        output.root()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::hex;

    fn of(length: usize) -> String {
        // The message of the published vectors: 0, 1, ... 250, again and again.
        let message: Vec<u8> = (0..length).map(|i| (i % 251) as u8).collect();
        let mut hasher = Hasher::new();
        for piece in message.chunks(97) {
            hasher.update(piece);
        }
        hex(&hasher.finish())
    }

    #[test]
    fn vectors_hold_over_block_chunk_and_tree_boundaries() {
        for line in include_str!("../../tests/blake3.txt").lines() {
            let (length, digest) = line.split_once(' ').expect("LENGTH DIGEST");
            assert_eq!(of(length.parse().expect("a length")), digest, "length {length}");
        }
    }
}
