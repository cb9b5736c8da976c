"""The options of `tokenweir generate`: what is sent, refused and printed."""

from __future__ import annotations

import asyncio
import io
import os
from pathlib import Path

import pytest
from tokenweir import PositionLogprobs, TokenLogprob

from engine.requests.request import Chat, ChatMessage
from server.cli.app import run
from server.cli.calls.generation import prompt_table
from server.cli.tables import print_table
from tests.fakes.engines import OPTIONS, FakeGenerator, running_worker


@pytest.fixture
def generator() -> FakeGenerator:
    generator = FakeGenerator()
    generator.capabilities = (*generator.capabilities, *OPTIONS)
    return generator


async def _generate(address: str, *arguments: str) -> int:
    typed = ["generate", "--model", "dates", *arguments, "--server", address]
    return await asyncio.to_thread(run, typed)


async def test_a_text_can_be_what_a_user_says(generator: FakeGenerator) -> None:
    generator.capabilities = (*generator.capabilities, "chat")
    async with running_worker(generator) as (_, address):
        assert await _generate(address, "--chat", "--system", "be brief", "why so") == 0
        assert await _generate(address, "--chat", "--beam", "2", "--num-outputs", "2", "why") == 0

    first, second = (request.prompt for request in generator.requests)
    assert first == Chat((ChatMessage("system", "be brief"), ChatMessage("user", "why so")))
    assert second == Chat((ChatMessage("user", "why"),))


@pytest.mark.parametrize("typed", [("--chat", "--ids", "5"), ("--system", "be brief", "why")])
def test_a_text_is_read_in_one_way(
    typed: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "--model", "dates", *typed, "--server", "127.0.0.1:1"]) == 2
    assert "leave" in capsys.readouterr().err


async def test_prompt_and_prefix_can_be_token_ids(
    generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("5 7\n"))
    arguments = ("--ids", "--prefix", "3,4")
    async with running_worker(generator) as (_, address):
        assert await _generate(address, *arguments, "--strategy", "sampling", "11,12") == 0
        assert await _generate(address, *arguments) == 0

    assert [request.prompt for request in generator.requests] == [(11, 12), (5, 7)]
    assert [request.target_prefix for request in generator.requests] == [(3, 4), (3, 4)]
    assert generator.requests[0].params.strategy == "sampling"


@pytest.mark.parametrize("num_outputs", ["1", "2"])
async def test_alignment_names_the_source_token_of_every_token(
    num_outputs: str, generator: FakeGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--alignment", "--temperature", "1", "--num-outputs", num_outputs)
    async with running_worker(generator) as (_, address):
        assert await _generate(address, "one three", *options) == 0

    out = capsys.readouterr().out
    rows = [line.strip("│ ").split(" │ ") for line in out.splitlines() if "%" in line]
    cells = [[cell.strip() for cell in row] for row in rows]
    expected = [["'<3>'", "'<9>'", "2 of 2", "75.0%"], ["'<5>'", "'<9>'", "2 of 2", "75.0%"]]
    assert cells == expected * int(num_outputs)
    assert "-2.0000" not in out, "log-probabilities were not asked for"


async def test_prompt_logprobs_are_a_table_with_ranks_and_alternatives(
    generator: FakeGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_worker(generator) as (_, address):
        arguments = ("one two", "--prompt-logprobs", "2")
        assert await _generate(address, *arguments) == 0

    text, *table = capsys.readouterr().out.splitlines()
    (row,) = [line for line in table if "-2.0000" in line]
    cells = [cell.strip() for cell in row.strip("│ ").split(" │ ")]
    assert text == "one two "
    assert cells == ["'<1>'", "-2.0000", "2", "'<90>' -1.0000, '<91>' -2.0000"]


async def test_the_tokens_of_the_prompt_are_a_line(
    generator: FakeGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_worker(generator) as (_, address):
        assert await _generate(address, "one two", "--prompt-token-ids") == 0

    assert capsys.readouterr().out.splitlines() == ["one two ", "prompt\t4 '<4>'\t9 '<9>'"]


def test_brackets_in_tokens_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    token = TokenLogprob(1, b"[red]x[/]", -1.0, 1)

    print_table(prompt_table([PositionLogprobs(token, (token,))]))

    assert capsys.readouterr().out.count("[red]x[/]") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--logit-bias", "5:3"), "'5:3' is not TOKEN_ID=VALUE; give a token id and a finite"),
        (("--logit-bias", "5=inf"), "'5=inf' is not TOKEN_ID=VALUE"),
        (("--logit-bias", "-5=1"), "'-5' is not a token id; give a number from 0 to 2147483647"),
        (("--logit-bias", "5=1", "--logit-bias", "5=2"), "token 5 has 1 and 2; give one value"),
        (("--ban", "2147483648"), "'2147483648' is not a token id; give a number from 0 to"),
        (("--stop-token", "the"), "'the' is not a token id"),
        (("--ids",), "--ids: 'one' is not a token id"),
        (("--ids", "--prefix", "x"), "--ids: 'x' is not a token id"),
        (("--strategy", "best"), "'best' is not one of"),
        (("two", "--request-id", "me"), "'me' names one request, and there are 2"),
        (
            ("--tokens-per-message", "4", "--num-outputs", "2"),
            "--tokens-per-message 4 is of a stream, and --num-outputs 2 are not streamed",
        ),
    ],
)
def test_what_generate_cannot_send_is_said_before_a_server_is_called(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "--model", "dates", "one", *options]) == 2

    assert message in " ".join(capsys.readouterr().err.split())


async def test_a_bias_beyond_the_limit_is_refused_by_the_server(
    generator: FakeGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_worker(generator) as (_, address):
        arguments = ("one", "--logit-bias", "5=20000")
        assert await _generate(address, *arguments, "--ban", "100") == 1

    err = capsys.readouterr().err
    assert "logit_bias[5]: 20000 is outside -10000 to 10000; banned_tokens keep" in err
    assert "banned_tokens[0]: 100 is outside the vocabulary, 0 to 99" in err


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"caf\xe9", "byte 0xe9 in line 1 is not UTF-8"), (None, "more than 4,194,304 bytes")],
)
def test_a_file_that_cannot_be_sent_is_named(
    content: bytes | None, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_bytes(content or b"")
    if content is None:
        os.truncate(schema, 40 * 2**30)

    code = run(["generate", "--model", "echo", "--json-schema", str(schema), "a"])

    assert code == 3
    err = capsys.readouterr().err
    assert err.startswith(f"error: {schema} cannot be read: ") and problem in err
