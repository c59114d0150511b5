"""`python -m dynamo.cli.bench.replay`: the command without the rest of the command line."""

from __future__ import annotations

import sys

from dynamo.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "replay", *sys.argv[1:]]))
