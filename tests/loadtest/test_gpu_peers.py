"""Peers of our engine on a GPU: the comparison is right, and none may be missing there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from loadtest.gpu_check import pieces, speed
from loadtest.gpu_check.hugging_face import HuggingFaceAdapter, load
from loadtest.gpu_check.part import Settings
from loadtest.lab.peers.comparison import Comparison
from loadtest.lab.peers.worker import LoadOptions

PEER = "torch eager, growing cache"
WHY = "RuntimeError: torch 2.13.0+cpu sees no CUDA device"


def load_quick(weights: str) -> HuggingFaceAdapter:
    setting = {"cuda": 0, "quick": 1}
    return load(LoadOptions("nowhere", weights, 1, 3, 18, 1, setting))


@pytest.mark.parametrize(
    "shape",
    [
        "gpt2-124m",
        "llama-1b",
        pytest.param("bart-large", marks=pytest.mark.long),
        pytest.param("marian-base", marks=pytest.mark.long),
    ],
)
def test_both_modes_of_hugging_face_say_what_a_search_without_a_cache_says(
    shape: str,
) -> None:
    prompts = [[5, 6, 7, 8], [9, 8, 7, 6], [300, 200, 100, 1]]

    eager, static = (load_quick(f"{shape} {mode}") for mode in ("eager", "generate"))

    expected = _greedy(eager, prompts, 6)
    assert eager.generate(prompts, 6) == static.generate(prompts, 6) == expected
    assert {*eager.versions} == {"torch", "transformers"}


@pytest.mark.parametrize(
    "shape",
    [
        "gpt2-124m",
        "marian-base",
        pytest.param("llama-1b", marks=pytest.mark.long),
        pytest.param("bart-large", marks=pytest.mark.long),
    ],
)
def test_on_a_gpu_generate_is_compiled_with_a_static_cache_and_eager_is_not(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "0")  # as it would be set for good
    compiled: dict[str, set[bool]] = {}
    for mode in ("generate", "eager"):
        adapter = load_quick(f"{shape} {mode}")
        kind = type(adapter._model)
        said = compiled[mode] = set[bool]()
        asks = kind._valid_auto_compile_criteria

        def would(model: Any, *given: Any, asks: Any = asks, said: set[bool] = said) -> bool:
            with monkeypatch.context() as patch:
                patch.setattr(type(model), "device", torch.device("cuda"))
                said.add(asks(model, *given))
            return False  # not here, where it would take minutes

        with monkeypatch.context() as patch:
            patch.setattr(kind, "_valid_auto_compile_criteria", would)
            adapter.generate([[5, 6, 7, 8]], 3)

    assert compiled == {"generate": {True}, "eager": {False}}


@torch.no_grad()
def _greedy(adapter: HuggingFaceAdapter, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Call the model with all tokens in every step."""
    model, source = adapter._model, torch.tensor(prompts)
    given = {"input_ids": source} if model.config.is_encoder_decoder else {}
    name = "decoder_input_ids" if given else "input_ids"
    tokens = torch.zeros(len(prompts), 1, dtype=torch.long) if given else source
    for _ in range(count):
        logits = model(**given, **{name: tokens}, use_cache=False).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    found: list[list[int]] = tokens[:, -count:].tolist()
    return found


def compare(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    device: Literal["cuda", "cpu"],
    *,
    is_emulated: bool,
) -> speed.Outcome:
    """Compare where one engine could not be loaded."""
    found = Comparison((), (), {PEER: WHY}, {})
    monkeypatch.setattr(speed, "build", lambda *given, quick: tmp_path / "graphs")
    monkeypatch.setattr(speed, "compare", lambda *given: found)
    monkeypatch.setattr(speed, "is_emulated", lambda: is_emulated)
    return speed.compare_shape(Settings(device, True, tmp_path), "gpt2-124m")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_comparison_without_a_peer_fails_and_names_it(
    device: Literal["cuda", "cpu"], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outcome = compare(monkeypatch, tmp_path, device, is_emulated=False)

    assert outcome.passed is False
    assert f"without {PEER}: {WHY}" in outcome.summary


def test_the_emulated_device_is_measured_without_those_that_need_a_real_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outcome = compare(monkeypatch, tmp_path, "cuda", is_emulated=True)

    assert outcome.passed is None and outcome.found["missing"] == {PEER: WHY}


@pytest.mark.parametrize(
    ("sees_device", "has_transformers", "missing"),
    [
        (True, True, []),
        (False, True, [f"torch {torch.__version__} sees no CUDA device"]),
        (True, False, ["transformers is not installed"]),
    ],
)
def test_what_hugging_face_lacks_is_known_at_the_beginning(
    sees_device: bool,
    has_transformers: bool,
    missing: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_device)
    spec = object() if has_transformers else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)

    assert pieces.missing_for_peers("cuda") == missing


def test_the_first_part_says_what_comparisons_will_lack(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    outcome = pieces.describe(Settings("cpu", True, tmp_path))

    assert "speed.* will fail: transformers is not installed" in outcome.summary
    assert outcome.found["missing_for_peers"] == ["transformers is not installed"]
