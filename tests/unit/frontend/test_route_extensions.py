"""Routes that programs add to the frontend: what they answer, what they see, and what ends the start."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from dynamo import llm
from dynamo.errors import InvalidArgument
from dynamo.llm import FrontendExtensionContext, FrontendResponse, FrontendRoute
from support.cases import each_case
from support.frontend_cluster import cluster


def get() -> None: ...


async def get_later() -> None: ...


class Later:
    async def __call__(self) -> None: ...


@pytest.fixture
def extend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Sequence[str]]:
    """Make the setting that names a function."""

    def module_of(function: Any) -> Sequence[str]:
        module = ModuleType("an_extension")
        module.__dict__["routes"] = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return (f"{module.__name__}:routes",)

    return module_of


async def test_a_frontend_serves_the_routes_of_an_extension(
    tmp_path: Path, extend: Callable[[Any], Sequence[str]], caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[FrontendExtensionContext] = []

    def models() -> object:
        (context,) = seen
        return [
            context.is_ready, context.is_cancelled, context.has_any_ready_model, list(context.model_display_names()),
            list(context.serving_ready_display_names()), context.is_model_ready_to_serve("m"),
            context.is_model_ready_to_serve("no"),
        ]  # fmt: skip

    def routes(context: FrontendExtensionContext) -> list[FrontendRoute]:
        seen.append(context)
        return [
            FrontendRoute("GET", "/my/models", models),
            FrontendRoute("GET", "/my/teapot", lambda: FrontendResponse(418, {"short": True})),
            FrontendRoute("GET", "/my/failure", lambda: 1 / 0),
            FrontendRoute("GET", "/my/object", object),
        ]

    async with cluster(tmp_path, route_extensions=extend(routes)) as house:
        assert (await house.client.get("/my/models")).json == [True, False, False, [], [], False, False]
        await house.worker()
        assert (await house.client.get("/my/models")).json == [True, False, True, ["m"], ["m"], True, False]
        teapot = await house.client.get("/my/teapot")
        assert (teapot.status, teapot.json) == (418, {"short": True})
        for path, reason in (("/my/failure", "ZeroDivisionError"), ("/my/object", "TypeError")):
            caplog.clear()
            failed = await house.client.get(path)
            assert (failed.status, failed.json) == (500, {"error": "frontend route extension failed"})
            (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
            assert record.exc_info is not None
            assert type(record.exc_info[1]).__name__ == reason
        assert (await house.client.call("POST", "/my/teapot", b"")).status == 405
        document = (await house.client.get("/openapi.json")).json
        assert list(document["paths"]["/my/models"]) == ["get"]


@each_case(
    ("routes", "reason"),
    [
        (lambda context: [FrontendRoute("GET", "/x", get)] * 2, "/x is served by two extensions"),
        (lambda context: [FrontendRoute("GET", "/health", get)], "/health is a path of the frontend"),
        (
            lambda context: [FrontendRoute("GET", "/v1/models/m/ready", get)],
            "/v1/models/m/ready is a path of the frontend",
        ),
        (lambda context: [FrontendRoute("GET", "/v1/chat/completions", get)], "completions is a path of the frontend"),
        (lambda context: ["/x"], "an_extension:routes: expected FrontendRoute, got str"),
        (lambda context: 1 / 0, "an_extension:routes: ZeroDivisionError"),
        (None, "no function of this name in the module an_extension"),
    ],
)
async def test_an_extension_that_cannot_be_served_ends_the_start(
    tmp_path_factory: pytest.TempPathFactory, extend: Callable[[Any], Sequence[str]], routes: Any, reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        async with cluster(tmp_path_factory.mktemp("frontend"), route_extensions=extend(routes)):
            pass


@each_case("name", ["no_such_module:routes", "no_such_entry_point"])
async def test_an_extension_that_is_not_there_ends_the_start(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"^route extension {name}: "):
        async with cluster(tmp_path_factory.mktemp("frontend"), route_extensions=(name,)):
            pass


@each_case(
    ("make", "error", "message"),
    [
        (lambda: FrontendRoute("POST", "/x", get), ValueError, "unsupported FrontendRoute method 'POST'; only GET is supported"),
        (lambda: FrontendRoute("GET", "x", get), ValueError, "frontend route path must start with '/': x"),
        (lambda: FrontendRoute("GET", "/{x}", get), ValueError, r"frontend route path must be static \(no '{...}', '\*', or whitespace\)"),
        (lambda: FrontendRoute("GET", "/x y", get), ValueError, "frontend route path must be static"),
        (lambda: FrontendRoute("GET", "/x", get_later), ValueError, "handler must be synchronous; async def handlers are not supported"),
        (lambda: FrontendRoute("GET", "/x", Later()), ValueError, "handler must be synchronous"),
        (lambda: FrontendRoute("GET", "/x", cast(Any, "get")), TypeError, "FrontendRoute handler must be callable"),
        (lambda: FrontendResponse(1000, None), ValueError, "status_code must be an integer from 100 to 999, got 1000"),
        (lambda: FrontendResponse(99, None), ValueError, "status_code must be an integer from 100 to 999, got 99"),
    ],
)  # fmt: skip
def test_a_route_that_cannot_be_is_refused_where_it_is_made(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_the_names_are_those_of_the_native_module() -> None:
    from dynamo import _core

    route = FrontendRoute("GET", "/x", get)
    assert (route.method, route.path) == ("GET", "/x")
    for name in ("FrontendRoute", "FrontendResponse", "FrontendExtensionContext"):
        assert getattr(_core, name) is getattr(llm, name)
