"""Packaging: pins, the two onnxruntimes that never meet, a light client, its extras."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution, version
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tokenweir import AsyncClient

from exporter.toolchain import read_toolchain
from server.config import GatewayConfig
from server.settings import Admin
from server.wire import protocol
from tests.fakes.gateways import entry, running_gateway

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    name: {canonicalize_name(requirement.name): requirement for requirement in requirements}
    for name, requirements in (
        (name, [Requirement(line) for line in lines if not line.startswith("tokenweir[")])
        for name, lines in {
            **PROJECT["optional-dependencies"],
            "": PROJECT["dependencies"],
        }.items()
    )
}
PINS = {
    canonicalize_name(pin.name): pin.specifier
    for pin in (
        Requirement(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
}


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_every_requirement_is_pinned_to_a_version_that_it_allows(extra: str) -> None:
    for name, requirement in EXTRAS[extra].items():
        (pin,) = PINS[name]
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), f"{requirement}, pinned to {pin}"


def test_a_gpu_gets_the_other_onnxruntime_and_no_second_one() -> None:
    assert "onnxruntime" in EXTRAS["cpu"]
    assert "onnxruntime-gpu" in EXTRAS["gpu"]
    for name in ("gpu", "peers-gpu", "export", "loadtest", "dev", ""):
        assert not {"onnxruntime", "onnxruntime-genai"} & set(EXTRAS[name])


def test_a_gpu_gets_the_libraries_of_cuda_13_that_onnxruntime_is_linked_to_and_no_more() -> None:
    """The libraries that link it are looked at in tests/emulated."""
    asked = {name for name in EXTRAS["gpu"] if name.startswith("nvidia-")}

    assert asked == {"nvidia-cublas", "nvidia-cuda-runtime", "nvidia-curand"}
    for name in ("nvidia-cublas", "nvidia-cuda-runtime"):
        assert not EXTRAS["gpu"][name].specifier.contains("12.9.9")
        assert not EXTRAS["gpu"][name].specifier.contains("14.0")


@pytest.mark.parametrize(
    ("target", "extras", "last"),
    [
        ("demo", "", ".venv-gpu/bin/tokenweir demo --device cuda --out demo-gpu"),
        (
            "test",
            ",dev",
            '.venv-gpu/bin/pytest -m "not long and not emulated and not ray" '
            "tests/emulated tests/exporter tests/parity",
        ),
    ],
)
def test_on_a_gpu_make_has_an_environment_of_its_own(target: str, extras: str, last: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", target, "GPU=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert last in lines
    brought = f"gpu,serve,http,export,import,loadtest{extras}"
    install = f".venv-gpu/bin/pip install --quiet --editable '.[{brought}]'"
    assert install in lines[: lines.index(last)]
    assert "installing into .venv-gpu: 3 GB, two to five minutes" in done.stdout
    assert ".venv/" not in done.stdout


def test_make_tries_the_emulated_device_with_the_wheel_that_it_brings() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "test-emulated"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    pip = ".venv/bin/pip install --quiet --no-deps --upgrade --target"
    brought = [lines.index(f"{pip} .emulated onnxruntime-gpu")]
    brought += [lines.index(f"{pip} .emulated/headers nvidia-cuda-runtime nvidia-cuda-crt")]
    assert max(brought) < lines.index(".venv/bin/pytest -m emulated tests/emulated")


def test_the_same_peers_are_compared_on_a_gpu() -> None:
    twins = {"onnxruntime-genai": "onnxruntime-genai-cuda"}

    assert {twins.get(name, name) for name in EXTRAS["peers"]} == set(EXTRAS["peers-gpu"])


def test_the_client_does_not_bring_what_runs_or_serves_models() -> None:
    assert set(EXTRAS[""]) == {
        "click",
        "googleapis-common-protos",
        "grpcio",
        "grpcio-health-checking",
        "grpcio-reflection",  # for the adapter of KServe's clients
        "grpcio-status",
        "protobuf",
        "rich",
    }


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the built wheel beside what it asks for without an extra, and nothing else."""
    place = tmp_path_factory.mktemp("light")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(place / "wheel"))
    site = place / "site"
    zipfile.ZipFile(wheel).extractall(site)
    for one in _closure(EXTRAS[""]):
        for top in {file.parts[0] for file in one.files or () if file.parts[0] != ".."}:
            _link(Path(str(one.locate_file(top))), site / top)
    return site


