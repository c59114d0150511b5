//! The sample engine in a program that has TLS.

use std::sync::Arc;

use sample_backend::SampleEngine;

fn main() -> anyhow::Result<()> {
    dynamo_backend_tls::install();
    let (engine, config) = SampleEngine::from_args(None)?;
    dynamo_backend_common::run(Arc::new(engine), config)
}
