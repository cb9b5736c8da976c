"""Options of encoders, each alone against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from exporter.models import TransformerConfig, build_model

Randomize = Callable[[nn.Module], nn.Module]

MASK = torch.arange(7) < torch.tensor([7, 3, 1])[:, None]
OPTIONS: dict[str, Any] = {
    "architecture": "encoder",
    "d_model": 16,
    "num_heads": 2,
    "d_ff": 24,
    "num_encoder_layers": 2,
    "vocab_size": 29,
    "max_source_len": 8,
    "positions.kind": "learned",
    "labels": ("a", "b"),
}


def make_encoder(randomize: Randomize, **options: Any) -> Any:
    model: Any = build_model(TransformerConfig.of({**OPTIONS, **options}))
    return randomize(model).encoder


def turn(heads: Tensor, base: float) -> Tensor:
    """Turn (B, h, S, d) as complex numbers."""
    half = heads.shape[-1] // 2
    waves = base ** (-torch.arange(half) / half)
    angles = torch.arange(heads.shape[2])[:, None] * waves
    turned = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat((turned.real, turned.imag), dim=-1)


def attend(attention: Any, hidden: Tensor, mask: Tensor, base: float | None = None) -> Tensor:
    """Attend by torch's own function."""

    def heads(projection: nn.Linear) -> Tensor:
        return projection(hidden).view(*hidden.shape[:2], 2, 8).transpose(1, 2)

    query, key = heads(attention.q_proj), heads(attention.k_proj)
    if base is not None:
        query, key = turn(query, base), turn(key, base)
    found = F.scaled_dot_product_attention(query, key, heads(attention.v_proj), attn_mask=mask)
    return attention.out_proj(found.transpose(1, 2).flatten(2))


@torch.no_grad()
def test_queries_and_keys_of_an_encoder_are_turned(randomize: Randomize) -> None:
    encoder = make_encoder(randomize, positions={"kind": "rotary", "rotary_base": 20.0})
    hidden = torch.randn(3, 7, 16)

    found = encoder.layers[0].self_attention(hidden, hidden, hidden, mask=MASK[:, None, None])

    expected = attend(encoder.layers[0].self_attention, hidden, MASK[:, None, None], 20.0)
    torch.testing.assert_close(found[MASK], expected[MASK], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_query_sees_keys_on_either_side_in_its_window(randomize: Randomize) -> None:
    positions = {"kind": "rotary", "rotary_base": 20.0, "local_rotary_base": 5.0}
    attention = {"window": 3, "windowed_layers": (1,)}
    encoder = make_encoder(randomize, positions=positions, attention=attention)
    hidden = torch.randn(3, 7, 16)

    found = encoder(hidden, MASK)

    places = torch.arange(7)
    near = (places[:, None] - places).abs() <= 2
    masks = [MASK[:, None, None], MASK[:, None, None] & near]
    expected = hidden
    for layer, mask, base in zip(encoder.layers, masks, (20.0, 5.0), strict=True):
        attended = attend(layer.self_attention, expected, mask, base)
        expected = layer.self_attention_residual.norm(expected + attended)
        expected = layer.feed_forward_residual.norm(expected + layer.feed_forward(expected))
    torch.testing.assert_close(found[MASK], expected[MASK], rtol=1e-4, atol=1e-5)
    alone = encoder(hidden[1:2, :3])  # without a mask the window holds as well
    torch.testing.assert_close(found[1:2, :3], alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_norms_may_have_no_bias(randomize: Randomize) -> None:
    encoder = make_encoder(randomize, norm_position="first", norm_bias=False)
    hidden = torch.randn(2, 5, 16)

    norm = encoder.final_norm

    torch.testing.assert_close(norm(hidden), F.layer_norm(hidden, (16,), norm.weight))
    assert not any("norm.bias" in name for name, _ in encoder.named_parameters())


@torch.no_grad()
def test_gate_of_an_encoder_goes_through_gelu(randomize: Randomize) -> None:
    options = {"gated": True, "bias": False, "activation": "gelu"}
    layer = make_encoder(randomize, feed_forward=options).layers[0].feed_forward
    hidden = torch.randn(2, 5, 16)

    gate, up, down = (part.weight for part in (layer.gate_proj, layer.up_proj, layer.down_proj))
    expected = (F.gelu(hidden @ gate.T) * (hidden @ up.T)) @ down.T

    torch.testing.assert_close(layer(hidden), expected)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"attention.window": 2}, "attention.window is for decoder and encoder"),
        ({"positions.kind": "rotary"}, "rotary positions are for decoder and encoder"),
    ],
)
def test_option_that_an_encoder_lacks_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError) as refused:
        TransformerConfig.of({**OPTIONS, **options, "architecture": "encoder-decoder"})

    assert problem in refused.value.errors()[0]["msg"]
