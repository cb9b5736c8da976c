"""The check of a GPU runs through where kernels compute nothing, and says that nothing is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.lab.gpu.part import Status
from loadtest.lab.gpu.parts import choose
from tests.emulated.conftest import RunScript

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(600)]

_SECONDS = 7200  # on processors that may have much else to do
_ENDS: dict[str, Status] = {  # by kind
    "machine": "measured",
    "rows": "failed",
    "certificate": "failed",
    "bench": "measured",
    "served": "passed",  # whatever tokens come
    "speed": "measured",
}


def test_the_first_look_says_that_the_device_is_emulated(
    on_device: RunScript, tmp_path: Path
) -> None:
    seen = on_device("check_gpu.py", "machine", str(tmp_path))

    (machine,) = seen["results"]["parts"]
    assert (seen["code"], machine["status"]) == (0, "measured"), seen["table"]
    assert machine["found"]["gpu"] == "EMULATED sm_90"
    assert seen["results"]["is_emulated"]
    assert "nothing is computed, and no number means anything" in seen["table"]


@pytest.mark.long
@pytest.mark.timeout(_SECONDS + 60)
def test_every_part_that_there_is_reaches_its_end(on_device: RunScript, tmp_path: Path) -> None:
    expected = {part.name: _ENDS[part.name.partition(".")[0]] for part in choose([])}

    seen = on_device("check_gpu.py", "", str(tmp_path), timeout=_SECONDS)

    parts: dict[str, Any] = {part["name"]: part for part in seen["results"]["parts"]}
    assert {name: part["status"] for name, part in parts.items()} == expected, seen["table"]
    assert [*parts] == [*expected] and seen["code"] == 1
    for name, part in parts.items():
        kind, found = name.partition(".")[0], part["found"]
        if kind == "rows":
            assert "NOTHING computed" in part["summary"], name
        elif kind == "certificate":  # by what is compared, and by nothing before
            assert found == {"exit_code": 1}, part["summary"]
        elif kind == "bench":
            assert [one["concurrency"] for one in found["results"]] == [1, 3], name
        elif kind == "served":
            assert [*found] == ["1", "3"], name
        elif kind == "speed":
            assert [line["concurrency"] for line in found["lines"]] == [1, 3], name
            assert len(found["missing"]) == 4, name  # torch has no emulated device
