"""A model is asked for what it does, not for its class."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from exporter.graphs.torch_export import build_graphs
from exporter.models import TransformerConfig
from exporter.models.layers import Decoder
from exporter.models.protocol import generator

CONFIG = TransformerConfig(
    family="gpt",
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
    with pytest.raises(TypeError, match="Linear has no decoder, so that it writes nothing"):
        generator(nn.Linear(2, 2))
