"""`tokenweir replay`: a recorded request is asked again, and what differs is named."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from server.cli.app import run
from tests.server.fakes import OPTIONS, FakeGenerator, running_worker


@pytest.fixture
def generator() -> FakeGenerator:
    generator = FakeGenerator()
    generator.capabilities = (*generator.capabilities, *OPTIONS)
    return generator


async def typed(address: str, *arguments: str) -> int:
    return await asyncio.to_thread(run, [*arguments, "--server", address])


async def recorded(address: str, file: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return what is written of a generation."""
    assert (
        await typed(address, "generate", "--model", "dates", "--record", str(file), *arguments) == 0
    )
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--temperature 2 --logprobs 2",
        "--beam 2 --num-outputs 2 --logit-bias 5=1.5",
        "--json --prompt-logprobs 1",
        "--ids --prefix 3,4",
    ],
)
async def test_the_same_answer_is_bit_equal(
    generator: FakeGenerator, tmp_path: Path, options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ("5,7", "8") if "--ids" in options else ("one two", "three")
    async with running_worker(generator) as (_, address):
        asked = await recorded(address, tmp_path / "r", *options.split(), *prompts)
        code = await typed(address, "replay", str(tmp_path / "r"))

    assert (code, len(asked)) == (0, 2)
    said = capsys.readouterr().out.splitlines()[-2:]
    assert said == ["request 1: bit-equal", "request 2: bit-equal"]
    before, again = generator.requests[:2], generator.requests[2:]
    assert [one.prompt for one in before] == [one.prompt for one in again]
    assert [one.params for one in before] == [one.params for one in again]  # the seed as well


async def test_what_differs_is_named(
    generator: FakeGenerator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recorded.jsonl"
    async with running_worker(generator) as (_, address):
        (asked,) = await recorded(address, file, "--logprobs", "0", "one three five")
        other, shorter, same = (json.loads(json.dumps(asked)) for _ in range(3))
        other["answer"]["sequences"][0]["token_ids"][1] = 9
        other["answer"]["provenance"] |= {"threads": 4, "manifest_sha256": "ab", "processor": ""}
        shorter["answer"]["sequences"][0]["token_ids"].pop()
        same["answer"]["sequences"][0]["logprobs"][2]["chosen"]["logprob"] = -2.5
        write(file, [other, shorter, same, asked])

        assert await typed(address, "replay", str(file)) == 1

    said = capsys.readouterr().out.splitlines()[-4:]
    assert said[0].startswith("request 1: sequence 0: token 1 was 9, is 5; package was ab, is 0101")
    assert "; processor was not said, is " in said[0]
    assert said[0].endswith("; threads was 4, is 1")
    assert said[1].startswith(
        "request 2: sequence 0: token 2 was none, is 4; from the same package"
    )
    assert said[2].startswith("request 3: sequence 0: the same tokens, but other logprobs; from")
    assert said[3] == "request 4: bit-equal"


@pytest.mark.parametrize("line", ["[]", "{", '{"model": "dates"}'])
def test_another_file_is_refused_by_its_line(
    tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(line)

    assert run(["replay", str(file), "--server", "127.0.0.1:1"]) == 3
    assert f"{file}:1 is not what" in capsys.readouterr().err


def write(file: Path, lines: Sequence[object]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
