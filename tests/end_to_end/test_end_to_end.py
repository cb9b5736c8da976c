"""The whole way: export, `tokenweir serve` with Ray and two replicas, calls through the gateway.

The models are tiny and random, so their texts are noise; what counts is that every text is the one
that the eager model gives alone, whatever else runs, dies or stops at the time.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenweir import AsyncClient, Generation, Unavailable
from tokenweir.v1 import generation_service_pb2, generation_service_pb2_grpc

from engine.package.manifest import PackageFormat
from exporter.checkpoint import load_checkpoint, save_checkpoint
from exporter.export import export_package
from exporter.models import TransformerConfig, build_model
from loadtest.lab.process_tree import read_tree
from server.api import REPLICA_KEY
from server.auth.internal_certificate import internal_certificate
from server.ray.serving import serving
from server.settings import Admin, Engine, Listen, Packages, Settings
from tests.fakes.calls import until
from tests.fakes.processes import is_alive
from tests.fakes.served import word_tokenizer
from tests.fakes.stand_in_certificate import export_with_stand_in
from tests.fakes.traces import traced  # noqa: F401 - a fixture

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

VOCAB_SIZE = 128
SHAPE = {"d_model": 32, "num_heads": 4, "d_ff": 64, "vocab_size": VOCAB_SIZE, "eos_token_id": 2}
CONTINUE, TRANSLATE = "continue", "translate"
CONFIGS = {
    CONTINUE: TransformerConfig(
        architecture="decoder", num_decoder_layers=2, max_target_len=192, **SHAPE
    ),
    TRANSLATE: TransformerConfig(
        architecture="encoder-decoder",
        num_encoder_layers=1,
        num_decoder_layers=2,
        max_source_len=12,
        max_target_len=48,
        bos_token_id=1,
        **SHAPE,
    ),
}
SLOTS = 8  # per model and replica: 64 streams do not all fit


@dataclass
class Server:
    """A running `tokenweir serve`."""

    process: subprocess.Popen[str]
    address: str
    log: Path

    def pids(self) -> dict[str, int]:
        """Return the process of every replica that has ever joined."""
        found = re.findall(r"joined: .* process (\d+), replica (\w+)", self.log.read_text())
        return {replica: int(pid) for pid, replica in found}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a stream."""

    replica: str | None  # that admitted it
    text: str
    code: grpc.StatusCode


@pytest.fixture(scope="module", autouse=True)
def single_thread() -> Iterator[None]:
    """Threads of torch that wait for each other crawl when the server takes the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of random models, by the name under which they are served."""
    directory = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    for name, config in CONFIGS.items():
        save_random(directory / name, config, noise=0.3)
    return {name: directory / name for name in CONFIGS}


def save_random(path: Path, config: TransformerConfig, *, noise: float) -> None:
    model = build_model(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * torch.randn(weight.shape))
    save_checkpoint(path, path.name, model, word_tokenizer(VOCAB_SIZE))


