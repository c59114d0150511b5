"""The kernel without the other wings: each of its modules can be imported where they are not there."""

from __future__ import annotations

import json
import subprocess
import sys

from wings import ROOTS

PROGRAM = """
import importlib, json, pkgutil, sys
kernel, others = sys.argv[1], set(sys.argv[2:])
sys.path[:] = [kernel, *(entry for entry in sys.path if entry not in others)]
import dynamo
names = [info.name for info in pkgutil.walk_packages(dynamo.__path__, "dynamo.") if not info.name.endswith("__main__")]
for name in names:
    if ".template" not in name:
        importlib.import_module(name)
wings = {module.__file__ for module in sys.modules.values() if module.__name__.startswith("dynamo.")}
print(json.dumps([len(names), sorted(file for file in wings if file and not file.startswith(kernel))]))
"""


def test_every_module_of_the_kernel_can_be_imported_without_the_other_wings() -> None:
    roots = [str(root) for root in ROOTS]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *roots], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    imported, from_other_wings = json.loads(done.stdout)
    assert (imported > 500, from_other_wings) == (True, [])
