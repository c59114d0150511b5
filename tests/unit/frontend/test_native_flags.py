"""Every flag of the native frontend 1.6.1 is served, harmless, or refused in words."""

from __future__ import annotations

import argparse

import pytest

from dynamo.frontend import args
from dynamo.frontend.settings import FrontendSettings

FLAGS = """
--active-prefill-tokens-threshold-frac --router-conditional-disagg-config --router-session-affinity-mode
--router-tracking-key-id
--active-decode-blocks-threshold --active-prefill-tokens-threshold --aic-attention-dp-size --aic-backend
--aic-backend-version --aic-model-path --aic-moe-ep-size --aic-moe-tp-size --aic-mtp-seed --aic-nextn
--aic-nextn-accept-rates --aic-perf-config --aic-system --aic-tp-size --ais-attention-dp-size --ais-backend
--ais-backend-version --ais-model-path --ais-moe-ep-size --ais-moe-tp-size --ais-mtp-seed --ais-nextn
--ais-nextn-accept-rates --ais-perf-config --ais-system --ais-tp-size --assume-kv-reuse --discovery-backend
--dump-config-to --dyn-chat-processor --dyn-debug-perf --dyn-preprocess-workers --enable-anthropic-api
--enable-session-prefix-index --enable-streaming-reasoning-dispatch --enable-streaming-tool-dispatch
--enforce-disagg --event-plane --exclude-tools-when-tool-choice-none --frontend-route-extension
--grpc-metrics-port --http-host --http-port --interactive --kserve-grpc-server --kv-cache-block-size
--kv-events --load-aware --metrics-prefix --migration-limit --migration-max-seq-len --model-name --model-path
--namespace --namespace-prefix --nats-tls-ca-cert-path --nats-tls-client-cert-path --nats-tls-client-key-path
--nats-tls-insecure --reasoning-field-name --request-plane --response-plane --router-approximate-cache-policy
--router-assume-kv-reuse --router-conditional-disagg --router-decode-active-request-weight
--router-decode-policy --router-disk-cache-hit-weight --router-event-threads --router-host-cache-hit-weight
--router-kv-events --router-kv-overlap-score-credit --router-kv-overlap-score-credit-decay
--router-min-initial-workers --router-mode --router-policy-config --router-predicted-ttl-secs
--router-prefill-load-model --router-prefill-load-scale --router-prefill-policy --router-queue-policy
--router-queue-threshold --router-replica-sync --router-session-affinity-ttl-secs --router-temperature
--router-track-active-blocks --router-track-output-blocks --router-track-prefill-tokens --router-tracking-hash
--router-tracking-key-file --router-ttl-secs --serve-indexer --shared-cache-multiplier --shared-cache-type
--strip-anthropic-preamble --tcp-tls-ca-cert-path --tcp-tls-cert-path --tcp-tls-client-ca-cert-path
--tcp-tls-client-cert-path --tcp-tls-client-key-path --tcp-tls-key-path --tls-cert-path
--tls-client-ca-cert-path --tls-key-path --tokenizer --tokenizer-fallback --track-active-blocks
--track-output-blocks --trust-remote-code --use-remote-indexer --version
"""  # `--aic-*`: the names that 1.6 still reads for `--ais-*`
NATIVE = FLAGS.split()


def actions() -> dict[str, argparse.Action]:
    parser = args._build(FrontendSettings())
    return {option: action for action in parser._actions for option in action.option_strings}


def test_no_native_flag_is_unknown() -> None:
    assert len(NATIVE) == len(set(NATIVE)) == 115
    assert [flag for flag in NATIVE if flag not in actions()] == []


@pytest.mark.parametrize("flag", [flag for flag in NATIVE if isinstance(actions()[flag], args._NotInThisVersion)])
def test_a_native_flag_that_is_not_built_is_refused_by_name(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [flag] if actions()[flag].nargs == 0 else [flag, "1"]
    with pytest.raises(SystemExit) as left:
        args.parse_args(given, env={})
    assert left.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {flag} is not in this version\n")


@pytest.mark.parametrize("flag", [flag for flag in NATIVE if isinstance(actions()[flag], args._Inert)])
def test_a_native_flag_without_an_effect_changes_nothing(flag: str) -> None:
    action = actions()[flag]
    given = [flag] if action.nargs == 0 else [flag, str(next(iter(action.choices or ["1"])))]
    assert args.parse_args(given, env={}) == args.parse_args([], env={})
