"""The flags of the native frontend 1.6.1 that mean nothing here: refused by name, or accepted without an effect."""

from __future__ import annotations

from typing import Final

from dynamo.settings.readers import one_of, switch, text
from dynamo.settings.table import Setting, Status, declared

__all__ = ["INERT", "ONE_VALUE", "REFUSED"]


def _flags(status: Status, with_value: str, switches: str) -> tuple[Setting, ...]:
    return (
        *(declared(None, text, "", flag=name, status=status) for name in with_value.split()),
        *(declared(None, switch, "", flag=name, status=status) for name in switches.split()),
    )


# What they switch on does not exist yet. Naming one is an error: a flag that is silently ignored is a trap.
REFUSED: Final = (
    declared(None, switch, "", flag=("--interactive", "-i"), status=Status.REFUSED),
    *_flags(
        Status.REFUSED,
        """
    --model-name --model-path --grpc-metrics-port --frontend-route-extension
    --router-prefill-load-model
    --router-tracking-key-file --router-tracking-key-id --tool-call-parser --reasoning-parser
    """,
        """
    --serve-indexer --use-remote-indexer --kserve-grpc-server
    --enable-session-prefix-index
    """,
    ),
)

# Accepted, because leaving them out of a script would change nothing: the kv router has one thread, and no shared cache; the `--ai?-...` ones tune the load model that `--router-prefill-load-model ais` names, under both of its
# names.
INERT: Final = _flags(
    Status.INERT,
    """
    --router-event-threads --shared-cache-multiplier
    --aic-attention-dp-size --aic-backend --aic-backend-version --aic-model-path --aic-moe-ep-size --aic-moe-tp-size
    --aic-mtp-seed --aic-nextn --aic-nextn-accept-rates --aic-perf-config --aic-system --aic-tp-size
    --ais-attention-dp-size --ais-backend --ais-backend-version --ais-model-path --ais-moe-ep-size --ais-moe-tp-size
    --ais-mtp-seed --ais-nextn --ais-nextn-accept-rates --ais-perf-config --ais-system --ais-tp-size
    """,
    """
    --dyn-debug-perf --tokenizer-fallback --trust-remote-code
    """,
)

ONE_VALUE: Final = (
    declared(None, one_of("dynamo"), "`dynamo` is the only one", flag="--dyn-chat-processor", group="requests"),
    declared(None, one_of("default"), "`default` is the only one", flag="--tokenizer", group="requests"),
    declared(None, one_of("public-xxh3-v1"), "`public-xxh3-v1` is the only one", flag="--router-tracking-hash",
             group="kv router"),
    declared(None, one_of("none"), "`none` is the only one", flag="--shared-cache-type", group="kv router"),
)  # fmt: skip
