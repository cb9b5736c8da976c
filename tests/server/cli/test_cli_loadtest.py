"""`tokenweir loadtest` against a scripted server: what it asks, its lines, its exit codes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tokenweir.v1 import generation_service_pb2, prediction_service_pb2

from loadtest.cli.default_prompts import SENTENCES
from server.cli.app import run
from server.cli.demo import _use as use_of_the_demo
from tests.fakes.scripted_server import (
    ScriptedServer,
    fail,
    list_models,
    scripted_server,
    stream_messages,
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, never_late: None) -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        running.answers["GenerateStream"] = lambda request, context: stream_messages(["a", "b"])
        monkeypatch.setenv("TOKENWEIR_SERVER", running.address)
        yield running


def loadtest(*options: str) -> int:
    return run(["loadtest", "--model", "m", *options])


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]


def test_all_is_well_is_0(server: ScriptedServer, capsys: pytest.CaptureFixture[str]):
    bounds = ("--slo", "ttft=9s,tpot=9s,e2e=9s", "--verify", "0.5")

    assert loadtest("--requests", "20", "--rate", "100", *bounds) == 0

    out = " ".join(capsys.readouterr().out.split())
    assert "20 of 20" in out and "100.0% of all" in out


def test_a_missed_threshold_is_1_with_its_line(server, capsys, tmp_path: Path):
    file = tmp_path / "run.json"
    options = ("--requests", "20", "--slo", "ttft=1us,e2e=9s", "--percentile", "90")

    assert loadtest(*options, "--json", str(file)) == 1

    (line,) = errors(capsys)
    assert line.startswith("error: threshold missed: p90 of ttft is ")
    good = json.loads(file.read_text())["goodput"]
    assert (good["share"], good["per_second"]) == (0.0, 0.0)


def test_a_session_of_answers_without_a_text_is_refused(server, capsys):
    server.answers["ListModels"] = list_models("m", capabilities=["classify"])
    server.answers["Classify"] = lambda request, context: prediction_service_pb2.ClassifyResponse(
        results=[prediction_service_pb2.ClassifyResponse.Classes()]
    )

    assert loadtest("--requests", "2", "--turns", "2") == 3

    said = " ".join(capsys.readouterr().err.split())
    assert "a session goes on with the text of its answers, and these have only" in said


def test_a_failed_request_is_1_with_its_line(server, capsys):
    calls: list[int] = []

    def third(request, context):
        calls.append(1)
        if len(calls) == 3:
            fail(context, grpc.StatusCode.INTERNAL, "broken")
        return stream_messages(["a"])

    server.answers["GenerateStream"] = third

    assert loadtest("--requests", "10", "--concurrency", "1") == 1

    assert errors(capsys) == ["error: 1 of 10 requests failed"]


def test_a_test_that_is_all_warm_up_is_1_with_its_line(server, capsys):
    assert loadtest("--requests", "10", "--warmup", "500") == 1

    (line,) = errors(capsys)
    assert line.startswith("error: nothing was measured: no request was due behind the warm-up")


def test_a_wrong_answer_is_1_with_its_line(server, capsys, tmp_path: Path):
    answers = tmp_path / "answers.jsonl"
    assert loadtest("--requests", "12", "--answers", str(answers)) == 0
    server.answers["GenerateStream"] = lambda request, context: stream_messages(["a", "c"])
    capsys.readouterr()

    assert loadtest("--requests", "12", "--expect", str(answers)) == 1

    out, err = capsys.readouterr()
    assert err == "error: 12 of 12 answers are not those expected\n"
    assert "text is 'ac', not 'ab'" in " ".join(out.split())


def test_answers_of_a_session_are_compared_at_every_turn(server, capsys, tmp_path: Path):
    answers, report = tmp_path / "answers.jsonl", tmp_path / "run.json"
    sessions = ("--requests", "2", "--turns", "3")

    def say(request, context):
        return stream_messages([request.request.inputs[0].text, "!"])

    def say_otherwise_at_last(request, context):
        text = request.request.inputs[0].text
        return stream_messages([text, "?" if text.endswith("!!") else "!"])

    server.answers["GenerateStream"] = say
    assert loadtest(*sessions, "--answers", str(answers)) == 0
    assert loadtest(*sessions, "--expect", str(answers)) == 0
    server.answers["GenerateStream"] = say_otherwise_at_last
    capsys.readouterr()

    assert loadtest(*sessions, "--expect", str(answers), "--json", str(report)) == 1

    assert errors(capsys) == ["error: 2 of 6 answers are not those expected"]
    checks = [record["check"] for record in json.loads(report.read_text())["records"]]
    assert checks == ["right", "right", "wrong"] * 2


def test_a_turn_without_a_kept_answer_is_not_compared_and_that_is_said(server, capsys, tmp_path):
    answers = tmp_path / "answers.jsonl"
    assert loadtest("--requests", "2", "--answers", str(answers)) == 0
    capsys.readouterr()

    assert loadtest("--requests", "2", "--turns", "3", "--expect", str(answers)) == 0

    out = " ".join(capsys.readouterr().out.split())
    assert "answers as expected │ 2 of 2" in out
    assert "4 answers were not compared: none is known to their requests" in out


def test_expected_fields_that_the_answers_do_not_have_are_refused(server, capsys, tmp_path):
    prompts, answers = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("p\n")
    answers.write_text('{"prompt": "p", "answer": {"text": "ab", "logprobs": [1.5]}}\n')

    assert loadtest("--prompts", str(prompts), "--expect", str(answers)) == 3

    assert "the expected answers have logprobs, those of the server only text" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize(
    "series",
    [("--sweep", "50,60"), ("--search", "--rate", "50", "--rounds", "1", "--slo", "e2e=9s")],
)
def test_wrong_answers_fail_a_sweep_and_a_search(series: tuple[str, ...], server, capsys, tmp_path):
    prompts, answers = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("p\n")
    answers.write_text('{"prompt": "p", "answer": {"text": "other"}}\n')
    work = ("--prompts", str(prompts), "--expect", str(answers), "--requests", "3")

    assert loadtest(*work, *series) == 1

    lines = [line for line in errors(capsys) if "are not those expected" in line]
    assert lines[0] == "error: at 50 requests/s 3 of 3 answers are not those expected"


@pytest.mark.parametrize(
    "more", [(), ("--slo", "ttft=9s"), ("--sweep", "50"), ("--sweep", "50", "--slo", "ttft=9s")]
)
@pytest.mark.parametrize(
    ("strict", "code", "kind"), [((), 0, "warning"), (("--strict",), 1, "error")]
)
def test_a_late_client_is_told_once_and_is_1_where_that_is_asked(
    strict: tuple[str, ...],
    code: int,
    kind: str,
    more: tuple[str, ...],
    server,
    capsys,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("loadtest.metrics.MAX_SHARE", 0.0)

    assert loadtest("--requests", "4", *more, *strict) == code

    out, err = capsys.readouterr()
    (line,) = [
        line for line in (out + err).splitlines() if "load test itself was the limit" in line
    ]
    assert line.startswith(f"{kind}: ")


def test_an_answer_that_is_another_one_alone_is_1_with_its_line(server, capsys):
    calls: list[int] = []

    def once(request, context):
        calls.append(1)
        return stream_messages(["early" if len(calls) < 12 else "late"])

    server.answers["GenerateStream"] = once

    assert loadtest("--requests", "10", "--verify", "1") == 1

    (line,) = errors(capsys)
    assert line.endswith("of 10 answers are others than to the same requests alone")


def test_every_problem_has_a_line_of_its_own(server, capsys):
    def broken(request, context):
        fail(context, grpc.StatusCode.INTERNAL, "broken")

    server.answers["GenerateStream"] = broken

    assert loadtest("--requests", "4", "--slo", "e2e=1s") == 1

    lines = errors(capsys)
    assert lines[:2] == [
        "error: 4 of 4 requests failed",
        "error: threshold missed: p99 of e2e is none, for requests failed, bound 1000 ms",
    ]


def test_options_of_all_and_of_kinds_reach_the_server(server):
    mix = ("--mix", "1 short max_new_tokens=3", "--mix", "1 beam beam=4 length_penalty=0.5")

    assert loadtest("--requests", "30", "--option", "tenant=blue", *mix) == 0

    asked = [one.request for one in server.requests if hasattr(one, "request")]
    assert {one.scheduling.tenant for one in asked} == {"blue"}
    assert {one.stopping.max_new_tokens for one in asked} == {0, 3}
    assert {one.decoding.beam.width for one in asked} == {0, 4}


def test_options_of_generate_hold_for_all_requests_and_those_of_kinds_before_them(server, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text("{}")
    named = ("--max-new-tokens", "9", "--logit-bias", "5=-1.5", "--ban", "8", "--beam-end", "limit")
    mix = ("--mix", "1 wide beam=4", "--mix", "1 other")

    words = ("--beam", "2", *named, "--json-schema", str(schema), *mix, "--option", "tenant=blue")
    assert loadtest("--requests", "30", *words) == 0

    asked = [one.request for one in server.requests if hasattr(one, "request")]
    assert {one.decoding.beam.width for one in asked} == {2, 4}
    assert {one.decoding.beam.end for one in asked} == {generation_service_pb2.BEAM_END_LIMIT}
    assert {one.stopping.max_new_tokens for one in asked} == {9}
    assert {dict(one.decoding.controls.logit_bias)[5] for one in asked} == {-1.5}
    assert {tuple(one.decoding.controls.banned_tokens) for one in asked} == {(8,)}
    assert {one.decoding.constraint.json_schema for one in asked} == {"{}"}
    assert {one.scheduling.tenant for one in asked} == {"blue"}


def test_its_help_is_of_the_load_test(capsys):
    assert run(["loadtest", "--help"]) == 0

    out = capsys.readouterr().out
    assert "--typical-p" not in out and "tokenweir generate" in " ".join(out.split())


def test_synthetic_prompts_have_their_lengths(server):
    lengths = ("--input-tokens", "5-9", "--output-tokens", "7", "--token-ids", "3-4")

    assert loadtest("--requests", "30", *lengths) == 0

    asked = [one.request for one in server.requests if hasattr(one, "request")][1:]
    assert {len(one.inputs[0].tokens.ids) for one in asked} == {5, 6, 7, 8, 9}
    assert {token for one in asked for token in one.inputs[0].tokens.ids} == {3, 4}
    assert {one.stopping.min_new_tokens for one in asked} == {7}
    assert all(one.stopping.ignore_eos for one in asked)


def test_a_trace_is_replayed_from_its_file(server, tmp_path: Path):
    trace, report = tmp_path / "trace.jsonl", tmp_path / "run.json"
    trace.write_text('{"prompt": "a", "at": 10}\n{"prompt": "b", "at": 10.4}\n')
    options = ("--arrival", "trace", "--trace-speed", "4", "--prompts", str(trace))

    assert loadtest(*options, "--json", str(report)) == 0

    records = json.loads(report.read_text())["records"]
    assert [record["scheduled"] for record in records] == pytest.approx([0.0, 0.1])


def test_a_sweep_draws_latency_against_rate(server, tmp_path: Path, capsys):
    files = ("--json", str(tmp_path / "s.json"), "--html", str(tmp_path / "s.html"))

    assert loadtest("--sweep", "20,40", "--duration", "0.2", *files) == 0

    assert [trial["rate"] for trial in json.loads((tmp_path / "s.json").read_text())["trials"]] == [
        20.0,
        40.0,
    ]
    assert "Latency against rate" in (tmp_path / "s.html").read_text()
    assert [line for line in capsys.readouterr().err.splitlines() if "kept" in line] == [
        "20 requests/s, kept: yes; 0 requests failed",
        "40 requests/s, kept: yes; 0 requests failed",
    ]


@pytest.mark.long
def test_a_search_that_ends_a_test_before_its_answers_says_nothing_of_its_insides(
    server, caplog: pytest.LogCaptureFixture
):
    """The first test is too fast for the server, and is ended with calls under way."""
    calls: list[int] = []

    def late_at_first(request, context):
        calls.append(1)
        if 1 < len(calls) < 500:
            time.sleep(1.0)
        yield from stream_messages(["a"])

    server.answers["GenerateStream"] = late_at_first
    load = ("--arrival", "constant", "--rate", "500", "--duration", "2", "--slo", "e2e=600ms")

    loadtest("--search", "--rounds", "1", "--tolerance", "1", *load)

    assert len(calls) < 1200
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.long  # the search itself is tested on a simulated server
def test_the_search_finds_the_knee_of_a_server_that_serves_one_at_a_time(
    server, tmp_path: Path, capsys
):
    """20 ms a request, one after the other: no rate above 50/s keeps any bound for long."""
    one_at_a_time = threading.Lock()

    def slow(request, context):
        with one_at_a_time:
            time.sleep(0.02)
        yield from stream_messages(["a"])

    server.answers["GenerateStream"] = slow
    file = tmp_path / "search.json"
    load = ("--arrival", "constant", "--rate", "20", "--duration", "1", "--slo", "e2e=250ms")

    loadtest("--search", "--rounds", "1", "--tolerance", "0.3", *load, "--json", str(file))

    search = json.loads(file.read_text())["search"]
    assert 10 < search["rate"] < 75
    assert search["low"] <= search["rate"] <= search["high"]


def test_comparing_two_files_says_which_is_worse(server, tmp_path: Path, capsys):
    fast, slow = tmp_path / "fast.json", tmp_path / "slow.json"
    load = ("--requests", "60", "--concurrency", "2")
    server.answers["GenerateStream"] = lambda request, context: stream_messages(["a"])
    assert loadtest(*load, "--json", str(fast)) == 0

    def late(request, context):
        time.sleep(0.02)
        yield from stream_messages(["a"])

    server.answers["GenerateStream"] = late
    assert loadtest(*load, "--json", str(slow)) == 0
    capsys.readouterr()

    assert run(["loadtest", "compare", str(slow), str(fast)]) == 0
    assert run(["loadtest", "compare", str(fast), str(slow)]) == 1

    out, err = capsys.readouterr()
    assert "the second is better: TTFT p50" in " ".join(out.split())
    assert "is worse than" in err and "end to end p50" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--requests 0", "0 is not in the range x>=1"),
        ("--duration 0", "0.0 is not in the range x>0"),
        ("--duration inf", "inf is not a finite number"),
        ("--timeout 0", "0.0 is not in the range x>0"),
        ("--concurrency 0", "0 is not in the range x>=1"),
        ("--processes 65", "65 is not in the range 1<=x<=64"),
        ("--verify 1.5", "1.5 is not in the range 0<=x<=1"),
        ("--warmup -1", "-1.0 is not in the range x>=0"),
        ("--slo e2e=1s --percentile 101", "101.0 is not in the range 0<x<=100"),
        ("--rate 1 --arrival gamma --burstiness 0", "0.0 is not in the range x>0"),
        ("--rate 1 --arrival bursts", "'bursts' is not one of"),
        ("--arrival trace --trace-speed 0", "0.0 is not in the range x>0"),
        ("--search --rounds 101", "101 is not in the range 1<=x<=100"),
        ("--search --tolerance 0", "0.0 is not in the range 0.001<=x<=1"),
        ("--rate x", "is not a rate; give requests per second"),
        ("--input-tokens 0", "give numbers from 1 to"),
        ("--mix beam", "is not a kind of requests"),
        ("--option beam", "is not NAME=VALUE"),
        ("--sweep 1,x", "is not a list of rates above 0"),
        ("--search --sweep 1,2", "--search and --sweep both say at which rates"),
        ("--rate 5 --sweep 1,2", "--rate and --sweep both say at which rates"),
        ("--search --concurrency 3", "give --rate for an open loop"),
        ("--arrival trace --rate 3", "a trace has its own times"),
        ("--sweep 1 --png x.png", "--png and --answers are of one load test"),
        ("--token-ids 9-3", "is not a range of token ids"),
        ("--arrival gamma", "--arrival needs --rate, --sweep or --search; give that too"),
        ("--rate 5 --burstiness 0.5", "--burstiness needs --arrival gamma"),
        ("--trace-speed 2", "--trace-speed needs --arrival trace"),
        ("--percentile 90", "--percentile needs --slo"),
        ("--token-ids 3-9", "--token-ids needs --input-tokens"),
        ("--sweep 5 --rounds 2", "--rounds needs --search"),
        ("--sweep 5 --tolerance 0.5", "--tolerance needs --search"),
        ("--search --slo e2e=1s --rate 10-100", "--rate 10-100 is not one rate"),
        ("--mix=1\xa0a --mix=2\xa0a", "two kinds of --mix are called 'a'; rename one"),
    ],
)
def test_what_cannot_be_is_wrong_usage(options: str, message: str, capsys):
    assert loadtest(*(option.replace("\xa0", " ") for option in options.split(" "))) == 2

    assert message in " ".join(capsys.readouterr().err.split())


def test_a_line_with_an_option_that_nobody_knows_is_refused_before_the_test(
    server, capsys, tmp_path: Path
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b", "options": {"beem": 4}}\n')

    assert loadtest("--prompts", str(prompts), "--requests", "10") == 3

    assert "a request cannot be made: unknown option beem" in capsys.readouterr().err


def test_a_search_in_tests_that_are_too_short_for_its_bounds_says_so(server, capsys):
    one_at_a_time = threading.Lock()

    def slow(request, context):
        with one_at_a_time:
            time.sleep(0.02)
        yield from stream_messages(["a"])

    server.answers["GenerateStream"] = slow
    load = ("--requests", "20", "--rate", "40", "--arrival", "constant", "--slo", "e2e=200ms")

    loadtest("--search", "--rounds", "1", "--tolerance", "1", *load)

    out = " ".join(capsys.readouterr().out.split())
    assert "of one round, which says nothing of others" in out
    assert "too short for these bounds" in out and "give --duration 2 and no --requests" in out


def test_the_demo_writes_the_page(server, tmp_path: Path, capsys):
    server.answers["ListModels"] = list_models("dates")

    problems = use_of_the_demo(server.address, tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == {
        "loadtest.html",
        "loadtest.json",
        "loadtest.png",
    }
    assert not any("load test" in problem for problem in problems)
    assert "400 of 400" in capsys.readouterr().out


def test_without_a_model_it_is_missed(capsys):
    assert run(["loadtest", "--requests", "3"]) == 2

    assert "Missing option '--model'" in capsys.readouterr().err


def test_a_bound_that_is_none_is_refused_before_anything_is_sent(server, capsys):
    assert loadtest("--slo", "ttft=200") == 3

    assert "is not a bound of a latency" in capsys.readouterr().err
    assert server.requests == []


@pytest.mark.parametrize(
    ("capabilities", "architecture", "asked"),
    [
        (["generate"], "gpt", "3rd of Feb, 1998"),
        (["generate", "chat"], "gpt", SENTENCES[0]),
        (["embed"], "bert", SENTENCES[0]),
        (["classify"], "vision-encoder", b"\x89PNG"),
    ],
)
def test_what_is_asked_by_default_suits_the_model(
    capabilities: list[str], architecture: str, asked: str | bytes, server
):
    told = list_models("m", capabilities=capabilities, architecture=architecture)
    server.answers["ListModels"] = told
    server.answers["Embed"] = lambda request, context: prediction_service_pb2.EmbedResponse(
        vectors=[prediction_service_pb2.EmbedResponse.Vector(values=[1.0])]
    )
    server.answers["Classify"] = lambda request, context: prediction_service_pb2.ClassifyResponse(
        results=[prediction_service_pb2.ClassifyResponse.Classes()]
    )

    assert loadtest("--requests", "1", "--concurrency", "1") == 0

    kinds = prediction_service_pb2.EmbedRequest, prediction_service_pb2.ClassifyRequest
    sent = [one for one in server.requests if hasattr(one, "request") or isinstance(one, kinds)]
    match sent[-1]:  # it asks for the server's state, too
        case prediction_service_pb2.EmbedRequest(items=[item]):
            assert item.text == asked
        case prediction_service_pb2.ClassifyRequest(items=[item]):
            assert item.image.startswith(asked)
        case generated:
            (one,) = generated.request.inputs
            assert (one.chat.messages[0].content if "chat" in capabilities else one.text) == asked
