"""The check of a GPU runs through where kernels compute nothing, and says that nothing is right.

Every run tries the cheapest part of most kinds: a certificate, rows, steps and a variant. The rest
is long, whole requests (`speed`) among them.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.emulated.conftest import RunScript

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(600)]

_ROWS = "rows.llama.bf16"
_CERTIFICATES = ("certificate.llama.fp16.kv-int8", "certificate.sentiment.bf16")
_MEASURED = ("steps.gpt2-124m.int4", "variant.llama.efficient-attention")
_MEASURED_LONG = (
    "steps.bart-large",
    "speed.llama-1b",
    "pieces.likeliest",
    "variant.llama.int8-blocks-one-launch",
)


def run(on_device: RunScript, *names: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return all that a run leaves, and what became of its parts by name."""
    seen = on_device("check_gpu.py", ",".join(names))
    return seen, {part["name"]: part for part in seen["results"]["parts"]}


@pytest.mark.long
def test_the_device_is_named_and_copies_arrive_there(on_device: RunScript) -> None:
    seen, parts = run(on_device, "machine", "pieces.row-copies")

    assert seen["code"] == 0
    assert seen["results"]["is_emulated"] and "The device is emulated" in seen["table"]
    assert parts["machine"]["found"]["gpu"] == "EMULATED sm_90"
    assert parts["pieces.row-copies"]["status"] == "passed"  # copies are real there


def test_rows_fail_because_nothing_is_computed(on_device: RunScript) -> None:
    seen, parts = run(on_device, _ROWS)

    assert seen["code"] == 1
    assert parts[_ROWS]["status"] == "failed"
    assert "NOTHING computed" in parts[_ROWS]["summary"]
    assert parts[_ROWS]["found"]["digest"] == parts[_ROWS]["found"]["digest_again"]


@pytest.mark.long
@pytest.mark.parametrize("name", _CERTIFICATES)
def test_a_certificate_fails_by_what_is_compared_and_by_nothing_before(
    name: str, on_device: RunScript
) -> None:
    seen, parts = run(on_device, name)

    assert seen["code"] == 1 and parts[name]["status"] == "failed"
    assert parts[name]["found"] == {"error": "CertificateError"}


def test_what_computes_nothing_is_refused_of_a_format_that_may_lose_anything(
    on_device: RunScript,
) -> None:
    name = "certificate.digits.fp16.int4"

    _, parts = run(on_device, name)

    assert parts[name]["found"] == {"error": "CertificateError"}
    assert "a kernel computes something else here" in parts[name]["summary"]


@pytest.mark.parametrize(
    "name",
    [*_MEASURED, *(pytest.param(name, marks=pytest.mark.long) for name in _MEASURED_LONG)],
)
def test_every_kind_of_measurement_runs_through(name: str, on_device: RunScript) -> None:
    seen, parts = run(on_device, name)

    assert (seen["code"], parts[name]["status"]) == (0, "measured"), seen["results"]
    rows = next(iter(parts[name]["found"]["tables"].values()))
    counted = {"steps": ("rows", {1, 3}), "speed": ("streams", {1, 3}), "variant": ("rows", {1, 4})}
    column, counts = counted.get(name.partition(".")[0], ("k", {1, 64, 128}))
    assert {row[column] for row in rows} == counts
