"""User names and passwords that stand inside addresses, for everything that is shown: logs, dumps, pages."""

from __future__ import annotations

import re
from typing import Final

MASK: Final = "***"

_IN_ADDRESS: Final = re.compile(
    r"(?<=//)[^/?#\s,]*@"  # scheme://user:password@host, several with commas between them
    r"|(?<=//)[^/?#\s]*@"  # one whose password holds a comma
    r"|(?<![^\s,/=])[^\s,/@:]*:[^\s,/]*@"  # user:password@host:port, as settings take it without a scheme
)


def without_credentials(text: str) -> str:
    """Return the text with `***` in place of the users and passwords of its addresses."""
    return _IN_ADDRESS.sub(f"{MASK}@", text) if "@" in text else text
