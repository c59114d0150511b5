"""`dynamo replay-policy`: several policies beside each other, on decisions that a router recorded."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from dynamo.errors import DynamoException, InvalidArgument
from dynamo.placement.kv_state import NO_MATCH, KvChoice, KvState
from dynamo.placement.policies.kv_policies import kv_policy, kv_policy_types
from dynamo.router.kv.decisions import DecisionRecord, RecordedPolicies, read_decisions, recompute
from dynamo.router.kv.settings import policy_name
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import each, switch
from dynamo.settings.table import read_settings, setting, settings_of

_DESCRIPTION: Final = """\
Reads decisions that a router recorded (--router-mode kv --router-decisions FILE), and has each of the named policies decide
them from the same figures. Each decision stands alone: had a policy been in force, later requests would have met other
workers. `dynamo bench replay --mode kv:POLICY` computes that, on a trace.
"""
_EPILOG: Final = """\
example:
  dynamo replay-policy decisions.jsonl --policy time --policy lmetric.py:LMetric
"""
FIRST_TOKEN_TERMS: Final = frozenset({"wait", "prefill", "room"})
"""Of a cost of the policy `time`: what passes before the first token of the request itself."""


@dataclass(slots=True)
class PolicyFigures:
    """What one policy would have done."""

    policy: str
    decisions: int = 0
    same: int = 0  # as the policy in force
    refused: int = 0  # it leaves no worker
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_ms: list[float] = field(
        default_factory=list
    )  # as the policy `time` estimates it, where it would have gone

    def add(self, record: DecisionRecord, choice: KvChoice | None, costs: KvChoice) -> None:
        """Take one decision; None: the policy leaves no worker. `costs`: those of the policy `time`."""
        self.decisions += 1
        self.prompt_tokens += record.state.request.prompt_tokens
        if choice is None:
            self.refused += 1
            return
        self.same += choice.rank == record.rank
        self.cached_tokens += _cached(record.state, choice)
        terms = next(each.terms for each in costs.candidates if each.rank == choice.rank)
        self.first_token_ms.append(sum(term.value for term in terms if term.name in FIRST_TOKEN_TERMS))

    def row(self) -> dict[str, float | str]:
        """Return the figures as a row of the report."""
        times = sorted(self.first_token_ms)
        return {
            "policy": self.policy,
            "decisions": self.decisions,
            "same_percent": 100 * self.same / max(1, self.decisions),
            "cached_percent": 100 * self.cached_tokens / max(1, self.prompt_tokens),
            "first_token_mean_ms": sum(times) / max(1, len(times)),
            "first_token_p99_ms": times[min(len(times) - 1, int(0.99 * len(times)))] if times else 0.0,
            "refused": self.refused,
        }


def _cached(state: KvState, choice: KvChoice) -> int:
    overlap = state.matches.get(choice.position, NO_MATCH).overlap
    return min(state.request.prompt_tokens, overlap.device * state.block_size)


@dataclass(frozen=True, slots=True)
class ReplayPolicyFlags:
    """Which policies to compare."""

    # fmt: off
    policies: tuple[str, ...] = setting((), None, each(policy_name(*kv_policy_types())), "A policy: a known name, or `FILE.py:CLASS`; repeated, all of them",
        flag="--policy", repeats=True)
    json: bool = setting(False, None, switch, "Write the rows as JSON", flag="--json", negative="")
    # fmt: on


def build_parser() -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser("dynamo replay-policy", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("file", metavar="FILE", help="recorded decisions")
    add_flags(parser, (made for _, made in settings_of(ReplayPolicyFlags)), {})
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = build_parser()
    parsed = parser.parse_args(argv)
    given = read_settings(ReplayPolicyFlags, {}, vars(parsed))
    if not given.policies:
        parser.error("name at least one --policy")
    try:
        with open(parsed.file, "rb") as file:
            rows = [figures.row() for figures in _compare(file, parsed.file, given.policies)]
    except (InvalidArgument, OSError) as error:
        parser.error(str(error))
    if given.json:
        print(json.dumps(rows))
    else:
        print(_table(rows))
    return 0


def _compare(lines: Iterable[bytes], source: str, names: Sequence[str]) -> list[PolicyFigures]:
    policies, estimate, made = (
        [(PolicyFigures(name), kv_policy(name)) for name in names],
        kv_policy("time"),
        RecordedPolicies(),
    )
    recorded: PolicyFigures | None = None
    for header, record in read_decisions(lines, source):
        costs = estimate.choose(record.state, record.draw, with_terms=True)
        if recorded is None:
            recorded = PolicyFigures(f"{header.policy} (recorded)")
        recorded.add(record, recompute(made.named(header.policy, header.parameters), record), costs)
        for figures, policy in policies:
            try:
                choice = recompute(policy, record)
            except DynamoException:  # it leaves no worker
                choice = None
            figures.add(record, choice, costs)
    return [*([] if recorded is None else [recorded]), *[figures for figures, _ in policies]]


_HEADS: Final = {
    "policy": "policy", "decisions": "decisions", "same_percent": "same %", "cached_percent": "cached %",
    "first_token_mean_ms": "first token ms", "first_token_p99_ms": "p99 ms", "refused": "refused",
}  # fmt: skip


def _table(rows: Sequence[dict[str, float | str]]) -> str:
    """Return the rows as text; estimates of first tokens are those of the policy `time`."""
    shown = [[f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    cells = [list(_HEADS.values()), *shown]
    widths = [max(len(line[at]) for line in cells) for at in range(len(_HEADS))]
    lines = [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
