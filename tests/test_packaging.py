"""What is installed: every requirement has its pin, and the two onnxruntimes never meet."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    name: {canonicalize_name(requirement.name): requirement for requirement in requirements}
    for name, requirements in (
        (name, [Requirement(line) for line in lines])
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


def test_the_same_peers_are_compared_on_a_gpu() -> None:
    twins = {"onnxruntime-genai": "onnxruntime-genai-cuda"}

    assert {twins.get(name, name) for name in EXTRAS["peers"]} == set(EXTRAS["peers-gpu"])
