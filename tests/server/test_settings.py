"""The settings of a server: from a file, options and defaults, and honoured by real calls."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path

import grpc
import pytest
import tokenweir
from tokenweir.v1 import prediction_service_pb2

from engine.config import EngineConfig, RequestLimits
from engine.errors import ConfigError
from engine.generation.async_engine import AsyncEngine
from engine.generation.core import EngineCore
from engine.package.package import Package
from engine.text.constraint import ConstraintCompiler
from engine.text.tokenizer import Tokenizer
from server.cli.app import cli, run
from server.cli.given_settings import SETTING_OF_OPTION
from server.config import (
    FOLLOWING,
    GatewayConfig,
    LogConfig,
    MetricsConfig,
    ServeConfig,
    TracingConfig,
    WorkerConfig,
)
from server.front_config import HttpConfig, KserveConfig
from server.gateway.gateway import Gateway
from server.identity.config import DoorsConfig
from server.settings import Settings
from server.worker.in_process import InProcessWorker
from tests.conftest import EOS, VOCAB_SIZE, Script, ScriptedRunner
from tests.server.calls import Stubs, failure_of, generate, stream, stubs_for, until
from tests.server.fakes import (
    FakeGenerator,
    FakePredictor,
    prediction_package,
    running_worker,
)

EVERYTHING = """
[serve]
packages = { dates = "packages/dates" }
port = 7
grace = 5
[engine]
max_queue_size = 9
decode_buckets = [1, 8]
max_num_seqs = 8
device = "cpu"
own_process = true
max_step_seconds = inf
[engine.limits]
max_inputs = 3
[worker]
max_request_bytes = 67108864
[gateway]
worker_wait = 1.5
"""


def read(tmp_path: Path, text: str) -> Settings:
    (tmp_path / "serve.toml").write_text(text)
    settings = Settings()
    settings.read(tmp_path / "serve.toml")
    return settings


def test_a_file_sets_what_its_sections_name_and_leaves_the_rest(tmp_path: Path) -> None:
    config = read(tmp_path, f"\ufeff{EVERYTHING}").config()

    assert config.packages == {"dates": tmp_path / "packages/dates"}
    assert (config.port, config.grace, config.host) == (7, 5.0, "127.0.0.1")
    assert config.engine == EngineConfig(
        max_num_seqs=8,
        max_queue_size=9,
        decode_buckets=(1, 8),
        device="cpu",
        own_process=True,
        max_step_seconds=math.inf,
        limits=RequestLimits(max_inputs=3),
    )
    assert config.worker == WorkerConfig(max_request_bytes=64 << 20)
    assert config.gateway_settings.max_request_bytes == 64 << 20
    assert config.gateway_settings.worker_wait == 1.5
    assert config.worker_settings("127.0.0.9").limits.max_inputs == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gateway]\nworker_wai = 1", "no setting gateway.worker_wai; the nearest is gateway.work"),
        ("[engines]\nmax_num_seqs = 1", "no setting engines.max_num_seqs; the nearest is engine.m"),
        ("port = 1", "there is no setting port; the nearest is serve.port"),
        ("[engines]", "there is no setting engines; the nearest is engine."),
        ("[http]\nport = 1", "http.port follows from serve.http_port; leave it out"),
        ("[kserve.tls]\ntls_key = 'x'", "kserve.tls follows from gateway.doors; leave it out"),
        ("[engine.limit]\nmax_inputs = 1", "the nearest is engine.limits.max_inputs"),
        ("[engine]\nlimits = 3", "engine.limits is a section, [engine.limits], not a value"),
        ("[gateway]\nport = 3", "gateway.port follows from serve.port; leave it out"),
        ("[worker.limits]\nmax_inputs = 3", "worker.limits follows from engine.limits; leave"),
        ("[serve]\nport = '80'", "serve.port ('80') is of the wrong type: Input should be a valid"),
        ("[serve]\nport = true", "serve.port (True) is of the wrong type"),
        ("[engine]\nreuse_prefixes = 1", "engine.reuse_prefixes (1) is of the wrong type"),
        ("[engine]\ndevice = 'tpu'", "engine.device ('tpu') is of the wrong type: Input should be"),
        ("[serve.packages]\na = 1", "serve.packages.a (1) is of the wrong type"),
        ("[serve", "is not TOML"),
    ],
)
def test_what_a_file_has_wrong_is_named_with_the_file(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)

    assert str(caught.value).startswith(str(tmp_path / "serve.toml"))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[worker]\nmax_request_bytes = 67108865", "worker.max_request_bytes: max_request_bytes"),
        ("[engine.limits]\nmax_inputs = 0", "engine.limits.max_inputs: max_inputs (0) must be at "),
        ("[engine.limits]\nmax_logprobs = -1", "max_logprobs (-1) must be at least 0"),
        ("[gateway]\nworker_wait = inf", "gateway.worker_wait: worker_wait (inf) must be above 0"),
        ("[gateway]\nworker_wait = nan", "gateway.worker_wait: worker_wait (nan) must be above 0"),
        ("[worker]\nhealth_period = 0.0", "worker.health_period: health_period (0.0) must be abov"),
    ],
)
def test_what_is_out_of_bounds_is_named_with_file_and_key(
    text: str, message: str, tmp_path: Path
) -> None:
    settings = read(tmp_path, text)

    with pytest.raises(ConfigError) as caught:
        settings.check()

    assert str(caught.value).startswith(f"{tmp_path / 'serve.toml'}, ")
    assert message in str(caught.value)


def test_what_is_printed_is_a_file_with_the_same_settings(tmp_path: Path) -> None:
    settings = read(tmp_path, EVERYTHING)
    settings.give("serve.port", 8, "--port")

    lines = list(settings.lines())
    again = read(tmp_path, "\n".join(lines)).config()

    assert again == settings.config()
    assert "port = 8  # --port" in lines
    assert f"worker_wait = 1.5  # {tmp_path / 'serve.toml'}" in lines
    assert "max_concurrent_calls = 1024  # default" in lines
    assert "# num_gpus_per_replica is not set  # default" in lines
    assert "# max_request_bytes follows from worker.max_request_bytes" in lines


SECTIONS = {
    "serve": ServeConfig,
    "engine": EngineConfig,
    "engine.limits": RequestLimits,
    "worker": WorkerConfig,
    "gateway": GatewayConfig,
    "gateway.doors": DoorsConfig,
    "http": HttpConfig,
    "kserve": KserveConfig,
    "log": LogConfig,
    "metrics": MetricsConfig,
    "tracing": TracingConfig,
}


def test_paths_in_any_letters_are_printed_as_they_are_read(tmp_path: Path) -> None:
    text = '[serve]\npackages = { "tÿpe 🗓" = "päckages/🗓" }'
    settings = read(tmp_path, text)

    again = read(tmp_path, "\n".join(settings.lines()))

    assert again.config().packages == {"tÿpe 🗓": tmp_path / "päckages/🗓"}


def test_a_path_that_was_typed_is_printed_for_a_file_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings()
    settings.give("gateway.doors.tokens", Path("tokens.toml"), "--tokens")

    assert f'tokens = "{tmp_path / "tokens.toml"}"  # --tokens' in list(settings.lines())


def test_every_setting_of_every_section_is_printed() -> None:
    printed: dict[str, set[str]] = {}
    for line in Settings().lines():
        if line.startswith("["):
            names = printed[line.strip("[]")] = set()
        elif found := re.match(r"(?:# )?(\w+) (?:=|is not set|follows)", line):
            names.add(found[1])

    def is_section(section: str, name: str) -> bool:
        return f"{section}.{name}" in SECTIONS or (section == "serve" and name in SECTIONS)

    def missing(section: str, kind: type) -> list[str]:
        names = [one.name for one in fields(kind) if not is_section(section, one.name)]
        return [name for name in names if name not in printed[section]]

    assert printed.keys() == SECTIONS.keys()
    assert {name: missing(name, kind) for name, kind in SECTIONS.items()} == {
        name: [] for name in SECTIONS
    }


@pytest.mark.parametrize(("section", "kind"), SECTIONS.items())
def test_of_a_key_that_a_section_does_not_have_the_nearest_is_named(
    section: str, kind: type, tmp_path: Path
) -> None:
    names = (one.name for one in fields(kind))
    key = next(name for name in names if f"{section}.{name}" not in FOLLOWING)
    named = f"{section}.{key}"

    with pytest.raises(ConfigError, match=f"no setting {named}x; the nearest is {named}$"):
        read(tmp_path, f"[{section}]\n{key}x = 1")


def test_serve_takes_a_file_and_options_win_over_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served: list[ServeConfig] = []
    monkeypatch.setattr("server.cli.service.serve_until_ended", served.append)
    (tmp_path / "serve.toml").write_text(EVERYTHING)

    assert run(["serve", "--config", str(tmp_path / "serve.toml"), "--port", "0"]) == 0

    (config,) = served
    assert (config.port, config.grace, list(config.packages)) == (0, 5.0, ["dates"])


def test_a_json_log_is_json_from_the_first_line_on(
    tmp_path: Path,
) -> None:
    program = (
        "import server.cli.service as service; from server.cli.app import run\n"
        "from types import SimpleNamespace\n"
        "served = SimpleNamespace(admin_address='a:1', http_url='http://a:2', address='a:3')\n"
        "service.serve_until_ended = lambda config: service.announce(served, ['m'], config.log)\n"
        f"run(['serve', '--model', 'm={tmp_path}', '--log-format', 'json'])"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    lines = [json.loads(line)["message"] for line in done.stderr.splitlines()]
    assert lines == [
        "starting 1 worker ...",
        "operated on a:1",
        "answering OpenAI's protocol at http://a:2/v1",
        "stopped",
    ]
    assert done.stdout == "serving m on a:3; Ctrl-C stops\n"


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ([], (2, 2)),
        (["--replicas", "3"], (3, 3)),
        (["--max-replicas", "5"], (2, 5)),
        (["--min-replicas", "1"], (1, 1)),
    ],
)
def test_replicas_of_a_file_and_of_options_fit_together(
    options: list[str], bounds: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served: list[ServeConfig] = []
    monkeypatch.setattr("server.cli.service.serve_until_ended", served.append)
    (tmp_path / "serve.toml").write_text("[serve]\npackages = {a = 'x'}\nmin_replicas = 2\n")

    assert run(["serve", "--config", str(tmp_path / "serve.toml"), *options]) == 0

    assert [(c.min_replicas, c.max_replicas) for c in served] == [bounds]


def test_settings_are_printed_without_a_package_and_nothing_is_served(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("server.cli.service.serve_until_ended")

    assert run(["serve", "--print-config", "--grace", "3"]) == 0

    out = capsys.readouterr().out
    assert tomllib.loads(out)["serve"]["grace"] == 3.0
    assert "grace = 3.0  # --grace\n" in out


def test_an_option_has_the_default_of_its_setting() -> None:
    options = {option.name: option for option in cli.commands["serve"].params}
    options |= {"prefix_affinity": None}  # a gateway's own, with another default

    for name, setting in SETTING_OF_OPTION.items():
        if (option := options[name]) is not None:
            default = option.to_info_dict()["default"]
            assert default in (None, (), Settings()[setting].value), name


# Limits, through the gateway and a worker as `serve` makes them of a file.

MakeEngine = Callable[[EngineConfig], tuple[AsyncEngine, ScriptedRunner]]


@pytest.fixture
def clock() -> Callable[[], float]:
    """The clock of the deadlines that the server gives to the engine."""
    return time.monotonic


@pytest.fixture
def scripted_engine(
    make_core: Callable[..., tuple[EngineCore, ScriptedRunner]],
    make_package: Callable[..., Package],
    byte_tokenizer: Tokenizer,
    spell: Callable[[str], Script],
) -> MakeEngine:
    """Make an engine on a scripted model; the worker starts it."""

    def make(config: EngineConfig) -> tuple[AsyncEngine, ScriptedRunner]:
        core, runner = make_core(spell("yes" * 15), config=config)
        package = make_package()
        constraints = ConstraintCompiler(byte_tokenizer, VOCAB_SIZE, (EOS,))
        return AsyncEngine(package, core, byte_tokenizer, config, constraints=constraints), runner

    return make


@asynccontextmanager
async def served(config: ServeConfig, *engines: object) -> AsyncIterator[Stubs]:
    async with running_worker(*engines, config=config.worker_settings("127.0.0.1")) as (_, address):
        gateway = Gateway(config.gateway_settings)
        port = await gateway.start()
        try:
            await gateway.sync([address])
            await until(lambda: gateway.num_serving == 1)
            async with stubs_for(f"127.0.0.1:{port}") as stubs:
                yield stubs
        finally:
            await gateway.close()


def config_of(tmp_path: Path, text: str) -> ServeConfig:
    settings = read(tmp_path, text)
    settings.give("serve.packages", {"model": tmp_path}, "test")
    return replace(settings.config(), port=0)


def image(num_bytes: int) -> prediction_service_pb2.ClassifyRequest:
    content = b"\x89PNG" + bytes(num_bytes - 4)
    item = prediction_service_pb2.Item(image=content)
    return prediction_service_pb2.ClassifyRequest(model="digits", items=[item])


async def test_a_large_image_passes_where_messages_may_be_so_large(tmp_path: Path) -> None:
    config = config_of(tmp_path, "[worker]\nmax_request_bytes = 67108864")
    digits = FakePredictor(prediction_package("digits", task="classify"))

    async with served(config, digits) as stubs:
        response = await stubs.prediction.Classify(image((64 << 20) - 100))
        too_large = await failure_of(stubs.prediction.Classify(image(64 << 20)))

    assert len(response.results) == 1
    assert too_large.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (
        "more than 67,108,864, the most that a request may have" in too_large.violations["request"]
    )


def test_a_photo_passes_where_the_model_is_in_the_process() -> None:
    digits = FakePredictor(prediction_package("digits", task="classify"))
    worker = InProcessWorker({"digits": digits}, EngineConfig())
    try:
        with tokenweir.Client(worker.address) as client:
            assert client.classify("digits", b"\x89PNG" + bytes(9_000_000)).labels
    finally:
        worker.close()


async def test_a_limit_of_requests_is_that_of_a_call(tmp_path: Path) -> None:
    config = config_of(tmp_path, "[engine.limits]\nmax_inputs = 1")

    async with served(config, FakeGenerator()) as stubs:
        failure = await failure_of(stubs.generation.Generate(generate("a", "b")))

    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert list(failure.violations) == ["inputs"]


@pytest.mark.parametrize("section", ["gateway", "worker"])
@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("max_concurrent_calls = 1", "1 calls are open here, the most that may be"),
        ("max_open_bytes = 10", "more exceed 10"),
    ],
)
async def test_what_is_open_is_limited(
    section: str, limit: str, message: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, f"[{section}]\n{limit}")
    engine = FakeGenerator()

    async with served(config, engine) as stubs:
        call = stubs.generation.GenerateStream(stream("HOLD"))
        await until(lambda: len(engine.requests) == 1)
        failure = await failure_of(stubs.generation.Generate(generate("a")))
        call.cancel()

    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert message in failure.message


async def test_the_queue_of_an_engine_holds_as_many_as_it_may(
    scripted_engine: MakeEngine, tmp_path: Path
) -> None:
    config = config_of(tmp_path, "[engine]\nmax_queue_size = 1\nmax_num_seqs = 1")
    engine, runner = scripted_engine(config.engine)
    all_wait = threading.Event()  # it refuses between two steps
    runner.before_step = lambda: all_wait.wait(60)

    async with served(config, engine) as stubs:
        calls = [stubs.generation.Generate(generate("a>", model="scripted")) for _ in range(3)]
        await until(lambda: _num_inside(engine) + sum(call.done() for call in calls) == 3)
        all_wait.set()
        codes = sorted([(await call.code()).name for call in calls])

    assert codes == ["OK", "OK", "RESOURCE_EXHAUSTED"]


def _num_inside(engine: AsyncEngine) -> int:
    load = engine.load()
    return load.running + load.waiting


async def test_a_call_waits_for_a_worker_as_long_as_it_may(tmp_path: Path) -> None:
    config = config_of(tmp_path, "[gateway]\nworker_wait = 0.05")
    gateway = Gateway(config.gateway_settings)
    port = await gateway.start()

    try:
        async with stubs_for(f"127.0.0.1:{port}") as stubs:
            failure = await failure_of(stubs.generation.Generate(generate("a"), timeout=60))
    finally:
        await gateway.close()

    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "STARTING")
