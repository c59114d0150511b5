"""Lets SGLang run on a CPU, for tests of behaviour alone: `python tools/sglang_rig.py PYTHON`, a Python of an environment of its own.

SGLang's kernels have no build for CPUs on PyPI. A dense model with `torch_native` attention calls none of them, but the code
imports their names: a stand-in has every name, and each raises when it is called. torchvision's operators are declared before
torchvision is imported, as its build for CUDA cannot load them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PACKAGES = (
    "torch==2.13.0", "transformers==5.19.0", "xgrammar==0.2.7", "numpy", "scipy", "aiohttp", "fastapi", "orjson", "pybase64",
    "gguf", "kernels>=0.14.1,<0.15", "psutil", "pillow", "pydantic", "python-multipart", "partial_json_parser", "interegular",
    "einops", "setproctitle", "sentencepiece", "tiktoken", "uvicorn", "watchfiles", "openai-harmony==0.0.4",
    "llguidance>=1.7.6,<2", "IPython", "compressed-tensors==0.18.0", "easydict", "distro", "soundfile==0.13.1", "requests",
    "prometheus-client", "nvidia-ml-py", "blobfile==3.0.0", "py-spy", "zstandard", "dill", "openai",
)  # fmt: skip
ALONE = ("sglang==0.5.23", "torchvision==0.28.0")  # without their requirements, which want CUDA

KERNELS = '''"""A stand-in for SGLang's kernels: every name is there, and raises when it is called."""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.4.10"


class _Missing:
    def __init__(self, name):
        self._name = name

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{self._name} has no build for CPUs here")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __hash__(self):
        return hash(self._name)

    def __eq__(self, other):
        return isinstance(other, _Missing) and other._name == self._name


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(name)


class _Module(types.ModuleType):
    __path__ = []
    __getattr__ = staticmethod(__getattr__)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
'''

OPERATORS = """import importlib.abc
import sys


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            from torch import library

            sys._torchvision_operators = operators = library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                operators.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision())
"""


def main() -> None:
    """Install SGLang and the rig into the environment of the named Python."""
    python = sys.argv[1]
    root = Path(__file__).resolve().parent.parent
    pip = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", *ALONE], check=True)
    subprocess.run([*pip, *PACKAGES, "-e", f"{root}[guided,prometheus]"], check=True)
    asked = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    packages = Path(asked.stdout.strip())
    (packages / "sgl_kernel").mkdir(exist_ok=True)
    (packages / "sgl_kernel" / "__init__.py").write_text(KERNELS)
    (packages / "torchvision_operators.py").write_text(OPERATORS)
    (packages / "torchvision_operators.pth").write_text("import torchvision_operators\n")


if __name__ == "__main__":
    main()
