//! Metrics under the names that the simulated engine has them, so that dashboards made for it show the mock engine.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::scheduler::{Backend, Core};

const BOUNDS: [f64; 19] =
    [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

#[derive(Debug, Default)]
pub(crate) struct Histogram {
    counts: [AtomicU64; BOUNDS.len() + 1],
    sum_micros: AtomicU64,
}

impl Histogram {
    pub(crate) fn observe(&self, seconds: f64) {
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_micros.fetch_add((seconds * 1e6) as u64, Ordering::Relaxed);
    }

    fn write(&self, out: &mut String, name: &str, label: &str) {
        let _ = writeln!(out, "# TYPE {name} histogram"); // writing to a text cannot fail
        let mut total = 0;
        for (number, count) in self.counts.iter().enumerate() {
            total += count.load(Ordering::Relaxed);
            let bound = BOUNDS.get(number).map_or_else(|| "+Inf".to_owned(), f64::to_string);
            let _ = writeln!(out, "{name}_bucket{{{label},le=\"{bound}\"}} {total}");
        }
        let sum = self.sum_micros.load(Ordering::Relaxed) as f64 / 1e6;
        let _ = writeln!(out, "{name}_sum{{{label}}} {sum}\n{name}_count{{{label}}} {total}");
    }
}

/// What the mock engine counts.
#[derive(Debug, Default)]
pub(crate) struct MockMetrics {
    pub(crate) first_token: Histogram,
    pub(crate) between_tokens: Histogram,
    pub(crate) whole: Histogram,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    first_tokens: AtomicU64,
}

impl MockMetrics {
    /// Counts a request whose prompt was computed.
    pub(crate) fn on_first_token(&self, prompt_tokens: usize, cached_tokens: usize) {
        self.prompt_tokens.fetch_add(prompt_tokens as u64, Ordering::Relaxed);
        self.cached_tokens.fetch_add(cached_tokens as u64, Ordering::Relaxed);
        self.first_tokens.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the part of all prompt tokens that were cached; `None`: no prompt was computed yet.
    pub(crate) fn hit_rate(&self) -> Option<f32> {
        let prompts = self.prompt_tokens.load(Ordering::Relaxed);
        (prompts > 0).then(|| self.cached_tokens.load(Ordering::Relaxed) as f32 / prompts as f32)
    }

    /// Returns the exposition of a scrape.
    pub(crate) fn text(&self, model: &str, cores: &[Core]) -> String {
        let backend = cores.first().map_or(Backend::Vllm, |core| core.options.backend);
        let prefix = match backend {
            Backend::Vllm => "vllm",
            Backend::Sglang => "sglang",
            Backend::Trtllm => "trtllm",
        };
        let escaped = model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let label = format!("model_name=\"{escaped}\"");
        let mut out = String::new();
        let mut put = |name: &str, kind: &str, value: f64| {
            let _ = writeln!(out, "# TYPE {prefix}:{name} {kind}\n{prefix}:{name}{{{label}}} {value}");
        };
        let (running, waiting) = cores.iter().map(Core::counts).fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        if backend == Backend::Sglang {
            put("num_running_reqs", "gauge", running as f64);
            put("num_queue_reqs", "gauge", waiting as f64);
            put("cache_hit_rate", "gauge", f64::from(self.hit_rate().unwrap_or(0.0)));
            put("num_requests_total", "counter", self.first_tokens.load(Ordering::Relaxed) as f64);
        } else {
            let (used, blocks) = cores
                .iter()
                .map(|core| (core.pool.used(), core.pool.blocks()))
                .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
            let usage = used as f64 / blocks.max(1) as f64;
            put("num_requests_running", "gauge", running as f64);
            put("num_requests_waiting", "gauge", waiting as f64);
            put("kv_cache_usage_perc", "gauge", usage);
            put("gpu_cache_usage_perc", "gauge", usage);
            put("num_preemptions_total", "counter", cores.iter().map(|core| core.preemptions).sum::<u64>() as f64);
        }
        self.first_token.write(&mut out, &format!("{prefix}:time_to_first_token_seconds"), &label);
        self.between_tokens.write(&mut out, &format!("{prefix}:inter_token_latency_seconds"), &label);
        self.whole.write(&mut out, &format!("{prefix}:e2e_request_latency_seconds"), &label);
        out
    }
}
