//! The schedules of the native mocker, and the contract.

use dynamo_backend_common::testing::{mock_context, run_conformance};
use dynamo_backend_common::{FinishReason, LLMEngine, PreprocessedRequest, StopConditions};
use futures::StreamExt;
use serde_json::{Value, json};

use crate::engine::MockEngine;
use crate::options::read_configuration;
use crate::output::Output;
use crate::scheduler::{Core, PassResult, Wanted};

fn core(engine: Value) -> Core {
    let mut engine = engine;
    for (name, value) in [("block_size", json!(16)), ("num_gpu_blocks", json!(4096))] {
        engine.as_object_mut().expect("an object").entry(name).or_insert(value);
    }
    let options = read_configuration(&json!({"engine": engine})).expect("options");
    Core::new(options.scheduler, options.timing, 42)
}

fn wanted(tokens: std::ops::Range<u32>, max_output: usize) -> Wanted {
    let seed = tokens.start ^ tokens.end << 16;
    Wanted {
        token_ids: tokens.collect(),
        max_output,
        output: Output::new(u64::from(seed) << 32 | max_output as u64, max_output, None, None),
        lora_name: None,
        cache_salt: None,
        prompt_arrives: false,
    }
}

/// Runs a core to its end; `arrivals` are (ms, prompt, tokens) in the order of time. Returns (request, ms) of each token.
fn timeline(core: &mut Core, arrivals: &[(f64, std::ops::Range<u32>, usize)]) -> Vec<(u64, f64)> {
    let (mut now, mut next, mut seen) = (0.0, 0, Vec::new());
    loop {
        while next < arrivals.len() && arrivals[next].0 <= now {
            let (_, prompt, count) = arrivals[next].clone();
            core.submit(next as u64, wanted(prompt, count));
            next += 1;
        }
        match core.begin_pass() {
            Some(duration) => {
                now += duration;
                let result = core.end_pass();
                seen.extend(result.emitted.iter().flat_map(|one| one.tokens().iter().map(|_| (one.number, now))));
            }
            None if next < arrivals.len() => now = arrivals[next].0,
            None => return seen,
        }
    }
}

fn near(found: f64, expected: f64) {
    assert!((found - expected).abs() < 0.001, "{found} is not {expected}");
}

#[test]
fn times_are_those_of_the_native_mocker() {
    let one = timeline(&mut core(json!({})), &[(0.0, 0..562, 4)]);
    near(one[0].1, 25.1675);
    near(one[1].1 - one[0].1, 6.2021);
    near(one[3].1, 43.776);
    let both = timeline(&mut core(json!({})), &[(0.0, 0..562, 1), (0.0, 1000..1200, 1)]);
    near(both[0].1, 28.316);
    near(both[1].1, 28.316);
    let later = timeline(&mut core(json!({})), &[(0.0, 0..562, 5), (40.0, 1000..1800, 1)]);
    near(later.iter().find(|(number, _)| *number == 1).expect("a token").1, 43.776 + 38.898 - 3.776);
    let again = timeline(&mut core(json!({})), &[(0.0, 0..560, 1), (200.0, 0..560, 1)]);
    near(again[1].1 - 200.0, 16.744);
    let long = timeline(&mut core(json!({})), &[(0.0, 0..20_000, 1)]);
    near(long[0].1, 415.183);
    let scaled = json!({"speedup_ratio": 0.5, "decode_speedup_ratio": 2});
    let slow = timeline(&mut core(scaled), &[(0.0, 0..562, 2)]);
    near(slow[0].1, 50.335);
    near(slow[1].1 - slow[0].1, 6.202);
    for backend in ["sglang", "trtllm"] {
        let other = timeline(&mut core(json!({"backend": backend})), &[(0.0, 0..562, 2)]);
        near(other[0].1, 25.167);
        near(other[1].1 - other[0].1, 6.202);
    }
}