@pytest.fixture(scope="module")
def packages(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("packages")
    for name, checkpoint in checkpoints.items():
        export_with_stand_in(checkpoint, directory / name, PackageFormat())
    return {name: directory / name for name in checkpoints}


@pytest.fixture(scope="module")
def server(packages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The one server of this file; the last test stops it."""
    more = ("--metrics-port", "0", "--http-port", "0", "--admin-port", "0")
    with _serve(packages, tmp_path_factory.mktemp("server"), *more) as server:
        yield server


@contextmanager
def _serve(
    packages: dict[str, Path], directory: Path, *more: str, **environment: str
) -> Iterator[Server]:
    """Run `tokenweir serve` with two replicas, `more` options, and a log in `directory`."""
    log = directory / "log"
    command = [Path(sys.executable).with_name("tokenweir"), "serve", *packages.values()]
    options = ["--replicas", "2", "--port", "0", "--max-num-seqs", str(SLOTS), "--grace", "60"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *options, *more],
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
        )
    try:
        yield Server(process, _wait_for_address(process, log), log)
    finally:
        process.terminate()
        try:
            process.wait(180)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


@pytest.fixture(scope="module")
def eager(checkpoints: dict[str, Path]) -> Callable[[str, str, int], str]:
    """Return what the eager model answers to a prompt alone, by greedy search."""
    loaded = {name: load_checkpoint(path) for name, path in checkpoints.items()}

    @functools.cache
    @torch.no_grad()
    def answer(name: str, prompt: str, max_new_tokens: int) -> str:
        model, tokenizer = loaded[name].model, loaded[name].tokenizer
        assert tokenizer is not None
        ids = tokenizer.encode(prompt).ids
        if name == TRANSLATE:
            memory = model.encode(torch.tensor([ids]), None)
            ids = [1]
        output: list[int] = []
        while len(output) < max_new_tokens:
            inputs = torch.tensor([ids + output])
            logits = model.decode(inputs, memory, None) if name == TRANSLATE else model(inputs)
            token = int(logits[0, -1].argmax())
            if token == 2:  # end of sequence
                break
            output.append(token)
        return tokenizer.decode(output, skip_special_tokens=True)

    return answer


async def test_64_concurrent_streams_give_exactly_the_texts_of_the_eager_model(
    server: Server, eager: Callable[[str, str, int], str]
) -> None:
    asked = _mixed_requests(64)

    async with AsyncClient(server.address, timeout=180) as client:

        async def ask(name: str, prompt: str, max_new_tokens: int) -> str:
            stream = client.stream(name, prompt, max_new_tokens=max_new_tokens)
            return "".join([piece async for piece in stream])

        answers = await asyncio.gather(*(ask(*request) for request in asked))

    assert answers == [eager(*request) for request in asked]
    assert len({len(answer) for answer in answers}) > 10, "the lengths are hardly mixed"


async def test_every_request_has_a_line_in_the_log_of_the_command(server: Server) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    async with aio.insecure_channel(server.address) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        for number in range(3):
            request = generation_service_pb2.GenerateRequest(
                model=CONTINUE,
                inputs=[generation_service_pb2.Input(text="w3")],
                stopping=generation_service_pb2.Stopping(max_new_tokens=4),
                request_id=f"line-{number}",
            )
            metadata = (("traceparent", f"00-{trace}-b7ad6b7169203331-01"),)
            await stub.Generate(request, metadata=metadata)

    pattern = rf"worker \S+: request request_id=(line-\d) .* status=OK trace_id={trace}$"
    async with asyncio.timeout(180):
        while len(found := re.findall(pattern, server.log.read_text(), re.MULTILINE)) < 3:
            await asyncio.sleep(0.05)
    assert set(found) == {"line-0", "line-1", "line-2"}


async def test_metrics_of_gateway_and_workers_are_one_answer(server: Server) -> None:
    async with AsyncClient(server.address) as client:
        await asyncio.gather(
            *(client.generate(CONTINUE, "w3", max_new_tokens=20) for _ in range(16))
        )
    (page,) = re.findall(r"metrics on (http://127\.0\.0\.1:\d+/metrics)", server.log.read_text())

    async with asyncio.timeout(180):
        while True:
            text = await asyncio.to_thread(_read, page)
            tokens = re.findall(r"tokenweir_generation_tokens_total\{.*\} (\S+)", text)
            if len(tokens) >= 2:  # workers tell once a second
                break
            await asyncio.sleep(0.1)

    workers = set(re.findall(r'tokenweir_step_seconds_count\{.*worker="(\S+?)"\}', text))
    assert len(workers) == 2
    assert "tokenweir_workers_serving 2.0" in text
    assert "tokenweir_worker_restarts_total 0.0" in text


async def test_openais_protocol_and_the_load_are_answered_beside_it(
    server: Server, eager: Callable[[str, str, int], str]
) -> None:
    (url,) = re.findall(
        r"OpenAI's protocol at (http://127\.0\.0\.1:\d+)/v1", server.log.read_text()
    )
    asked = {"model": CONTINUE, "prompt": "w3", "max_tokens": 8, "temperature": 0}

    answer = json.loads(
        await asyncio.to_thread(_read, f"{url}/v1/completions", json.dumps(asked).encode())
    )
    load = json.loads(await asyncio.to_thread(_read, f"{url}/page/load"))

    assert answer["choices"][0]["text"] == eager(CONTINUE, "w3", 8)
    assert {worker["replica_id"] for worker in load["workers"]} == {*server.pids()}


def _read(page: str, data: bytes | None = None) -> str:
    with urllib.request.urlopen(page, data, timeout=180) as answer:
        text: str = answer.read().decode()
        return text


async def test_server_listens_on_the_loopback_interface_only(server: Server) -> None:
    for pid in read_tree(server.process.pid):
        for address in _listening_addresses(pid):
            assert address in LOOPBACK, f"process {pid} listens on {address}"


async def test_replicas_run_without_torch(server: Server) -> None:
    assert len(server.pids()) == 2
    for pid in server.pids().values():
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


async def test_killed_replica_loses_nothing_and_is_replaced(
    server: Server, eager: Callable[[str, str, int], str]
) -> None:
    before = server.pids()
    asked = [(CONTINUE, f"w{10 + i % 8}", 160) for i in range(64)]
    admitted: asyncio.Queue[str] = asyncio.Queue()

    async with aio.insecure_channel(server.address) as channel:
        streams = [asyncio.create_task(_stream(channel, *a, admitted)) for a in asked]
        victim = await admitted.get()
        os.kill(before[victim], signal.SIGKILL)
        assert not any(stream.done() for stream in streams), "the replica was killed too late"
        async with asyncio.timeout(180):
            outcomes = await asyncio.gather(*streams)

    assert [(outcome.code, outcome.text) for outcome in outcomes] == [
        (grpc.StatusCode.OK, eager(*request)) for request in asked
    ]

    deadline = time.monotonic() + 180
    while len(server.pids()) < len(before) + 1:
        assert time.monotonic() < deadline, server.log.read_text()
        await asyncio.sleep(0.1)
    async with asyncio.timeout(180):
        while await _replicas_in_use(server.address) != set(server.pids()) - {victim}:
            await asyncio.sleep(0.1)


async def test_sigterm_lets_running_streams_end_and_leaves_no_process(
    server: Server, eager: Callable[[str, str, int], str]
) -> None:
    asked = [(CONTINUE, f"w{10 + i % 8}", 160) for i in range(2 * SLOTS)]
    admitted: asyncio.Queue[str] = asyncio.Queue()
    processes = [*read_tree(server.process.pid)]

    async with aio.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        streams = [asyncio.create_task(_stream(channel, *a, admitted)) for a in asked]
        for _ in asked:
            await admitted.get()
        server.process.send_signal(signal.SIGTERM)
        health = (await watch.read()).status
        running = [stream for stream in streams if not stream.done()]
        async with asyncio.timeout(180):
            outcomes = await asyncio.gather(*streams)
        exit_code = await asyncio.to_thread(server.process.wait, 180)

    assert health == health_pb2.HealthCheckResponse.NOT_SERVING
    assert running, "all streams had ended before the signal"
    assert [(o.code, o.text) for o in outcomes] == [
        (grpc.StatusCode.OK, eager(*request)) for request in asked
    ]
    assert exit_code == 0
    await until(lambda: not any(map(is_alive, processes)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing Ray warns
async def test_replicas_follow_the_load_and_return_to_the_minimum(
    packages: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As where Ray has several machines: gateway and workers show each other a certificate.
    certificate = internal_certificate("10.0.0.7")
    monkeypatch.setattr("server.ray.serving.internal_certificate", lambda host: certificate)
    config = Settings(
        packages=Packages(
            {CONTINUE: f"file://{packages[CONTINUE]}"},  # the workers fetch it
            cache=tmp_path / "cache",
        ),
        listen=Listen(port=0),
        admin=Admin(port=0),
        engine=Engine(num_threads=1, max_replicas=2, target_live_requests=2, downscale_delay=1),
    )
    async with serving(config) as service, AsyncClient(service.address, timeout=180) as client:

        async def keep_busy() -> None:
            while True:
                await client.generate(CONTINUE, "w3", max_new_tokens=180)

        users = [asyncio.create_task(keep_busy()) for _ in range(6)]
        async with asyncio.timeout(180):
            while service.pool.num_serving < 2:
                await asyncio.sleep(0.05)
        for user in users:
            user.cancel()
        await asyncio.wait(users)
        async with asyncio.timeout(180):
            while len(service.discovery.workers) > 1:
                await asyncio.sleep(0.1)

        assert [user for user in users if not user.cancelled()] == []
        assert (await client.generate(CONTINUE, "w3", max_new_tokens=3)).usage.output_tokens == 3
        (worker,) = service.discovery.workers
        async with AsyncClient(worker.address, max_attempts=1) as stranger:
            with pytest.raises(Unavailable):
                await stranger.generate(CONTINUE, "w3", timeout=60)
        async with AsyncClient(service.admin_address) as operator:
            (replica,) = (await operator.server_info()).replicas
            assert [load.replica_id for load in await operator.load()] == [replica.replica_id]
            assert replica.replica_id == worker.replica_id
        assert len(list((tmp_path / "cache").glob("*/manifest.json"))) == 1


# Python imports it in every process: steps hang in those whose number is the name of a file.
HANGING_STEPS = """
import os, pathlib, sys, threading, time

def patch():
    while not hasattr(sys.modules.get("engine.generation.core"), "EngineCore"):
        time.sleep(0.01)
    core = sys.modules["engine.generation.core"].EngineCore
    hangs = pathlib.Path(__file__).with_name("hangs")
    step = core.step
    def perhaps_hang(self):
        while (hangs / str(os.getpid())).exists():
            time.sleep(0.05)
        return step(self)
    core.step = perhaps_hang

threading.Thread(target=patch, daemon=True).start()
"""


@pytest.mark.long
@pytest.mark.parametrize("way", ["process stopped", "step never returns"])
async def test_hung_replica_loses_nothing_and_is_replaced(
    way: str,
    packages: dict[str, Path],
    eager: Callable[[str, str, int], str],
    tmp_path: Path,
) -> None:
    (tmp_path / "hangs").mkdir()
    (tmp_path / "sitecustomize.py").write_text(HANGING_STEPS)
    python_path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    asked = [(CONTINUE, f"w{10 + i % 8}", 160) for i in range(64)]
    admitted: asyncio.Queue[str] = asyncio.Queue()

    with _serve(packages, tmp_path, PYTHONPATH=python_path) as server:
        before = server.pids()
        async with aio.insecure_channel(server.address) as channel:
            streams = [asyncio.create_task(_stream(channel, *a, admitted)) for a in asked]
            victim = await admitted.get()
            if way == "process stopped":
                os.kill(before[victim], signal.SIGSTOP)
            else:
                (tmp_path / "hangs" / str(before[victim])).touch()
            hung = time.monotonic()
            assert not any(stream.done() for stream in streams), "the replica hung too late"
            async with asyncio.timeout(180):
                outcomes = await asyncio.gather(*streams)
            ended_after = time.monotonic() - hung
            while len(server.pids()) < len(before) + 1:
                assert time.monotonic() < hung + 30, server.log.read_text()
                await asyncio.sleep(0.05)
            replaced_after = time.monotonic() - hung

    assert [(outcome.code, outcome.text) for outcome in outcomes] == [
        (grpc.StatusCode.OK, eager(*request)) for request in asked
    ]
    assert ended_after < 15
    assert replaced_after < 20
    assert not is_alive(before[victim])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing Ray warns
async def test_what_may_be_partial_is_answered_at_a_drain(
    packages: dict[str, Path], eager: Callable[[str, str, int], str]
) -> None:
    config = Settings(
        packages=Packages({CONTINUE: packages[CONTINUE]}),
        listen=Listen(port=0, grace=0),
        engine=Engine(num_threads=1, max_num_seqs=1),
    )
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(serving(config))
        async with AsyncClient(service.address, timeout=60, max_attempts=1) as client:
            asked = [
                asyncio.create_task(
                    client.generate(CONTINUE, "w3", max_new_tokens=180, allow_partial=True)
                )
                for _ in range(64)
            ]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            await stack.aclose()
            outcomes = await asyncio.gather(*asked, return_exceptions=True)

    (partial,) = [
        outcome
        for outcome in outcomes
        if isinstance(outcome, Generation) and outcome.finish_reason == "drained"
    ]
    assert eager(CONTINUE, "w3", 180).startswith(partial.text)
    refused = [outcome for outcome in outcomes if isinstance(outcome, Unavailable)]
    assert refused and {outcome.reason for outcome in refused} == {"DRAINING"}


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_packages_for_cuda_are_served_on_a_cpu(
    checkpoints: dict[str, Path], eager: Callable[[str, str, int], str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    gentle = tmp_path / "gentle"  # its logits differ by more than float16 rounds
    small = TransformerConfig(
        architecture="decoder", num_decoder_layers=2, max_target_len=16, **SHAPE
    )
    save_random(gentle, small, noise=0.05)
    export_package(checkpoints[TRANSLATE], tmp_path / "fp32", target="cuda")
    export_package(gentle, tmp_path / "fp16", target="cuda", precision="fp16")
    packages = {precision: tmp_path / precision for precision in ("fp32", "fp16")}
    prompts = [prompt for name, prompt, _ in _mixed_requests(32) if name == TRANSLATE]

    with _serve(packages, tmp_path, "--device", "cpu") as server:
        async with AsyncClient(server.address, timeout=180) as client:
            told = {model.model: (model.device, model.precision) for model in await client.models()}
            answers = await asyncio.gather(
                *(client.generate("fp32", prompt, max_new_tokens=9) for prompt in prompts)
            )
            scores = await asyncio.gather(
                *(client.score("fp16", prompt, "w5 w7 w9") for prompt in prompts)
            )

    assert told == {name: ("cpu", name) for name in packages}
    assert [a.text for a in answers] == [eager(TRANSLATE, prompt, 9) for prompt in prompts]
    expected = [_eager_score(gentle, prompt, [5, 7, 9]) for prompt in prompts]
    assert [score.sum_logprob for score in scores] == pytest.approx(expected, abs=0.02)


@torch.no_grad()
def _eager_score(checkpoint: Path, prompt: str, target: list[int]) -> float:
    loaded = load_checkpoint(checkpoint)
    assert loaded.tokenizer is not None
    ids = torch.tensor([[*loaded.tokenizer.encode(prompt).ids, *target]])
    logprobs = loaded.model(ids)[0].log_softmax(-1)[-len(target) - 1 : -1]
    return float(logprobs.gather(1, torch.tensor(target)[:, None]).sum())


def _mixed_requests(count: int) -> list[tuple[str, str, int]]:
    rng = random.Random(0)
    requests = []
    for i in range(count):
        name, longest, most = ((CONTINUE, 60, 70), (TRANSLATE, 12, 40))[i % 2]
        words = rng.choices(range(3, VOCAB_SIZE), k=rng.randint(1, longest))
        requests.append((name, " ".join(f"w{word}" for word in words), rng.randint(1, most)))
    return requests


async def _stream(
    channel: aio.Channel,
    name: str,
    prompt: str,
    max_new_tokens: int,
    admitted: asyncio.Queue[str],
) -> Outcome:
    """Stream without any retry of the client's, and note who admits."""
    stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
    request = generation_service_pb2.GenerateRequest(
        model=name,
        inputs=[generation_service_pb2.Input(text=prompt)],
        stopping=generation_service_pb2.Stopping(max_new_tokens=max_new_tokens),
    )
    call = stub.GenerateStream(generation_service_pb2.GenerateStreamRequest(request=request))
    replica, text = None, ""
    try:
        metadata = dict(await call.initial_metadata() or ())
        if replica := metadata.get(REPLICA_KEY):
            admitted.put_nowait(replica)
        async for message in call:
            text += message.delta.text
    except aio.AioRpcError as error:
        return Outcome(replica, text, error.code())
    return Outcome(replica, text, grpc.StatusCode.OK)


async def _replicas_in_use(address: str) -> set[str]:
    async with AsyncClient(address) as client:
        answers = await asyncio.gather(
            *(client.generate(CONTINUE, "w3", max_new_tokens=20) for _ in range(16))
        )
    return {answer.provenance.replica_id for answer in answers}


def _wait_for_address(process: subprocess.Popen[str], log: Path) -> str:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"^serving .* on (\S+);", log.read_text(), re.MULTILINE):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(f"the server does not start:\n{log.read_text()}")


# As /proc/net/tcp and tcp6 write 127.0.0.1, ::1 and ::ffff:127.0.0.1.
LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF0000" + "0100007F"}


def _listening_addresses(pid: int) -> set[str]:
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets |= set(re.findall(r"^socket:\[(\d+)\]$", str(descriptor.readlink())))
        except OSError:  # it has just been closed
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in sockets:
                found.add(local.split(":")[0])
    return found
