"""The variables of a worker that no flag sets, beside the times of its end (`ShutdownTimes`)."""

from __future__ import annotations

from typing import Final

from dynamo.contract.config import WorkerConfig
from dynamo.settings.readers import switch, text
from dynamo.settings.table import declared, setting_of

ALLOW_DOWNLOAD: Final = setting_of(WorkerConfig, "allow_download")  # also for workers that parse no command line
VALIDATE: Final = declared(
    "DYN_BACKEND_VALIDATE", switch, "Also fail streams that say something after their last chunk", unset=False
)
MAP_BUILTIN_ERRORS: Final = declared(
    "DYN_BACKEND_MAP_BUILTIN_ERRORS",
    switch,
    "Python's own exceptions get the categories of 1.6.1; see [errors](errors.md)",
    unset=False,
)
SELF_HOST_METADATA: Final = declared(
    "DYN_SELF_HOST_METADATA",
    switch,
    "Offer the model's files on the status server, where there is one",
    unset=True,
)
RL_ENDPOINT: Final = declared(
    "DYN_RL_ENDPOINT", text, "Name of the reinforcement-learning directory endpoint", unset="rl"
)
