"""Output formats: how families of models write tool calls and reasoning, as a table and few machines."""

from dynamo.text.formats.reasoning import REASONING_FORMATS, ReasoningFormat
from dynamo.text.formats.scanner import TextMachine
from dynamo.text.formats.tool_set import ToolSet
from dynamo.text.formats.tools import TOOL_FORMATS, ToolFormat

__all__ = ["REASONING_FORMATS", "TOOL_FORMATS", "ReasoningFormat", "TextMachine", "ToolFormat", "ToolSet"]
