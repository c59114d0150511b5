//! The scheduler of sglang: prompts are admitted against the memory that running requests will still need.
//!
//! Its radix cache works by pages (a page is a block here): complete pages are entered after each prompt and token, and the
//! least recently used leaves are evicted, which is the order of [`PrefixPool`](super::PrefixPool).

use std::collections::HashSet;

use super::{Core, SchedulePolicy, SchedulerOptions};

/// Times the conservativeness: the part of the possible output that is reserved at first.
const FIRST_RATIO: f64 = 0.7;
/// Of the first ratio.
const LEAST_RATIO: f64 = 0.14;
/// Passes from the first to the least ratio.
const RATIO_STEPS: f64 = 600.0;
/// Above it the queue is not sorted.
const LPM_MAX_WAITING: usize = 128;
/// A prefix this long that several wait for is computed by one of them first.
const LPM_SHARED_TOKENS: usize = 32;

pub(super) fn first_ratio(options: &SchedulerOptions) -> f64 {
    FIRST_RATIO * options.sglang.schedule_conservativeness
}

impl Core {
    pub(super) fn schedule_pages(&mut self) {
        let first = first_ratio(&self.options);
        let least = LEAST_RATIO * first;
        self.ratio = least.max(self.ratio - (first - least) / RATIO_STEPS);
        if self.schedule_decodes() {
            self.ratio = first;
        } else if !self.waiting.is_empty() {
            let is_sorted = self.options.sglang.schedule_policy == SchedulePolicy::Lpm;
            if is_sorted && (2..=LPM_MAX_WAITING).contains(&self.waiting.len()) {
                self.sort_by_prefix();
            }
            self.admit_pages();
        }
    }

    // -- decode --------------------------------------------------------------------------------------------------

    /// Returns the tokens that a running request needs pages for in its next step.
    fn upto(&self, place: usize) -> usize {
        let (request, drafts) = (self.request(place), self.options.accept_rates.len());
        if drafts == 0 { request.known } else { (request.known + drafts).min(request.last) }
    }

    fn missing_pages(&self, place: usize) -> usize {
        self.upto(place).div_ceil(self.options.block_size).saturating_sub(self.request(place).held)
    }

    /// Plans a token for each running request; returns whether pages were too few for all.
    fn schedule_decodes(&mut self) -> bool {
        let mut needed: usize = self.running.iter().map(|place| self.missing_pages(*place)).sum();
        let mut was_short = false;
        while needed > self.pool.available() {
            was_short = true;
            let victim = (0..self.running.len()).min_by_key(|at| self.request(self.running[*at]).generated());
            match victim.filter(|_| self.running.len() > 1) {
                Some(at) => {
                    let place = self.running.remove(at);
                    needed -= self.missing_pages(place);
                    self.preempt(place);
                }
                None if !self.reclaim() => break,
                None => {}
            }
        }
        for number in 0..self.running.len() {
            let place = self.running[number];
            self.grow(place, self.upto(place));
            self.request_mut(place).scheduled = 1;
            self.planned.push(place);
        }
        was_short
    }

    /// Takes the pages of prompts back that are computed in part and wait; returns whether there were any.
    fn reclaim(&mut self) -> bool {
        let mut found = false;
        for number in 0..self.waiting.len() {
            let place = self.waiting[number];
            found |= self.request(place).held > 0;
            self.release(place);
            self.request_mut(place).computed = 0;
        }
        found
    }

    // -- admission -----------------------------------------------------------------------------------------------

    fn admit_pages(&mut self) {
        let (block_size, clip) = (self.options.block_size, self.options.sglang.clip_max_new_tokens);
        let mut budget = self.options.sglang.max_prefill_tokens.min(self.options.sglang.chunked_prefill_size);
        let left = |request: &super::Request| (request.last - request.known).min(clip);
        let running: usize = self.running.iter().map(|place| left(self.request(*place))).sum();
        let mut reserved = self.ratio * running as f64;
        while self.running.len() < self.options.max_num_seqs && budget > 0 {
            let Some(place) = self.waiting.front().copied() else { return };
            let request = self.request(place);
            let is_begun = request.held > 0;
            let (found, active) = if is_begun { (request.computed / block_size, 0) } else { self.found(request) };
            let missing = request.known - found * block_size;
            let computes = self.computes(request);
            let is_whole = missing <= budget || !computes;
            let count = if is_whole { missing } else { budget / block_size * block_size };
            if count == 0 {
                return;
            }
            let charge = count.div_ceil(block_size) * block_size;
            let future = if is_whole { left(request) } else { 0 };
            let pinned = if is_begun { 0 } else { found - active };
            let room = ((self.pool.available() - pinned) * block_size) as f64 - reserved;
            if room <= (charge + future) as f64 {
                if !self.planned.is_empty() {
                    return;
                }
                self.waiting.pop_front();
                self.reclaim(); // it is alone, and everything is its
                self.waiting.push_front(place);
            }
            if !is_begun {
                self.pin_prefix(place, found);
            }
            let upto = self.request(place).computed + count;
            if !self.grow(place, upto) {
                return; // the pages that it needs come back with the end of those that run
            }
            self.request_mut(place).scheduled = count;
            self.planned.push(place);
            if !is_whole {
                return; // the rest of it stays at the head of the queue
            }
            self.waiting.pop_front();
            self.running.push(place);
            reserved += future as f64;
            budget = budget.saturating_sub(if computes { charge } else { 0 });
        }
    }

    /// Puts the longest cached prefix first, and whoever waits for another one's prefix last.
    fn sort_by_prefix(&mut self) {
        let block_size = self.options.block_size;
        // The number of the page in which the shared tokens end.
        let shared = LPM_SHARED_TOKENS.div_ceil(block_size) - 1;
        let (mut begun, mut ahead, mut behind, mut seen) = (Vec::new(), Vec::new(), Vec::new(), HashSet::new());
        for place in std::mem::take(&mut self.waiting) {
            let request = self.request(place);
            if request.held > 0 {
                begun.push(place);
                continue;
            }
            let cached = self.found(request).0 * block_size;
            let identity = request.identities.get(shared).filter(|_| cached <= LPM_SHARED_TOKENS);
            if identity.is_some_and(|identity| !seen.insert(*identity)) {
                behind.push(place);
            } else {
                ahead.push((cached, place));
            }
        }
        ahead.sort_by_key(|(cached, _)| std::cmp::Reverse(*cached));
        let ahead = ahead.into_iter().map(|(_, place)| place);
        self.waiting = begun.into_iter().chain(ahead).chain(behind).collect();
    }
}