def _closure(requirements: Iterable[str]) -> list[Distribution]:
    """Return the installed distributions of these names, with all that they ask for."""
    found: dict[str, Distribution] = {}
    waiting = list(requirements)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in found:
            found[name] = distribution(name)
            asked = map(Requirement, found[name].requires or ())
            waiting += [
                one.name for one in asked if not one.marker or one.marker.evaluate({"extra": ""})
            ]
    return list(found.values())


def _link(source: Path, place: Path) -> None:
    """Link a file or folder; one that several distributions share is a folder of links."""
    if source.name == "google" or (source.is_dir() and place.is_dir()):
        place.mkdir(exist_ok=True)
        for child in source.iterdir():
            _link(child, place / child.name)
    elif not place.exists():
        place.symlink_to(source)


def _run(light: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-S", "-P", "-W", "error", *command],
        env={**environment, "PYTHONPATH": str(light), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=light,
        capture_output=True,
        text=True,
    )


def _tokenweir(light: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _run(light, "-c", "from server.cli import main; main()", *arguments)


def test_the_wheel_brings_the_client_typed_and_nothing_that_compares_engines(light: Path) -> None:
    assert (light / "tokenweir" / "py.typed").is_file()
    assert (light / "tokenweir" / "v1" / "common_pb2.pyi").is_file()
    assert not (light / "loadtest" / "lab").exists()
    assert not (light / "loadtest" / "results").exists()
    assert sum(path.stat().st_size for path in light.rglob("*") if _is_ours(path, light)) < 4e6


def test_of_what_measures_only_load_test_and_benchmark_are_in_the_wheel(light: Path) -> None:
    found = {path.name for path in (light / "loadtest").iterdir() if path.is_dir()}

    assert found == {"arrival", "benchmark", "cli", "reports", "target", "work"}
    assert (light / "loadtest" / "reports" / "page.html.j2").is_file()


def test_bench_of_the_wheel_needs_no_more_than_its_extras(light: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.append(sys.argv.pop());"
        "import loadtest.runner, loadtest.reports.report;"
        "from server.cli import main; main()"
    )
    done = _run(light, "-c", code, "bench", str(tmp_path), sysconfig.get_path("purelib"))

    assert done.stderr.startswith(f"error: {tmp_path} is empty")  # so far it came


def _is_ours(path: Path, light: Path) -> bool:
    ours = ("tokenweir", "engine", "exporter", "server", "loadtest")
    return path.is_file() and path.relative_to(light).parts[0] in ours


async def test_the_version_of_the_project_is_told_everywhere(light: Path, tmp_path: Path) -> None:
    (tmp_path / "operators.toml").write_text(entry("tw_operator", tenant="ann"))
    admin = Admin(port=0, tokens=tmp_path / "operators.toml")
    async with running_gateway(config=GatewayConfig(admin=admin)) as (gateway, _):
        async with AsyncClient(f"127.0.0.1:{gateway.admin_port}", token="tw_operator") as client:
            server = await client.server_info()
    (latest, *_) = re.findall(r"^## ([\d.]+) - ", (ROOT / "CHANGELOG.md").read_text(), re.M)

    told = {
        "installed": version("tokenweir"),
        "command": _tokenweir(light, "--version").stdout.removeprefix("tokenweir ").rstrip(),
        "manifest": read_toolchain()["tokenweir"],
        "wire": protocol.hello().release,
        "server": server.version,
        "changelog": latest,
    }
    assert told == dict.fromkeys(told, PROJECT["version"])


def test_a_light_install_imports_the_client(light: Path) -> None:
    done = _run(light, "-c", "import tokenweir; tokenweir.Client('127.0.0.1:1').close()")

    assert (done.returncode, done.stderr) == (0, "")


def test_the_client_calls_a_server_where_no_name_of_linux_is(light: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "sys.modules.update(dict.fromkeys(('fcntl', 'grp', 'pwd', 'resource')))\n"
        "del os.sched_getaffinity, signal.SIGHUP\n"
        "import tokenweir\n"
        "with tokenweir.Client('127.0.0.1:1', max_attempts=1) as client:\n"
        "    try: client.generate('m', 'text')\n"
        "    except tokenweir.Unavailable: print('called')"
    )
    done = _run(light, "-c", code)

    assert (done.returncode, done.stdout, done.stderr) == (0, "called\n", "")


def test_the_import_of_the_client_loads_grpc_and_messages_and_nothing_for_a_terminal(
    light: Path,
) -> None:
    code = "import sys, tokenweir; print(*{name.partition('.')[0] for name in sys.modules})"
    done = _run(light, "-c", code)

    allowed = {"cython_runtime", "google", "grpc", "grpc_health", "grpc_status", "tokenweir"}
    allowed |= {"grpc_reflection", "typing_extensions"}  # grpc looks for the one by itself
    found = {name for name in done.stdout.split() if not name.startswith("_")}
    assert found - sys.stdlib_module_names - allowed == set()
    assert "tokenweir" in found


def test_a_light_install_takes_less_than_60_mb(light: Path) -> None:
    files = [
        (file.suffix, file.size or 0) for one in _closure(EXTRAS[""]) for file in one.files or ()
    ]
    ours = [
        (path.suffix, path.stat().st_size) for path in light.rglob("*") if _is_ours(path, light)
    ]
    # Compiled sources take about as much room again.
    size = sum(size * (2 if suffix == ".py" else 1) for suffix, size in files + ours)

    assert 30e6 < size < 60e6


def test_a_light_install_has_the_help_of_every_command(light: Path) -> None:
    from server.cli.app import cli

    code = (
        "import sys; from server.cli.app import run;"
        "sys.exit(max(run([*name, '--help']) for name in [(), *((n,) for n in sys.argv[1:])]))"
    )
    done = _run(light, "-c", code, *cli.commands)

    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"Usage: tokenweir {name} " in done.stdout for name in cli.commands)


@pytest.mark.parametrize(
    ("command", "extras"),
    [
        ("train dates --out x", "export"),
        ("import . --out x", "export"),
        ("explain . text", "export"),
        ("export . --out x", "export,cpu"),
        ("verify . .", "export,cpu"),
        ("serve .", "serve,cpu"),
        ("http", "http"),
        ("bench .", "cpu"),
        ("cache", "cpu"),
        ("loadtest --model m", "loadtest"),
        ("demo", "serve,cpu,export,loadtest"),
    ],
)
def test_a_command_whose_extra_is_missing_names_it_in_one_line(
    light: Path, command: str, extras: str
) -> None:
    done = _tokenweir(light, *command.split())

    assert done.returncode == 3, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"install it with: pip install 'tokenweir[{extras}]'" in done.stderr


def test_a_light_install_calls_a_server(light: Path) -> None:
    done = _tokenweir(light, "generate", "--model", "m", "text", "--server", "127.0.0.1:1")

    assert done.returncode == 4
    assert done.stderr.startswith("error: no server answers at 127.0.0.1:1")


def test_a_light_install_has_the_settings_of_kserves_server(light: Path, tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text("[kserve]\nport = 7\n")

    printed = _tokenweir(light, "kserve", "--print-config")
    of_file = _tokenweir(light, "kserve", "--config", str(tmp_path / "serve.toml"))

    assert (printed.returncode, printed.stderr) == (0, "")
    assert "port = 8001  # default" in printed.stdout
    assert of_file.returncode == 3
    assert of_file.stderr.endswith("install it with: pip install 'tokenweir[http]'\n")


def test_a_light_install_names_the_extra_that_a_model_in_this_process_needs(light: Path) -> None:
    done = _run(light, "-c", "import tokenweir; tokenweir.load('packages/dates')")

    assert "ImportError: tokenweir.load runs the model in this process" in done.stderr
    assert "pip install 'tokenweir[cpu]', or for a GPU 'tokenweir[gpu]'" in done.stderr
