"""Options that decoders of today have, each alone against torch, and all in a cache."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F

from exporter.models import TransformerConfig, build_model
from exporter.models.attention import MultiHeadAttention
from exporter.models.cache import LayerCache
from exporter.models.config import AttentionConfig, RotaryScaling
from exporter.models.layers import DecoderLayer
from exporter.models.positions import RotaryPositions
from tests.exporter.models.conftest import make_attention

B, T, D, H = 2, 7, 16, 2
OPTIONS = {
    "architecture": "decoder",
    "d_model": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "key_dim": 16,
    "value_dim": 16,
    "d_ff": 40,
    "num_decoder_layers": 3,
    "norm": "rms",
    "norm_position": "first",
    "vocab_size": 29,
    "max_target_len": 12,
    "positions.kind": "rotary",
    "scale_embeddings": False,
}
MODERN = {
    "norm_position": "both",
    "attention.qk_norm": True,
    "attention.window": 4,
    "attention.windowed_layers": (0, 2),
    "positions.local_rotary_base": 10.0,
    "positions.rotary_dim": 8,
    "positions.rotary_scaling": RotaryScaling(frequencies=(0.25, 0.05, 0.01, 0.002)),
    "attention.softcap": 2.0,
    "logit_softcap": 3.0,
}


def config_of(**options: object) -> TransformerConfig:
    return TransformerConfig.of({**OPTIONS, **options})


def heads_of(attention: MultiHeadAttention, hidden: torch.Tensor) -> list[torch.Tensor]:
    return [
        projection(hidden).unflatten(-1, (H, -1)).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]


@torch.no_grad()
def test_a_query_sees_as_many_keys_as_its_window(randomize):
    attention = randomize(make_attention(D, H, window=3))
    hidden = torch.randn(B, T, D)
    places = torch.arange(T)
    distance = places[:, None] - places

    output = attention(hidden, hidden, hidden, is_causal=True)

    seen = (distance >= 0) & (distance < 3)
    heads = F.scaled_dot_product_attention(*heads_of(attention, hidden), attn_mask=seen)
    torch.testing.assert_close(output, attention.out_proj(heads.transpose(1, 2).flatten(2)))


@torch.no_grad()
def test_scores_stay_within_their_bound(randomize):
    attention = randomize(make_attention(D, H, AttentionConfig(softcap=0.5)))
    hidden = torch.randn(B, T, D) * 3
    q, k, v = heads_of(attention, hidden)
    scores = q @ k.mT / (D // H) ** 0.5
    assert scores.abs().max() > 2

    output = attention(hidden, hidden, hidden)

    heads = (0.5 * torch.tanh(scores / 0.5)).softmax(-1) @ v
    torch.testing.assert_close(output, attention.out_proj(heads.transpose(1, 2).flatten(2)))


@torch.no_grad()
def test_queries_and_keys_have_norms_of_their_own(randomize):
    attention = randomize(make_attention(D, H, AttentionConfig(qk_norm=True), norm_eps=1e-2))
    hidden = torch.randn(B, T, D)
    q, k, v = heads_of(attention, hidden)

    output = attention(hidden, hidden, hidden, is_causal=True)

    q = F.rms_norm(q, (D // H,), attention.q_norm.weight, 1e-2)
    k = F.rms_norm(k, (D // H,), attention.k_norm.weight, 1e-2)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(output, attention.out_proj(heads.transpose(1, 2).flatten(2)))


@torch.no_grad()
def test_attention_and_feed_forward_read_the_same_input_side_by_side(randomize):
    config = config_of(parallel_residual=True, positions={"kind": "learned"})
    layer = randomize(DecoderLayer(config))
    hidden = torch.randn(B, T, 24)

    output = layer(hidden)

    normed = layer.self_attention_residual.norm(hidden)
    attended = layer.self_attention(normed, normed, normed, is_causal=True)
    forwarded = layer.feed_forward(layer.feed_forward_residual.norm(hidden))
    torch.testing.assert_close(output, hidden + attended + forwarded)


@torch.no_grad()
def test_norms_on_both_sides_leave_the_sum_alone(randomize):
    config = config_of(norm_position="both", positions={"kind": "learned"})
    layer = randomize(DecoderLayer(config))
    hidden = torch.randn(B, T, 24)

    output = layer(hidden)

    residual = layer.self_attention_residual
    normed = residual.norm(hidden)
    attended = layer.self_attention(normed, normed, normed, is_causal=True)
    hidden = hidden + residual.output_norm(attended)
    residual = layer.feed_forward_residual
    hidden = hidden + residual.output_norm(layer.feed_forward(residual.norm(hidden)))
    torch.testing.assert_close(output, hidden)


@torch.no_grad()
def test_logits_stay_within_their_bound_and_their_bias_does_not(randomize):
    decoder = randomize(build_model(config_of(logit_softcap=2.0, output_bias=True))).decoder
    decoder.output.weight.mul_(9)
    hidden = torch.randn(3, 24)
    decoder.output.bias[5] = -1e30

    logits = decoder.logits(hidden)

    bounded = logits - decoder.output.bias
    assert (logits[:, 5] == -1e30).all()
    expected = 2 * torch.tanh(hidden @ decoder.output.weight.T / 2)
    keep = torch.arange(29) != 5
    torch.testing.assert_close(bounded[:, keep], expected[:, keep])


def test_the_output_may_have_no_bias_where_queries_have_one():
    attention = make_attention(D, H, AttentionConfig(output_bias=False))

    assert attention.q_proj.bias is not None and attention.out_proj.bias is None


def test_a_part_of_a_head_turns_and_the_rest_stays():
    heads = torch.randn(1, 1, 9, 16)

    turned = RotaryPositions(9, 16, base=100.0, turned=8)(heads)

    moving = [0, 1, 2, 3, 8, 9, 10, 11]
    still = [i for i in range(16) if i not in moving]
    assert torch.equal(turned[..., still], heads[..., still])
    alone = RotaryPositions(9, 8, base=100.0)(heads[..., moving])
    torch.testing.assert_close(turned[..., moving], alone)


def test_frequencies_of_their_own_and_a_factor_turn_heads_instead_of_a_base():
    scaling = RotaryScaling(frequencies=(0.5, 0.25, 0.125, 0.1), attention_factor=1.5)

    rotary = RotaryPositions(5, 8, base=100.0, scaling=scaling)

    torch.testing.assert_close(rotary.sin[1], 1.5 * torch.tensor(scaling.frequencies).sin())
    torch.testing.assert_close(rotary.cos**2 + rotary.sin**2, torch.full((5, 4), 2.25))


@pytest.mark.parametrize(
    "options",
    [MODERN, {"parallel_residual": True, "positions.rotary_dim": 4}, {"attention.window": 3}],
)
@torch.no_grad()
def test_new_positions_behind_a_cache_are_those_of_the_whole_text(options, randomize):
    decoder = randomize(build_model(config_of(**options))).decoder
    ids = torch.randint(0, 29, (1, 12))
    whole = decoder(ids)
    empty = torch.zeros(1, 2, 12, decoder.cache_head_dim)
    nothing = torch.tensor([0])
    caches = [LayerCache(empty, empty, nothing, nothing, nothing[None]) for _ in range(3)]

    parts = []
    for start, end in ((0, 5), (5, 6), (6, 12)):
        for cache in caches:
            cache.seqlens_k = torch.tensor([end - 1], dtype=torch.int32)
            cache.position_ids = torch.arange(start, end)[None]
        parts.append(decoder(ids[:, start:end], caches=caches))

    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention.windowed_layers": (1,)}, "attention.windowed_layers needs attention.window"),
        (
            {"positions.local_rotary_base": 9.0},
            "positions.local_rotary_base needs attention.window",
        ),
        ({"positions.rotary_dim": 5}, r"rotary_dim \(5\) must be even and at most key_dim \(16\)"),
        ({"positions": {"rotary_dim": 4}}, "rotary_dim needs rotary positions"),
        (
            {"parallel_residual": True, "norm_position": "last"},
            "parallel_residual needs norm_position first, got last",
        ),
        (
            {"positions.rotary_scaling": RotaryScaling(frequencies=(1.0, 0.5))},
            "a frequency for each of 8 waves, got 2",
        ),
        (
            {"key_dim": 12, "value_dim": 12, "attention.qk_norm": True},
            "qk_norm needs a key_dim that is a multiple of 8, got 12",
        ),
        ({"attention.softcap": 0}, "attention.softcap"),
    ],
)
def test_options_that_do_not_go_together_are_named(options, message):
    with pytest.raises(ValidationError, match=message):
        config_of(**options)
