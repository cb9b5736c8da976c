"""The check of a GPU runs through where kernels compute nothing, and says that nothing is right."""

from __future__ import annotations

from typing import Any

import pytest

from tests.emulated.conftest import RunScript

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(600)]

_WRONG = (
    "rows.llama.bf16",
    "certificate.llama.fp16.kv-int8",
    "certificate.sentiment.bf16",
)
_MEASURED = (
    "steps.gpt2-124m.int4",
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
def test_certificates_fail_by_what_is_compared_and_by_nothing_before(on_device: RunScript) -> None:
    seen, parts = run(on_device, "machine", "pieces.row-copies", *_WRONG)

    assert seen["code"] == 1
    assert seen["results"]["is_emulated"] and "The device is emulated" in seen["table"]
    assert parts["machine"]["found"]["gpu"] == "EMULATED sm_90"
    assert parts["pieces.row-copies"]["status"] == "passed"  # copies are real there
    assert {name: parts[name]["status"] for name in _WRONG} == dict.fromkeys(_WRONG, "failed")
    rows, *certificates = _WRONG
    assert "NOTHING computed" in parts[rows]["summary"]
    assert parts[rows]["found"]["digest"] == parts[rows]["found"]["digest_again"]
    for name in certificates:
        assert parts[name]["found"] == {"error": "CertificateError"}


def test_what_computes_nothing_is_refused_of_a_format_that_may_lose_anything(
    on_device: RunScript,
) -> None:
    name = "certificate.digits.fp16.int4"

    _, parts = run(on_device, name)

    assert parts[name]["found"] == {"error": "CertificateError"}
    assert "a kernel computes something else here" in parts[name]["summary"]


@pytest.mark.long
def test_every_kind_of_measurement_runs_through(on_device: RunScript) -> None:
    seen, parts = run(on_device, *_MEASURED)

    statuses = {name: part["status"] for name, part in parts.items()}
    assert statuses == dict.fromkeys(_MEASURED, "measured"), seen["results"]
    assert seen["code"] == 0
    steps = parts["steps.bart-large"]["found"]["tables"]
    (decoding,) = (rows for title, rows in steps.items() if title.startswith("decode steps"))
    assert [row["rows"] for row in decoding] == [1, 3]
    (whole,) = parts["speed.llama-1b"]["found"]["tables"].values()
    assert {row["streams"] for row in whole} == {1, 3}
