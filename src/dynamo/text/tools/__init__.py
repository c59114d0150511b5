"""Tool calls that have to come, and the promises of every tool-call parser. The formats are in `text.formats`."""

from __future__ import annotations

from dynamo.text.tools.base import ToolParser
from dynamo.text.tools.forced import NamedCallParser, RequiredCallsParser

__all__ = ["NamedCallParser", "RequiredCallsParser", "ToolParser"]
