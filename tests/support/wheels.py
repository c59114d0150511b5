"""Wheels without the build tools, which a test would have to download."""

from __future__ import annotations

import base64
import hashlib
import tomllib
import zipfile
from pathlib import Path


def write_wheel(package: Path, folder: Path) -> Path:
    """Write the wheel of a package that `dynamo new` made."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    stem = f"{project['name'].replace('-', '_')}-{project['version']}"
    files = {path.relative_to(package / "src").as_posix(): path.read_bytes() for path in package.glob("src/*/*.py")}
    requirements = "".join(f"Requires-Dist: {each}\n" for each in project["dependencies"])
    scripts = "".join(f"{name} = {target}\n" for name, target in project["scripts"].items())
    files |= {
        f"{stem}.dist-info/METADATA": (
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n{requirements}".encode()
        ),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/entry_points.txt": f"[console_scripts]\n{scripts}".encode(),
    }
    record = f"{stem}.dist-info/RECORD"
    lines = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    folder.mkdir()
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(record, "\n".join([*lines, f"{record},,"]) + "\n")
    return wheel


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
