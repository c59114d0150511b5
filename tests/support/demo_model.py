"""The demonstration model as it is shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import dynamo.reference.demo

FILES: Final[Path] = dynamo.reference.demo.DIRECTORY
