"""The parts of `make image`: layers whose bytes repeat, a layout that is what it says, a bill of what is inside."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.server
import io
import json
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from oci_image.__main__ import main
from oci_image.base import DebianPackage, read_base, write_base_layer
from oci_image.containerfile import read_containerfile, settings
from oci_image.errors import CannotBuild
from oci_image.kinds import EXTRAS, UID, USER, Build, Labels, build_rust
from oci_image.layers import Layer, LayerWriter, Owner
from oci_image.layout import Image, Layout, write_archive
from oci_image.python_layer import Environment, PythonPackage
from oci_image.sbom import crates, debian_components, python_components, write_bill

from support.cases import each_case

ROOT: Final = Path(__file__).parents[3]
DEPLOY: Final = ROOT / "deploy"
EPOCH: Final = 1_700_000_000
LABELS: Final = Labels("1.2.3", "abc", "2026-01-02T03:04:05Z", "https://example.org/x")
STATUS: Final = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Source: glibc (2.36-9)
Version: 2.36-9+deb12u14

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""


def write_layer(path: Path) -> Layer:
    with LayerWriter(path, EPOCH) as writer:
        writer.add_bytes("opt/x/y", b"content", mode=0o755)
        writer.add_link("opt/x/z", "/opt/x/y")
        writer.add_folder("home/dynamo", owner=Owner(5, 6))
    assert writer.layer is not None
    return writer.layer


def members(path: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(path) as archive:
        return {each.name: each for each in archive}


def write_root(path: Path, *, python: str = "3.11", newest: int = EPOCH) -> Path:
    """Write the tar file of a small root file system, unsorted and with what an installation leaves behind."""
    files = {
        f"./usr/bin/python{python}": b"\x7fELF",
        "./var/lib/dpkg/status": STATUS.encode(),
        "./var/log/dpkg.log": b"today",
        "./var/cache/x": b"today",
        "./etc/passwd": b"root:x:0:0::/root:/bin/sh\n",
        "./etc/group": b"root:x:0:\n",
        "./etc/hostname": b"builder",
        "./usr/lib/python3/a.py": b"pass",
    }
    with tarfile.open(path, "w") as archive:
        for name in ("./", "./usr", "./usr/bin", "./dev", "./dev/null"):
            member = tarfile.TarInfo(name)
            member.type = tarfile.CHRTYPE if name == "./dev/null" else tarfile.DIRTYPE
            member.mode = 0o755
            archive.addfile(member)
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            member.mtime = newest if name.endswith(".py") else newest + 5000
            archive.addfile(member, io.BytesIO(content))
        second = tarfile.TarInfo("./usr/bin/a-second-name")
        second.type, second.linkname = tarfile.LNKTYPE, f"./usr/bin/python{python}"
        archive.addfile(second)
    return path


# -- layers --------------------------------------------------------------------------------------------------------------


def test_the_same_content_gives_the_same_layer(tmp_path: Path) -> None:
    first, second = write_layer(tmp_path / "a"), write_layer(tmp_path / "elsewhere" / "b")
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.digest == second.digest


def test_a_layer_is_named_for_its_bytes_and_for_those_before_compression(tmp_path: Path) -> None:
    layer = write_layer(tmp_path / "layer")
    packed = layer.path.read_bytes()
    assert layer.digest == f"sha256:{hashlib.sha256(packed).hexdigest()}"
    assert layer.diff_id == f"sha256:{hashlib.sha256(gzip.decompress(packed)).hexdigest()}"
    assert layer.size == len(packed)


def test_members_have_parents_owners_modes_and_one_time(tmp_path: Path) -> None:
    found = members(write_layer(tmp_path / "layer").path)
    assert list(found) == ["opt", "opt/x", "opt/x/y", "opt/x/z", "home", "home/dynamo"]
    assert found["opt/x/y"].mode == 0o755
    assert (found["home/dynamo"].uid, found["home/dynamo"].gid, found["home"].uid) == (5, 6, 0)
    assert {each.mtime for each in found.values()} == {EPOCH}
    assert found["opt/x/z"].linkname == "/opt/x/y"


def test_a_layer_that_fails_half_way_leaves_no_file(tmp_path: Path) -> None:
    def write() -> None:
        with LayerWriter(tmp_path / "layer", EPOCH) as writer:
            writer.add_bytes("x", b"x")
            writer.add_tree(tmp_path / "nothing", "y")

    with pytest.raises(FileNotFoundError):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_tree_is_written_sorted_with_links_and_programs(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "b").mkdir(parents=True)
    (tree / "b" / "program").write_text("#!/bin/sh\n")
    (tree / "b" / "program").chmod(0o700)
    (tree / "a").write_text("a")
    (tree / "a").chmod(0o600)
    (tree / "link").symlink_to("a")
    with LayerWriter(tmp_path / "layer", EPOCH) as writer:
        writer.add_tree(tree, "opt")
    found = members(tmp_path / "layer")
    assert {name: each.mode for name, each in found.items() if each.isreg()} == {"opt/a": 0o644, "opt/b/program": 0o755}
    assert list(found) == ["opt", "opt/a", "opt/b", "opt/b/program", "opt/link"]


# -- layout --------------------------------------------------------------------------------------------------------------


def write_image(tmp_path: Path) -> Path:
    layer = write_layer(tmp_path / "layer")
    image = Image({"User": "1"}, LABELS.created, [layer], ["made"], LABELS.of("x"))
    Layout(tmp_path / "image").write(image, "x:1.2.3")
    return tmp_path / "image"


def test_every_blob_has_the_digest_and_the_size_that_point_to_it(tmp_path: Path) -> None:
    folder = write_image(tmp_path)
    assert json.loads((folder / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    seen = set()

    def check(descriptor: dict[str, Any]) -> bytes:
        digest = descriptor["digest"].partition(":")[2]
        content = (folder / "blobs" / "sha256" / digest).read_bytes()
        assert (hashlib.sha256(content).hexdigest(), len(content)) == (digest, descriptor["size"])
        seen.add(digest)
        return content

    (top,) = json.loads((folder / "index.json").read_bytes())["manifests"]
    manifest = json.loads(check(top))
    config = json.loads(check(manifest["config"]))
    layers = [check(each) for each in manifest["layers"]]
    assert config["rootfs"]["diff_ids"] == [
        f"sha256:{hashlib.sha256(gzip.decompress(each)).hexdigest()}" for each in layers
    ]
    assert len(config["history"]) == len(layers)
    assert {path.name for path in (folder / "blobs" / "sha256").iterdir()} == seen
    assert top["annotations"]["org.opencontainers.image.ref.name"] == "x:1.2.3"
    assert manifest["annotations"]["org.opencontainers.image.source"] == "https://example.org/x"


def test_an_image_is_read_as_it_was_written_and_one_in_its_place_has_only_its_own_blobs(tmp_path: Path) -> None:
    layout = Layout(write_image(tmp_path))
    image = layout.read()
    assert (image.config, image.comments, len(image.layers)) == ({"User": "1"}, ["made"], 1)
    before = sorted((tmp_path / "image").rglob("*"))
    layout.write(image, "x:1.2.3")
    assert sorted((tmp_path / "image").rglob("*")) == before


def test_a_damaged_or_missing_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotBuild, match="holds no image; build it first"):
        Layout(tmp_path / "nothing").read()
    folder = write_image(tmp_path)
    layer = Layout(folder).read().layers[0]
    layer.path.write_bytes(b"something else")
    with pytest.raises(CannotBuild, match="is damaged"):
        Layout(folder).read()


def test_the_archive_of_equal_folders_is_equal(tmp_path: Path) -> None:
    folder = write_image(tmp_path)
    write_archive(folder, tmp_path / "one.tar")
    write_archive(folder, tmp_path / "two.tar")
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
    assert {"oci-layout", "index.json"} < members(tmp_path / "one.tar").keys()


# -- the root file system ------------------------------------------------------------------------------------------------


def test_a_root_file_system_is_read(tmp_path: Path) -> None:
    base = read_base(write_root(tmp_path / "root.tar"))
    assert base.packages == (DebianPackage("libc6", "2.36-9+deb12u14", "amd64", "glibc"),)
    assert (base.glibc, base.python, base.epoch) == ((2, 36), (3, 11), EPOCH)


def test_its_layer_is_sorted_has_no_traces_of_the_day_and_keeps_the_time_of_python_files(tmp_path: Path) -> None:
    path = write_root(tmp_path / "root.tar")
    found = members(write_base_layer(path, read_base(path), tmp_path / "layer").path)
    kept = [name for name, each in found.items() if not each.islnk()]
    assert kept == sorted(kept)
    assert not {"var/log/dpkg.log", "var/cache/x", "etc/hostname", "dev/null"} & found.keys()
    assert {"dev", "usr/lib/python3/a.py", "var/lib/dpkg/status"} <= found.keys()
    assert {each.mtime for each in found.values() if each.isreg()} == {EPOCH}
    assert list(found)[-1] == "usr/bin/a-second-name"  # its first name has to be there before
    assert found["usr/bin/a-second-name"].linkname == "usr/bin/python3.11"


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "other.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("x"))
    with pytest.raises(CannotBuild, match="not a root file system of Debian: it has no etc/group"):
        read_base(tmp_path / "other.tar")


def test_a_python_of_another_version_is_refused_with_the_release_that_fits(tmp_path: Path) -> None:
    base = read_base(write_root(tmp_path / "root.tar", python="3.99"))
    with pytest.raises(CannotBuild, match=r"has Python 3\.99, and this is Python .*--suite bookworm"):
        Environment(tmp_path, base, "x86_64")


# -- the images ----------------------------------------------------------------------------------------------------------


def build(tmp_path: Path) -> Build:
    base = write_root(tmp_path / "root.tar", python=f"{sys.version_info[0]}.{sys.version_info[1]}")
    (tmp_path / "work").mkdir(exist_ok=True)
    return Build(tmp_path / "out", tmp_path / "work", "bookworm", base, lambda line: None)


def program(path: Path, *versions: str) -> Path:
    path.write_bytes(b"\x7fELF\0" + b"".join(f"GLIBC_{each}\0".encode() for each in versions))
    return path


def test_a_program_becomes_an_image_with_a_user_labels_and_a_health_check_command(tmp_path: Path) -> None:
    archive = build_rust(build(tmp_path), program(tmp_path / "sample", "2.2.5", "2.34"), LABELS)
    image = Layout(tmp_path / "out" / "sample").read()
    assert image.config["User"] == "10001:10001"
    assert image.config["Labels"]["org.opencontainers.image.revision"] == "abc"
    assert image.config["Entrypoint"] == ["backend"]
    assert "DYN_SYSTEM_PORT=9090" not in image.config["Env"]
    found = members(image.layers[1].path)
    assert (found["home/dynamo"].uid, found["usr/local/bin/backend"].mode) == (UID, 0o755)
    assert found["usr/local/bin/dynamo-ready"].mode == 0o755
    assert archive == tmp_path / "out" / "sample.oci.tar"
    with tarfile.open(image.layers[1].path) as layer:
        users = layer.extractfile("etc/passwd")
        bill = layer.extractfile("usr/share/sbom/sample.cdx.json")
        assert users is not None
        assert bill is not None
        assert f"{USER}:x:{UID}:{UID}:" in users.read().decode()
        assert bill.read() == (tmp_path / "out" / "sample.cdx.json").read_bytes()


def test_a_program_that_needs_a_newer_c_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotBuild, match=r"needs a C library of version 2\.41, and the root file system has 2\.36"):
        build_rust(build(tmp_path), program(tmp_path / "sample", "2.5", "2.41"), LABELS)


def test_a_program_of_a_user_s_is_not_labelled_as_ours(tmp_path: Path) -> None:
    options = ["--base", str(write_root(tmp_path / "root.tar")), "--out", str(tmp_path / "out"), "--version", "3.4"]
    assert (
        main(["rust", "--binary", str(program(tmp_path / "mine", "2.5")), "--source", "https://x.example", *options])
        == 0
    )
    labels = Layout(tmp_path / "out" / "mine").read().config["Labels"]
    found = {name.removeprefix("org.opencontainers.image."): value for name, value in labels.items()}
    assert found.pop("created")
    assert found == {"title": "mine", "version": "3.4", "source": "https://x.example"}


def test_the_settings_of_the_server_are_those_of_its_containerfile() -> None:
    found = settings(read_containerfile(DEPLOY / "Containerfile"))
    assert found["Entrypoint"] == ["tini", "--"]
    assert found["Cmd"] == ["python", "-m", "dynamo.frontend"]
    assert found["ExposedPorts"].keys() == {"8000/tcp", "9090/tcp", "9345/tcp"}
    assert found["WorkingDir"] == "/home/dynamo"
    assert found["Healthcheck"] == {
        "Test": ["CMD", "dynamo-ready"],
        "Interval": 5_000_000_000,
        "Timeout": 5_000_000_000,
        "StartPeriod": 60_000_000_000,
        "Retries": 3,
    }
    text = (DEPLOY / "Containerfile").read_text()
    assert f'pip install --no-cache-dir ".[{EXTRAS}]"' in text
    assert f"--uid {UID} {USER}" in text


def test_what_cannot_be_built_is_one_sentence_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        "a backend is made of a wheel: make image KIND=backend WHEEL=": ["backend"],
        "a worker in Rust is made of a program": ["rust"],
        "there is no file": ["rust", "--binary", str(tmp_path / "nothing")],
    }
    for text, arguments in cases.items():
        assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err.startswith(f"image: {text}")
    assert list((tmp_path / "out").iterdir()) == []


# -- the packages of Python ----------------------------------------------------------------------------------------------


def write_wheel(folder: Path) -> Path:
    name = "sample_package-1.0"
    files = {
        "sample_package/__init__.py": "def main():\n    print('hello')\n",
        f"{name}.dist-info/METADATA": "Metadata-Version: 2.4\nName: Sample_Package\nVersion: 1.0\nLicense-Expression: MIT\n",
        f"{name}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name}.dist-info/entry_points.txt": "[console_scripts]\nsample = sample_package:main\nother = sample_package:main\n",
    }

    def line(name: str, text: str) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        return f"{name},sha256={digest},{len(text)}\n"

    path = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in files.items():
            archive.writestr(each, text)
        record = f"{name}.dist-info/RECORD"
        archive.writestr(record, "".join(line(each, text) for each, text in files.items()) + f"{record},,\n")
    return path


@pytest.mark.process  # it starts pip
def test_a_wheel_is_installed_compiled_and_run_by_the_image_s_python(tmp_path: Path) -> None:
    base = read_base(build(tmp_path).base or tmp_path)
    packages = Environment(tmp_path / "packages", base, "x86_64")
    wheel = write_wheel(tmp_path)
    packages.install([str(wheel)], with_dependencies=False)
    packages.compile()
    assert packages.packages() == [PythonPackage("Sample_Package", "1.0", "MIT", True)]
    assert packages.commands_of([wheel]) == ["sample", "other"]
    with LayerWriter(tmp_path / "layer", EPOCH) as writer:
        packages.write_environment(writer)
        packages.write(writer)
        packages.write_programs(writer)
    found = members(tmp_path / "layer")
    short = f"{sys.version_info[0]}.{sys.version_info[1]}"
    site = f"opt/dynamo/lib/python{short}/site-packages"
    assert found["opt/dynamo/bin/python"].linkname == f"/usr/bin/python{short}"
    assert f"{site}/sample_package/__pycache__/__init__.cpython-{short.replace('.', '')}.pyc" in found
    assert not [name for name in found if name.endswith("direct_url.json")]
    with tarfile.open(tmp_path / "layer") as layer:
        script = layer.extractfile("opt/dynamo/bin/sample")
        record = layer.extractfile(f"{site}/sample_package-1.0.dist-info/RECORD")
        assert script is not None
        assert record is not None
        assert script.read().startswith(b"#!/opt/dynamo/bin/python\n")
        assert b"direct_url" not in record.read()


# -- the bill of materials -----------------------------------------------------------------------------------------------


def test_the_bill_names_each_part_by_its_package_url(tmp_path: Path) -> None:
    (tmp_path / "Cargo.lock").write_text('version = 3\n\n[[package]]\nname = "tokio"\nversion = "1.2.3"\n')
    parts = [
        *debian_components([DebianPackage("libstdc++6", "12.2.0-14", "amd64", "gcc-12")]),
        *python_components(
            [PythonPackage("Sample_Package", "1.0+x", "MIT", True), PythonPackage("b", "2", "BSD", False)]
        ),
        *crates(tmp_path / "Cargo.lock"),
    ]
    bill = json.loads(write_bill("x", "1", LABELS.created, parts))
    assert [each["purl"] for each in bill["components"]] == [
        "pkg:cargo/tokio@1.2.3",
        "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14?arch=amd64",
        "pkg:pypi/b@2",
        "pkg:pypi/sample-package@1.0%2Bx",
    ]
    assert bill["components"][3]["licenses"] == [{"expression": "MIT"}]
    assert bill["components"][2]["licenses"] == [{"license": {"name": "BSD"}}]
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.5", 1)
    assert write_bill("x", "1", LABELS.created, parts) == write_bill("x", "1", LABELS.created, parts[::-1])


# -- the health check ----------------------------------------------------------------------------------------------------


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path != "/silent":
            self.send_response(200 if self.path == "/ready" else 503)
            self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def http_server() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def ready(*arguments: str, **env: str) -> tuple[int, str]:
    argv = ["bash", str(DEPLOY / "ready.sh"), *arguments]
    done = subprocess.run(argv, env={"PATH": "/usr/bin:/bin", **env}, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@each_case(
    ("path", "status", "says"),
    [("/ready", 0, ""), ("/not", 1, "answers 503"), ("/silent", 1, "does not answer")],
)
def test_the_health_check_is_green_for_200_alone(path: str, status: int, says: str, http_server: int) -> None:
    found, text = ready(f"http://127.0.0.1:{http_server}{path}")
    assert (found, says in text) == (status, True)


def test_the_health_check_looks_where_the_variables_say(http_server: int) -> None:
    assert ready(DYN_HTTP_PORT=str(http_server)) == (0, "")
    code, text = ready(DYN_SYSTEM_PORT=str(http_server), DYN_HTTP_PORT="1")
    assert (code, f"http://127.0.0.1:{http_server}/health answers 503" in text) == (1, True)
    assert ready("ftp://x") == (1, "dynamo-ready: ftp://x is not http://HOST:PORT/PATH\n")


def test_the_health_check_is_red_where_nothing_listens() -> None:
    code, text = ready("http://127.0.0.1:1/ready")
    assert code == 1
    assert "nothing listens at 127.0.0.1:1" in text
