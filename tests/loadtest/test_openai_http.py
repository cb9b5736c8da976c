"""The same load to a server of OpenAI's protocol."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from loadtest.arrival.arrival import ClosedLoop
from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError, NoServerError
from loadtest.load_report import LoadReport
from loadtest.runner import LoadTest
from loadtest.work.ask import Ask, InTurn, Work, texts

Body = dict[str, Any]


class HttpServer:
    """Answers with what a test scripts: a status and the bytes behind it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Body]] = []
        self.headers: list[dict[str, str]] = []
        self.models: object = {"data": [{"id": "m"}, {"id": "n"}]}
        self.answer: Callable[[str, Body], tuple[int, bytes]] = lambda path, body: (200, stream())
        self.url = ""
        self.closes_unsaid = False  # the end of each connection, and not of the answer


def event(**content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def stream(*pieces: str, name: str = "text") -> bytes:
    pieces = pieces or ("a", "b")
    choices = [{"text": one} if name == "text" else {"delta": {name: one}} for one in pieces]
    events = [event(choices=[choice]) for choice in choices]
    end = event(choices=[{"text": "", "finish_reason": "length"}])
    usage = {"prompt_tokens": 4, "completion_tokens": 5}
    usage_event = event(choices=[], usage={**usage, "prompt_tokens_details": {"cached_tokens": 2}})
    return b"".join([b": a comment\n\n", *events, end, usage_event, b"data: [DONE]\n\n"])


@pytest.fixture
def server() -> Iterator[HttpServer]:
    script = HttpServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, json.dumps(script.models).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            script.asked.append((self.path, body))
            script.headers.append(dict(self.headers))
            self._send(*script.answer(self.path, body))

        def _send(self, status: int, content: bytes) -> None:
            if script.closes_unsaid:
                self.protocol_version = "HTTP/1.1"
            self.send_response(status)
            if script.closes_unsaid:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()  # the end of the connection is that of the answer
            self.wfile.write(content)
            self.close_connection = True

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    script.url = f"http://127.0.0.1:{running.server_port}/v1"
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    yield script
    running.shutdown()
    running.server_close()
    thread.join()


def load(server: HttpServer, work: Work, num_requests: int = 4, **more: Any) -> LoadReport:
    config = LoadConfig(server.url, "m", ClosedLoop(2), num_requests, timeout=60, **more)
    return LoadTest(config, work, client_arguments=lambda: {"token": "secret"}).run()


def test_texts_are_completed_and_streams_are_measured(server: HttpServer):
    report = load(server, texts(("p",), max_new_tokens=5, min_new_tokens=5, temperature=0.0))

    assert report.num_failed == 0
    path, body = server.asked[-1]
    assert path == "/v1/completions"
    assert (body["model"], body["prompt"], body["stream"]) == ("m", "p", True)
    assert (body["max_tokens"], body["min_tokens"], body["temperature"]) == (5, 5, 0.0)
    assert server.headers[-1]["Authorization"] == "Bearer secret"
    record = report.records[0]
    assert (record.input_tokens, record.cached_input_tokens, record.output_tokens) == (4, 2, 5)
    assert len(record.token_times) == 2 and record.finish_reason == "length"
    assert report.summary.time_to_first_token.count == 4


def test_answers_of_another_protocol_are_refused(server: HttpServer):
    kept = Ask("p", expected={"text": "ab", "token_ids": [1, 2]})

    with pytest.raises(
        LoadTestError, match="have token_ids, those of the server only text, finish"
    ):
        load(server, InTurn("kept", (kept,)))


def test_a_server_may_close_connections_without_a_word(server: HttpServer):
    server.closes_unsaid = True

    report = load(server, texts(("p",)), num_requests=40)

    assert report.summary.errors == {}


def test_conversations_go_to_chat_and_grow_with_their_turns(server: HttpServer):
    server.answer = lambda path, body: (200, stream("a", "b", name="content"))
    ask = Ask(({"role": "user", "content": "hi"},), turns=("why {answer}?",))

    report = load(server, InTurn("talk", (ask,)), num_requests=1)

    assert report.num_failed == 0 and len(report.records) == 2
    path, body = server.asked[-1]
    assert path == "/v1/chat/completions"
    assert [one["content"] for one in body["messages"]] == ["hi", "ab", "why ab?"]


def test_reasoning_has_tokens_and_is_no_part_of_the_answer(server: HttpServer):
    thought = stream("a", "b", name="reasoning_content").partition(b"data: [DONE]")[0]
    server.answer = lambda path, body: (200, thought + stream("c", name="content"))
    ask = Ask(({"role": "user", "content": "hi"},), turns=("why {answer}?",))

    report = load(server, InTurn("talk", (ask,)), num_requests=1)

    assert [len(record.token_times) for record in report.records] == [3, 3]
    assert server.asked[-1][1]["messages"][1]["content"] == "c"


def test_token_ids_and_vectors_are_asked_for(server: HttpServer):
    vector = {"data": [{"embedding": [0.5, 1.5]}], "usage": {"prompt_tokens": 3}}
    server.answer = lambda path, body: (
        (200, json.dumps(vector).encode()) if path == "/v1/embeddings" else (200, stream())
    )
    asks = (Ask((5, 6)), Ask("p", method="embed", expected={"values": [0.5, 1.5]}))

    report = load(server, InTurn("both", asks), num_requests=4)

    assert report.num_failed == 0 and report.checks.num_expected == 2
    assert report.checks.num_wrong_expected == 0
    assert {tuple(body["prompt"]) for path, body in server.asked if "prompt" in body} == {(5, 6)}


@pytest.mark.parametrize(
    ("status", "content", "error"),
    [
        (429, b'{"error": {"message": "full", "code": "busy"}}', "HTTP_429 busy"),
        (500, b"broken", "HTTP_500"),
        (200, event(choices=[{"text": "a"}]), "DATA_LOSS BROKEN_STREAM"),
        (200, b"data: no json\n\n", "DATA_LOSS UNREADABLE"),
        (200, b"data: []\n\n", "DATA_LOSS UNREADABLE"),
        (200, event(choices=["a"]), "DATA_LOSS UNREADABLE"),
        (200, event(choices=[], usage={"completion_tokens": "many"}), "DATA_LOSS UNREADABLE"),
        (200, event(error={"message": "out of memory"}), "INTERNAL"),
    ],
)
def test_what_is_not_an_answer_is_a_failed_request(
    server: HttpServer, status: int, content: bytes, error: str
):
    server.answer = lambda path, body: (status, content)

    report = load(server, texts(("p",)), num_requests=2)

    assert report.summary.errors == {error: 2}


@pytest.mark.parametrize("content", [b'{"data": []}', b'{"object": "error"}', b"[]", b"broken"])
def test_what_is_no_vector_is_a_failed_request(server: HttpServer, content: bytes):
    server.answer = lambda path, body: (200, content)

    report = load(server, InTurn("v", (Ask("p", method="embed"),)), num_requests=2)

    assert report.summary.errors == {"DATA_LOSS UNREADABLE": 2}


def test_a_server_need_not_say_how_many_tokens_there_were(server: HttpServer):
    nothing = {"prompt_tokens": None, "completion_tokens": None, "prompt_tokens_details": None}
    server.answer = lambda path, body: (
        200,
        event(choices=[{"text": "a"}], usage=nothing)
        + event(choices=[{"text": None, "delta": None, "finish_reason": "stop"}], usage=None),
    )

    report = load(server, texts(("p",)), num_requests=2)

    record = report.records[0]
    assert (record.status, record.finish_reason) == ("OK", "stop")
    assert (record.input_tokens, record.output_tokens) == (0, 1)


def test_answers_are_verified_there_too(server: HttpServer):
    numbers = iter(range(1000))
    server.answer = lambda path, body: (200, stream(str(next(numbers))))

    report = load(server, texts(("p",)), verify=1.0)

    assert report.checks.num_wrong_verified == 4


def test_what_is_not_there_is_said(server: HttpServer):
    server.models = {"data": [{"id": "other"}]}
    with pytest.raises(LoadTestError, match="has no model 'm'; it has: other"):
        load(server, texts(("p",)))
    with pytest.raises(NoServerError, match="no server answers at http://127.0.0.1:1"):
        LoadTest(LoadConfig("http://127.0.0.1:1/v1", "m", ClosedLoop(1), 1), texts(("p",))).run()


@pytest.mark.parametrize("models", [[], "x", {"data": [1]}])
def test_a_server_need_not_list_its_models(server: HttpServer, models: object):
    server.models = models

    assert load(server, texts(("p",)), num_requests=1).num_failed == 0


def test_what_the_protocol_does_not_have_is_refused(server: HttpServer):
    with pytest.raises(LoadTestError, match="has no call to score"):
        load(server, InTurn("s", (Ask("p", method="score", target="t"),)))
