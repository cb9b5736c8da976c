"""`tokenweir replay`: a recorded request is asked again, and what differs is named."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from server.cli.app import run
from server.cli.calls.recorded import recording
from tests.fakes.engines import OPTIONS, FakeGenerator, running_worker


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
        other["answer"]["provenance"]["server_version"] = "0.0.1"
        shorter["answer"]["sequences"][0]["token_ids"].pop()
        same["answer"]["sequences"][0]["logprobs"][2]["chosen"]["logprob"] = -2.5
        write(file, [other, shorter, same, asked])

        assert await typed(address, "replay", str(file)) == 1

    said = capsys.readouterr().out.splitlines()[-4:]
    assert said[0].startswith("request 1: sequence 0: token 1 was 9, is 5; package was ab, is 0101")
    assert "; version of the server was 0.0.1, is " in said[0]
    assert "; processor was not said, is " in said[0]
    assert said[0].endswith("; threads was 4, is 1")
    assert said[1].startswith(
        "request 2: sequence 0: token 2 was none, is 4; from the same package"
    )
    assert said[2].startswith("request 3: sequence 0: the same tokens, but other logprobs; from")
    assert said[3] == "request 4: bit-equal"


def changed(**fields: Any) -> str:
    """Return a line as it is recorded, with something else in its place."""
    answer = {
        "sequences": [{"token_ids": [1]}],
        "prompt_logprobs": [],
        "source_pieces": [],
        "provenance": {"seed": 0},
    }
    line = {"model": "dates", "prompt": "a", "options": {}, "answer": answer}
    answer |= fields.pop("said", {})
    return json.dumps(line | fields)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{",
        '{"model": "dates"}',
        changed(model=7),
        changed(prompt=7),
        changed(prompt={"role": "user"}),
        changed(options=[]),
        changed(options={"logit_bias": [5]}),
        changed(options={"logit_bias": {"a": 5}}),
        changed(answer="text"),
        changed(answer={}),
        changed(said={"provenance": None}),
        changed(said={"provenance": {}}),
        changed(said={"sequences": {"0": {}}}),
        changed(said={"sequences": [7]}),
        changed(said={"sequences": [{"token_ids": 3}]}),
    ],
)
def test_another_file_is_refused_by_its_line(
    tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(line)

    assert run(["replay", str(file), "--server", "127.0.0.1:1"]) == 3
    assert f"{file}:1 is not what" in capsys.readouterr().err


def write(file: Path, lines: Sequence[object]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [{"text": "a"}]},
        {"options": {"unknown": 1}},
        {"options": {"top_k": "many"}},
        {"options": {"seed": -1}},
        {"options": {"model": "dates"}},
    ],
)
def test_what_cannot_be_asked_is_named_by_its_line(
    tmp_path: Path, fields: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "changed.jsonl"
    file.write_text(changed(**fields))

    assert run(["replay", str(file), "--server", "127.0.0.1:1"]) == 3
    assert f"{file}:1 cannot be asked again: " in capsys.readouterr().err


def test_a_file_without_a_request_is_not_taken_for_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "empty.jsonl"
    file.touch()

    assert run(["replay", str(file), "--server", "127.0.0.1:1"]) == 3
    assert capsys.readouterr().err.startswith(f"error: {file} is empty; ")


def test_a_line_without_end_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "long.jsonl"
    with file.open("wb") as long:
        long.truncate(2**27)

    assert run(["replay", str(file), "--server", "127.0.0.1:1"]) == 3
    assert "more than 67,108,864 bytes" in capsys.readouterr().err


async def test_a_record_that_cannot_be_written_is_refused_before_anything_is_asked(
    generator: FakeGenerator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nowhere" / "r"
    async with running_worker(generator) as (_, address):
        asked = ("generate", "--model", "dates", "--record", str(file), "a")
        assert await typed(address, *asked) == 3

    said = capsys.readouterr().err
    assert said == f"error: cannot write {file}: No such file or directory\n"
    assert not generator.requests


def test_where_nothing_is_answered_an_older_record_stays(tmp_path: Path) -> None:
    file = tmp_path / "r"
    file.write_text("before")

    asked = ["generate", "--model", "dates", "--record", str(file), "a", "--timeout", "0.2"]
    assert run([*asked, "--server", "127.0.0.1:1"]) == 4

    assert [one.name for one in tmp_path.iterdir()] == ["r"]
    assert file.read_text() == "before"


def test_a_record_that_the_disk_cannot_hold_leaves_the_older_one(tmp_path: Path) -> None:
    file = tmp_path / "r"
    file.write_text("before")

    with pytest.raises(OSError, match="No space"), recording(file) as note:
        note("dates", "a", {}, {"text": "b"})  # type: ignore[arg-type]
        raise OSError(errno.ENOSPC, "No space left on device")

    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("r", "before")]