#[test]
fn every_request_ends_and_gives_its_blocks_back_in_a_cache_that_is_too_small() {
    for engine in [
        json!({"num_gpu_blocks": 40}),
        json!({"num_gpu_blocks": 40, "preemption_mode": "fifo"}),
        json!({"num_gpu_blocks": 40, "max_num_batched_tokens": 50, "enable_chunked_prefill": false}),
        json!({"num_gpu_blocks": 40, "aic_nextn": 3}),
        json!({"num_gpu_blocks": 40, "backend": "trtllm"}),
        json!({"num_gpu_blocks": 40, "backend": "sglang", "sglang": {"chunked_prefill_size": 64}}),
        json!({"num_gpu_blocks": 40, "backend": "sglang", "sglang": {"schedule_policy": "lpm"}}),
        json!({"num_gpu_blocks": 40, "enable_prefix_caching": false}),
    ] {
        let mut core = core(engine.clone());
        for number in 0..30 {
            core.submit(number, wanted(number as u32 % 7 * 1000..number as u32 % 7 * 1000 + 100, 60));
        }
        core.submit(99, wanted(0..5000, 1));
        let (mut counts, mut rejected, mut passes) = ([0; 30], Vec::new(), 0);
        while core.begin_pass().is_some() {
            let PassResult { emitted, rejected: more, .. } = core.end_pass();
            emitted.iter().for_each(|one| counts[one.number as usize] += one.tokens().len());
            rejected.extend(more);
            passes += 1;
            assert!(passes < 100_000, "{engine}: no end");
        }
        assert_eq!(counts, [60; 30], "{engine}");
        assert_eq!((rejected, core.pool.used()), (vec![99], 0), "{engine}");
    }
}

#[test]
fn a_cancelled_request_gives_its_blocks_back_at_the_end_of_the_pass() {
    let mut core = core(json!({}));
    let ticket = core.submit(1, wanted(0..100, 10));
    core.begin_pass();
    core.cancel(ticket);
    assert!(core.pool.used() > 0);
    assert!(core.end_pass().emitted.is_empty());
    core.cancel(ticket);
    assert_eq!((core.pool.used(), core.has_work()), (0, false));
}

#[test]
fn passes_are_those_of_the_python_mocker() {
    let vectors: Value = serde_json::from_str(include_str!("../../mocker-vectors.json")).expect("JSON");
    for vector in vectors.as_array().expect("a list") {
        let options = read_configuration(&json!({"engine": vector["engine"]})).expect("options");
        let mut core = Core::new(options.scheduler, options.timing, 42);
        for (number, request) in vector["requests"].as_array().expect("a list").iter().enumerate() {
            let number_of = |name: &str| request[name].as_u64().expect("a number") as u32;
            let prompt = number_of("first")..number_of("first") + number_of("prompt");
            core.submit(number as u64, wanted(prompt, number_of("output") as usize));
        }
        let mut passes = Vec::new();
        while let Some(duration) = core.begin_pass() {
            let result = core.end_pass();
            let emitted: Vec<u64> = result.emitted.iter().map(|one| one.number).collect();
            passes.push((duration, json!([emitted, core.pool.used(), core.preemptions])));
        }
        let expected = vector["passes"].as_array().expect("a list");
        for (number, (found, expected)) in passes.iter().zip(expected).enumerate() {
            let expected = expected.as_array().expect("a list");
            near(found.0, expected[0].as_f64().expect("a time"));
            assert_eq!(found.1, json!(expected[1..]), "{}: pass {number}", vector["engine"]);
        }
        assert_eq!(passes.len(), expected.len(), "{}", vector["engine"]);
    }
}

#[tokio::test]
async fn a_clean_up_ends_every_stream_as_cancelled() {
    let options = read_configuration(&json!({"engine": {"speedup_ratio": 0.001}})).expect("options");
    let engine = MockEngine::new("m", options, 42);
    engine.start(1).await.expect("a start");
    let stop = StopConditions { max_tokens: Some(5), ..StopConditions::default() };
    let request = PreprocessedRequest::builder().token_ids(vec![1, 2, 3]).stop_conditions(stop).build();
    let mut streams = Vec::new();
    for _ in 0..3 {
        streams.push(engine.generate(request.clone(), mock_context().into()).await.expect("a stream"));
    }
    engine.cleanup().await.expect("a clean-up");
    for stream in streams {
        let items: Vec<_> = stream.collect().await;
        let last = items.last().expect("an item").as_ref().expect("a chunk");
        assert_eq!(last.finish_reason, Some(FinishReason::Cancelled));
    }
    assert!(engine.generate(request, mock_context().into()).await.is_err());
}

#[tokio::test]
async fn it_keeps_the_contract() {
    let options = read_configuration(&json!({"engine": {"speedup_ratio": 20}})).expect("options");
    run_conformance(|| MockEngine::new("m", options.clone(), 42)).await.expect("the contract");
}
