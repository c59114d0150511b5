//! One simulated engine rank without a clock: requests in, passes out, each with its duration.
//!
//! A pass decides at its beginning, and what it brings is seen at its end. A request that is submitted while a pass runs is
//! looked at when the next one begins.

mod batching;
mod options;
mod pool;
mod radix;
mod request;

use std::collections::VecDeque;

use dynamo_backend_common::kv::{BlockChange, KvBlock};

pub(crate) use options::{Backend, PreemptionMode, Role, SchedulePolicy, SchedulerOptions, SglangOptions};
pub(crate) use pool::PrefixPool;
pub(crate) use request::{Request, Wanted};

use crate::output::Chance;
use crate::timing::Timing;

/// The most tokens that one pass brings for one request: one, and the drafts of speculative decoding.
pub(crate) const MAX_BURST: usize = 6;

/// A request's place in its rank. It is good for as long as the request lasts, and harmless afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    place: usize,
    number: u64,
}

/// Tokens that one pass brought for one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Emitted {
    pub(crate) number: u64,
    tokens: [u32; MAX_BURST],
    count: usize,
    pub(crate) is_first: bool,
    pub(crate) is_last: bool,
    /// Prompt tokens that were cached.
    pub(crate) cached_tokens: usize,
    pub(crate) prompt_tokens: usize,
}

impl Emitted {
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens[..self.count]
    }
}

/// What one pass brought.
#[derive(Debug, Default)]
pub(crate) struct PassResult {
    pub(crate) emitted: Vec<Emitted>,
    /// Requests that can never be served here.
    pub(crate) rejected: Vec<u64>,
    /// Changes of the cache, in order.
    pub(crate) changes: Vec<BlockChange>,
}

/// One rank.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) options: SchedulerOptions,
    pub(crate) pool: PrefixPool,
    pub(crate) preemptions: u64,
    timing: Timing,
    requests: Vec<Option<Request>>,
    free_places: Vec<usize>,
    waiting: VecDeque<usize>,
    running: Vec<usize>,
    planned: Vec<usize>,
    is_in_pass: bool,
    rejected: Vec<u64>,
    cancelled: Vec<usize>,
    chance: Chance,
    /// For sglang: the part of the possible output of running requests that admission reserves.
    ratio: f64,
}

impl Core {
    /// `seed` decides which drafts are accepted.
    pub(crate) fn new(options: SchedulerOptions, timing: Timing, seed: u64) -> Self {
        Self {
            pool: PrefixPool::new(options.num_gpu_blocks),
            preemptions: 0,
            timing,
            requests: Vec::new(),
            free_places: Vec::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            planned: Vec::new(),
            is_in_pass: false,
            rejected: Vec::new(),
            cancelled: Vec::new(),
            chance: Chance::new(seed),
            ratio: radix::first_ratio(&options),
            options,
        }
    }

    // -- in ------------------------------------------------------------------------------------------------------

    /// Queues a request. One that can never be served is in `rejected` of the next pass.
    pub(crate) fn submit(&mut self, number: u64, wanted: Wanted) -> Ticket {
        let room = self.output_room(wanted.token_ids.len());
        if room == 0 {
            self.rejected.push(number);
            return Ticket { place: usize::MAX, number };
        }
        let asked = if self.options.role == Role::Prefill { 1 } else { wanted.max_output };
        let wanted = Wanted { max_output: asked.min(room), ..wanted };
        let request = Request::new(number, wanted, self.options.block_size);
        let place = match self.free_places.pop() {
            Some(place) => {
                self.requests[place] = Some(request);
                place
            }
            None => {
                self.requests.push(Some(request));
                self.requests.len() - 1
            }
        };
        self.waiting.push_back(place);
        Ticket { place, number }
    }

    /// Returns how many tokens can follow such a prompt; 0: it is rejected.
    pub(crate) fn output_room(&self, prompt_tokens: usize) -> usize {
        let capacity = self.options.capacity_tokens();
        let longest = self.options.max_model_len.map_or(capacity, |length| capacity.min(length));
        longest.saturating_sub(prompt_tokens)
    }

    /// Ends a request; what it holds is free at the end of the pass that runs, or now. Idempotent.
    pub(crate) fn cancel(&mut self, ticket: Ticket) {
        let found = self.requests.get_mut(ticket.place).and_then(Option::as_mut);
        let Some(request) = found.filter(|request| request.number == ticket.number && !request.is_over) else { return };
        request.is_over = true;
        self.cancelled.push(ticket.place);
        if !self.is_in_pass {
            self.drop_cancelled();
        }
    }

