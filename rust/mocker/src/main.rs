//! Serves with mock engines, several in one process where asked for. See `docs/mocker.md`.

mod args;
mod engine;
mod metrics;
mod options;
mod output;
mod scheduler;
#[cfg(test)]
mod tests;
mod timing;

use std::sync::Arc;

use clap::Parser;
use dynamo_backend_common::{LLMEngine, run_many};

use crate::args::Args;
use crate::engine::MockEngine;

fn main() -> anyhow::Result<()> {
    let fleet = match Args::parse().fleet() {
        Ok(fleet) => fleet,
        Err(mistake) => {
            eprintln!("Error: {mistake}");
            std::process::exit(2);
        }
    };
    let workers = fleet.workers.into_iter().map(|worker| {
        let engine: Arc<dyn LLMEngine> = Arc::new(MockEngine::new(worker.model, worker.options, worker.seed));
        (engine, worker.config)
    });
    run_many(workers.collect(), fleet.stagger)
}
