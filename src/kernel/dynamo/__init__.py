"""Put any LLM engine behind a production API, in pure Python.

The import root is `dynamo`, so that every snippet of the guide "Writing Unified Backends" runs as printed.
"""

from pathlib import Path
from pkgutil import extend_path

__version__ = "0.2.0"

# A checkout has five source roots (see src/README.md); an installed wheel has them merged, and nothing is added.
__path__ = extend_path(__path__, __name__)

# The native system installs into the same import root. Two systems mixed in one folder fail later and far away
# (half of the modules are theirs), so the mixture is refused at the first import.
_native = sorted(found.name for folder in __path__ for found in Path(folder).glob("_core*.so"))
if _native:
    raise ImportError(
        f"dynamo-unified and the native ai-dynamo share this environment (found dynamo/{_native[0]}). "
        "Both own the import root 'dynamo'. Use one virtual environment for each: "
        "`pip uninstall ai-dynamo ai-dynamo-runtime`, then reinstall dynamo-unified."
    )
