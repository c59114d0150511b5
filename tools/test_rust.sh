#!/usr/bin/env bash
# Tests the Rust SDK. Says why and leaves with 0 where there is no cargo, or no crates to build with.
# PYTHON: the interpreter with the development tools. RUST_TARGET: where cargo builds (default: rust/target).
# RUST_QUICK=1: format, clippy and unit tests only. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
DEBIAN=/usr/share/cargo/registry # where Debian's librust-*-dev packages put their crates, on every machine

if ! command -v cargo > /dev/null; then
  echo "test-rust: skipped, because there is no cargo; https://rustup.rs installs it"
  exit 0
fi
target=$(realpath -m "${RUST_TARGET:-rust/target}")
export CARGO_TARGET_DIR=$target
flags=()
if ! (cd rust && cargo fetch --quiet --config net.retry=0 2> /dev/null); then
  flags=(--offline --config 'source.crates-io.replace-with="debian"' --config "source.debian.directory=\"$DEBIAN\"")
  if ! (cd rust && cargo fetch --quiet "${flags[@]}"); then
    echo "test-rust: skipped, because crates.io cannot be reached and Debian's crates are not all there. They come with:"
    echo "  apt-get install librust-{anyhow,async-stream,async-trait,clap,futures,rmp-serde,serde,serde-derive}-dev \\"
    echo "    librust-{serde-json,tokio,tracing,tracing-subscriber}-dev"
    exit 0
  fi
fi
cd rust
cargo fmt --check
(cd .. && "${PYTHON:-python3}" -m pytest -q tests/unit/docs/test_rust_sources.py)
cargo clippy "${flags[@]}" --workspace --all-targets --all-features -- -D warnings
tls=dynamo-backend-tls # a workspace of its own: it needs OpenSSL, and the others do not
if (cd $tls && cargo fetch --quiet "${flags[@]}" 2> /dev/null) && pkg-config --exists openssl 2> /dev/null; then
  (cd $tls && cargo fmt --check && cargo clippy "${flags[@]}" --all-targets -- -D warnings && cargo test "${flags[@]}")
else
  echo "test-rust: $tls is skipped: OpenSSL or its crates are not there. They come with:"
  echo "  apt-get install libssl-dev pkg-config librust-openssl-dev librust-tokio-openssl-dev"
  tls=
fi
if [ -n "${RUST_QUICK:-}" ]; then
  cargo test "${flags[@]}" --workspace --all-features --lib --bins
  exit 0
fi
if [ -n "$tls" ]; then
  (cd $tls && cargo build "${flags[@]}" --examples)
  export RUST_TLS_ENGINE=$target/debug/examples/tls-sample
fi
cargo test "${flags[@]}" --workspace --all-features
cargo build "${flags[@]}" --workspace
cd ..
export RUST_SCRIPTED_ENGINE=$target/debug/scripted-engine RUST_SAMPLE_ENGINE=$target/debug/sample-backend
export RUST_MOCKER=$target/debug/mocker RUST_INTEROP_ENGINE=$target/debug/interop-engine
RUST_CARGO_FLAGS=$("${PYTHON:-python3}" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "${flags[@]}")
export RUST_CARGO_FLAGS
"${PYTHON:-python3}" -m pytest -q -rs tests/process/rust "$@"
RUST_WORKERS=all "${PYTHON:-python3}" -m pytest -q -rs tests/process/e2e tests/process/frontend/test_traces.py "$@"
for half in first second; do # a lost request goes on at a worker in the other language, both ways
  RUST_WORKERS=$half "${PYTHON:-python3}" -m pytest -q -rs tests/process/e2e/test_e2e_workers.py "$@"
done
"${PYTHON:-python3}" -m pytest -q -rs -m interop tests/long/interop -k "rust or Rust" "$@" # with DYNAMO_NATIVE_PYTHON
