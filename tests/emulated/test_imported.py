"""Imported models of every family: every node is on the emulated device, every call is captured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import ViTImageProcessorPil

from engine.package.manifest import Precision
from exporter.checkpoint import load_checkpoint
from exporter.graphs.package_graphs import write_graphs
from exporter.graphs.target import CUDA
from exporter.graphs.torch_export import build_graphs
from exporter.huggingface import import_checkpoint
from tests.emulated.conftest import RunScript
from tests.emulated.test_placement import assert_on_device
from tests.exporter.huggingface.decoders import DECODERS, LONG, OPT_350M, save_decoder
from tests.exporter.huggingface.encoders import HEADS, OPTIONS, save_encoder, save_vision
from tests.exporter.huggingface.translation_sources import MODELS
from tests.exporter.huggingface.translation_sources import save as save_translation

pytestmark = [pytest.mark.emulated, pytest.mark.long, pytest.mark.timeout(900)]

_IMAGES = ViTImageProcessorPil(size={"height": 8, "width": 8})
_PHI_LONG = {"rope_parameters": LONG, "original_max_position_embeddings": 20}
_DECODERS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in DECODERS),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("opt", OPT_350M),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("phi3", _PHI_LONG),
]
Save = Callable[[Path], Any]
KINDS: dict[str, list[Save]] = {
    "decoders": [partial(save_decoder, model_type=name, **options) for name, options in _DECODERS],
    "encoder-decoders": [partial(save_translation, name) for name in MODELS],
    "readers": [
        *(partial(save_encoder, name=name, head=head) for name in OPTIONS for head in HEADS),
        partial(save_vision, class_name="ViTForImageClassification", processor=_IMAGES),
    ],
}


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_imported_models_are_on_the_device(
    kind: str, precision: Precision, on_device: RunScript, tmp_path: Path
) -> None:
    paths = []
    for number, save in enumerate(KINDS[kind]):
        place = tmp_path / str(number)
        save(path=place / "source")
        import_checkpoint(place / "source", place / "checkpoint")
        model = load_checkpoint(place / "checkpoint").model
        graphs = build_graphs(model, target=CUDA, precision=precision)
        write_graphs(graphs, place)
        paths += [str(place / file) for file in graphs]

    assert_on_device(paths, on_device)
