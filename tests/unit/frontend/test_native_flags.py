"""Every flag of the native frontend 1.6.1 is served, harmless, or refused in words."""

from __future__ import annotations

import pytest

from dynamo.frontend import args
from dynamo.settings.table import Status
from support.cases import each_case

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


SERVED = {flag: made for made in args.flagged_settings() for flag in made.flags}
SERVED |= {flag: made for made in args.flagged_settings() if made.read.is_switch for flag in made.negative_flags}


def with_status(status: Status) -> list[str]:
    return [flag for flag in NATIVE if flag != "--version" and SERVED[flag].status is status]


def written(flag: str) -> list[str]:
    return [flag] if SERVED[flag].read.is_switch else [flag, "1"]


def test_no_native_flag_is_unknown() -> None:
    assert len(NATIVE) == len(set(NATIVE)) == 115
    parser = args.build_parser({})
    known = {option for action in parser._actions for option in action.option_strings}
    assert [flag for flag in NATIVE if flag not in known] == []


@each_case("flag", with_status(Status.REFUSED))
def test_a_native_flag_that_is_not_built_is_refused_by_name(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        args.parse_args(written(flag), env={})
    assert left.value.code == 2
    assert f"error: {flag} is not in this version (" in capsys.readouterr().err


@each_case("flag", with_status(Status.INERT))
def test_a_native_flag_without_an_effect_changes_nothing(flag: str) -> None:
    assert args.parse_args(written(flag), env={}) == args.parse_args([], env={})


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--dyn-chat-processor", "dynamo"),
        ("--router-tracking-hash", "public-xxh3-v1"),
        ("--shared-cache-type", "none"),
    ],
)
def test_a_native_flag_with_one_value_takes_that_one(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert args.parse_args([flag, value], env={}) == args.parse_args([], env={})
    with pytest.raises(SystemExit):
        args.parse_args([flag, "other"], env={})
    assert f"{flag}: 'other' is unknown; use one of {value}" in capsys.readouterr().err
