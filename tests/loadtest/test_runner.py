"""Load tests against a scripted gRPC server."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from tokenweir.v1 import (
    admin_service_pb2,
    common_pb2,
    generation_service_pb2,
    prediction_service_pb2,
)

from loadtest.arrival.arrival import ClosedLoop, OpenLoop, Replay
from loadtest.arrival.rates import Rates
from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError
from loadtest.goals import parse_slo
from loadtest.interruption import signals_held
from loadtest.load_report import LoadReport
from loadtest.metrics import summarize
from loadtest.reports.report import notes
from loadtest.runner import Course, LoadTest, Watch
from loadtest.sender import arrival_times
from loadtest.work.ask import Ask, InTurn, Work, texts
from loadtest.work.common import Common
from loadtest.work.lengths import parse_lengths
from loadtest.work.mix import Mix, parse_kind
from loadtest.work.synthetic import Synthetic
from tests.fakes.scripted_server import (
    ScriptedServer,
    fail,
    list_models,
    scripted_server,
    stream_messages,
)

WORK = texts(("p", "q"))


def run(config: LoadConfig, work: Work = WORK, watch: Watch = lambda course: None) -> LoadReport:
    return LoadTest(config, work, watch).run()


def streams(server: ScriptedServer) -> list[generation_service_pb2.GenerateStreamRequest]:
    return [request for request in server.requests if hasattr(request, "request")]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        running.answers["GenerateStream"] = lambda request, context: stream_messages(["a", "b"])
        yield running


def open_loop(server: ScriptedServer, num_requests: int, rate: float) -> LoadConfig:
    arrival = OpenLoop(Rates((rate,)), "constant")
    return LoadConfig(server.address, "m", arrival, num_requests, timeout=60)


def closed_loop(server: ScriptedServer, num_requests: int, concurrency: int) -> LoadConfig:
    return LoadConfig(server.address, "m", ClosedLoop(concurrency), num_requests, timeout=60)


def test_records_hold_what_the_stream_brought(server):
    report = run(closed_loop(server, num_requests=3, concurrency=1))

    assert [record.index for record in report.records] == [0, 1, 2]
    assert [record.prompt for record in report.records] == [0, 1, 0]
    record = report.records[1]
    assert (record.status, record.finish_reason) == ("OK", "eos")
    assert (record.input_tokens, record.output_tokens, record.first_tokens) == (4, 2, 1)
    assert record.scheduled <= record.sent < record.token_times[0] <= record.token_times[1]
    assert record.token_times[1] <= record.finished
    assert (record.server_queue, record.server_batch_size) == (0.003, 2.0)
    assert report.method == "generate"
    assert report.summary.output_tokens == 6


def test_one_request_before_the_test_is_not_measured(server):
    run(closed_loop(server, num_requests=3, concurrency=1))

    assert len(streams(server)) == 4


def test_it_is_none_of_the_test_where_requests_never_repeat(server):
    work = Synthetic(parse_lengths("8"))

    run(closed_loop(server, num_requests=3, concurrency=1), work)

    prompts = {tuple(one.request.inputs[0].tokens.ids) for one in streams(server)}
    assert len(prompts) == 4
    assert prompts > {work.ask(index).prompt for index in range(3)}


def test_open_loop_counts_latency_from_the_scheduled_time_while_the_server_stalls(server):
    """One call at a time, and the first takes half a second: later ones wait, and say so."""
    one_at_a_time, all_asked = threading.Lock(), threading.Event()
    asked, served = list[int](), list[int]()

    def stalling(request, context):
        asked.append(1)
        if len(asked) == 11:  # with the warm-up
            all_asked.set()
        with one_at_a_time:
            served.append(1)
            if len(served) == 2:  # the first after the warm-up
                time.sleep(0.5)
                all_asked.wait(60)
            yield from stream_messages(["a"])

    server.answers["GenerateStream"] = stalling

    open_report = run(open_loop(server, num_requests=10, rate=50))
    served.clear()
    closed_report = run(closed_loop(server, num_requests=10, concurrency=1))

    for record in open_report.records:  # due every 20 ms, all answered at about 0.5 s
        assert record.end_to_end >= 0.5 - record.scheduled
    assert open_report.summary.max_in_flight == 10
    hidden = closed_report.summary.end_to_end.p50  # the same stall
    assert hidden < open_report.summary.end_to_end.p50 / 2


def test_open_loop_sends_on_time_however_many_are_running(server):
    asked, all_asked = list[int](), threading.Event()

    def slow(request, context):
        asked.append(1)
        if len(asked) == 16:  # with the warm-up
            all_asked.set()
        assert len(asked) == 1 or all_asked.wait(60)
        yield from stream_messages(["a"])

    server.answers["GenerateStream"] = slow
    config = open_loop(server, num_requests=15, rate=100)

    report = run(config)

    assert [record.scheduled for record in report.records] == arrival_times(config, WORK)
    assert report.summary.num_ok == report.summary.max_in_flight == 15


def test_closed_loop_never_exceeds_its_concurrency(server):
    running = most = num_asked = 0
    lock, four_there = threading.Lock(), threading.Barrier(4, timeout=60)

    def counted(request, context):
        nonlocal running, most, num_asked
        with lock:
            num_asked += 1
            is_measured = num_asked > 1  # behind the warm-up
            running += 1
            most = max(most, running)
        if is_measured:
            four_there.wait()
        with lock:
            running -= 1
        yield from stream_messages(["a"])

    server.answers["GenerateStream"] = counted

    report = run(closed_loop(server, num_requests=20, concurrency=4))

    assert most == 4
    assert report.summary.max_in_flight == 4
    assert report.summary.num_ok == 20


def test_errors_are_counted_by_status_and_reason_and_not_retried(server):
    info = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="tokenweir")
    numbers = iter(range(100))

    def mixed(request, context):
        number = next(numbers)
        if number % 3 == 1:
            fail(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "full", info)
        if number % 3 == 2:
            fail(context, grpc.StatusCode.INTERNAL, "broken")
        return stream_messages(["a"])

    server.answers["GenerateStream"] = mixed

    report = run(closed_loop(server, num_requests=9, concurrency=1))

    assert report.summary.num_ok == 3
    assert report.summary.errors == {"RESOURCE_EXHAUSTED QUEUE_FULL": 3, "INTERNAL": 3}
    assert {record.message for record in report.records} == {"", "full", "broken"}
    assert report.summary.end_to_end.count == 3


def test_requests_that_are_given_no_time_expire_at_a_server_that_answers(server):
    released = threading.Event()

    def list_late(request, context):
        time.sleep(0.2)
        return list_models("m")(request, context)

    def late(request, context):
        released.wait(60)
        yield from stream_messages(["a"])

    server.answers["ListModels"] = list_late
    server.answers["GenerateStream"] = late
    config = replace(closed_loop(server, num_requests=2, concurrency=2), timeout=0.05)

    report = run(config)
    released.set()

    assert report.summary.errors == {"DEADLINE_EXCEEDED": 2}


def test_stream_without_its_summary_is_an_error(server):
    server.answers["GenerateStream"] = lambda request, context: list(stream_messages(["a"]))[:-1]

    report = run(closed_loop(server, num_requests=2, concurrency=1))

    assert report.summary.errors == {"DATA_LOSS BROKEN_STREAM": 2}


def test_tokens_that_the_server_had_kept_are_counted(server):
    def cached(request, context):
        *others, summary = stream_messages(["a"])
        summary.summary.usage.cached_input_tokens = 3
        yield from (*others, summary)

    server.answers["GenerateStream"] = cached

    report = run(closed_loop(server, num_requests=4, concurrency=1))

    assert report.summary.cached_input_tokens == 12
    assert "they repeat, and 12 of 16 input tokens came from what the server had kept" in (
        " ".join(notes(report))
    )


def test_the_load_test_says_how_busy_it_was_itself(server):
    """A display that stalls is the event loop's own fault, and no server's."""
    config = replace(open_loop(server, num_requests=20, rate=20), slo=parse_slo("e2e=10s"))

    stalled = run(config, watch=lambda course: time.sleep(0.2))

    assert stalled.own.loop_delay.max > 0.1
    assert stalled.own.is_limit and stalled.invalid
    (said,) = stalled.problems
    assert said.startswith("the load test itself was kept waiting") and not stalled.faults
    assert said not in notes(stalled), "it is said once"


def test_requests_that_are_sent_late_make_a_run_invalid(server, never_late, monkeypatch):
    """Each of its own processes may be quick, and what was due has waited all the same."""
    monkeypatch.setattr("loadtest.runner.MAX_DELAY", 0.0)

    (reason,) = run(open_loop(server, num_requests=20, rate=200)).invalid

    assert "requests sent" in reason and "ms late" in reason


def test_whoever_watches_sees_all_that_has_ended(server):
    seen: list[int] = []

    def watch(course: Course) -> None:
        seen.append(len(course.records))

    run(closed_loop(server, num_requests=3, concurrency=2), watch=watch)

    assert seen[-1] == 3


def test_nobody_at_the_address_is_said_clearly():
    config = LoadConfig("127.0.0.1:1", "m", ClosedLoop(1), 1, timeout=60)

    with pytest.raises(LoadTestError, match="no server answers at 127.0.0.1:1; start one"):
        run(config)


def test_one_pass_model_is_measured_from_end_to_end(server):
    server.answers["ListModels"] = list_models("m", capabilities=["label", "embed"])
    server.answers["Label"] = lambda request, context: prediction_service_pb2.LabelResponse(
        results=[prediction_service_pb2.LabelResponse.Spans()],
        usage=common_pb2.Usage(input_tokens=6),
    )

    report = run(closed_loop(server, num_requests=4, concurrency=2))

    assert report.method == "label"
    assert report.summary.num_ok == 4
    assert report.summary.input_tokens == 24
    assert report.summary.end_to_end.count == 4
    assert report.summary.time_to_first_token is None


def test_prompts_of_an_image_model_are_files(server, tmp_path: Path):
    model = admin_service_pb2.ModelInfo(
        model="m", architecture="vision-encoder", capabilities=["classify"]
    )
    server.answers["ListModels"] = lambda request, context: admin_service_pb2.ListModelsResponse(
        models=[model]
    )
    server.answers["Classify"] = lambda request, context: prediction_service_pb2.ClassifyResponse(
        results=[prediction_service_pb2.ClassifyResponse.Classes()]
    )
    (tmp_path / "a.png").write_bytes(b"png")
    config = closed_loop(server, num_requests=1, concurrency=1)

    assert run(config, texts((str(tmp_path / "a.png"),))).summary.num_ok == 1
    asked = [request for request in server.requests if hasattr(request, "items")]
    assert asked[-1].items[0].image == b"png"
    with pytest.raises(LoadTestError, match="prompts are paths of image files"):
        run(config, texts(("no such file",)))


def prompts_of(server: ScriptedServer) -> list[str]:
    """The prompts that were asked behind the warm-up."""
    return [one.request.inputs[0].text for one in streams(server)][1:]


def test_records_are_none_of_the_garbage_collectors_while_requests_are_sent(server):
    """To look at all of them stops the test, and with it the requests that are due."""
    before = gc.get_freeze_count()
    during: list[int] = []

    run(
        closed_loop(server, num_requests=20, concurrency=1),
        watch=lambda course: during.append(gc.get_freeze_count()),
    )

    gc.unfreeze()
    assert during[-1] > before


def test_a_stall_of_a_second_shows_in_the_99th_percentile_of_the_open_loop(server):
    """Requests behind the first third, at 100/s, meet a server that stands still."""
    until = [0.0]
    seen: list[int] = []
    lock = threading.Lock()

    def stalling(request, context):
        with lock:
            seen.append(1)
            if len(seen) == 34:
                until[0] = time.monotonic() + 1.0
        time.sleep(max(0.0, until[0] - time.monotonic()))
        yield from stream_messages(["a"])

    server.answers["GenerateStream"] = stalling

    report = run(open_loop(server, num_requests=100, rate=100))

    assert report.summary.time_to_first_token.p99 > 0.9
    assert report.summary.num_ok == 100


def test_a_duration_ends_a_closed_loop_and_its_edges_are_in_no_figure(server):
    config = replace(
        closed_loop(server, 1, 2), num_requests=None, duration=0.9, warmup=0.2, cooldown=0.2
    )

    report = run(config)

    assert (report.window.start, report.window.end) == pytest.approx((0.2, 0.7))
    assert report.records
    assert report.summary.num_due == sum(0.2 <= one.scheduled < 0.7 for one in report.records)
    assert report.records[-1].scheduled < 0.9
    assert "of the warm-up and the cool-down are in no figure" in " ".join(notes(report))


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_test_is_ended_when_it_cannot_keep_its_bounds_any_more(server, num_processes: int):
    """A minute of requests of which each is too late: the first of them decide."""
    config = replace(
        open_loop(server, 1, rate=50),
        num_requests=None,
        duration=60.0,
        slo=parse_slo("e2e=1us"),
        stop_when_missed=True,
        num_processes=num_processes,
    )

    report = run(config)

    assert 30 < len(report.records) < 1000  # one in a hundred of 3,000 may be late
    assert not report.goals[0].is_kept and not report.interrupted
    assert report.summary.duration < 30


def test_turns_of_sessions_count_among_what_may_miss_a_bound(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: set[int] = set()

    def is_lost(records: Any, window: Any, slo: Any, num_due: int) -> bool:
        numbers.add(num_due)
        return False

    monkeypatch.setattr("loadtest.runner.is_lost", is_lost)
    asks = (Ask("p", turns=("{answer}",) * 3), Ask("q"))
    config = replace(open_loop(server, 10, rate=100), slo=parse_slo("e2e=9s"))

    report = run(replace(config, stop_when_missed=True), InTurn("sessions", asks))

    assert numbers == {len(report.records)} == {25}


def test_the_next_prompt_of_a_session_is_the_last_answer(server):
    def say(request, context):
        return stream_messages([request.request.inputs[0].text, "!"])

    server.answers["GenerateStream"] = say
    config = closed_loop(server, num_requests=2, concurrency=1)

    report = run(config, Common(texts(("a", "b")), num_turns=3))

    assert prompts_of(server) == ["a", "a!", "a!!", "b", "b!", "b!!"]
    assert [(r.index, r.turn) for r in report.records] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]


def test_a_trace_is_sent_at_its_times(server):
    asks = tuple(Ask(name, at=at) for name, at in (("a", 0.0), ("b", 0.3), ("c", 0.4)))
    config = LoadConfig(server.address, "m", Replay(2.0), timeout=60)

    report = run(config, InTurn("trace", asks))

    assert [record.scheduled for record in report.records] == pytest.approx([0.0, 0.15, 0.2])
    assert report.records[2].sent >= 0.2


def test_kinds_of_a_mix_have_figures_of_their_own(server):
    server.answers["Score"] = lambda request, context: generation_service_pb2.ScoreResponse(
        scores=[generation_service_pb2.ScoreResponse.Score(sum_logprob=-1.0)]
    )
    kinds = (parse_kind("1 short max_new_tokens=2"), parse_kind("1 score method=score target=t"))
    config = closed_loop(server, num_requests=40, concurrency=4)

    report = run(config, Mix(WORK, kinds))

    assert report.num_failed == 0
    assert set(report.kinds) == {"short", "score"}
    assert sum(one.num_ok for one in report.kinds.values()) == 40
    assert report.kinds["short"].time_to_first_token is not None
    assert report.kinds["score"].time_to_first_token is None


def test_answers_that_are_others_alone_are_wrong(server):
    """The server answers otherwise as soon as nobody else asks."""
    running = [0]
    lock = threading.Lock()

    def depends_on_others(request, context):
        with lock:
            running[0] += 1
        time.sleep(0.02)
        answer = "crowd" if running[0] > 1 else "alone"
        with lock:
            running[0] -= 1
        yield from stream_messages([answer])

    server.answers["GenerateStream"] = depends_on_others
    config = replace(closed_loop(server, num_requests=40, concurrency=8), verify=0.5)

    report = run(config)

    checks = report.checks
    assert 5 < checks.num_verified < 35
    assert checks.num_wrong_verified > checks.num_verified / 2
    assert checks.wrong[0].field == "text"
    assert (checks.wrong[0].wanted, checks.wrong[0].got) == ("'alone'", "'crowd'")
    assert "are others than to the same requests alone" in " ".join(report.problems)


def test_a_sample_is_asked_again_with_the_seed_that_the_server_drew(server):
    config = replace(closed_loop(server, num_requests=2, concurrency=1), verify=1.0)

    report = run(config, texts(("p",), temperature=0.5))

    assert report.checks.num_verified == 2 and report.checks.num_wrong_verified == 0
    first, again = (streams(server)[place].request.decoding.sampling for place in (1, -1))
    assert not first.HasField("seed")
    assert again.seed == 11  # as the summary said


def test_a_search_by_beams_is_asked_again_as_it_was(server):
    """Whatever seed a server names: no seed goes with beams."""
    config = replace(closed_loop(server, num_requests=3, concurrency=1), verify=1.0)

    report = run(config, texts(("p",), beam=4))

    assert (report.checks.num_verified, report.checks.num_unverified) == (3, 0)


def test_an_answer_that_is_not_the_expected_one_is_wrong(server):
    asks = (
        Ask("p", expected={"text": "ab", "token_ids": [1, 2]}),
        Ask("q", expected={"text": "x"}),
    )

    report = run(closed_loop(server, num_requests=4, concurrency=1), InTurn("known", asks))

    assert [record.check for record in report.records] == ["right", "wrong"] * 2
    assert report.checks.num_wrong_expected == 2
    assert report.faults == ("2 of 4 answers are not those expected",)
    assert str(report.checks.wrong[0]) == "request 1: text is 'ab', not 'x'"


def test_what_the_server_says_of_its_load_is_kept(server):
    load = admin_service_pb2.GetLoadResponse.ReplicaLoad(model="m", running=3, waiting=2)
    other = admin_service_pb2.GetLoadResponse.ReplicaLoad(model="n", running=9)
    server.answers["GetLoad"] = lambda request, context: admin_service_pb2.GetLoadResponse(
        replicas=[load, load, other]
    )

    report = run(open_loop(server, num_requests=6, rate=10))

    assert {(sample.running, sample.waiting) for sample in report.server} == {(6, 4)}


def test_the_load_may_be_told_at_another_address_to_an_operator(server):
    with scripted_server() as admin:
        load = admin_service_pb2.GetLoadResponse.ReplicaLoad(model="m", running=5)
        admin.answers["GetLoad"] = lambda request, context: admin_service_pb2.GetLoadResponse(
            replicas=[load]
        )
        config = replace(open_loop(server, 6, rate=10), admin_address=admin.address)
        secrets = {"metadata": [("said", "caller")], "admin_token": None}

        report = LoadTest(config, WORK, client_arguments=lambda: secrets).run()

        assert {sample.running for sample in report.server} == {5}
        assert all(data["said"] == "caller" for data in admin.metadata)
    assert not any(hasattr(request, "replicas") for request in server.requests)


def test_several_processes_send_one_load_together(server):
    config = replace(open_loop(server, num_requests=30, rate=60), num_processes=2, verify=0.2)

    report = run(config)

    assert [record.index for record in report.records] == list(range(30))
    assert [record.scheduled for record in report.records] == arrival_times(config, WORK)
    assert report.num_failed == 0 and report.own.num_processes == 2
    assert report.checks.num_verified > 0 and report.checks.num_wrong_verified == 0


def test_a_process_that_cannot_begin_is_told(server):
    config = replace(closed_loop(server, num_requests=3, concurrency=2), num_processes=2)

    with pytest.raises(LoadTestError, match="unknown option beams"):
        run(config, texts(("p",), beams=5))


def test_a_process_that_ends_before_its_work_is_told(server):
    config = replace(open_loop(server, num_requests=1000, rate=20), num_processes=2)

    def kill_one(course: Course) -> None:
        if course.records:
            for process in multiprocessing.active_children()[:1]:  # none at the end
                process.kill()

    with pytest.raises(LoadTestError, match="a process of the load test has ended before its work"):
        run(config, watch=kill_one)


def test_an_interrupt_while_a_test_is_ended_for_its_bounds_is_heard(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> bool:
        if not server.requests[5:]:
            return False
        signal.raise_signal(signal.SIGINT)
        return True

    monkeypatch.setattr("loadtest.runner.is_lost", interrupted)
    config = replace(open_loop(server, 1000, rate=50), slo=parse_slo("e2e=9s"))

    report = run(replace(config, stop_when_missed=True))

    assert report.interrupted


def test_an_interrupt_while_the_report_is_put_together_leaves_it(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def summarize_late(*records: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return summarize(*records)

    monkeypatch.setattr("loadtest.runner.summarize", summarize_late)

    report = run(LoadConfig(server.address, "m", ClosedLoop(2), num_requests=6))

    assert report.interrupted
    assert (len(report.records), report.summary.num_ok) == (6, 6)


def test_signals_wait_while_a_result_is_written_whatever_thread_takes_them() -> None:
    is_over, written = threading.Event(), False
    other = threading.Thread(target=is_over.wait)
    other.start()

    with pytest.raises(KeyboardInterrupt):
        with signals_held():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            written = True
    is_over.set()
    other.join()

    assert written
