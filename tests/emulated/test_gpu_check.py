"""The check of a GPU runs through where kernels compute nothing, and says that nothing is right.

Every run tries a part of most kinds, the cheapest: a certificate, rows, steps, whole requests
(`speed`) and a variant. The rest is long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loadtest.gpu_check.shapes import build
from tests.emulated.conftest import RunScript

Run = Callable[..., tuple[dict[str, Any], dict[str, dict[str, Any]]]]

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(600)]

_ROWS = "rows.llama.bf16"
_CERTIFICATES = ("certificate.llama.fp16.kv-int8", "certificate.sentiment.bf16")
_MEASURED = ("steps.gpt2-124m.int4", "speed.gpt2-124m", "variant.llama.efficient-attention")
_MEASURED_LONG = (
    "steps.bart-large",
    "speed.marian-base",
    "pieces.likeliest",
    "variant.llama.int8-blocks-one-launch",
)


@pytest.fixture(scope="module")
def run(on_device: RunScript, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run parts; return all that is left of them, and what became of each by name."""
    work = tmp_path_factory.mktemp("work")
    for weights in (None, "int4"):  # here, for to trace a first graph takes a process long
        build("gpt2-124m", work / "speed", quick=True, weights=weights)

    def run(*names: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        seen = on_device("check_gpu.py", ",".join(names), str(work))
        return seen, {part["name"]: part for part in seen["results"]["parts"]}

    return run


@pytest.mark.long
def test_the_device_is_named_and_copies_arrive_there(run: Run) -> None:
    seen, parts = run("machine", "pieces.row-copies")

    assert seen["code"] == 0
    assert seen["results"]["is_emulated"] and "The device is emulated" in seen["table"]
    assert parts["machine"]["found"]["gpu"] == "EMULATED sm_90"
    assert parts["pieces.row-copies"]["status"] == "passed"  # copies are real there


def test_rows_fail_because_nothing_is_computed(run: Run) -> None:
    seen, parts = run(_ROWS)

    assert seen["code"] == 1
    assert parts[_ROWS]["status"] == "failed"
    assert "NOTHING computed" in parts[_ROWS]["summary"]
    assert parts[_ROWS]["found"]["digest"] == parts[_ROWS]["found"]["digest_again"]


@pytest.mark.long
@pytest.mark.parametrize("name", _CERTIFICATES)
def test_a_certificate_fails_by_what_is_compared_and_by_nothing_before(name: str, run: Run) -> None:
    seen, parts = run(name)

    assert seen["code"] == 1 and parts[name]["status"] == "failed"
    assert parts[name]["found"] == {"error": "CertificateError"}


def test_what_computes_nothing_is_refused_of_a_format_that_may_lose_anything(run: Run) -> None:
    name = "certificate.digits.fp16.int4"

    _, parts = run(name)

    assert parts[name]["found"] == {"error": "CertificateError"}
    assert "a kernel computes something else here" in parts[name]["summary"]


@pytest.mark.parametrize(
    "name",
    [*_MEASURED, *(pytest.param(name, marks=pytest.mark.long) for name in _MEASURED_LONG)],
)
def test_every_kind_of_measurement_runs_through(name: str, run: Run) -> None:
    seen, parts = run(name)

    assert (seen["code"], parts[name]["status"]) == (0, "measured"), seen["results"]
    rows = next(iter(parts[name]["found"]["tables"].values()))
    counted = {"steps": ("rows", {1, 3}), "speed": ("streams", {1, 3}), "variant": ("rows", {1, 4})}
    column, counts = counted.get(name.partition(".")[0], ("k", {1, 64, 128}))
    assert {row[column] for row in rows} == counts
