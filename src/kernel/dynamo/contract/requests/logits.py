"""Logits processors: an engine-neutral description that an integration turns into its own hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

from dynamo.contract.modes import DisaggregationMode

_FORCED_SEQUENCE: Final = "forced_sequence"


@runtime_checkable
class BaseLogitsProcessor(Protocol):
    """Change the logits of one position of one request, whichever engine runs it. A processor with state belongs to one request only."""

    def __call__(self, input_ids: Sequence[int], logits: Any) -> None:
        """Edit `logits` (the engine's own tensor, one value per vocabulary entry) in place; return nothing.

        `input_ids` are the tokens so far.
        """


@dataclass(frozen=True)
class ForcedTokenSequenceSpec:
    """Generate exactly these tokens, then EOS. Plain data: it may cross a process boundary."""

    token_ids: tuple[int, ...]
    eos_token_id: int


@dataclass(frozen=True)
class PythonProcessorSpec:
    """A processor built in this process. `factory` is called once per request, so that state is never shared."""

    factory: Callable[[], BaseLogitsProcessor]


LogitsProcessorEntry = ForcedTokenSequenceSpec | PythonProcessorSpec


@dataclass(frozen=True)
class LogitsProcessorSpec:
    """The processors every request of an engine gets, in order."""

    entries: tuple[LogitsProcessorEntry, ...]
    generation_only: bool = True  # prefill and encode workers skip them: they produce no text of their own


def is_generation_stage(disaggregation_mode: DisaggregationMode) -> bool:
    """Return whether a worker of this role produces the text the client sees."""
    return disaggregation_mode in (DisaggregationMode.AGGREGATED, DisaggregationMode.DECODE)


def logits_processors_for_request(
    spec: LogitsProcessorSpec | None, *, disaggregation_mode: DisaggregationMode
) -> list[LogitsProcessorEntry]:
    """Return the entries that apply on a worker of this role; [] when there are none."""
    if spec is None or (spec.generation_only and not is_generation_stage(disaggregation_mode)):
        return []
    return list(spec.entries)


def serialize_logits_processor_entries(entries: Iterable[LogitsProcessorEntry]) -> list[dict[str, Any]]:
    """Return the JSON form. Raises TypeError for an entry that only exists in this process."""
    records = []
    for entry in entries:
        if not isinstance(entry, ForcedTokenSequenceSpec):
            raise TypeError(
                f"{type(entry).__name__} cannot leave its process; only ForcedTokenSequenceSpec can be serialised"
            )
        records.append(
            {"kind": _FORCED_SEQUENCE, "token_ids": list(entry.token_ids), "eos_token_id": entry.eos_token_id}
        )
    return records


def deserialize_logits_processor_entries(payload: Iterable[Mapping[str, Any]]) -> list[LogitsProcessorEntry]:
    """Read the JSON form back into equal objects. Raises ValueError for an unknown kind."""
    entries: list[LogitsProcessorEntry] = []
    for record in payload:
        kind = record.get("kind")
        if kind != _FORCED_SEQUENCE:
            raise ValueError(f"unknown logits processor kind {kind!r}; this version has {_FORCED_SEQUENCE!r}")
        token_ids = tuple(int(token_id) for token_id in record["token_ids"])
        entries.append(ForcedTokenSequenceSpec(token_ids, int(record["eos_token_id"])))
    return entries
