"""What an image is made of, as CycloneDX 1.5: Debian's packages, distributions of Python, crates."""

from __future__ import annotations

import json
import tomllib
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from oci_image.base import DebianPackage
from oci_image.python_layer import PythonPackage

__all__ = ["crates", "debian_components", "python_components", "write_bill"]

SPECIFICATION: Final = "1.5"


def debian_components(packages: Iterable[DebianPackage]) -> list[dict[str, Any]]:
    """Return the components for packages of Debian."""
    return [
        _component(
            each.name,
            each.version,
            f"pkg:deb/debian/{quote(each.name)}@{quote(each.version, safe='')}?arch={each.architecture}",
            properties=[{"name": "debian:source", "value": each.source}],
        )
        for each in packages
    ]


def python_components(packages: Iterable[PythonPackage]) -> list[dict[str, Any]]:
    """Return the components for distributions of Python, with the licence that each names."""
    found = []
    for each in packages:
        name = each.name.lower().replace("_", "-").replace(".", "-")
        more: dict[str, Any] = {}
        if each.license:
            license_of = {"expression": each.license} if each.is_expression else {"license": {"name": each.license}}
            more["licenses"] = [license_of]
        found.append(
            _component(each.name, each.version, f"pkg:pypi/{quote(name)}@{quote(each.version, safe='')}", **more)
        )
    return found


def crates(lock: Path) -> list[dict[str, Any]]:
    """Return the components for the crates of a lock file, those that only its tests use included."""
    packages = tomllib.loads(lock.read_text())["package"]
    return [
        _component(each["name"], each["version"], f"pkg:cargo/{quote(each['name'])}@{quote(each['version'], safe='')}")
        for each in packages
    ]


def write_bill(name: str, version: str, created: str, components: Sequence[dict[str, Any]]) -> bytes:
    """Return the document. The same components give the same bytes."""
    listed = sorted(components, key=lambda each: str(each["bom-ref"]))
    named = json.dumps([name, version, listed], sort_keys=True)
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, named)}",
        "version": 1,
        "metadata": {
            "timestamp": created,
            "component": {"type": "container", "bom-ref": name, "name": name, "version": version},
        },
        "components": listed,
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def _component(name: str, version: str, purl: str, **more: Any) -> dict[str, Any]:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, **more}