    /// Returns whether a pass would do anything.
    pub(crate) fn has_work(&self) -> bool {
        !(self.running.is_empty() && self.waiting.is_empty() && self.rejected.is_empty())
    }

    /// Returns whether a pass has begun and not ended.
    pub(crate) fn is_in_pass(&self) -> bool {
        self.is_in_pass
    }

    /// Returns how many requests run, and how many wait.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    // -- one pass ------------------------------------------------------------------------------------------------

    /// Decides on the next pass and returns how long it takes, in ms; `None` when there is nothing to do.
    pub(crate) fn begin_pass(&mut self) -> Option<f64> {
        if !self.has_work() {
            return None;
        }
        self.is_in_pass = true;
        match self.options.backend {
            Backend::Vllm | Backend::Trtllm => self.schedule_batch(),
            Backend::Sglang => self.schedule_pages(),
        }
        Some(self.duration_ms())
    }

    /// Sums up what was planned, and asks the timing model.
    fn duration_ms(&self) -> f64 {
        let options = &self.options;
        let (mut prefills, mut inputs, mut prefixes, mut decodes, mut context) = (0, 0, 0, 0, 0);
        for request in self.planned.iter().filter_map(|place| self.requests[*place].as_ref()) {
            let (known, count) = (request.known, request.scheduled);
            if count == 1 && known - request.computed == 1 && known > request.prompt_tokens {
                decodes += 1;
                context += known;
            } else if count > 0 && self.computes(request) {
                prefills += 1;
                inputs += request.computed + count;
                prefixes += request.computed;
            }
        }
        let speedup = options.speedup_ratio;
        if speedup == 0.0 {
            return 0.0;
        }
        let mut total = 0.0;
        if prefills > 0 {
            total += self.timing.prefill_ms(prefills, inputs / prefills, prefixes / prefills) / speedup;
        }
        if decodes > 0 && options.role != Role::Prefill && options.decode_speedup_ratio != 0.0 {
            let step = self.timing.decode_ms(context, options.capacity_tokens());
            total += step / (speedup * options.decode_speedup_ratio);
        }
        total
    }

    /// Makes what the pass computed visible, and returns it.
    pub(crate) fn end_pass(&mut self) -> PassResult {
        self.is_in_pass = false;
        let mut result = PassResult { rejected: std::mem::take(&mut self.rejected), ..PassResult::default() };
        let evicted = self.pool.take_evicted();
        if !evicted.is_empty() {
            result.changes.push(BlockChange::Removed(evicted));
        }
        let planned = std::mem::take(&mut self.planned);
        result.emitted.reserve(planned.len());
        let mut finished = Vec::new();
        for place in &planned {
            if self.advance(*place, &mut result) {
                finished.push(*place);
            }
        }
        if !finished.is_empty() {
            for place in &finished {
                self.release(*place);
            }
            let requests = &self.requests;
            self.running
                .retain(|place| requests[*place].as_ref().is_some_and(|request| !request.is_over || request.held > 0));
            for place in finished {
                self.forget(place);
            }
        }
        self.planned = planned;
        self.planned.clear(); // its memory serves the next pass
        if !self.cancelled.is_empty() {
            self.drop_cancelled();
        }
        result
    }

    /// Takes one request over the end of its pass and returns whether it is complete.
    fn advance(&mut self, place: usize, result: &mut PassResult) -> bool {
        let (block_size, caching) = (self.options.block_size, self.options.enable_prefix_caching);
        let Some(request) = self.requests[place].as_mut().filter(|request| !request.is_over) else { return false };
        let before = request.computed;
        let mut computed = before + request.scheduled;
        if computed < request.known {
            request.computed = computed;
            if caching {
                self.name_blocks(place, computed / block_size, result);
            }
            return false;
        }
        let is_first = request.known == request.prompt_tokens;
        let mut count = 1;
        if !is_first && computed - before == 1 {
            let room = (request.last - request.known).saturating_sub(1);
            for rate in self.options.accept_rates.iter().take(room) {
                if self.chance.part() >= *rate {
                    break;
                }
                count += 1;
            }
            computed += count - 1;
        }
        let mut emitted = Emitted {
            number: request.number,
            tokens: [0; MAX_BURST],
            count,
            is_first,
            is_last: false,
            cached_tokens: request.cached_tokens.unwrap_or(0),
            prompt_tokens: request.prompt_tokens,
        };
        for token in &mut emitted.tokens[..count] {
            *token = request.make_token();
        }
        request.known += count;
        request.computed = computed;
        emitted.is_last = request.known >= request.last;
        request.is_over = emitted.is_last;
        result.emitted.push(emitted);
        if caching {
            self.name_blocks(place, computed / block_size, result);
        }
        emitted.is_last
    }

