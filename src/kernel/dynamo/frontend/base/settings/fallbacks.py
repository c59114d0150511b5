"""The settings of fallbacks: which models serve in place of one that cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dynamo.settings.choices import FAILURE_KINDS
from dynamo.settings.readers import SettingReader, each, milliseconds, off_at_zero
from dynamo.settings.table import setting

_CLUSTER: Final = "cluster"


def _chain(given: str) -> tuple[str, ...]:
    name, _, rest = given.partition("=")
    chain = (name.strip(), *(other.strip() for other in rest.split(",")))
    if len(chain) < 2 or not all(map(str.isprintable, chain)) or not all(chain) or len(set(chain)) < len(chain):
        raise ValueError(f"{given!r} is no chain: write MODEL=OTHER,ANOTHER, each once")
    return chain


def _kinds(given: str) -> tuple[str, ...]:
    kinds = tuple(kind.strip() for kind in given.lower().split(","))
    if unknown := [kind for kind in kinds if kind not in FAILURE_KINDS]:
        raise ValueError(f"{unknown[0]!r} is unknown; use some of {','.join(FAILURE_KINDS)}")
    return kinds


def next_models(chain: Sequence[str], place: int, kind: str | None, kinds: Sequence[str]) -> Sequence[str]:
    """Return the models that may serve after the one at `place` failed with `kind`, in order; None: no failure for others."""
    return chain[place + 1 :] if kind is not None and kind in kinds else ()


@dataclass(frozen=True, kw_only=True)
class FallbackSettings:
    """The chains, and when the next model of one is tried."""

    # fmt: off
    fallbacks: tuple[tuple[str, ...], ...] = setting((), "DYN_FALLBACK", each(SettingReader(_chain, metavar="MODEL=OTHER,...")),
        "Models that serve [in place of one](upstream.md#fallbacks) that fails before its first token; may be repeated",
        flag="--fallback", dest="fallbacks", group=_CLUSTER, repeats=True)
    fallback_on: tuple[str, ...] = setting(FAILURE_KINDS, "DYN_FALLBACK_ON",
        SettingReader(_kinds, show=",".join, metavar="KINDS"), "Which failures count", flag="--fallback-on", group=_CLUSTER)
    fallback_after_seconds: float | None = setting(None, "DYN_FALLBACK_AFTER_MS", off_at_zero(milliseconds()),
        "Without a first token by then the next model serves; 0: never", flag="--fallback-after-ms",
        dest="fallback_after_seconds", group=_CLUSTER)
    # fmt: on
