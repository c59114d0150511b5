"""The inspector's page as files: where they are served, under which policy, and what no script of it may do."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from wings import WINGS

from dynamo.frontend.parts.inspector.part import INSPECT_PATH, inspect_files
from support.access import bearer, key, write_keys
from support.asgi_client import AsgiClient
from support.cases import each_case
from support.frontend_cluster import cluster

FOLDER = Path(str(files("dynamo.frontend.parts.inspector").joinpath("static/inspect")))
COLUMNS_MODULE = "export const COLUMNS"  # made when it is requested
SCRIPTS = sorted(FOLDER.rglob("*.js"))

# What makes text into elements or code, and what a policy would refuse anyway: found here before a browser does.
FORBIDDEN = (
    "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "createContextualFragment",
    "DOMParser", "setHTMLUnsafe", "srcdoc =", "javascript:", "http://", "https://cdn", "importScripts", "XMLHttpRequest",
)  # fmt: skip
ALLOWED = {"dom.js": ("http://",)}  # the name of the SVG namespace


@each_case("path", SCRIPTS, ids=[str(path.relative_to(FOLDER)) for path in SCRIPTS])
def test_no_script_makes_elements_or_code_of_text(path: Path) -> None:
    text = path.read_text()
    allowed = ALLOWED.get(path.name, ())
    assert [word for word in FORBIDDEN if word in text and word not in allowed] == []
    assert len(text.splitlines()) <= 600


@each_case("path", SCRIPTS, ids=[str(path.relative_to(FOLDER)) for path in SCRIPTS])
def test_every_import_leads_to_a_name_that_is_there(path: Path) -> None:
    for names, where in re.findall(r'import \{([^}]*)\} from "([^"]+)"', path.read_text()):
        target = (path.parent / where).resolve()
        assert target.is_relative_to(FOLDER)
        given = target.read_text() if target.exists() else COLUMNS_MODULE
        for name in filter(None, (name.strip() for name in names.split(","))):
            assert re.search(rf"export (?:async )?(?:function|const|class) {name}\b", given), f"{name} of {where}"


def test_the_page_has_no_script_and_no_style_of_its_own() -> None:
    html = (FOLDER / "index.html").read_text()
    assert "<style" not in html
    assert re.findall(r"<script[^>]*>(.*?)</script>", html) == [""]
    assert not re.search(r'\s(style|on\w+)="', html)
    assert re.findall(r'(?:src|href)="([^"#]+)"', html) == ["icon.svg", "inspect.css", "app.js"]


def test_the_style_fetches_nothing() -> None:
    css = (FOLDER / "inspect.css").read_text()
    assert "url(" not in css
    assert "@import" not in css


def test_every_file_of_the_folder_is_served_and_in_the_wheel() -> None:
    paths = {INSPECT_PATH + str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()}
    assert set(inspect_files()) == paths - {INSPECT_PATH + "index.html"} | {INSPECT_PATH, INSPECT_PATH + "columns.js"}
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    # Hatchling takes every file of a package that git does not ignore.
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {
        "packages": [f"src/{wing}/dynamo" for wing in WINGS],
        "exclude": [f"/src/{wing}/dynamo/py.typed" for wing in WINGS if wing != "kernel"],
    }


async def test_the_page_comes_with_a_policy_and_is_sent_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, http_host="127.0.0.1") as house:
        for path in inspect_files():
            answer = await house.client.get(path)
            assert answer.status == 200
            policy = answer.headers["content-security-policy"]
            assert "default-src 'self'; connect-src 'self'" in policy
            for part in ("frame-ancestors 'none'", "object-src 'none'", "base-uri 'none'", "form-action 'none'"):
                assert part in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            again = await house.client.get(path, if_none_match=answer.headers["etag"])
            assert (again.status, again.body) == (304, b"")
        moved = await house.client.get("/inspect")
        assert (moved.status, moved.headers["location"]) == (308, "/inspect/")
        assert (await house.client.get("/inspect/nothing.js")).status == 404
        assert (await house.client.get("/inspect/../pages.py")).status == 404


async def test_the_home_page_leads_to_the_inspector_where_it_is_served(tmp_path: Path) -> None:
    for settings, is_there in (({}, True), ({"disable_admin_api": True}, False), ({"http_host": "0.0.0.0"}, False)):
        async with cluster(tmp_path, **dict[str, Any]({"http_host": "127.0.0.1"} | settings)) as house:
            assert (b"/inspect/" in (await house.client.get("/")).body) is is_there
            assert ((await house.client.get("/inspect/")).status == 200) is is_there


@each_case("settings", [{}, {"admin_port": 0}], ids=["the port of the API", "a port of its own"])
async def test_the_files_need_no_key_and_what_they_show_does(tmp_path: Path, settings: dict[str, Any]) -> None:
    keys = write_keys(tmp_path / "admins.toml", key("root"))
    async with cluster(tmp_path, http_host="127.0.0.1", admin_keys_file=str(keys), **settings) as house:
        client = AsgiClient(house.frontend.admin_asgi) if settings else house.client
        for path in inspect_files():
            assert (await client.get(path)).status == 200
        assert (await client.get("/busy_threshold")).status == 401
        assert (await client.call("GET", "/busy_threshold", headers=bearer("root"))).status == 200
        await client.aclose()
