//! The blocks of a simulated KV cache: counted, shared by identity, and evicted in the order of their last use.
//!
//! A block is free, private (unfinished, or without an identity), active (at least one running request uses it) or inactive
//! (cached, and evicted when room is needed). Nothing is stored, so private blocks are a number and the others are names.

use std::collections::{BTreeMap, BTreeSet, HashMap};

#[derive(Clone, Copy, Debug)]
struct Resident {
    /// Running requests that use the block; 0: it is inactive.
    users: u32,
    /// Its place in the order of eviction, while it is inactive.
    stamp: u64,
}

/// The blocks of one rank. The sum of free, private, active and inactive blocks never changes.
#[derive(Debug)]
pub(crate) struct PrefixPool {
    blocks: usize,
    free: usize,
    resident: HashMap<u64, Resident>,
    /// Inactive blocks by their stamp: the next one to evict is in front.
    inactive: BTreeMap<u64, u64>,
    /// Private blocks with the content of another block.
    copies: HashMap<u64, u32>,
    evicted: Vec<u64>,
    next_stamp: u64,
}

impl PrefixPool {
    pub(crate) fn new(blocks: usize) -> Self {
        Self {
            blocks,
            free: blocks,
            resident: HashMap::new(),
            inactive: BTreeMap::new(),
            copies: HashMap::new(),
            evicted: Vec::new(),
            next_stamp: 0,
        }
    }

    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Returns how many blocks a request can get: free and inactive ones.
    pub(crate) fn available(&self) -> usize {
        self.free + self.inactive.len()
    }

    /// Returns how many blocks running requests hold: private and active ones.
    pub(crate) fn used(&self) -> usize {
        self.blocks - self.available()
    }

    /// Returns how many of these identities are resident without a gap, and how many of those are active.
    pub(crate) fn find(&self, identities: &[u64]) -> (usize, usize) {
        let (mut found, mut active) = (0, 0);
        for identity in identities {
            let Some(block) = self.resident.get(identity) else { break };
            found += 1;
            active += usize::from(block.users > 0);
        }
        (found, active)
    }

    /// Makes a running request a user of these blocks, which are resident.
    pub(crate) fn pin(&mut self, identities: &[u64]) {
        for identity in identities {
            if let Some(block) = self.resident.get_mut(identity) {
                if block.users == 0 {
                    self.inactive.remove(&block.stamp);
                }
                block.users += 1;
            }
        }
    }

    /// Makes blocks private, evicting inactive ones; returns `false`, and changes nothing, when there are too few.
    pub(crate) fn take(&mut self, count: usize) -> bool {
        if count > self.available() {
            return false;
        }
        let missing = count.saturating_sub(self.free);
        self.free -= count - missing;
        for _ in 0..missing {
            let Some((_, identity)) = self.inactive.pop_first() else { break };
            self.resident.remove(&identity);
            if !self.copies.contains_key(&identity) {
                self.evicted.push(identity); // else it lives on in a private block
            }
        }
        true
    }

    /// Gives private blocks their identities and returns the runs of blocks that nobody had before; `first` is the number of
    /// the first identity in its request.
    ///
    /// A block whose identity is resident already stays private, and its number is added to `duplicates`.
    pub(crate) fn name(
        &mut self,
        identities: &[u64],
        first: usize,
        duplicates: &mut BTreeSet<usize>,
    ) -> Vec<std::ops::Range<usize>> {
        let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
        for (at, identity) in identities.iter().enumerate() {
            let number = first + at;
            if self.resident.contains_key(identity) {
                duplicates.insert(number);
                *self.copies.entry(*identity).or_default() += 1;
                continue;
            }
            self.resident.insert(*identity, Resident { users: 1, stamp: 0 });
            if self.copies.contains_key(identity) {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.end == number => run.end += 1,
                _ => runs.push(number..number + 1),
            }
        }
        runs
    }

    /// Gives the `held` blocks of a request back, of which the first ones have these identities.
    ///
    /// The last block goes first, so that a suffix is evicted before its prefix. A duplicate is freed, unless the block that it
    /// duplicates was evicted meanwhile.
    pub(crate) fn release(&mut self, identities: &[u64], held: usize, duplicates: &BTreeSet<usize>) {
        self.free += held - identities.len();
        for (number, identity) in identities.iter().enumerate().rev() {
            if duplicates.contains(&number) {
                self.release_duplicate(*identity);
            } else if let Some(block) = self.resident.get_mut(identity) {
                block.users -= 1;
                if block.users == 0 {
                    self.rest(*identity);
                }
            }
        }
    }

    fn release_duplicate(&mut self, identity: u64) {
        match self.copies.get_mut(&identity) {
            Some(count) if *count > 1 => *count -= 1,
            _ => {
                self.copies.remove(&identity);
            }
        }
        if self.resident.contains_key(&identity) {
            self.free += 1;
        } else {
            self.rest(identity);
        }
    }

    /// Makes a block the last one to be evicted.
    fn rest(&mut self, identity: u64) {
        let stamp = self.next_stamp;
        self.next_stamp += 1;
        self.resident.insert(identity, Resident { users: 0, stamp });
        self.inactive.insert(stamp, identity);
    }

    /// Returns the identities whose last block was evicted since the last call.
    pub(crate) fn take_evicted(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.evicted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suffix_is_evicted_before_its_prefix() {
        let mut pool = PrefixPool::new(4);
        let mut none = BTreeSet::new();
        assert!(pool.take(3));
        assert_eq!(pool.name(&[1, 2, 3], 0, &mut none).first(), Some(&(0..3)));
        pool.release(&[1, 2, 3], 3, &none);
        assert_eq!((pool.used(), pool.available()), (0, 4));
        assert!(pool.take(2));
        assert_eq!(pool.take_evicted(), [3]);
        assert_eq!(pool.find(&[1, 2, 3]), (2, 0));
        assert!(!pool.take(3));
    }

    #[test]
    fn a_copy_keeps_an_evicted_block_alive() {
        let mut pool = PrefixPool::new(2);
        let (mut first, mut second) = (BTreeSet::new(), BTreeSet::new());
        assert!(pool.take(2));
        pool.name(&[7], 0, &mut first);
        assert!(pool.name(&[7], 0, &mut second).is_empty());
        pool.release(&[7], 1, &first);
        assert!(pool.take(1));
        assert!(pool.take_evicted().is_empty());
        pool.release(&[7], 1, &second);
        assert_eq!(pool.find(&[7]), (1, 0));
    }
}
