"""What an operator sets for pods of plain vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamo.picker.pods.listing import PodDefaults, PodRecord, read_pods
from dynamo.settings.readers import SettingReader, above_zero, integer, path, port_or_off, text
from dynamo.settings.table import setting

_GROUP: Final = "pods of plain vLLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """Which pods there are, and what is the same for all of them."""

    # fmt: off
    pods: tuple[PodRecord, ...] = setting((), "DYN_PICKER_PODS",
        SettingReader(read_pods, show=lambda pods: ",".join(map(str, pods)), metavar="[ROLE@]HOST:PORT,..."),
        "Pods of plain `vllm serve`, which the picker follows in place of workers with cards. The role is `prefill` or "
        "`decode`; without one a pod does both", flag="--pods", group=_GROUP)
    file: Path | None = setting(None, "DYN_PICKER_PODS_FILE", path,
        "A file of such pods (YAML or JSON); it is read again when it changes", flag="--pods-file", group=_GROUP)
    selector: str | None = setting(None, "DYN_PICKER_POD_SELECTOR", text,
        "In Kubernetes: the pods with these labels, in the namespace `POD_NAMESPACE`, such as `app=vllm`",
        flag="--pod-selector", group=_GROUP)
    role_label: str = setting("llm-d.ai/role", "DYN_PICKER_POD_ROLE_LABEL", text,
        "In Kubernetes: the label with the role of a pod; any value but `prefill` and `decode`: both",
        flag="--pod-role-label", group=_GROUP)
    model_path: str | None = setting(None, "DYN_PICKER_POD_MODEL_PATH", text,
        "The model's tokenizer and template: a directory, or `hub:NAME`. Unset: what a pod names as the root of its model",
        flag="--pod-model-path", group=_GROUP)
    card: Path | None = setting(None, "DYN_PICKER_POD_CARD", path,
        "A model card (JSON) in place of the model path, such as the `card_json` of a worker's record",
        flag="--pod-card", group=_GROUP)
    block_size: int | None = setting(None, "DYN_KV_CACHE_BLOCK_SIZE", integer(1),
        "Tokens per KV block. Unset: as each pod's `/metrics` have it", flag="--pod-block-size", group=_GROUP)
    event_port: int | None = setting(5557, "DYN_EPP_KV_EVENT_PORT", port_or_off,
        "Where pods publish KV events (`--kv-events-config`); 0: they do not, and the picker goes by what it sent",
        flag="--pod-event-port", group=_GROUP)
    event_topic: str = setting("", "DYN_EPP_KV_EVENT_TOPIC", text,
        "The topic of these events; empty: all", flag="--pod-event-topic", group=_GROUP)
    replay_port: int | None = setting(None, "DYN_EPP_REPLAY_PORT", port_or_off,
        "Where pods send events again that were missed (`replay_endpoint`)", flag="--pod-replay-port", group=_GROUP)
    poll_seconds: float = setting(1.0, "DYN_PICKER_POD_POLL_SECS", above_zero(),
        "How often `/health` and `/metrics` of each pod are read", flag="--pod-poll-seconds", group=_GROUP)
    timeout_seconds: float = setting(2.0, "DYN_PICKER_POD_TIMEOUT_SECS", above_zero(),
        "How long a pod may take to answer that; two failures in a row, or one refused connection, take a pod out of the choice",
        flag="--pod-timeout-seconds", group=_GROUP)
    waiting_limit: int | None = setting(None, "DYN_PICKER_POD_WAITING_LIMIT", integer(0),
        "A pod in which more requests wait than this gets no further one; when all of a model do, 429",
        flag="--pod-waiting-limit", group=_GROUP)
    # fmt: on

    @property
    def are_followed(self) -> bool:
        """Whether there is a list of pods."""
        return bool(self.pods) or self.file is not None or self.selector is not None

    @property
    def defaults(self) -> PodDefaults:
        """What holds for a pod whose record does not have its own."""
        return PodDefaults(self.event_port, self.replay_port)

    def check(self) -> None:
        """Raise ValueError for what does not go together."""
        lists = [
            name
            for name, given in (("--pods", self.pods), ("--pods-file", self.file), ("--pod-selector", self.selector))
            if given
        ]
        if len(lists) > 1:
            raise ValueError(f"{' and '.join(lists)} both name the pods: give one of them")
        if self.card is not None and self.model_path is not None:
            raise ValueError("--pod-card and --pod-model-path both name the tokenizer: give one of them")
