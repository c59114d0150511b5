"""How long passes take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.errors import InvalidArgument
from dynamo.mocker.timing import FixedTiming, PolynomialTiming, read_profile


def test_the_polynomials() -> None:
    timing = PolynomialTiming()
    assert timing.prefill_ms(1, 562, 0) == pytest.approx(25.1675, abs=1e-4)
    assert timing.prefill_ms(2, 381, 0) == pytest.approx(28.316, abs=1e-3)
    assert timing.prefill_ms(3, 16, 16) == 0
    assert timing.decode_ms(563, 563, 65536) == pytest.approx(6.2021, abs=1e-4)
    assert timing.decode_ms(70_000, 1, 65536) == timing.decode_ms(65536, 1, 65536)


def test_fixed_times_are_checked() -> None:
    assert FixedTiming(3, 1).prefill_ms(1, 2, 1) == 3
    with pytest.raises(InvalidArgument, match="decode_ms"):
        FixedTiming(1, float("nan"))


ARRAYS: dict[str, Any] = {
    "prefill_isl": [100, 200],
    "prefill_ttft_ms": [10.0, 30.0],
    "decode_active_kv_tokens": [0, 1000],
    "decode_context_length": [0, 100],
    "decode_itl": [[2.0, 4.0], [6.0, 8.0]],
}


def test_a_profile_is_interpolated_and_ends_at_its_grid(tmp_path: Path) -> None:
    np.savez(tmp_path / "profile.npz", **ARRAYS)
    timing = read_profile(tmp_path / "profile.npz")
    assert timing.prefill_ms(1, 150, 0) == 20
    assert timing.prefill_ms(2, 100, 0) == 30
    assert timing.prefill_ms(1, 99, 0) == timing.prefill_ms(1, 201, 0) == 0
    assert timing.decode_ms(500, 50, 10_000) == 5
    assert timing.decode_ms(1000, 100, 10_000) == 8
    assert timing.decode_ms(1001, 50, 10_000) == 1


def test_a_profilers_directory_holds_the_same_in_two_files(tmp_path: Path) -> None:
    for half in ("prefill", "decode"):
        (tmp_path / f"selected_{half}_interpolation").mkdir()
        arrays = {name: values for name, values in ARRAYS.items() if name.startswith(half)}
        np.savez(tmp_path / f"selected_{half}_interpolation" / "raw_data.npz", **arrays)
    assert read_profile(tmp_path).prefill_ms(1, 150, 0) == 20


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decode_itl": None}, "no array decode_itl"),
        ({"decode_itl": [[1.0]]}, "shape"),
        ({"prefill_isl": [200, 100]}, "prefill_isl must grow"),
        ({"prefill_ttft_ms": [1.0, float("inf")]}, "must be finite"),
    ],
)
def test_a_profile_that_is_not_right_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    np.savez(tmp_path / "profile.npz", **{k: v for k, v in (ARRAYS | change).items() if v is not None})
    with pytest.raises(InvalidArgument, match=said):
        read_profile(tmp_path / "profile.npz")
    with pytest.raises(InvalidArgument, match="a profile is an NPZ file"):
        read_profile(tmp_path / "nothing")
