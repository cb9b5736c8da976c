from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from exporter.models import TransformerConfig
from exporter.models.attention import MultiHeadAttention, padding_mask
from exporter.models.layers import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    PositionwiseFeedForward,
)

B, T, S, D = 2, 6, 7, 16
MASK = torch.arange(S) < torch.tensor([S, 3])[:, None]  # (B, S), True = real
LAYER_VARIANTS = [
    (position, activation) for position in ("first", "last") for activation in ("relu", "gelu")
]


def make_config(**options: object) -> TransformerConfig:
    base: dict[str, object] = {
        "architecture": "encoder-decoder",
        "d_model": D,
        "num_heads": 2,
        "d_ff": 24,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "vocab_size": 29,
        "max_source_len": 14,
        "max_target_len": 12,
        "bos_token_id": 1,
    }
    return TransformerConfig.of(base | options)


def copy_attention(ours: MultiHeadAttention, twin: nn.MultiheadAttention) -> None:
    projections = (ours.q_proj, ours.k_proj, ours.v_proj)
    twin.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
    twin.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
    twin.out_proj.load_state_dict(ours.out_proj.state_dict())


@torch.no_grad()
def copy_layer(
    ours: EncoderLayer | DecoderLayer,
    twin: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer,
) -> None:
    copy_attention(ours.self_attention, twin.self_attn)
    norms = [ours.self_attention_residual.norm, ours.feed_forward_residual.norm]
    if isinstance(ours, DecoderLayer):
        copy_attention(ours.cross_attention, twin.multihead_attn)
        norms.insert(1, ours.cross_attention_residual.norm)
    twin.linear1.load_state_dict(ours.feed_forward.up_proj.state_dict())
    twin.linear2.load_state_dict(ours.feed_forward.down_proj.state_dict())
    for i, norm in enumerate(norms, start=1):
        getattr(twin, f"norm{i}").load_state_dict(norm.state_dict())


def twin_options(config: TransformerConfig) -> dict[str, object]:
    return {
        "dim_feedforward": config.d_ff,
        "activation": config.feed_forward.activation,
        "norm_first": config.norm_position == "first",
        "layer_norm_eps": config.norm_eps,
        "batch_first": True,
    }


def assert_close_where_real(output: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(output[MASK], expected[MASK], rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("gated", [False, True])
def test_feed_forward_drops_out_its_inner_layer_in_training_only(gated, randomize):
    config = make_config(dropout=0.0, **{"feed_forward.dropout": 0.5, "feed_forward.gated": gated})
    layer = randomize(PositionwiseFeedForward(config))
    x = torch.randn(B, S, D)
    inner = layer.activation(layer.gate_proj(x) if gated else layer.up_proj(x))
    inner = inner * layer.up_proj(x) if gated else inner

    evaluated = layer(x)
    torch.manual_seed(3)
    trained = layer.train()(x)

    torch.manual_seed(3)
    torch.testing.assert_close(trained, layer.down_proj(nn.functional.dropout(inner, 0.5)))
    torch.testing.assert_close(evaluated, layer.down_proj(inner))


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"num_heads": 2}, "num_heads 2, value_dim 8 and d_model 16"),
        ({"num_heads": 1, "value_dim": 8}, "num_heads 1, value_dim 8 and d_model 16"),
    ],
)
def test_attention_without_output_projection_is_one_head_as_wide_as_the_model(options, got):
    with pytest.raises(ValueError, match=got):
        make_config(**{"attention.output": False}, **options)


@pytest.mark.parametrize(("norm_position", "activation"), LAYER_VARIANTS)
def test_encoder_layer_equals_torch(norm_position, activation, randomize):
    config = make_config(norm_position=norm_position, **{"feed_forward.activation": activation})
    layer = randomize(EncoderLayer(config))
    twin = nn.TransformerEncoderLayer(D, 2, **twin_options(config)).eval()
    copy_layer(layer, twin)
    x = torch.randn(B, S, D)

    output = layer(x, padding_mask(MASK))

    assert_close_where_real(output, twin(x, src_key_padding_mask=~MASK))


@pytest.mark.parametrize(("norm_position", "activation"), LAYER_VARIANTS)
def test_decoder_layer_equals_torch(norm_position, activation, randomize):
    config = make_config(norm_position=norm_position, **{"feed_forward.activation": activation})
    layer = randomize(DecoderLayer(config))
    twin = nn.TransformerDecoderLayer(D, 2, **twin_options(config)).eval()
    copy_layer(layer, twin)
    x, memory = torch.randn(B, T, D), torch.randn(B, S, D)

    output = layer(x, memory, padding_mask(MASK))

    causal = torch.ones(T, T).triu(1).bool()  # torch: True = may not attend
    expected = twin(x, memory, tgt_mask=causal, memory_key_padding_mask=~MASK)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_dropout_stands_on_every_sublayer_output_and_nowhere_else():
    layer = DecoderLayer(make_config(dropout=0.25, **{"attention.dropout": 0.5}))

    rates = {n: m.p for n, m in layer.named_modules() if isinstance(m, nn.Dropout)}

    assert rates == {
        "self_attention.attention_dropout": 0.5,
        "self_attention.dropout": 0.25,
        "cross_attention.attention_dropout": 0.5,
        "cross_attention.dropout": 0.25,
        "feed_forward.inner_dropout": 0.0,
        "feed_forward.dropout": 0.25,
    }


def test_residual_survives_when_all_of_a_sublayer_is_dropped():
    layer = EncoderLayer(make_config(norm_position="first", dropout=0.5))
    layer.self_attention.dropout.p = layer.feed_forward.dropout.p = 1.0
    x = torch.randn(B, S, D)

    torch.testing.assert_close(layer(x), x)


@pytest.mark.parametrize(
    ("norm_position", "final_norm", "expected"),
    [("first", None, True), ("last", None, False), ("last", True, True), ("first", False, False)],
)
def test_final_norm_comes_with_norm_first_unless_told(norm_position, final_norm, expected):
    config = make_config(norm_position=norm_position, final_norm=final_norm)

    for stack in (Encoder(config), Decoder(config)):
        assert isinstance(stack.final_norm, nn.LayerNorm) == expected


def test_activations_are_those_of_torch():
    for name, expected in {
        "relu": torch.nn.functional.relu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "silu": torch.nn.functional.silu,
    }.items():
        feed_forward = (
            EncoderLayer(make_config(**{"feed_forward.activation": name})).eval().feed_forward
        )
        x = torch.randn(B, S, D)

        output = feed_forward(x)

        inner = expected(x @ feed_forward.up_proj.weight.T)  # biases begin at zero
        torch.testing.assert_close(output, inner @ feed_forward.down_proj.weight.T)


@torch.no_grad()
def test_fully_padded_sequence_gives_numbers():
    encoder = Encoder(make_config()).eval()
    mask = torch.tensor([[True] * S, [False] * S])

    assert encoder(torch.randn(B, S, D), mask).isfinite().all()
