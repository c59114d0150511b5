//! The whole `main` of a worker: logging, the runtime, and the status that a process ends with.

use std::sync::Arc;
use std::time::Duration;

use crate::config::WorkerConfig;
use crate::engine::LLMEngine;
use crate::error::{BackendError, DynamoError, ErrorType};
use crate::raw::{Engine, RawEngine};
use crate::settings;
use crate::telemetry;
use crate::worker::Worker;

/// Serves an engine until SIGTERM or SIGINT; the whole `main` of a worker.
///
/// Makes the runtime, starts logging by `DYN_LOG`, and returns after the clean-up. The error is what failed first; a `main`
/// that returns it ends with status 1 and the error as the last line on stderr.
///
/// An `InvalidArgument`, which another attempt would meet again, ends the process here with the same last line and status
/// 2: a supervisor can tell that a restart is of no use.
pub fn run(engine: Arc<dyn LLMEngine>, config: WorkerConfig) -> anyhow::Result<()> {
    serve_all(vec![(Engine::Tokens(engine), config)], Duration::ZERO)
}

/// Serves an engine that takes the bodies of requests; as [`run`].
pub fn run_raw(engine: Arc<dyn RawEngine>, config: WorkerConfig) -> anyhow::Result<()> {
    serve_all(vec![(Engine::Raw(engine), config)], Duration::ZERO)
}

/// Serves several engines in one process, each as a worker of its own, with a pause between two starts.
///
/// As [`run`]; a worker that fails leaves the others alone, and is reported when all have left. Fixed ports of the listeners
/// count up by one for each worker.
pub fn run_many(workers: Vec<(Arc<dyn LLMEngine>, WorkerConfig)>, pause: Duration) -> anyhow::Result<()> {
    serve_all(workers.into_iter().map(|(engine, config)| (Engine::Tokens(engine), config)).collect(), pause)
}

fn serve_all(workers: Vec<(Engine, WorkerConfig)>, pause: Duration) -> anyhow::Result<()> {
    crate::logging::init();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = settings::integer("DYN_RUNTIME_NUM_WORKER_THREADS", cores as i64, 1);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(usize::try_from(threads).unwrap_or(cores).min(1024))
        .thread_name("engine")
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(async {
        let worker = |(number, (engine, config))| {
            let worker = Worker::of(engine, config).numbered(u16::try_from(number).unwrap_or(u16::MAX));
            let stopping = worker.stopping();
            async move {
                let start = pause.saturating_mul(u32::try_from(number).unwrap_or(u32::MAX));
                worker.listen_to_signals()?;
                tokio::select! {
                    () = stopping => return Ok(()),
                    () = tokio::time::sleep(start) => {}
                }
                worker.run().await
            }
        };
        let outcomes = futures::future::join_all(workers.into_iter().enumerate().map(worker)).await;
        outcomes.into_iter().collect::<Result<(), DynamoError>>()
    });
    // Tasks that ignore their end must not hold the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    telemetry::close();
    if let Err(mistake) = &outcome
        && matches!(
            mistake.error_type(),
            ErrorType::InvalidArgument | ErrorType::Backend(BackendError::InvalidArgument)
        )
    {
        eprintln!("Error: {mistake}");
        std::process::exit(2);
    }
    Ok(outcome?)
}
