"""Load configurations and arrival times."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loadtest.errors import LoadTestError
from loadtest.workload import LoadConfig, arrival_times, read_prompts

OPEN = LoadConfig("127.0.0.1:1", "m", ("p",), num_requests=5000, rate=50.0)


def test_constant_arrivals_are_evenly_spaced():
    config = replace(OPEN, arrival="constant", num_requests=4, rate=10.0)

    assert arrival_times(config) == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential():
    gaps = np.diff(arrival_times(OPEN))

    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05)
    # Memoryless: e^-1 of the gaps are longer than the mean.
    assert (gaps > 1 / 50).mean() == pytest.approx(np.exp(-1), abs=0.02)


def test_poisson_arrivals_repeat_with_their_seed():
    assert arrival_times(OPEN) == arrival_times(OPEN)
    assert arrival_times(OPEN) != arrival_times(replace(OPEN, seed=1))


def test_one_request_is_due_at_once():
    assert arrival_times(replace(OPEN, num_requests=1)) == [0.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"concurrency": 2}, r"rate \(50.0\) and concurrency \(2\): give one of them"),
        ({"rate": None}, r"rate \(None\) and concurrency \(None\): give one of them"),
        ({"rate": 0.0}, r"rate \(0.0\) must be above 0"),
        ({"rate": float("inf")}, r"rate \(inf\) must be above 0"),
        ({"rate": None, "concurrency": 0}, r"concurrency \(0\) must be at least 1"),
        ({"num_requests": 0}, r"num_requests \(0\) must be at least 1"),
        ({"arrival": "bursts"}, r"arrival \('bursts'\) must be poisson or constant"),
        ({"timeout": 0}, r"timeout \(0\) must be above 0"),
        ({"prompts": ()}, "there are no prompts"),
    ],
)
def test_impossible_configuration_is_refused(change, message):
    with pytest.raises(LoadTestError, match=message):
        replace(OPEN, **change)


def test_prompts_are_the_lines_of_a_file(tmp_path: Path):
    path = tmp_path / "prompts.txt"
    path.write_text("3rd of Feb\n\nle 7 août 2004\n", encoding="utf-8")

    assert read_prompts(path) == ("3rd of Feb", "le 7 août 2004")


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"\n \n"])
def test_file_without_prompts_is_refused(tmp_path: Path, content: bytes | None):
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(LoadTestError, match="prompts.txt"):
        read_prompts(path)


def test_a_file_of_no_reasonable_size_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.touch()
    os.truncate(path, 40 * 2**30)

    with pytest.raises(LoadTestError, match="more than 268,435,456 bytes; give fewer prompts"):
        read_prompts(path)
