"""The file of `--router-policy-config`: policy classes for all models or for some, named selectors, router settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Final, Literal, TypeVar

import msgspec

from dynamo.placement.queueing.profile import InvalidPolicy, PolicyClass, PolicyProfile, UncachedIslBucket, check_name

T = TypeVar("T")
BUILT_IN_SELECTOR: Final = "default"
MAX_NODES: Final = 20_000  # values of a file
MAX_LEVELS: Final = 50  # of maps and lists within each other
SelectorRole = Literal["aggregated", "prefill", "decode", "encode"]
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`")


class RouterFileSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of the `router` key. None: the file does not give it, so flag, variable and default decide."""

    host_cache_hit_weight: float | None = None
    disk_cache_hit_weight: float | None = None
    use_kv_events: bool | None = None
    router_replica_sync: bool | None = None
    router_track_active_blocks: bool | None = None
    router_track_output_blocks: bool | None = None
    router_assume_kv_reuse: bool | None = None
    router_track_prefill_tokens: bool | None = None
    router_tracking_hash: str | None = None
    router_tracking_key_file: str | None = None
    router_tracking_key_id: str | None = None
    router_prefill_load_model: str | None = None
    router_ttl_secs: float | None = None
    router_approximate_cache_policy: str | None = None
    router_event_threads: int | None = None
    use_remote_indexer: bool | None = None
    serve_indexer: bool | None = None
    shared_cache_type: str | None = None
    router_predicted_ttl_secs: float | None = None
    enable_session_prefix_index: bool | None = None


