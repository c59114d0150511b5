"""How long a test waits for what must come: far longer than it takes, as the machine may do other things as well."""

from __future__ import annotations

import os
from typing import Final

PATIENCE_SECONDS: Final = float(os.environ.get("TEST_PATIENCE_SECONDS") or 60)
# What happens at once on an idle machine; without the promise under test it would take longer than this, or for ever.
PROMPT_SECONDS: Final = PATIENCE_SECONDS / 4
