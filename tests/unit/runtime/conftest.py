"""Fixtures of this folder."""

from support.fake_kubernetes import patient_requests
from support.spans import exported

__all__ = ["exported", "patient_requests"]
