//! How long a pass takes: polynomials by default, or fixed times.
//!
//! ```text
//! prefill(n) = 4.209989e-07 n^2 + 1.518344e-02 n + 16.50142 ms     n: prompt tokens that the pass computes
//! decode(p)  = max(1, -25.74 p^2 + 54.01 p + 5.74) ms              p: the part of the cache that decoding requests use
//! ```

const LEAST_DECODE_MS: f64 = 1.0;

/// How long the work of one pass takes, in ms, before any speedup.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum Timing {
    /// What one model of 8 billion parameters takes on one accelerator of its time.
    #[default]
    Polynomial,
    /// The same times whatever the pass does: one for a pass with prompt tokens, and one for a pass that decodes.
    Fixed { prefill_ms: f64, decode_ms: f64 },
}

impl Timing {
    /// Returns the time to compute prompt tokens of `requests`, each from `mean_prefix` up to `mean_input` tokens.
    pub(crate) fn prefill_ms(self, requests: usize, mean_input: usize, mean_prefix: usize) -> f64 {
        match self {
            Self::Fixed { prefill_ms, .. } => prefill_ms,
            Self::Polynomial => {
                let tokens = (requests * (mean_input - mean_prefix)) as f64;
                if tokens == 0.0 { 0.0 } else { 4.209989e-07 * tokens * tokens + 1.518344e-02 * tokens + 16.50142 }
            }
        }
    }

    /// Returns the time of one decode step over `active` tokens of context in a cache of `total` tokens.
    pub(crate) fn decode_ms(self, active: usize, total: usize) -> f64 {
        match self {
            Self::Fixed { decode_ms, .. } => decode_ms,
            Self::Polynomial => {
                let part = (active as f64 / total as f64).min(1.0);
                (-25.74 * part * part + 54.01 * part + 5.74).max(LEAST_DECODE_MS)
            }
        }
    }
}
