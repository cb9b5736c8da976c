"""The settings of a server: from a file, options and defaults, and honoured by real calls."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import threading
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import tokenweir
from tokenweir.v1 import prediction_service_pb2

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.generation.async_engine import AsyncEngine
from server.cli.app import cli, run
from server.config import gateway_config, worker_config
from server.gateway.gateway import Gateway
from server.given_settings import COMMANDS, KNOWN, GivenSettings
from server.settings import Engine, Limits, Listen, Packages, Settings, Tls
from server.worker.in_process import InProcessWorker
from tests.conftest import Script, ScriptedRunner
from tests.fakes.calls import Stubs, failure_of, generate, stream, stubs_for, until
from tests.fakes.engines import (
    FakeGenerator,
    FakePredictor,
    prediction_package,
    running_worker,
)
from tests.fakes.gateways import running_gateway

EVERYTHING = """
[listen]
port = 7
grace = 5
[engine]
max_queue_size = 9
decode_buckets = [1, 8]
max_num_seqs = 8
device = "cpu"
own_process = true
max_step_seconds = inf
[limits]
max_inputs = 3
max_request_bytes = 67108864
worker_wait = 1.5
[packages]
models = { dates = "packages/dates", digits = "s3://models/digits" }
cache = "cache"
[tls]
cert = "/a.pem"
key = "b.pem"
"""


def read(tmp_path: Path, text: str) -> GivenSettings:
    (tmp_path / "serve.toml").write_text(text)
    given = GivenSettings()
    given.read(tmp_path / "serve.toml")
    return given


def test_a_file_sets_what_its_sections_name_and_leaves_the_rest(tmp_path: Path) -> None:
    settings = read(tmp_path, f"\ufeff{EVERYTHING}").served()

    assert settings == Settings(
        listen=Listen(port=7, grace=5.0),
        engine=Engine(
            max_num_seqs=8,
            max_queue_size=9,
            decode_buckets=(1, 8),
            device="cpu",
            own_process=True,
            max_step_seconds=math.inf,
        ),
        limits=Limits(max_inputs=3, max_request_bytes=64 << 20, worker_wait=1.5),
        packages=Packages(
            {"dates": tmp_path / "packages/dates", "digits": "s3://models/digits"},
            cache=tmp_path / "cache",
        ),
        tls=Tls(Path("/a.pem"), tmp_path / "b.pem"),
    )
    engine = settings.engine_config
    assert type(engine) is EngineConfig
    assert (engine.max_queue_size, engine.limits.max_inputs) == (9, 3)
    assert gateway_config(settings).max_request_bytes == 64 << 20
    assert gateway_config(settings).worker_wait == 1.5
    assert worker_config(settings, "127.0.0.9").max_inputs == 3


# The settings of a file, and what is said of them behind its name.
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("limits.worker_wai = 1", ": there is no setting limits.worker_wai; the nearest is limits"),
        ("engines.device = 1", ": there is no setting engines.device; the nearest is engine.devic"),
        ("engines = {}", ": there is no setting engines; the nearest is engine."),
        ("port = 1", ": there is no setting port; the nearest is "),
        ("listen = 3", ": listen is a section, [listen], not a value"),
        ("'listen.port' = 1", ": there is no setting 'listen.port'; the nearest is listen.port"),
        ('"listen\\n" = 1', ": there is no setting 'listen\\n'; the nearest is listen"),
        pytest.param("listen.port = " + "9" * 5000, " is not TOML: Exceeds the limit", id="digits"),
        pytest.param("listen.port = " + "[" * 3000, " is not TOML: ", id="depth"),
        pytest.param("listen.port = '" + "9" * 999 + "'", ") cannot be used: ", id="long"),
        ('auth.tokens = "a\\u0000b"', ": auth.tokens ('a\\x00b') has a character of code 0"),
        ('packages.models.a = "\\u0000"', ": packages.models ({{'a': '\\x00'}}) has a character "),
        ("[listen", " is not TOML: "),
        ("listen.port = '80'", ": listen.port ('80') cannot be used: Input should be a valid int"),
        ("listen.host = 2020-01-01", ": listen.host (['2020-01-01']) cannot be used: "),
        ("listen.port = true", ": listen.port (True) cannot be used: Input should be a valid int"),
        ("listen.port = 65536", ": listen.port (65536) must be at least 0 and at most 65535"),
        ("http.port = -1", ": http.port (-1) must be at least 0 and at most 65535"),
        ("listen.grace = -1", ": listen.grace (-1.0) must be at least 0 and at most 1000000"),
        ("engine.num_threads = 1025", ": engine.num_threads (1025) must be at least 0 and at most"),
        ("engine.reuse_prefixes = 1", "engine.reuse_prefixes (1) cannot be used: Input should be"),
        ("engine.device = 'tpu'", "engine.device ('tpu') cannot be used: Input should be 'cpu' or"),
        (
            "engine.target_live_requests = inf",
            ": engine.target_live_requests (inf) must be",
        ),
        ("packages.models = { a = 1 }", ": packages.models.a (1) cannot be used: "),
        ("limits.max_request_bytes = 67108865", ": limits.max_request_bytes (67108865) must be at"),
        ("limits.max_inputs = 0", ": limits.max_inputs (0) must be at least 1"),
        ("limits.worker_wait = inf", ": limits.worker_wait (inf) must be above 0"),
        ("kserve.max_request_bytes = 2147483648", ": kserve.max_request_bytes (2147483648) must"),
        ("limits.worker_wait = nan", ": limits.worker_wait (nan) must be above 0"),
        ("tracing.sample_ratio = 1.5", ": tracing.sample_ratio (1.5) must be at least 0"),
        ("engine.max_num_batched_tokens = 9", ", engine.max_num_batched_tokens: max_num_batched"),
        (
            "engine.min_replicas = 3\nengine.max_replicas = 2",
            "engine.max_replicas (2) must be at least engine.min_replicas (3)",
        ),
        ("tls.cert = 'a'", ", tls.cert: tls.cert ({}/a) and tls.key (None) belong together; give"),
        ("tls.client_ca = 'a'", ", tls.client_ca: tls.client_ca ({}/a) needs a certificate"),
        ("admin.tokens = 'a'", ", admin.tokens: admin.tokens ({}/a) are for the admin port; give"),
        *(
            (f'listen.name = "{name}"', ", listen.name: listen.name ('")
            for name in ("", "a b", "a/b", "-a", "a\\n")
        ),
        ("tracing.endpoint = 'a:1'", ", tracing.endpoint: tracing.endpoint (a:1) must be a URL, "),
        *(
            (f"http.allowed_origins = ['*', '{origin}']", f"http.allowed_origins ({origin}) must")
            for origin in ("https://a/", "a.example", "HTTPS://a", "https://a/page", "")
        ),
        (
            "http.port = 9\nlisten.gateway = false",
            ", http.port: http.port (9) needs the gateway; leave it out, and run `tokenweir http`",
        ),
        *(
            (f"{one}.port = 7\n{two}.port = 7", f"{one}.port and {two}.port are both 7; give one")
            for one, two in itertools.combinations(("listen", "http", "admin", "metrics"), 2)
        ),
        *(
            (
                f"auth.insecure = true\nlisten = {{ host = '{one}', port = 7 }}\n"
                f"metrics = {{ host = '{two}', port = 7 }}",
                "listen.port and metrics.port are both 7",
            )
            for one, two in (("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "0.0.0.0"), ("::", "::1"))
        ),
    ],
)
def test_what_a_file_has_wrong_is_named_with_the_file(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "serve.toml").write_text(text)

    assert run(["serve", "--config", str(tmp_path / "serve.toml"), "--print-config"]) == 3

    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"error: {tmp_path / 'serve.toml'}")
    assert len(err) < 700
    assert message.format(tmp_path) in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        ("--port 65536", 2, "'--port': 65536 is not in the range 0<=x<=65535"),
        ("--grace -1", 2, "'--grace': -1.0 is not in the range 0<=x<=1000000"),
        ("--grace inf", 2, "'--grace': inf is not in the range"),
        ("--replicas 1025", 2, "'--replicas': 1025 is not in the range 1<=x<=1024"),
        ("--target-live-requests inf", 2, "'--target-live-requests': inf is not a finite number"),
        ("--device tpu", 2, "'--device': 'tpu' is not one of 'cpu', 'cuda'"),
        ("--num-gpus-per-replica 2", 2, "'--num-gpus-per-replica': 2.0 is not in the range 0<=x<="),
        ("--name a/b", 3, "--name: listen.name ('a/b') may have letters, digits"),
        ("--otlp-endpoint a:1", 3, "--otlp-endpoint: tracing.endpoint (a:1) must be a URL"),
        (f"--tls-cert {__file__}", 3, "--tls-cert: tls.cert ("),
        (f"--admin-tokens {__file__}", 3, "--admin-tokens: admin.tokens ("),
        ("--port 7 --metrics-port 7", 3, "--port: listen.port and metrics.port are both 7"),
        ("--http-port 7 --no-gateway", 3, "--http-port: http.port (7) needs the gateway"),
        ("--min-replicas 3 --max-replicas 2", 3, "--max-replicas: engine.max_replicas (2) must be"),
        ("--replicas 3 --max-replicas 2", 2, "give --replicas, or --min-replicas and --max-"),
        ("--host 0.0.0.0", 3, "--host: listen.host (0.0.0.0) is reached from other machines"),
        (
            "--decode-buckets 1,8 --max-num-seqs 9",
            3,
            "decode_buckets (1, 8) must end with max_num_seqs (9)",
        ),
    ],
)
def test_what_was_typed_wrong_is_named_with_the_option(
    typed: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "--print-config", *typed.split()]) == code

    out, err = capsys.readouterr()
    assert not out
    assert message in err


def test_metrics_on_another_address_may_have_the_port(tmp_path: Path) -> None:
    text = "listen.port = 7\nmetrics = { port = 7, host = '127.0.0.2' }"

    assert read(tmp_path, text).served().metrics.port == 7


def test_what_is_printed_is_a_file_with_the_same_settings(tmp_path: Path) -> None:
    given = read(tmp_path, EVERYTHING)
    given.give("listen.port", 8, "--port")

    lines = list(given.lines())
    again = read(tmp_path, "\n".join(lines)).settings()

    assert again == given.settings()
    assert "port = 8  # --port" in lines
    assert f"worker_wait = 1.5  # {tmp_path / 'serve.toml'}" in lines
    assert "max_concurrent_calls = 4096  # default" in lines
    assert "# num_gpus_per_replica is not set  # default" in lines


def test_paths_in_any_letters_are_printed_as_they_are_read(tmp_path: Path) -> None:
    text = '[packages]\nmodels = { "tÿpe 🗓" = "päckages/🗓" }\ncache = "\\u007f\\"\\n\'"'
    given = read(tmp_path, text)

    again = read(tmp_path, "\n".join(given.lines()))

    assert again.settings().packages.models == {"tÿpe 🗓": tmp_path / "päckages/🗓"}
    assert again.settings().packages.cache == tmp_path / "\x7f\"\n'"


def test_a_certificate_or_list_that_is_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "fullchain1.pem").touch()
    (tmp_path / "fullchain.pem").symlink_to("fullchain1.pem")
    text = "tls = { cert = 'fullchain.pem', key = 'fullchain.pem' }\nauth.tokens = 'fullchain.pem'"

    settings = read(tmp_path, text).settings()

    link = tmp_path / "fullchain.pem"  # its renewal leads elsewhere
    assert (settings.tls.cert, settings.tls.key, settings.auth.tokens) == (link, link, link)


def test_a_home_directory_is_named_as_in_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    text = """
    tls = { cert = '~/a.pem', key = '~/b.pem' }
    packages.cache = '~'
    packages.models = { a = '~/a', b = '~no-such-user/b', c = 'x~', d = 's3://~/d' }
    """

    settings = read(tmp_path, text).settings()

    home = tmp_path / "home"
    assert settings.tls == Tls(home / "a.pem", home / "b.pem")
    assert settings.packages.cache == home
    models = {
        "a": home / "a",
        "b": tmp_path / "~no-such-user/b",
        "c": tmp_path / "x~",
        "d": "s3://~/d",
    }
    assert settings.packages.models == models


def test_what_is_not_utf_8_is_not_printed_as_toml(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--print-config", "--package-cache", "/a\udcff"]) == 3

    assert capsys.readouterr().err.startswith("error: '/a\\udcff' is not UTF-8, as TOML is; ")


def test_a_file_whose_name_has_a_line_break_is_told_in_one_line(tmp_path: Path) -> None:
    given = GivenSettings()
    given.take({"listen": {"port": 7}}, "a\nb.toml", tmp_path)

    assert "port = 7  # 'a\\nb.toml'" in list(given.lines())


def test_two_ports_of_a_gateway_are_not_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gateway", "--print-config", "--port", "7", "--admin-port", "7"]) == 3

    assert "--port: listen.port and admin.port are both 7" in capsys.readouterr().err


def test_no_models_in_a_file_are_none_to_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "serve.toml").write_text("packages.models = {}")

    assert run(["serve", "--config", str(tmp_path / "serve.toml")]) == 2

    assert "give at least one MODEL" in capsys.readouterr().err


def test_a_path_that_was_typed_is_printed_for_a_file_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = GivenSettings()
    given.give("auth.tokens", Path("tokens.toml"), "--tokens")

    assert f'tokens = "{tmp_path / "tokens.toml"}"  # --tokens' in list(given.lines())


def test_a_name_of_the_hub_is_printed_for_a_file_even_beside_a_directory_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me" / "net").mkdir(parents=True)
    (tmp_path / "me" / "net" / "config.json").write_text('{"model_type": "gpt2"}')

    assert run(["serve", "hf://me/net@v2", "--model", "b=other/net", "--print-config"]) == 0

    models = tomllib.loads(capsys.readouterr().out)["packages"]["models"]
    assert models == {"net": "hf://me/net@v2", "b": "hf://other/net"}
    assert run(["serve", "hf://"]) == 2
    assert "hf:// is no name of the Hub, as hf://ORG/NAME is" in capsys.readouterr().err


@pytest.mark.parametrize("name", KNOWN)
def test_of_a_key_that_a_section_does_not_have_the_nearest_is_named(
    name: str, tmp_path: Path
) -> None:
    section, _, key = name.partition(".")

    with pytest.raises(ConfigError, match=f"no setting {name}x; the nearest is {name}$"):
        read(tmp_path, f"[{section}]\n{key}x = 1")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_setting_is_one_of_its_command_with_its_help_and_default(
    command: str,
) -> None:
    options = {str(one.name).replace("__", "."): one for one in cli.commands[command].params}
    given = GivenSettings(command)

    for name, known in KNOWN.items():
        option = COMMANDS[command].option(known)
        assert (option is not None) == (name in options), name
        if option is not None:
            told = options[name].to_info_dict()
            assert told["help"].startswith(known.field.metadata["help"])
            assert told["default"] in (None, (), given[name].value), name


def test_serve_takes_a_file_and_options_win_over_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served: list[Settings] = []
    monkeypatch.setattr("server.cli.serving.service.serve_until_ended", served.append)
    (tmp_path / "serve.toml").write_text(EVERYTHING)
    _make_package(tmp_path / "packages/dates")

    assert run(["serve", "--config", str(tmp_path / "serve.toml"), "--port", "0"]) == 0

    (settings,) = served
    assert (settings.listen.port, settings.listen.grace) == (0, 5.0)
    assert list(settings.packages.models) == ["dates", "digits"]


def _make_package(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").write_text("{}")


def test_a_json_log_is_json_from_the_first_line_on(tmp_path: Path) -> None:
    _make_package(tmp_path)
    program = (
        "import server.cli.serving.service as service; from server.cli.app import run\n"
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
    served: list[Settings] = []
    monkeypatch.setattr("server.cli.serving.service.serve_until_ended", served.append)
    (tmp_path / "serve.toml").write_text("packages.models.a = 'x'\nengine.min_replicas = 2")
    _make_package(tmp_path / "x")

    assert run(["serve", "--config", str(tmp_path / "serve.toml"), *options]) == 0

    assert [(one.engine.min_replicas, one.engine.max_replicas) for one in served] == [bounds]


def test_settings_are_printed_without_a_package_and_nothing_is_served(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("server.cli.serving.service.serve_until_ended")

    assert run(["serve", "--print-config", "--grace", "3", "--no-gateway"]) == 0

    out = capsys.readouterr().out
    assert tomllib.loads(out)["listen"]["grace"] == 3.0
    assert "grace = 3.0  # --grace\n" in out
    assert "gateway = false  # --no-gateway\n" in out


# Limits, through the gateway and a worker as `serve` makes them of a file.


@asynccontextmanager
async def served(settings: Settings, *engines: object) -> AsyncIterator[Stubs]:
    worker, front = worker_config(settings, "127.0.0.1"), gateway_config(settings)
    async with (
        running_worker(*engines, config=worker) as (_, address),
        running_gateway(address, config=front) as (gateway, stubs),
    ):
        await until(lambda: gateway.pool.num_serving == 1)
        yield stubs


def settings_of(tmp_path: Path, text: str) -> Settings:
    given = read(tmp_path, text)
    given.give("listen.port", 0, "test")
    return given.settings()


def image(num_bytes: int) -> prediction_service_pb2.ClassifyRequest:
    content = b"\x89PNG" + bytes(num_bytes - 4)
    item = prediction_service_pb2.Item(image=content)
    return prediction_service_pb2.ClassifyRequest(model="digits", items=[item])


async def test_a_large_image_passes_where_messages_may_be_so_large(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "[limits]\nmax_request_bytes = 16777216")
    digits = FakePredictor(prediction_package("digits", task="classify"))

    async with served(settings, digits) as stubs:
        response = await stubs.prediction.Classify(image((16 << 20) - 100))
        too_large = await failure_of(stubs.prediction.Classify(image(16 << 20)))

    assert len(response.results) == 1
    assert too_large.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (
        "more than 16,777,216, the most that a request may have" in too_large.violations["request"]
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
    settings = settings_of(tmp_path, "[limits]\nmax_inputs = 1")

    async with served(settings, FakeGenerator()) as stubs:
        failure = await failure_of(stubs.generation.Generate(generate("a", "b")))

    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert list(failure.violations) == ["inputs"]


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("max_concurrent_calls = 1", "1 calls are open here, the most that may be"),
        ("max_worker_calls = 1", "1 calls are open here, the most that may be"),
        ("max_open_bytes = 10", "more exceed 10"),
    ],
)
async def test_what_is_open_is_limited(limit: str, message: str, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, f"[limits]\n{limit}")
    engine = FakeGenerator()

    async with served(settings, engine) as stubs:
        call = stubs.generation.GenerateStream(stream("HOLD"))
        await until(lambda: len(engine.requests) == 1)
        failure = await failure_of(stubs.generation.Generate(generate("a")))
        call.cancel()

    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert message in failure.message


async def test_the_queue_of_an_engine_holds_as_many_as_it_may(
    scripted_engine: Callable[..., tuple[AsyncEngine, ScriptedRunner]],
    spell: Callable[[str], Script],
    tmp_path: Path,
) -> None:
    settings = settings_of(tmp_path, "[engine]\nmax_queue_size = 1\nmax_num_seqs = 1")
    engine, runner = scripted_engine(spell("yes"), config=settings.engine_config)
    all_wait = threading.Event()  # it refuses between two steps
    runner.before_step = lambda: all_wait.wait(60)

    async with served(settings, engine) as stubs:
        calls = [stubs.generation.Generate(generate("a>", model="scripted")) for _ in range(3)]
        await until(lambda: _num_inside(engine) + sum(call.done() for call in calls) == 3)
        all_wait.set()
        codes = sorted([(await call.code()).name for call in calls])

    assert codes == ["OK", "OK", "RESOURCE_EXHAUSTED"]


def _num_inside(engine: AsyncEngine) -> int:
    load = engine.load()
    return load.running + load.waiting


async def test_a_call_waits_for_a_worker_as_long_as_it_may(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "[limits]\nworker_wait = 0.05")
    gateway = Gateway(gateway_config(settings))
    port = await gateway.start()

    try:
        async with stubs_for(f"127.0.0.1:{port}") as stubs:
            failure = await failure_of(stubs.generation.Generate(generate("a"), timeout=60))
    finally:
        await gateway.close()

    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "STARTING")
