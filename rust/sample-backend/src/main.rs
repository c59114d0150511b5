//! Serves the sample engine.

use std::sync::Arc;

use sample_backend::SampleEngine;

fn main() -> anyhow::Result<()> {
    let (engine, config) = SampleEngine::from_args(None)?;
    dynamo_backend_common::run(Arc::new(engine), config)
}
