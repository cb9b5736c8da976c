"""Lines of the standard input, and how `tokenweir generate` answers them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest
from tokenweir.v1 import common_pb2, generation_service_pb2

from server.cli.app import run
from server.cli.calls.connection import arriving_lines
from tests.fakes.scripted_server import ScriptedServer, fail, scripted_server, stream_messages


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        running.answers["Generate"] = lambda request, context: _echo(request)
        running.answers["GenerateStream"] = lambda request, context: stream_messages(
            [f"{request.request.inputs[0].text}?"]
        )
        yield running


def _echo(request: generation_service_pb2.GenerateRequest) -> object:
    return generation_service_pb2.GenerateResponse(
        results=[
            generation_service_pb2.Result(
                sequences=[
                    generation_service_pb2.Sequence(
                        text=f"{one.text}!", finish_reason=common_pb2.FINISH_REASON_EOS
                    )
                ]
            )
            for one in request.inputs
        ]
    )


def _give(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))


def _generate(server: ScriptedServer, *options: str) -> int:
    return run(["generate", "--model", "m", "--server", server.address, *options])


def test_the_lines_of_a_file_are_asked_together(
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _give(monkeypatch, "".join(f"{number}\n" for number in range(70)).encode())

    assert _generate(server, "--beam", "2", "--tokens-per-message", "3") == 0

    assert [len(request.inputs) for request in server.requests] == [32, 32, 6]
    assert {request.decoding.beam.width for request in server.requests} == {2}
    assert capsys.readouterr().out == "".join(f"{number}!\n" for number in range(70))


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    ],
)
def test_lines_that_are_refused_together_are_asked_one_by_one(
    code: grpc.StatusCode,
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.answers["Generate"] = lambda request, context: fail(context, code, "not all of them")
    _give(monkeypatch, b"a\nb")

    assert _generate(server) == 0

    assert capsys.readouterr().out == "a?\nb?\n"


def test_a_line_of_a_pipe_is_answered_before_the_next_one_comes(
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    read, write = os.pipe()
    lines = [b"two\n", b"three\n"]

    def answer(request: generation_service_pb2.GenerateStreamRequest, context: object) -> object:
        if lines:
            os.write(write, lines.pop(0))
        else:
            os.close(write)
        return stream_messages([request.request.inputs[0].text])

    server.answers["GenerateStream"] = answer
    os.write(write, b"one\n")
    with open(read, encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)

        assert _generate(server) == 0

    assert capsys.readouterr().out == "one\ntwo\nthree\n"


def test_a_standard_input_that_is_closed_is_told(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)  # as `<&-` leaves it

    assert _generate(server) == 2

    assert "Error: the standard input is closed; give the texts as" in capsys.readouterr().err


def test_with_json_every_line_has_its_own_times(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _give(monkeypatch, b"a\nb\n")

    assert _generate(server, "--json") == 0
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("content", "options", "problem"),
    [
        (b"7\n\xff\n8\n", (), "byte 0xff behind 0 characters is not UTF-8; convert the text"),
        (b"7\nx\n8\n", ("--ids",), "--ids: 'x' is not a token id"),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_line_that_cannot_be_sent_is_named_and_the_others_are_answered(
    content: bytes,
    options: tuple[str, ...],
    problem: str,
    form: tuple[str, ...],
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _give(monkeypatch, content)

    assert _generate(server, *form, *options) == 1

    out, err = capsys.readouterr()
    assert err.startswith(f"error: input 2: {problem}") and err.count("\n") == 1
    assert len(server.requests) == 2
    _, second, _ = out.splitlines()
    assert second == "" or json.loads(second)["error"]["code"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("environment", "written"),
    [
        ({"PYTHONIOENCODING": "iso-8859-1"}, b"?y??\n?y?\xfc?\n"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, None),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_texts_are_utf8_in_every_locale(
    environment: dict[str, str], written: bytes | None, as_json: bool, server: ScriptedServer
) -> None:
    text = "ếy─"
    answer = "".join(f"{one}?\n" for one in (text, f"{text}ü")).encode()
    command = [sys.executable, "-c", "from server.cli import main; main()", "generate"]

    done = subprocess.run(
        [*command, "--model", "m", *["--json"] * as_json, text, "-", "--server", server.address],
        input=f"{text}ü\n".encode(),
        capture_output=True,
        env={**os.environ, **environment},
    )

    assert (done.returncode, done.stderr) == (0, b"")
    assert [one.request.inputs[0].text for one in server.requests] == [text, f"{text}ü"]
    if as_json:
        found = [json.loads(line.decode()) for line in done.stdout.splitlines()]
        assert [one["sequences"][0]["text"] for one in found] == answer.decode().splitlines()
    else:
        assert done.stdout == (written or answer)


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"a", ["a"]),
        (b"a\n\nb\n", ["a", "", "b"]),
        ("\ufeffa\r\nb\rc\u2028d\x0b\x1c\n".encode(), ["a", "b\rc\u2028d\x0b\x1c"]),
        (b"\xef\xbb\xbfa", ["a"]),
        (b"a\n\xff\n", ["a", "\udcff"]),
        ("é\n".encode() * 50_000, ["é"] * 50_000),  # more than is read at once
    ],
)
def test_lines_are_those_of_the_text(
    content: bytes, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _give(monkeypatch, content)

    groups = list(arriving_lines(32))

    assert [line for group in groups for line in group] == lines
    assert all(1 <= len(group) <= 32 for group in groups)