    // -- blocks --------------------------------------------------------------------------------------------------

    fn request(&self, place: usize) -> &Request {
        // A place is freed only when no queue holds it any more.
        self.requests[place].as_ref().unwrap_or_else(|| unreachable!("place {place} is free"))
    }

    fn request_mut(&mut self, place: usize) -> &mut Request {
        self.requests[place].as_mut().unwrap_or_else(|| unreachable!("place {place} is free"))
    }

    /// Gives a request blocks for its first `tokens` tokens; returns `false`, and changes nothing, when there are too few.
    fn grow(&mut self, place: usize, tokens: usize) -> bool {
        let needed = tokens.div_ceil(self.options.block_size);
        let missing = needed.saturating_sub(self.request(place).held);
        if missing > 0 {
            if !self.pool.take(missing) {
                return false;
            }
            self.request_mut(place).held += missing;
        }
        true
    }

    /// Admits a request that reuses its first `blocks` blocks.
    fn pin_prefix(&mut self, place: usize, blocks: usize) {
        let block_size = self.options.block_size;
        let Some(request) = self.requests[place].as_mut() else { return };
        self.pool.pin(&request.identities[..blocks]);
        request.held = blocks;
        request.named = blocks;
        request.computed = blocks * block_size;
        request.cached_tokens.get_or_insert(request.computed.min(request.prompt_tokens));
    }

    fn name_blocks(&mut self, place: usize, count: usize, result: &mut PassResult) {
        let block_size = self.options.block_size;
        let Some(request) = self.requests[place].as_mut().filter(|request| count > request.named) else { return };
        request.name_blocks(count, block_size);
        let first = std::mem::replace(&mut request.named, count);
        for run in self.pool.name(&request.identities[first..count], first, &mut request.duplicates) {
            let parent_hash = run.start.checked_sub(1).map(|number| request.identities[number]);
            let blocks = run
                .map(|number| KvBlock { block_hash: request.identities[number], tokens_hash: request.content[number] })
                .collect();
            result.changes.push(BlockChange::Stored { parent_hash, blocks });
        }
    }

    /// Takes all blocks of a request back.
    fn release(&mut self, place: usize) {
        let Some(request) = self.requests[place].as_mut().filter(|request| request.held > 0) else { return };
        self.pool.release(&request.identities[..request.named], request.held, &request.duplicates);
        request.held = 0;
        request.named = 0;
        request.duplicates.clear();
    }

    /// Puts a running request back to the head of the queue, without its blocks; returns the tokens it had planned.
    fn preempt(&mut self, place: usize) -> usize {
        self.release(place);
        let planned = self.planned.iter().position(|other| *other == place);
        let mut given_back = 0;
        if let Some(at) = planned {
            self.planned.remove(at);
            given_back = self.request(place).scheduled;
        }
        self.request_mut(place).computed = 0;
        self.preemptions += 1;
        self.waiting.push_front(place);
        given_back
    }

    fn drop_cancelled(&mut self) {
        let dropped = std::mem::take(&mut self.cancelled);
        for place in &dropped {
            self.release(*place);
        }
        self.running.retain(|place| !dropped.contains(place));
        self.waiting.retain(|place| !dropped.contains(place));
        for place in dropped {
            self.forget(place);
        }
    }

    fn forget(&mut self, place: usize) {
        self.requests[place] = None;
        self.free_places.push(place);
    }

    /// Returns whether the prompt of a request takes time and budget here.
    fn computes(&self, request: &Request) -> bool {
        !(request.prompt_arrives && self.options.role == Role::Decode)
    }

    /// Returns how many blocks a request may reuse: its last token must be computed, unless for trtllm.
    fn reusable(&self, request: &Request) -> usize {
        let options = &self.options;
        if !options.enable_prefix_caching {
            return 0;
        }
        let blocks = if options.backend == Backend::Trtllm {
            request.known / options.block_size
        } else {
            let whole = (request.known - 1) / options.block_size;
            whole.saturating_sub(usize::from(!options.accept_rates.is_empty()))
        };
        blocks.min(request.identities.len())
    }

    /// Returns how many of the blocks that a request may reuse are resident, and how many of those are active.
    fn found(&self, request: &Request) -> (usize, usize) {
        self.pool.find(&request.identities[..self.reusable(request)])
    }
}
