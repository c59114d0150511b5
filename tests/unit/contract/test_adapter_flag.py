"""`--lora`: what it takes, what it says, and what of it is loaded once a worker serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.contract.config import adapter_of
from dynamo.engines.sample.engine import SampleLLMEngine
from dynamo.worker.adapters import adapter_uri
from support.cases import each_case


async def test_the_flag_may_be_repeated_and_is_checked_at_start() -> None:
    argv = ["--lora", "poet=/adapters/poet", "--lora", "clerk=hf://people/clerk@main"]
    _, config = await SampleLLMEngine.from_args(argv)
    assert config.loras == ("poet=/adapters/poet", "clerk=hf://people/clerk@main")
    assert (await SampleLLMEngine.from_args([]))[1].loras == ()


async def test_the_variable_lists_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_LORAS", "poet=/a,clerk=file:///b")
    assert (await SampleLLMEngine.from_args([]))[1].loras == ("poet=/a", "clerk=file:///b")


@each_case("given", ["poet", "=path", "poet=", "poet=s3://bucket/a", "poet=http://host/a"])
def test_what_is_no_adapter_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="adapter"):
        adapter_of(given)


def test_a_path_becomes_an_address(tmp_path: Path) -> None:
    assert adapter_uri(f"poet={tmp_path}") == ("poet", tmp_path.as_uri())
    assert adapter_uri("a/b=hf://people/poet@v=1") == ("a/b", "hf://people/poet@v=1")
