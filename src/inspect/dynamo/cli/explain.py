"""`dynamo explain`: what was decided, why, and what another policy would have done."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from dynamo.errors import InvalidArgument
from dynamo.placement.kv_state import NO_MATCH, KvChoice, KvPolicy, KvState
from dynamo.placement.policies.kv_policies import kv_policy, kv_policy_types
from dynamo.protocol.request_ids import uuid_in
from dynamo.router.kv.decisions import DecisionHeader, DecisionRecord, RecordedPolicies, read_decisions, recompute
from dynamo.router.kv.explain import explain
from dynamo.router.kv.settings import policy_name
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import SettingReader, each, integer, placeholder, switch, text
from dynamo.settings.table import read_settings, setting, settings_of

_DESCRIPTION: Final = """\
Reads decisions that a frontend recorded (--router-mode kv --router-decisions FILE), computes each again, and reports whether
it comes out the same. With --policy it also reports what that policy would have decided from the same figures: one step
each, as the requests that were to come would have met other workers.
"""


_EPILOG: Final = """\
example:
  dynamo explain decisions.jsonl --policy default --set overlap_score_credit=0
"""


@dataclass(slots=True)
class Comparison:
    """A file of decisions, computed again."""

    decisions: int = 0
    equal: int = 0  # came out as recorded
    other: int = 0  # the other policy chooses another rank
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts, where they went
    other_cached_tokens: int = 0  # where the other policy would have sent them
    shadowed: int = 0  # decided by a shadow policy, too
    shadow_equal: int = 0  # of those, the ones whose shadow comes out as recorded
    shadow_other: int = 0  # the shadow chose another rank

    def add(self, record: DecisionRecord, again: KvChoice, asked: KvChoice | None) -> None:
        """Take one decision: as recorded, computed again, and of the other policy."""
        self.decisions += 1
        self.equal += again.rank == record.rank and again.cost == record.cost
        self.prompt_tokens += record.state.request.prompt_tokens
        self.cached_tokens += _cached(record.state, again)
        if asked is not None:
            self.other += asked.rank != record.rank
            self.other_cached_tokens += _cached(record.state, asked)

    def add_shadow(self, record: DecisionRecord, again: KvChoice) -> None:
        """Take what the shadow policy chose: as recorded, and computed again."""
        self.shadowed += 1
        self.shadow_equal += again.rank == record.shadow_rank and again.cost == record.shadow_cost
        self.shadow_other += record.shadow_rank != record.rank

    def lines(self, policy: str, asked: str | None) -> list[str]:
        """Return the lines of the report."""
        if not self.decisions:
            return ["The file holds no decision."]
        found = [
            f"{self.decisions} decisions of the policy {policy}: {self.equal} come out as recorded.",
            f"Cached where the requests went: {_share(self.cached_tokens, self.prompt_tokens)} of the prompt tokens.",
        ]
        if self.shadowed:
            found.append(
                f"The shadow policy chose another worker for {self.shadow_other} of {self.shadowed}; {self.shadow_equal} of its "
                "choices come out as recorded."
            )
        if asked is not None:
            found += [
                f"The policy {asked} would have chosen another worker for {self.other} "
                f"({_share(self.other, self.decisions)}).",
                f"Cached where it would have sent them: {_share(self.other_cached_tokens, self.prompt_tokens)}.",
            ]
        return found


def _cached(state: KvState, choice: KvChoice) -> int:
    overlap = state.matches.get(choice.position, NO_MATCH).overlap
    return min(state.request.prompt_tokens, overlap.device * state.block_size)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def _parameter(given: str) -> tuple[str, float]:
    name, equals, value = given.partition("=")
    if not equals:
        raise ValueError(f"{given}: write NAME=VALUE")
    try:
        return name, float(value)
    except ValueError:
        raise ValueError(f"{given}: {value!r} is not a number") from None


@dataclass(frozen=True, slots=True)
class ExplainFlags:
    """Which decisions to explain, and what to compare them with."""

    # fmt: off
    policy: str | None = setting(None, None, policy_name(*kv_policy_types()), "Compute the choice of this policy, too: "
        f"{', '.join(f'`{name}`' for name in kv_policy_types())}, or `FILE.py:CLASS`", flag="--policy")
    parameters: tuple[tuple[str, float], ...] = setting((), None, each(SettingReader(_parameter, metavar="NAME=VALUE")),
        "A parameter of that policy; repeated, all of them", flag="--set", repeats=True)
    request: str | None = setting(None, None, placeholder("ID", text), "Explain the decisions of this request",
        flag="--request")
    show: int = setting(0, None, integer(0), "Explain so many decisions, the first ones", flag="--show")
    json: bool = setting(False, None, switch, "Write JSON: the explained decisions, then the figures", flag="--json",
        negative="")
    # fmt: on


def build_parser() -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser("dynamo explain", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("file", metavar="FILE", help="recorded decisions")
    add_flags(parser, (made for _, made in settings_of(ExplainFlags)), {})
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 1 when a decision does not come out as recorded."""
    parser = build_parser()
    parsed = parser.parse_args(argv)
    given = read_settings(ExplainFlags, {}, vars(parsed))
    try:
        asked = None if given.policy is None else kv_policy(given.policy, dict(given.parameters))
        with open(parsed.file, "rb") as file:
            header, compared = _compare(read_decisions(file, parsed.file), asked, given)
    except (InvalidArgument, OSError) as error:
        parser.error(str(error))
    name = "" if header is None else header.policy
    if given.json:
        print(json.dumps({name: getattr(compared, name) for name in Comparison.__slots__}))
    else:
        print("\n".join(compared.lines(name, given.policy)))
    return 0 if (compared.equal, compared.shadow_equal) == (compared.decisions, compared.shadowed) else 1


def _compare(decisions: Any, asked: KvPolicy | None, given: ExplainFlags) -> tuple[DecisionHeader | None, Comparison]:
    compared, policies, header, shown = Comparison(), RecordedPolicies(), None, 0
    wanted = uuid_in(given.request) if given.request else None
    for header, record in decisions:
        policy = policies.named(header.policy, header.parameters)
        again = recompute(policy, record)
        other = None if asked is None else recompute(asked, record)
        compared.add(record, again, other)
        shadow = None
        if header.shadow is not None and record.shadow_rank is not None:
            shadow = policies.named(header.shadow, header.shadow_parameters)
            compared.add_shadow(record, recompute(shadow, record))
        if shown < given.show or uuid_in(record.request_id) == wanted:
            shown += 1
            _show(record, explain(policy, record.state, again), as_json=given.json)
            for beside in (shadow, asked):
                if beside is not None and (choice := recompute(beside, record)).rank != again.rank:
                    _show(record, explain(beside, record.state, choice), as_json=given.json)
    return header, compared


def _show(record: DecisionRecord, explained: Any, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"request_id": record.request_id, "model": record.model, **explained}))
        return
    print(f"{record.request_id} ({record.model}), {explained['policy']}: {explained['summary']}")
    for candidate in islice(explained["candidates"], 8):
        terms = ", ".join(f"{name} {value:.1f}" for name, value in candidate["terms"].items())
        mark = "*" if candidate["is_chosen"] else " "
        print(
            f"  {mark} {candidate['worker_id']:x}.{candidate['dp_rank']}  {candidate['cost']:.1f} {explained['unit']} = {terms};  cached "
            f"{candidate['cached_blocks']['device']}, requests {candidate['load']['requests']}, trust {candidate['trust']}"
        )


if __name__ == "__main__":
    sys.exit(main())
