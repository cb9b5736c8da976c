"""Tiny configurations and random weights for the tests of the models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from exporter.models import TransformerConfig
from exporter.models.attention import MultiHeadAttention
from exporter.models.config import AttentionConfig, FeedForwardConfig, PositionConfig
from exporter.models.positions import RelativePositions


@pytest.fixture(autouse=True)
def _same_weights_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture
def randomize() -> Callable[[nn.Module], nn.Module]:
    """Give every parameter random values: zero biases and unit norms would hide mistakes."""

    def apply(module: nn.Module) -> nn.Module:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        return module.eval()

    return apply


def make_attention(
    d_model: int,
    num_heads: int,
    options: AttentionConfig | None = None,
    *,
    relative: RelativePositions | None = None,
    window: int | None = None,
    **others: Any,
) -> MultiHeadAttention:
    """Return attention by options of a model that is no more than it."""
    config = TransformerConfig.model_construct(
        d_model=d_model,
        num_heads=num_heads,
        attention=options or AttentionConfig(),
        **{"dropout": 0.0, **others},
    )
    return MultiHeadAttention(config, relative=relative, window=window)


@pytest.fixture
def translation_config() -> TransformerConfig:
    return TransformerConfig(
        architecture="encoder-decoder",
        d_model=16,
        num_heads=2,
        d_ff=24,
        num_encoder_layers=2,
        num_decoder_layers=2,
        vocab_size=29,
        max_source_len=14,
        max_target_len=12,
        bos_token_id=1,
        eos_token_id=2,
    )


@pytest.fixture
def gpt_config() -> TransformerConfig:
    return TransformerConfig(
        architecture="decoder",
        d_model=16,
        num_heads=2,
        d_ff=24,
        num_decoder_layers=2,
        feed_forward=FeedForwardConfig(activation="gelu_tanh"),
        norm_position="first",
        vocab_size=29,
        max_target_len=12,
        positions=PositionConfig(kind="learned"),
        scale_embeddings=False,
    )
