"""Steps of the runner on the emulated device: what the host does for each of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from engine.package.manifest import PackageFormat
from exporter.graphs.contracts import generation_contract
from exporter.models import TransformerConfig
from tests.emulated.conftest import Export, RunScript
from tests.emulated.models import MODELS

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(600)]

CASES = [
    "gpt2-fp16",
    "marian-fp16",  # as test_placement has it: traced once for both
    *(
        pytest.param(case, marks=pytest.mark.long)
        for case in (
            "marian-fp32",
            "llama-bf16",
            "llama-fp32",
            "gemma2-fp32",
            "t5-fp32",
            "t5-fp16",
            "t5-bf16",
        )
    ),
]
COUNTED = ("launches", "graphs", "syncs", "memcpys", "bound", "uploads", "downloads")
# Everything goes there in one copy and comes back in one, and the host waits once.
CAPTURED = dict(zip(COUNTED, (0, 1, 1, 2, 0, 1, 1), strict=True))
# The ids are copied on the device. The host waits for what the step before has brought, and first
# for its inputs to have gone.
AHEAD = CAPTURED | {"syncs": 2, "memcpys": 3}


@pytest.fixture(scope="module", params=CASES)
def steps(
    request: pytest.FixtureRequest,
    export: Export,
    draw_paths: Callable[[int], list[str]],
    on_device: RunScript,
) -> Any:
    name, _, precision = request.param.partition("-")
    paths = export(name, precision)
    form = PackageFormat.of("cuda", precision)
    contract = generation_contract(TransformerConfig.of(MODELS[name]), form)
    assert contract is not None
    draws = json.dumps(draw_paths(contract.vocab_size))
    return on_device("run_steps.py", contract.model_dump_json(), draws, *sorted(paths))


def counts(step: dict[str, Any]) -> dict[str, int]:
    return {name: step[name] for name in COUNTED}


def test_a_captured_decode_step_is_one_launch_and_binds_nothing(steps: Any) -> None:
    for k in (1, 20):
        first, *later = (steps[f"decode {k} {i}"] for i in range(3))

        assert first["launches"] > 0 and first["graphs"] == 1
        assert [counts(step) for step in later] == [CAPTURED, CAPTURED]
    assert counts(steps["decode after it"]) == CAPTURED


def test_a_step_that_is_fed_is_one_launch_and_a_copy_more(steps: Any) -> None:
    for k in (1, 20):
        assert counts(steps[f"ahead {k}"]) == AHEAD


def test_draws_are_one_launch_more(steps: Any) -> None:
    for kind in range(3):
        first, again = steps[f"drawn {kind} 0"], steps[f"drawn {kind} 1"]

        assert first["launches"] > 0
        assert counts(again) == CAPTURED | {"graphs": 2}
        assert counts(steps[f"drawn {kind} ahead"]) == AHEAD | {"graphs": 2}
        assert steps[f"drawn {kind} rows"] == [[3], [3]]


def test_every_step_waits_once_and_copies_its_inputs_and_outputs_once(steps: Any) -> None:
    for name, step in steps.items():
        if name in ("chunks", "mixed", "beams", "beams again", "aligned", "large"):
            assert (step["syncs"], step["uploads"], step["downloads"]) == (1, 1, 1), name


def test_decoding_beside_a_chunk_is_one_launch_beside_those_of_the_chunk(steps: Any) -> None:
    assert steps["mixed"]["graphs"] == 1
    assert steps["mixed"]["launches"] == steps["large"]["launches"]
    assert [shape[0] for shape in steps["mixed"]["shapes"][:4]] == [5] * 4


def test_sequences_of_one_source_are_one_launch_too(steps: Any) -> None:
    for name in ("beams", "beams again"):
        if name in steps:
            assert counts(steps[name]) == CAPTURED


def test_attention_to_the_source_is_not_captured(steps: Any) -> None:
    if "aligned" in steps:
        assert steps["aligned"]["graphs"] == 0 and steps["aligned"]["launches"] > 0


def test_rows_of_logits_are_fetched_together_and_once(steps: Any) -> None:
    assert (steps["fetch"]["syncs"], steps["fetch"]["memcpys"]) == (1, 2)
    assert counts(steps["fetch again"]) == dict.fromkeys(COUNTED, 0)
    assert steps["row"] == ["float32", [3, 96]]
