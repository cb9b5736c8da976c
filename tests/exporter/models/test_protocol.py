"""A model is asked for what it does, not for its class."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx_ir as ir
import pytest
from torch import Tensor, nn

import exporter
from engine.package.manifest import Target
from exporter.graphs.target import CUDA, TARGETS
from exporter.graphs.torch_export import build_graphs
from exporter.models import ImageConfig, TransformerConfig
from exporter.models.cache import LayerCache
from exporter.models.layers import Decoder, EncoderOutput
from exporter.models.own import OwnConfig
from exporter.models.protocol import generator

CONFIG = TransformerConfig(
    architecture="decoder",
    d_model=16,
    num_heads=2,
    d_ff=8,
    num_decoder_layers=1,
    vocab_size=9,
    max_target_len=4,
)


class Own(nn.Module):
    """Writes like a GPT, and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.config = CONFIG
        self.decoder = Decoder(CONFIG)

    def encode(self, source_ids: Tensor, source_mask: Tensor | None = None) -> None:
        return None


def test_a_class_of_ones_own_is_exported() -> None:
    graphs = build_graphs(Own().eval())

    assert "CachedAttention" in {node.op_type for node in graphs["decoder.onnx"].graph}


def test_what_has_no_decoder_writes_nothing() -> None:
    with pytest.raises(TypeError, match="Linear has no decoder, so that it generates nothing"):
        generator(nn.Linear(2, 2))


class OwnDecoder(nn.Module):
    """A decoder that is none of ours: it has the methods that are asked for, and no more."""

    cache_head_dim = 8

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 16)

    def hidden_states(
        self, input_ids: Tensor, *, position_ids: Tensor, caches: Sequence[LayerCache]
    ) -> Tensor:
        hidden: Tensor = self.embedding(input_ids)
        return caches[0].attend(
            hidden, hidden, hidden, num_heads=2, num_kv_heads=2, value_dim=8, scale=1.0
        )

    def logits_in_float32(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.embedding.weight).float()

    def attentions(self) -> Iterator[nn.Module]:
        return iter(())

    cross_attentions = attentions


def test_a_decoder_of_ones_own_is_exported_in_half_precision() -> None:
    model = Own()
    model.decoder = OwnDecoder()  # type: ignore[assignment]

    graph = build_graphs(model.eval(), target=CUDA, precision="fp16")["decoder.onnx"].graph

    assert "CachedAttention" in {node.op_type for node in graph}
    assert graph.outputs[0].dtype == ir.DataType.FLOAT


class OwnViewer(nn.Module):
    """Sees pictures, and multiplies patches where it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.config = OwnConfig.image_encoder(ImageConfig(size=4, patch_size=2), labels=("a", "b"))
        self.convolution = nn.Conv2d(3, 2, 4)
        self.multiplies = False

    def multiply_patches(self) -> None:
        self.multiplies = True

    def forward(self, pixel_values: Tensor) -> EncoderOutput:
        if self.multiplies:
            weight = self.convolution.weight.flatten(1)
            return EncoderOutput(nn.functional.linear(pixel_values.flatten(1), weight), None)
        return EncoderOutput(self.convolution(pixel_values).flatten(1), None)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_viewer_is_told_how_a_target_wants_patches(target: Target) -> None:
    graph = build_graphs(OwnViewer().eval(), target=TARGETS[target])["model.onnx"].graph

    convolves = "Conv" in {node.op_type for node in graph}
    assert convolves != TARGETS[target].patches_as_product


@pytest.mark.parametrize("file", ["models/protocol.py", "graphs/torch_export.py"])
def test_no_model_is_asked_for_its_class(file: str) -> None:
    tree = ast.parse((Path(exporter.__file__).parent / file).read_text())

    asked = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not asked & {"isinstance", "cast", "OwnDecoder", "PatchEmbeddings"}
