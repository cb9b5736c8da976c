"""Streams whose worker is lost: another goes on, and the client sees one stream."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio
from tokenweir import AsyncClient, Client, Unavailable
from tokenweir.received import ReceivedSequence
from tokenweir.v1 import common_pb2
from tokenweir.v1 import generation_service_pb2 as pb

from engine.config import EngineConfig
from engine.errors import Draining, ReplicaLost, TokenweirError
from engine.generation.async_engine import AsyncEngine
from engine.requests.events import Admitted, GenerationEvent
from engine.requests.request import Deltas, GenerationRequest
from server.config import GatewayConfig, WorkerConfig
from server.gateway.gateway import Gateway
from server.gateway.resume.fast_forward import Different, FastForward
from server.gateway.resume.received_answer import ReceivedAnswer
from server.worker.worker import Worker
from tests.conftest import ScriptedRunner
from tests.fakes.calls import Stubs, failure_of, stream, until
from tests.fakes.engines import FakeGenerator, running_worker
from tests.fakes.gateways import running_gateway
from tests.fakes.http_calls import http_server
from tests.fakes.processes import worker_process

VOCAB_SIZE, EOS = 258, 257
MODEL = "m"
LOST = ReplicaLost("killed", 0.1)
Serving = Callable[..., AbstractAsyncContextManager["Losing"]]

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "ids": {"output": pb.Output(token_ids=True)},
    "log-probabilities": {"output": pb.Output(token_ids=True, logprobs=2, prompt_logprobs=1)},
    "seeded": {"decoding": pb.Decoding(sampling=pb.Sampling(temperature=2, seed=7))},
    "unseeded": {"decoding": pb.Decoding(sampling=pb.Sampling(temperature=2))},
    "constraint": {
        "decoding": pb.Decoding(
            sampling=pb.Sampling(temperature=3), constraint=pb.Constraint(regex="(ab|cd|é)+f")
        )
    },
    "several outputs": {
        "decoding": pb.Decoding(sampling=pb.Sampling(temperature=2), num_outputs=3),
        "output": pb.Output(token_ids=True, logprobs=0),
    },
    "beam": {
        "decoding": pb.Decoding(beam=pb.BeamSearch(width=3), num_outputs=2),
        "output": pb.Output(token_ids=True, logprobs=0),
    },
    "best of": {"decoding": pb.Decoding(sampling=pb.Sampling(best_of=3), num_outputs=2)},
    "stop string": {
        "decoding": pb.Decoding(sampling=pb.Sampling(temperature=4)),
        "stopping": pb.Stopping(max_new_tokens=12, strings=["abcdef", "éa"]),
    },
}


def babble(source: list[int], tokens: list[int]) -> np.ndarray:
    """Return logits that depend on all tokens before: letters, halves of an é, an end."""
    generator = random.Random(bytes(token % 256 for token in tokens))
    logits = np.full(VOCAB_SIZE, -30.0, np.float32)
    for token in (*b"abcdef", *"é".encode()):
        logits[token] = generator.gauss(0, 1)
    if len(tokens) > 8:
        logits[EOS] = generator.gauss(0, 1)
    return logits


@dataclass
class Run:
    """The course of one call at a worker."""

    num_events: int | None = None  # after so many of its answer it ends; None: all
    min_tokens: int = 1  # in a message
    error: TokenweirError = LOST
    changed: dict[str, Any] | None = None  # parameters that it takes in place of the asked ones


class Pace:
    """Lets a model take a step when the event of the last one was taken, or not much faster."""

    def __init__(self) -> None:
        self.is_strict = False  # for one sequence, whose every step has an event
        self._taken = threading.Semaphore(0)

    def begin(self) -> None:
        while self._taken.acquire(blocking=False):
            pass
        self._taken.release()

    def taken(self) -> None:
        self._taken.release()

    def before_step(self) -> None:
        if self.is_strict:
            self._taken.acquire(timeout=0.3)
        else:
            time.sleep(0.001)


@dataclass
class Losing:
    """A gateway before two workers, whose calls end as `runs` say, one after the other."""

    gateway: Gateway
    stubs: Stubs
    addresses: dict[str, str]  # the workers', by their ids
    runs: list[Run]
    pace: Pace

    async def ask(self, *runs: Run, **fields: Any) -> list[pb.GenerateStreamResponse]:
        self.runs[:] = runs
        call = self.stubs.generation.GenerateStream(asked(**fields))
        return [message async for message in call]


def asked(**fields: Any) -> pb.GenerateStreamRequest:
    resuming = {name: fields.pop(name) for name in list(fields) if name in RESUMING}
    stopping = fields.pop("stopping", pb.Stopping(max_new_tokens=8))
    fields.setdefault("request_id", f"r{next(_numbers)}")  # equal ones share their losses
    request = pb.GenerateRequest(
        model=MODEL, inputs=[pb.Input(text="ab")], stopping=stopping, **fields
    )
    return pb.GenerateStreamRequest(request=request, **resuming)


_numbers = itertools.count()
RESUMING = ("resume_after", "received", "origin")


def obeying(engine: AsyncEngine, runs: list[Run], pace: Pace) -> AsyncEngine:
    """Let the calls of an engine end as the runs say."""
    generate = engine.generate

    async def generate_as_told(request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        run = runs.pop(0) if runs else Run()
        deltas = Deltas(run.min_tokens) if request.deltas else None
        params = replace(request.params, **(run.changed or {}))
        events: Any = generate(replace(request, deltas=deltas, params=params))
        left = itertools.count() if run.num_events is None else iter(range(run.num_events))
        pace.begin()
        try:
            async with aclosing(events):
                async for event in events:
                    if not isinstance(event, Admitted) and next(left, None) is None:
                        raise run.error
                    yield event
                    pace.taken()
        finally:
            pace.taken()

    engine.generate = generate_as_told  # type: ignore[method-assign]
    return engine


@pytest.fixture
def serving(
    scripted_engine: Callable[..., tuple[AsyncEngine, ScriptedRunner]],
) -> Serving:
    """Serve a model at two workers behind a gateway."""

    def make_engine(num_threads: int, pace: Pace) -> AsyncEngine:
        config = EngineConfig(max_num_seqs=4, num_threads=num_threads)
        engine, runner = scripted_engine(babble, config=config)
        runner.before_step = pace.before_step  # so that tokens come one by one
        return engine

    @asynccontextmanager
    async def serve(
        threads: tuple[int, int] = (1, 1), worker_wait: float = 60
    ) -> AsyncIterator[Losing]:
        runs: list[Run] = []
        pace = Pace()
        async with AsyncExitStack() as stack:
            addresses = {}
            for num_threads in threads:
                engine = obeying(make_engine(num_threads, pace), runs, pace)
                worker = Worker({MODEL: engine}, WorkerConfig())
                addresses[worker.replica_id] = await worker.start()
                stack.push_async_callback(worker.drain, 0)
            gateway, stubs = await stack.enter_async_context(
                running_gateway(*addresses.values(), config=GatewayConfig(worker_wait=worker_wait))
            )
            await until(lambda: gateway.pool.num_serving == len(addresses))
            yield Losing(gateway, stubs, addresses, runs, pace)

    return serve


@pytest.fixture
async def cell(serving: Serving) -> AsyncIterator[Losing]:
    async with serving() as cell:
        yield cell


def answer(messages: list[pb.GenerateStreamResponse]) -> dict[int, Any]:
    """Return what came of every sequence, however it was cut."""
    assert [m.sequence_number for m in messages] == [*range(1, len(messages) + 1)]
    assert [m.WhichOneof("event") for m in messages].index("summary") == len(messages) - 1
    found: dict[int, Any] = {}
    for message in messages[:-1]:
        part = message.delta if message.HasField("delta") else message.finished
        text, ids, logprobs, end = found.setdefault(part.index, ["", [], [], []])
        if message.HasField("delta"):
            assert not end
            found[part.index][0] = text + message.delta.text
            ids += message.delta.tokens.ids
            logprobs += message.delta.logprobs
        else:
            end.append(message.finished)
    assert all(len(end) == 1 for _, _, _, end in found.values())
    return found


def seeded(fields: dict[str, Any], messages: list[pb.GenerateStreamResponse]) -> dict[str, Any]:
    """Return what asks for an answer again, by the seed that it was drawn with."""
    again = {
        name: type(value).FromString(value.SerializeToString()) for name, value in fields.items()
    }
    if "decoding" in again and again["decoding"].HasField("sampling"):
        again["decoding"].sampling.seed = messages[-1].summary.provenance.seed
    return again


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_goes_on_at_another_worker_wherever_it_broke(
    cell: Losing, kind: str
) -> None:
    fields = KINDS[kind]
    for first, second in ((1, 3), (3, 1)):
        for num_events in itertools.count():
            dies, goes_on = Run(num_events, min_tokens=first), Run(min_tokens=second)
            messages = await cell.ask(dies, goes_on, **fields)
            if cell.runs:  # the first worker has said all of it
                assert num_events >= 2, "the end of a sequence, and of the stream"
                break
            expected = await cell.ask(**seeded(fields, messages))
            assert answer(messages) == answer(expected), num_events
            assert messages[-1].summary.prompt_logprobs == expected[-1].summary.prompt_logprobs


async def test_a_stream_that_is_lost_twice_goes_on_at_a_third_worker(cell: Losing) -> None:
    cell.pace.is_strict = True
    fields = KINDS["unseeded"]

    messages = await cell.ask(Run(5), Run(3, min_tokens=2), Run(), **fields)

    assert ("gateway_resumed_streams", (), 2) in cell.gateway.snapshot()
    assert not cell.runs
    assert answer(messages) == answer(await cell.ask(**seeded(fields, messages)))


async def test_a_stream_goes_on_where_its_worker_stops_for_good(cell: Losing) -> None:
    cell.pace.is_strict = True
    for _ in range(4):  # such an end is not the fault of the request
        messages = await cell.ask(Run(3, error=Draining("stopping", 0.1)), request_id="same")

        assert not cell.runs
        assert answer(messages) == answer(await cell.ask())


async def test_a_stream_that_loses_three_workers_goes_to_no_other(cell: Losing) -> None:
    cell.pace.is_strict = True
    cell.runs[:] = [Run(2), Run(3), Run(4), Run()]

    lost = await failure_of(cell.stubs.generation.GenerateStream(asked()))

    assert (lost.code, lost.reason) == (grpc.StatusCode.INTERNAL, "REPLICAS_LOST")
    assert len(cell.runs) == 1


@pytest.mark.parametrize(
    "changed",
    [{"seed": 8}, {"max_new_tokens": 3}, {"temperature": 0.1, "logprobs": 1}],
    ids=["other tokens", "fewer", "more about them"],
)
async def test_another_answer_ends_the_stream(
    cell: Losing, changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    cell.pace.is_strict = True
    cell.runs[:] = [Run(5), Run(changed=changed)]

    call = cell.stubs.generation.GenerateStream(asked(**KINDS["seeded"]))
    lost = await failure_of(call)

    assert (lost.code, lost.reason) == (grpc.StatusCode.UNAVAILABLE, "REPLICA_LOST")
    assert any("otherwise than the worker before" in one.getMessage() for one in caplog.records)


async def test_a_worker_with_other_threads_does_not_go_on(serving: Serving) -> None:
    async with serving(threads=(1, 2), worker_wait=0.3) as cell:
        cell.pace.is_strict = True
        cell.runs[:] = [Run(4), Run()]
        call = cell.stubs.generation.GenerateStream(asked())
        first = str(dict(await call.initial_metadata())["tokenweir-replica"])
        await cell.gateway.pool.sync(
            [a for replica, a in cell.addresses.items() if replica != first]
        )

        lost = await failure_of(call)

    assert (lost.code, lost.reason) == (grpc.StatusCode.UNAVAILABLE, "REPLICA_LOST")
    assert not cell.runs


async def test_a_stream_of_a_killed_process_goes_on() -> None:
    survivor = FakeGenerator()
    survivor.capabilities += ("batch_invariant",)
    survivor.release.set()
    async with AsyncExitStack() as stack:
        doomed = await stack.enter_async_context(worker_process("batch_invariant"))
        _, address = await stack.enter_async_context(running_worker(survivor))
        gateway, stubs = await stack.enter_async_context(running_gateway(doomed.address))
        call = stubs.generation.GenerateStream(stream("one two HOLD three"))
        messages = aiter(call)
        begun = [await anext(messages), await anext(messages)]
        await gateway.pool.sync([doomed.address, address])
        await until(lambda: gateway.pool.num_serving == 2)

        doomed.kill()
        whole = [*begun, *[message async for message in messages]]

    assert answer(whole)[0][0] == "one two HOLD three "


async def test_who_asks_for_best_effort_is_told_of_the_loss(cell: Losing) -> None:
    cell.pace.is_strict = True
    scheduling = pb.Scheduling(determinism=common_pb2.DETERMINISM_BEST_EFFORT)
    cell.runs[:] = [Run(4), Run()]

    lost = await failure_of(cell.stubs.generation.GenerateStream(asked(scheduling=scheduling)))

    assert (lost.reason, len(cell.runs)) == ("REPLICA_LOST", 1)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_goes_on_behind_what_it_has(cell: Losing, kind: str) -> None:
    fields = KINDS[kind]
    call = cell.stubs.generation.GenerateStream(asked(**fields))
    origin = str(dict(await call.initial_metadata())["tokenweir-origin"])
    whole = [message async for message in call]

    for num_messages in range(len(whole)):
        begun = whole[:num_messages]
        resuming = {"resume_after": num_messages, "received": received(begun), "origin": origin}
        rest = await cell.ask(Run(min_tokens=2), **fields, **resuming)
        assert answer(begun + rest) == answer(whole), num_messages


def received(messages: list[pb.GenerateStreamResponse]) -> list[pb.Received]:
    found: dict[int, ReceivedSequence] = {}
    for message in messages:
        part = message.delta if message.HasField("delta") else message.finished
        one = found.setdefault(part.index, ReceivedSequence())
        if message.HasField("finished"):
            one.end = message.finished.SerializeToString()
        else:
            logprobs = [position.SerializeToString() for position in part.logprobs]
            one.add(part.text.encode(), part.tokens.ids, logprobs)
    return [one.message(index) for index, one in found.items()]


async def test_a_client_that_has_something_else_does_not_go_on(cell: Losing) -> None:
    call = cell.stubs.generation.GenerateStream(asked())
    origin = str(dict(await call.initial_metadata())["tokenweir-origin"])
    one = ReceivedSequence()
    one.add(b"?", (), ())

    resuming = {"resume_after": 1, "received": [one.message(0)], "origin": origin}
    lost = await failure_of(cell.stubs.generation.GenerateStream(asked(**resuming)))
    call.cancel()

    assert (lost.code, lost.reason) == (grpc.StatusCode.UNAVAILABLE, "REPLICA_LOST")


async def test_who_has_received_more_sequences_than_there_are_is_refused(cell: Losing) -> None:
    received = [pb.Received(index=index, tokens=1) for index in range(1025)]
    resuming = {"resume_after": 1, "received": received, "origin": "0" * 32}

    wrong = await failure_of(cell.stubs.generation.GenerateStream(asked(**resuming)))

    assert wrong.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "1025 sequences" in wrong.violations["received"]


async def test_losses_of_a_stream_count_where_its_client_goes_on_with_it(cell: Losing) -> None:
    cell.pace.is_strict = True
    call = cell.stubs.generation.GenerateStream(asked(request_id="poison"))
    origin = str(dict(await call.initial_metadata())["tokenweir-origin"])
    call.cancel()
    await cell.ask(Run(2), Run(3), Run(), request_id="poison")

    cell.runs[:] = [Run(1), Run()]
    resuming = {"resume_after": 0, "origin": origin, "request_id": "poison"}
    lost = await failure_of(cell.stubs.generation.GenerateStream(asked(**resuming)))

    assert (lost.reason, len(cell.runs)) == ("REPLICAS_LOST", 1)


async def test_an_origin_that_is_none_is_named(cell: Losing) -> None:
    wrong = await failure_of(cell.stubs.generation.GenerateStream(asked(origin="nowhere")))

    assert list(wrong.violations) == ["origin"]


# A client whose connection broke.


@asynccontextmanager
async def cut_off_after(address: str, num_messages: int) -> AsyncIterator[str]:
    """Relay streams to a server; the first call to begin breaks after so many messages."""
    left = [num_messages]

    async def relay(request: bytes, context: Any) -> AsyncIterator[bytes]:
        async with aio.insecure_channel(address) as channel:
            call = channel.unary_stream(STREAM)(request, timeout=context.time_remaining())
            await context.send_initial_metadata(await call.initial_metadata())
            try:
                async for message in call:
                    if left and not left[0]:
                        break
                    yield message
                    left[:] = [one - 1 for one in left]
                else:
                    return
            except aio.AioRpcError as error:
                await context.abort(error.code(), error.details())
            left.clear()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    server = aio.server()
    handler = grpc.unary_stream_rpc_method_handler(relay)
    service, method = STREAM.removeprefix("/").split("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


STREAM = "/tokenweir.v1.GenerationService/GenerateStream"
OPTIONS: dict[str, Any] = {"temperature": 2, "seed": 7, "logprobs": 2, "max_new_tokens": 8}


@pytest.mark.parametrize("num_messages", [0, 1, 5, 8])
async def test_a_client_goes_on_by_itself(cell: Losing, num_messages: int) -> None:
    async with (
        cut_off_after(cell.stubs.address, num_messages) as address,
        AsyncClient(address) as client,
    ):
        stream = client.stream(MODEL, "ab", **OPTIONS)
        text = "".join([piece async for piece in stream])
        whole = await AsyncClient(channel=cell.stubs.channel).generate(MODEL, "ab", **OPTIONS)

    assert (text, stream.result.sequences) == (whole.text, whole.sequences)


async def test_so_does_one_for_threads(cell: Losing) -> None:
    def ask(address: str) -> tuple[str, Any]:
        with Client(address) as client, client.stream(MODEL, "ab", **OPTIONS) as stream:
            return "".join(stream), stream.result.sequences

    async with cut_off_after(cell.stubs.address, 4) as address:
        text, sequences = await asyncio.to_thread(ask, address)
    whole = await AsyncClient(channel=cell.stubs.channel).generate(MODEL, "ab", **OPTIONS)

    assert (text, sequences) == (whole.text, whole.sequences)


@pytest.mark.parametrize("num_messages", [0, 1, 5])
async def test_so_does_the_http_server(cell: Losing, num_messages: int) -> None:
    asked = {"model": MODEL, "prompt": "ab", "temperature": 2, "seed": 7, "max_tokens": 8, "n": 2}

    def texts(events: list[Any]) -> list[str]:
        choices = [one for event in events[:-1] for one in event["choices"]]
        return ["".join(one["text"] for one in choices if one["index"] == i) for i in (0, 1)]

    async with http_server(cell.stubs.address) as caller:
        whole = await caller.stream(**asked)
    async with cut_off_after(cell.stubs.address, num_messages) as address:
        async with http_server(address) as caller:
            events = await caller.stream(**asked)

    assert events[-1] == whole[-1] == "[DONE]"
    assert texts(events) == texts(whole)


async def test_a_client_that_may_try_once_only_does_not(cell: Losing) -> None:
    async with cut_off_after(cell.stubs.address, 1) as address:
        async with AsyncClient(address, max_attempts=1) as client:
            with pytest.raises(Unavailable, match="Socket closed"):
                _ = [piece async for piece in client.stream(MODEL, "ab", **OPTIONS)]


async def test_before_a_server_that_cannot_go_on_the_loss_is_told(cell: Losing) -> None:
    worker = next(iter(cell.addresses.values()))
    async with cut_off_after(worker, 1) as address, AsyncClient(address) as client:
        with pytest.raises(Unavailable, match="Socket closed"):
            _ = [piece async for piece in client.stream(MODEL, "ab", **OPTIONS)]


# Parts of an answer, recognised in another one.


def delta(text: str, *ids: int, index: int = 0) -> pb.GenerateStreamResponse:
    made = pb.GenerateStreamResponse.Delta(index=index, text=text, tokens={"ids": ids})
    return pb.GenerateStreamResponse(delta=made)


def came(*messages: pb.GenerateStreamResponse) -> dict[int, pb.Received]:
    found = ReceivedAnswer()
    for message in messages:
        found.add(message.SerializeToString())
    return {index: one.message(index) for index, one in found.sequences().items()}


def test_the_same_in_other_pieces_has_the_same_hash() -> None:
    pieces = came(delta("one ", 1), delta("two", 2, 3), delta("x", 9, index=1), delta("é", -4))
    joined = came(delta("one twoé", 1, 2, 3, -4), delta("x", 9, index=1))

    assert pieces == joined
    assert (pieces[0].text_bytes, pieces[0].tokens, pieces[0].finished) == (9, 4, False)
    assert came(delta("one twoe", 1, 2, 3, -4))[0].sha256 != pieces[0].sha256
    assert came(delta("one twoé", 1, 2, 3, -5))[0].sha256 != pieces[0].sha256


def test_many_messages_have_the_same_hash_as_one() -> None:
    letters = [chr(ord("a") + i % 26) for i in range(10_000)]

    assert came(*map(delta, letters)) == came(delta("".join(letters)))


def test_what_is_known_is_cut_off() -> None:
    fast_forward = FastForward(came(delta("ab", 1, 2), delta("x", 9, index=1)), ReceivedAnswer())

    rests = [
        fast_forward.rest_of(message.SerializeToString())
        for message in (delta("a", 1), delta("y", 8, index=2), delta("bcé", 2, 3, 4))
    ]

    assert rests[0] is None
    assert pb.GenerateStreamResponse.FromString(rests[1] or b"") == delta("y", 8, index=2)
    assert pb.GenerateStreamResponse.FromString(rests[2] or b"") == delta("cé", 3, 4)
    assert not fast_forward.is_done
    now = fast_forward.received()
    assert (now[0].text_bytes, now[1].text_bytes, now[2].text_bytes) == (5, 1, 1)
    assert fast_forward.rest_of(delta("x", 9, index=1).SerializeToString()) is None
    assert fast_forward.is_done


@pytest.mark.parametrize(
    "second",
    [delta("ax", 1, 2), delta("ab", 1, 3), delta("abc", 1), delta("", 1, 2, 3)],
    ids=["text", "ids", "fewer ids", "less text"],
)
def test_what_differs_is_seen(second: pb.GenerateStreamResponse) -> None:
    fast_forward = FastForward(came(delta("ab", 1, 2)), ReceivedAnswer())

    with pytest.raises(Different):
        fast_forward.rest_of(second.SerializeToString())
