"""The settings of the autoscale signals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dynamo.settings.readers import (
    above_zero,
    switch,
)
from dynamo.settings.table import setting

_CLUSTER: Final = "cluster"


@dataclass(frozen=True, kw_only=True)
class ScalingSettings:
    """Whether the load is measured, and how full workers are meant to be."""

    # fmt: off
    autoscale: bool = setting(False, "DYN_AUTOSCALE", switch,
        "Measure how full the workers of each model are, as [metrics and JSON for autoscalers](scaling.md)",
        flag="--autoscale", group=_CLUSTER)
    autoscale_target: float = setting(0.7, "DYN_AUTOSCALE_TARGET", above_zero(1),
        "How full workers are meant to be; 1: full", flag="--autoscale-target", group=_CLUSTER)
    # fmt: on
