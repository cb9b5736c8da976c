"""The check of a GPU runs through where kernels compute nothing, and says that nothing is right.

Every run tries a part of most kinds, the cheapest: a certificate, rows, draws, steps, whole
requests (`speed`) and a variant. All parts together, as the command runs them, are long.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.package.graph_io import SAMPLING_GRAPHS
from loadtest.gpu_check.catalogue import make_parts
from loadtest.gpu_check.part import Settings, Status
from loadtest.gpu_check.shapes import build
from tests.emulated.conftest import RunScript

Parts = dict[str, dict[str, Any]]
Run = Callable[..., tuple[dict[str, Any], Parts]]

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(600)]

_ROWS = "rows.llama.bf16"
_MEASURED = ("steps.gpt2-124m.int4", "speed.gpt2-124m", "variant.llama.efficient-attention")
_ALL_SECONDS, _PART_SECONDS = 7200, 1800  # on processors that may have much else to do
# Ends of parts by the beginning of their names; the first that fits counts.
_ENDS: dict[str, Status] = {
    "packages": "passed",  # graphs are certified by the kernels of the CPU
    "pieces.row-copies": "passed",  # copies are real there
    "pieces.draws": "failed",
    "rows.": "failed",
    "certificate.": "failed",
    "": "measured",
}
_COUNTED = {"steps": ("rows", {1, 3}), "speed": ("streams", {1, 3}), "variant": ("rows", {1, 4})}
_CAPTURED = {"eager", "captured", "capture ms", "tokens/s"}
_COLUMNS: dict[str, list[set[str]]] = {  # by part, for each of its tables
    "steps": [_CAPTURED | {"captured, ids read", "busy"}, _CAPTURED | {"tokens/s captured"}],
    "speed": [
        {"tokens/s", "decode tokens/s", "prefill tokens/s", "their time / ours", "GPU busy"},
    ],
    "variant": [{"eager", "captured"}],
}
_DRAWS = "pieces.draws"
_OF_LOADING = {"load_seconds", "bytes_of_session", "bytes_of_rows", "bytes_after_work"}


@pytest.fixture(scope="module")
def run(on_device: RunScript, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run parts; return all that is left of them, and what became of each by name."""
    work = tmp_path_factory.mktemp("work")
    for weights in (None, "int4"):  # here, for to trace a first graph takes a process long
        build("gpt2-124m", work / "speed", quick=True, weights=weights)

    def run(*names: str, timeout: float = 240, limit: float = 240) -> tuple[dict[str, Any], Parts]:
        given = (",".join(names), str(work), str(limit))
        seen = on_device("check_gpu.py", *given, timeout=timeout)
        return seen, {part["name"]: part for part in seen["results"]["parts"]}

    return run


@pytest.mark.long
def test_rows_fail_because_nothing_is_computed(run: Run) -> None:
    seen, parts = run(_ROWS)

    assert seen["code"] == 1
    assert parts[_ROWS]["status"] == "failed"
    assert "NOTHING computed" in parts[_ROWS]["summary"]
    assert parts[_ROWS]["found"]["digest"] == parts[_ROWS]["found"]["digest_again"]


@pytest.mark.long
def test_what_computes_nothing_is_refused_of_a_format_that_may_lose_anything(run: Run) -> None:
    name = "certificate.digits.fp16.int4"

    _, parts = run(name)

    assert parts[name]["found"] == {"error": "CertificateError"}
    assert "a kernel computes something else here" in parts[name]["summary"]


def test_draws_are_timed_and_fail_because_nothing_is_computed(run: Run) -> None:
    seen, parts = run(_DRAWS)

    assert (seen["code"], parts[_DRAWS]["status"]) == (1, "failed"), seen["results"]
    assert_draws_are_timed(parts[_DRAWS])


@pytest.mark.long
@pytest.mark.parametrize("name", _MEASURED)
def test_every_kind_of_measurement_runs_through(name: str, run: Run) -> None:
    seen, parts = run(name)

    assert (seen["code"], parts[name]["status"]) == (0, "measured"), seen["results"]
    assert_tables_are_whole(name, parts[name])


@pytest.mark.long
@pytest.mark.timeout(_ALL_SECONDS + 60)
def test_every_part_that_there_is_reaches_its_end(run: Run, tmp_path: Path) -> None:
    expected = {
        part.name: end_of(part.name) for part in make_parts(Settings("cuda", True, tmp_path))
    }

    seen, parts = run(timeout=_ALL_SECONDS, limit=_PART_SECONDS)

    assert {name: part["status"] for name, part in parts.items()} == expected, seen["table"]
    assert seen["code"] == 1
    assert seen["results"]["is_emulated"] and "The device is emulated" in seen["table"]
    assert parts["machine"]["found"]["gpu"] == "EMULATED sm_90"
    for name, part in parts.items():
        if name.startswith("certificate."):  # by what is compared, and by nothing before
            assert part["found"] == {"error": "CertificateError"}, name
        elif name.startswith("rows."):
            assert "NOTHING computed" in part["summary"], name
        elif name == _DRAWS:
            assert_draws_are_timed(part)
        elif part["status"] == "measured" and name != "machine":
            assert_tables_are_whole(name, part)


def end_of(name: str) -> Status:
    return next(end for beginning, end in _ENDS.items() if name.startswith(beginning))


def assert_draws_are_timed(part: dict[str, Any]) -> None:
    (rows,) = part["found"]["tables"].values()
    assert len(rows) == 2 * len(SAMPLING_GRAPHS)
    assert all(row["eager"] > 0 and row["captured"] > 0 for row in rows)
    assert "captured: draw_nucleus.onnx: the graph draws" in str(part["found"]["wrong"])


def assert_tables_are_whole(name: str, part: dict[str, Any]) -> None:
    """Assert that a part's tables have a row for all that is to be counted, and what is asked."""
    kind, tables = name.partition(".")[0], [*part["found"]["tables"].values()]
    column, counts = _COUNTED.get(kind, ("k", {1, 64, 128}))
    assert {row[column] for row in tables[0]} == counts, name
    for rows, columns in zip(tables, _COLUMNS.get(kind, [set[str]()]), strict=True):
        assert all(columns <= row.keys() for row in rows), name
    if kind == "steps":
        assert all(part["found"][measured] > 0 for measured in _OF_LOADING), name