class Selector(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named way to choose a worker: a type of policy and its parameters."""

    name: str
    type: str
    parameters: dict[str, object] = {}


class _Selection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    aggregated: str | None = None
    prefill: str | None = None
    decode: str | None = None
    encode: str | None = None
    instances: tuple[Selector, ...] = ()


class _Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    default_policy_family: str
    uncached_isl_buckets: tuple[UncachedIslBucket, ...]
    policy_classes: tuple[PolicyClass, ...]


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    router: RouterFileSettings | None = None
    default_policy_family: str | None = None
    uncached_isl_buckets: tuple[UncachedIslBucket, ...] | None = None
    policy_classes: tuple[PolicyClass, ...] | None = None
    models: dict[str, object] = {}
    worker_selection: _Selection | None = None
    request_classifier: object = None


class PolicyFile:
    """The content of a policy file. Immutable."""

    __slots__ = ("_models", "_named", "_root", "_selectors", "router")

    def __init__(
        self,
        *,
        root: PolicyProfile | None = None,
        models: Mapping[str, PolicyProfile] | None = None,
        selectors: Mapping[SelectorRole, Selector] | None = None,
        named: Mapping[str, Selector] | None = None,
        router: RouterFileSettings | None = None,
    ) -> None:
        self._root, self._models, self._selectors = root, dict(models or {}), dict(selectors or {})
        self._named = dict(named or {})
        self.router = router or RouterFileSettings()

    def profile(self, model: str) -> PolicyProfile | None:
        """Return the profile of a model: its own, or the one of the file's root; None where the file has neither.

        A profile inherits nothing from another one.
        """
        return self._models.get(model, self._root)

    def selector(self, role: SelectorRole) -> Selector | None:
        """Return the selector of a role; None: the built-in one."""
        return self._selectors.get(role)

    def named_selector(self, name: str) -> Selector | None:
        """Return a selector by its name, whatever role it has."""
        return self._named.get(name)

    @property
    def selector_names(self) -> tuple[str, ...]:
        """The names of all selectors."""
        return tuple(self._named)


def read_policy_file(text: str) -> PolicyFile:
    """Read YAML (or JSON, which is YAML). Raises InvalidPolicy, which names the key, for anything that cannot be meant."""
    document = _parsed(text)
    if not isinstance(document, dict):
        raise InvalidPolicy("policy file", f"must be a map at the top, got {type(document).__name__}")
    found = _converted(document, _Document)
    if document.get("request_classifier") is not None:
        raise InvalidPolicy("request_classifier", "request classifiers are not built in this version")
    if not (found.models or any(value is not None for key, value in document.items() if key != "models")):
        raise InvalidPolicy("policy file", "gives none of router, policy classes, models and worker_selection")
    selection = found.worker_selection or _Selection()
    return PolicyFile(
        root=_root(found),
        models={name: _profile(each, f"models.{name}") for name, each in found.models.items()},
        selectors=_selectors(selection, named := _named(selection)),
        named=named,
        router=found.router,
    )


def _parsed(text: str) -> object:
    import yaml

    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)  # the one in C is not in every build
        node = loader.get_single_node()
        _check_nodes(node, "", count(1))
        return {} if node is None else loader.construct_document(node)
    except RecursionError as error:
        raise InvalidPolicy("policy file", f"has more than {MAX_LEVELS} levels, or holds itself") from error
    except (yaml.YAMLError, ValueError, AttributeError) as error:  # the last two: of values such as `!!int x`
        if isinstance(error, InvalidPolicy):
            raise
        raise InvalidPolicy("policy file", f"is not valid YAML: {error}") from error


def _check_nodes(node: object, path: str, numbers: Iterator[int], level: int = 0) -> None:
    """Raise InvalidPolicy for a key that a map gives twice, as YAML readers silently take the last one, and for a file that
    its references (`*name`) make larger or deeper than any that is meant.
    """
    import yaml

    if next(numbers) > MAX_NODES:
        raise InvalidPolicy("policy file", f"has more than {MAX_NODES} values, each reference counted in full")
    if level > MAX_LEVELS:
        raise InvalidPolicy("policy file", f"has more than {MAX_LEVELS} levels, or holds itself")
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                raise InvalidPolicy(f"{path}{name}", "is given twice")
            seen.add(name)
            _check_nodes(value, f"{path}{name}.", numbers, level + 1)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            _check_nodes(value, f"{path.removesuffix('.')}[{number}].", numbers, level + 1)


def _converted(value: object, form: type[T], path: str = "") -> T:
    """Return `value` as a `form`. Raises InvalidPolicy; `path` is where the value stands."""
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at ")
        place = (path + place.strip("`").removeprefix("$")).removeprefix(".")
        if unknown := _UNKNOWN.match(problem):
            problem = f"unknown key {unknown[1]!r}"
        raise InvalidPolicy(place or "policy file", problem[:1].lower() + problem[1:]) from error


def _root(found: _Document) -> PolicyProfile | None:
    given = (found.default_policy_family, found.uncached_isl_buckets, found.policy_classes)
    match given:
        case (None, None, None):
            return None
        case (str(family), tuple(buckets), tuple(classes)):
            return PolicyProfile(classes, buckets, family)
        case _:
            raise InvalidPolicy(
                "policy file", "default_policy_family, uncached_isl_buckets and policy_classes come all or not at all"
            )


def _profile(value: object, path: str) -> PolicyProfile:
    found = _converted(value, _Profile, path)
    return PolicyProfile(found.policy_classes, found.uncached_isl_buckets, found.default_policy_family, path=f"{path}.")


def _named(found: _Selection) -> dict[str, Selector]:
    named: dict[str, Selector] = {}
    for number, each in enumerate(found.instances):
        path = f"worker_selection.instances[{number}].name"
        check_name(each.name, path)
        if each.name == BUILT_IN_SELECTOR:
            raise InvalidPolicy(path, f"{BUILT_IN_SELECTOR!r} is the built-in selector")
        if each.name in named:
            raise InvalidPolicy(path, f"{each.name!r} is given twice")
        named[each.name] = each
    return named


def _selectors(found: _Selection, named: Mapping[str, Selector]) -> dict[SelectorRole, Selector]:
    roles: dict[SelectorRole, str | None] = {
        "aggregated": found.aggregated,
        "prefill": found.prefill,
        "decode": found.decode,
        "encode": found.encode,
    }
    chosen: dict[SelectorRole, Selector] = {}
    for role, name in roles.items():
        if name is None or name == BUILT_IN_SELECTOR:
            continue
        if name not in named:
            raise InvalidPolicy(f"worker_selection.{role}", f"no instance is called {name!r}")
        chosen[role] = named[name]
    return chosen
