"""Put any LLM engine behind a production API, in pure Python.

The import root is `dynamo`, so that every snippet of the guide "Writing Unified Backends" runs as printed.
"""

from pathlib import Path

__version__ = "0.1.0"

# The native system installs into the same import root. Two systems mixed in one folder fail later and far away
# (half of the modules are theirs), so the mixture is refused at the first import.
_native = sorted(p.name for p in (Path(__file__).parent / "_core").parent.glob("_core*.so"))
if _native:
    raise ImportError(
        f"dynamo-unified and the native ai-dynamo share this environment (found dynamo/{_native[0]}). "
        "Both own the import root 'dynamo'. Use one virtual environment for each: "
        "`pip uninstall ai-dynamo ai-dynamo-runtime`, then reinstall dynamo-unified."
    )
