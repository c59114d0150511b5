//! The schedulers of vllm and of trtllm: one token budget for the prompts and the decode steps of a pass.
//!
//! vllm takes running requests first, then waiting ones in their order; running ones are preempted when blocks run out. trtllm
//! admits only what can run to its end beside all that runs already, so that nothing is ever preempted.

use super::{Backend, Core, PreemptionMode, Request};

impl Core {
    pub(super) fn schedule_batch(&mut self) {
        let (budget, was_preempted) = self.schedule_running();
        if !was_preempted {
            self.admit_batch(budget);
        }
    }

    /// Plans the running requests; returns what is left of the budget (0: nothing more in this pass), and whether any was
    /// preempted.
    fn schedule_running(&mut self) -> (usize, bool) {
        let mut budget = self.options.max_num_batched_tokens;
        let (block_size, drafts) = (self.options.block_size, self.options.accept_rates.len());
        let is_fifo = self.options.preemption_mode == PreemptionMode::Fifo;
        let (mut was_preempted, mut number) = (false, 0);
        while number < self.running.len() && budget > 0 {
            let place = self.running[number];
            let request = self.request(place);
            let mut count = request.known - request.computed;
            if count > budget {
                if !self.options.enable_chunked_prefill {
                    return (0, was_preempted);
                }
                count = budget;
            }
            let mut upto = request.computed + count;
            if drafts > 0 && upto == request.known && request.known > request.prompt_tokens {
                upto = (upto + drafts).min(request.last);
            }
            if upto > request.held * block_size && !self.grow(place, upto) {
                // The same request comes once more, unless it was the one that went.
                let victim = if is_fifo { self.running.remove(0) } else { self.running.remove(self.running.len() - 1) };
                budget += self.preempt(victim);
                was_preempted = true;
                if is_fifo && number > 0 {
                    number -= 1;
                }
                continue;
            }
            self.request_mut(place).scheduled = count;
            self.planned.push(place);
            budget -= count;
            number += 1;
        }
        (budget, was_preempted)
    }

    fn admit_batch(&mut self, mut budget: usize) {
        let block_size = self.options.block_size;
        while budget > 0 && self.running.len() < self.options.max_num_seqs {
            let Some(place) = self.waiting.front().copied() else { return };
            let request = self.request(place);
            let Some(found) = self.admissible(request) else { return };
            let missing = request.known - found * block_size;
            let computes = self.computes(request);
            let mut count = if computes { missing.min(budget) } else { missing };
            if count < missing && !self.options.enable_chunked_prefill {
                if budget < self.options.max_num_batched_tokens {
                    return;
                }
                count = missing; // more than any budget: alone in a pass, instead of never
            }
            self.pin_prefix(place, found);
            let upto = self.request(place).computed + count;
            if !self.grow(place, upto) {
                self.release(place); // cannot be: `admissible` has counted these blocks
                return;
            }
            self.waiting.pop_front();
            self.request_mut(place).scheduled = count;
            self.running.push(place);
            self.planned.push(place);
            budget = budget.saturating_sub(if computes { count } else { 1 });
        }
    }

    /// Returns how many cached blocks the request can reuse; `None` when the cache has no room for it now.
    fn admissible(&self, request: &Request) -> Option<usize> {
        let block_size = self.options.block_size;
        let mut room = self.pool.available();
        let mut needed = request.known.div_ceil(block_size);
        if self.options.backend == Backend::Trtllm {
            let promised = |place: &usize| {
                let other = self.request(*place);
                other.last.div_ceil(block_size) - other.held
            };
            room = room.checked_sub(self.running.iter().map(promised).sum())?;
            needed = request.last.div_ceil(block_size);
        }
        if needed > room + self.reusable(request) {
            return None;
        }
        let (found, active) = self.found(request);
        (needed <= room + active).then_some(found)
    }
}
