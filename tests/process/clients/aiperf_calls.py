"""The lines on AIPerf of docs/benchmarking.md, as they are there. Run by `test_clients.py` with the address of a server."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
TOKENIZER = ROOT / "src" / "lab" / "dynamo" / "reference" / "demo" / "model"

page = (ROOT / "docs" / "benchmarking.md").read_text()
block = re.search(r"```bash\npip install aiperf\n(.+?)```", page, re.DOTALL)
assert block is not None, "the page has no lines on AIPerf"
lines = re.sub(r"\\\n\s*", "", block[1]).splitlines()
assert [line.split()[0] for line in lines] == ["aiperf", "jq"]

# The script's first line names the folder in which pip ran, which was renamed since.
program = shlex.join([sys.executable, str(Path(sys.executable).with_name("aiperf"))])
replaced = {
    "aiperf profile": f"{program} profile",
    "http://127.0.0.1:8000": sys.argv[1],
    "path/to/model": str(TOKENIZER),
}
# With HF_HUB_OFFLINE it takes the path of a tokenizer for a name of the hub.
environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
with tempfile.TemporaryDirectory() as folder:
    for line in lines:
        if line.startswith("jq ") and shutil.which("jq") is None:
            print("jq is not installed: its line was not run")
            continue
        for here, there in replaced.items():
            line = line.replace(here, there)
        subprocess.run(line, shell=True, check=True, cwd=folder, env=environment)
    assert (Path(folder) / "aiperf-figures" / "server_metrics_export.json").exists()
