"""`dynamo files`: repair a directory of files while no frontend serves it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dynamo.cli.usage import UsageError
from dynamo.errors import InvalidArgument
from dynamo.frontend.parts.batches.repair import repair
from dynamo.settings.command import CommandParser

_DESCRIPTION: Final = "Look after a directory of files (`dynamo serve --files-dir DIR`) while no frontend serves it."
_EPILOG: Final = """\
repair makes a row in the index for each stored file that has none, and a new index where it is gone. Nothing is deleted.
What only the index knew is lost with it: names, purposes, owners and batches. The files get their ids as names, the purpose
user_data, and the owner of --owner.

example:
  dynamo files repair /var/lib/dynamo/files
"""


def build_parser(env: Mapping[str, str]) -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser("dynamo files", description=_DESCRIPTION, epilog=_EPILOG)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=CommandParser)
    one = actions.add_parser("repair", help="list stored files that the index has lost in it again")
    one.add_argument("directory", metavar="DIR", help="the directory of files")
    one.add_argument(
        "--owner", default="", metavar="PROJECT", help="whose they are (default: that of a frontend without keys)"
    )
    return parser


def main(argv: list[str]) -> int:
    """Run one action; return the exit status."""
    given = build_parser(os.environ).parse_args(argv)
    directory = Path(given.directory).expanduser()
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory")
    try:
        found = repair(directory, given.owner)
    except InvalidArgument as error:
        raise UsageError(str(error)) from None
    for file in found:
        print(f"{file.id}  {file.bytes} bytes")
    print(f"{len(found)} file(s) have a row again" if found else "every stored file has its row", file=sys.stderr)
    return 0
