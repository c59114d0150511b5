"""What an operator sets for recordings and about the requests that failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dynamo.settings.readers import integer, mebibytes, switch
from dynamo.settings.table import setting

MIB: Final = 1024 * 1024
_GROUP: Final = "recording"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSettings:
    """Bounds on what is kept of requests. Sizes in bytes."""

    # fmt: off
    keep_failed: int = setting(200, "DYN_KEEP_FAILED", integer(0),
        "How many [failed requests](recording.md#failed-requests) are kept in memory, each as a bundle: what was asked, where "
        "it went, what it met. 0: none; failures are only counted", flag="--keep-failed", group=_GROUP)
    keep_failed_bytes: int = setting(8 * MIB, "DYN_KEEP_FAILED_MB", mebibytes,
        "How much memory they may take")
    keep_failed_content: bool = setting(False, "DYN_KEEP_FAILED_CONTENT", switch,
        "Keep their prompts and media, too. Otherwise only the parameters are kept, and the lengths of texts",
        flag="--keep-failed-content", group=_GROUP)
    # fmt: on
