from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exporter.models.attention import (
    MultiHeadAttention,
    causal_mask,
    dot_product_scores,
    padding_mask,
    record_probabilities,
    relu_weights,
    softmax_weights,
)
from exporter.models.config import AttentionConfig
from exporter.models.layers import EncoderLayer
from tests.exporter.models.conftest import make_attention

B, T, S, D, H = 2, 5, 7, 12, 3
KEY_MASK = torch.arange(S) < torch.tensor([S, 4])[:, None]  # (B, S)


def torch_twin(attention: MultiHeadAttention) -> nn.MultiheadAttention:
    """torch's own multi-head attention with the weights of ours."""
    bias = attention.q_proj.bias is not None
    twin = nn.MultiheadAttention(D, H, bias=bias, batch_first=True).eval()
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    with torch.no_grad():
        twin.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        twin.out_proj.weight.copy_(attention.out_proj.weight)
        if bias:
            twin.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
            twin.out_proj.bias.copy_(attention.out_proj.bias)
    return twin


def attention_by_loops(
    attention: MultiHeadAttention, query: Tensor, source: Tensor, mask: Tensor
) -> Tensor:
    """Multi-head attention for one sentence, (T, D) and (S, D), one number after the other."""
    d_k, d_v = attention.key_dim, attention.value_dim
    q, k, v = attention.q_proj(query), attention.k_proj(source), attention.v_proj(source)
    rows = []
    for t in range(len(query)):
        heads = []
        for h in range(attention.num_heads):
            allowed = [s for s in range(len(source)) if mask[s]]
            qh = q[t, h * d_k : (h + 1) * d_k]
            scores = []
            for s in allowed:
                kh = k[s, h * d_k : (h + 1) * d_k]
                if attention.score == "additive":
                    scores.append(float(attention.score_weight[h] @ torch.tanh(qh + kh)))
                else:
                    scores.append(float(qh @ kh) / math.sqrt(d_k))
            if attention.normalizer == "relu":
                weights = [max(score, 0.0) / len(allowed) for score in scores]
            else:
                total = sum(math.exp(score) for score in scores)
                weights = [math.exp(score) / total for score in scores]
            values = [v[s, h * d_v : (h + 1) * d_v] for s in allowed]
            heads.append(sum(w * value for w, value in zip(weights, values, strict=True)))
        rows.append(attention.out_proj(torch.cat(heads)))
    return torch.stack(rows)


def test_softmax_of_scaled_products_equals_torch():
    q, k, v = torch.randn(B, H, T, 4), torch.randn(B, H, S, 4), torch.randn(B, H, S, 6)
    mask = padding_mask(KEY_MASK) & causal_mask(T, S)

    probabilities = softmax_weights(dot_product_scores(q, k, scale=4**-0.5), mask)

    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(probabilities @ v, expected)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(B, H, T))
    assert not probabilities[~mask.expand_as(probabilities)].any()


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_scores_are_scaled_as_they_are_told(scale, randomize):
    attention = randomize(make_attention(D, H, AttentionConfig(scale=scale)))
    hidden, source = torch.randn(B, T, D), torch.randn(B, S, D)
    heads = [attention.q_proj(hidden), attention.k_proj(source), attention.v_proj(source)]
    q, k, v = (x.unflatten(-1, (H, D // H)).transpose(1, 2) for x in heads)
    values = F.scaled_dot_product_attention(q, k, v, scale=scale)

    output = attention(hidden, source, source)
    traced = attention.with_probabilities(hidden, source, source).output

    expected = attention.out_proj(values.transpose(1, 2).flatten(2))
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(traced, expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_attention_over_three_sources_equals_torch(bias, padded, randomize):
    attention = randomize(make_attention(D, H, AttentionConfig(bias=bias)))
    query, key, value = torch.randn(B, T, D), torch.randn(B, S, D), torch.randn(B, S, D)
    mask = KEY_MASK if padded else None

    output = attention(query, key, value, padding_mask(mask))
    explicit = attention.with_probabilities(query, key, value, padding_mask(mask))

    expected, expected_probabilities = torch_twin(attention)(
        query,
        key,
        value,
        key_padding_mask=None if mask is None else ~mask,
        average_attn_weights=False,
    )
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(explicit.output, expected)
    torch.testing.assert_close(explicit.probabilities, expected_probabilities)


@pytest.mark.parametrize("padded", [True, False])
def test_causal_attention_equals_torch(padded, randomize):
    attention = randomize(make_attention(D, H))
    x = torch.randn(B, S, D)
    mask = KEY_MASK if padded else torch.ones_like(KEY_MASK)

    output = attention(x, x, x, padding_mask(mask) if padded else None, is_causal=True)
    explicit = attention.with_probabilities(x, x, x, padding_mask(mask), is_causal=True)

    expected, expected_probabilities = torch_twin(attention)(
        x,
        x,
        x,
        attn_mask=~causal_mask(S, S),
        key_padding_mask=~mask,
        average_attn_weights=False,
    )
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(explicit.probabilities, expected_probabilities)


@torch.no_grad()
@pytest.mark.parametrize("score", ["dot", "additive"])
@pytest.mark.parametrize("normalizer", ["softmax", "relu"])
@pytest.mark.parametrize(
    ("heads", "key_dim", "value_dim"), [(H, 4, 4), (H, 5, 3), (H, 2, 7), (1, 5, 3)]
)
def test_attention_equals_loops(score, normalizer, heads, key_dim, value_dim, randomize):
    options = AttentionConfig(score=score, normalizer=normalizer)
    attention = randomize(make_attention(D, heads, options, key_dim=key_dim, value_dim=value_dim))
    query, source = torch.randn(B, T, D), torch.randn(B, S, D)

    output = attention(query, source, source, padding_mask(KEY_MASK))

    for b in range(B):
        expected = attention_by_loops(attention, query[b], source[b], KEY_MASK[b])
        torch.testing.assert_close(output[b], expected)


@torch.no_grad()
@pytest.mark.parametrize("padded", [True, False])
def test_a_single_head_without_output_projection_equals_torch(padded, randomize):
    attention = randomize(make_attention(D, 1, AttentionConfig(output=False), key_dim=5))
    query, source = torch.randn(B, T, D), torch.randn(B, S, D)
    mask = padding_mask(KEY_MASK) if padded else None

    output = attention(query, source, source, mask)
    explicit = attention.with_probabilities(query, source, source, mask)

    q, k, v = attention.q_proj(query), attention.k_proj(source), attention.v_proj(source)
    expected = F.scaled_dot_product_attention(q, k, v, None if mask is None else mask[:, 0])
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(explicit.output, expected)
    assert "out_proj.weight" not in attention.state_dict()


def test_key_and_value_widths_are_those_of_the_paper():
    attention = make_attention(D, H, key_dim=5, value_dim=3)

    assert attention.q_proj.weight.T.shape == attention.k_proj.weight.T.shape == (D, H * 5)
    assert attention.v_proj.weight.T.shape == (D, H * 3)
    assert attention.out_proj.weight.T.shape == (H * 3, D)


@pytest.mark.parametrize("score", ["dot", "additive"])
@pytest.mark.parametrize("normalizer", ["softmax", "relu"])
def test_fully_masked_row_gives_numbers_and_leaves_others_alone(score, normalizer):
    options = AttentionConfig(score=score, normalizer=normalizer)
    attention = make_attention(D, H, options).eval()
    x = torch.randn(B, S, D, requires_grad=True)
    mask = torch.stack([torch.ones(S, dtype=torch.bool), torch.zeros(S, dtype=torch.bool)])

    output = attention(x, x, x, padding_mask(mask))
    explicit = attention.with_probabilities(x, x, x, padding_mask(mask))
    output.sum().backward()

    assert output.isfinite().all() and explicit.output.isfinite().all()
    assert x.grad.isfinite().all()
    assert not explicit.probabilities[1].any()
    torch.testing.assert_close(output[:1], attention(x[:1], x[:1], x[:1]))


def test_relu_weights_do_not_depend_on_padding():
    scores = torch.randn(1, H, T, S)
    mask = torch.arange(S) < 4

    weights = relu_weights(scores, mask)

    torch.testing.assert_close(weights[..., :4], relu_weights(scores[..., :4], None))
    assert not weights[..., 4:].any()


@torch.no_grad()
@pytest.mark.parametrize("normalizer", ["softmax", "relu"])
def test_attention_dropout_drops_weights_and_scales_the_rest(normalizer):
    attention = make_attention(4, 1, AttentionConfig(dropout=0.5, normalizer=normalizer))
    for parameter in attention.parameters():
        nn.init.zeros_(parameter)
    for bias in (attention.q_proj.bias, attention.k_proj.bias):
        nn.init.ones_(bias)  # every score is 4 / sqrt(4) = 2
    nn.init.eye_(attention.v_proj.weight)
    nn.init.eye_(attention.out_proj.weight)
    ones = torch.ones(64, 10, 4)

    dropped = attention(ones, ones, ones)[..., 0]
    kept = attention.eval()(ones, ones, ones)[..., 0]

    weight = 1.0 if normalizer == "softmax" else 2.0  # sum of the weights of a query
    torch.testing.assert_close(kept, torch.full_like(kept, weight))
    # Each of 10 weights is doubled or gone: the sum is a multiple of a fifth.
    fifths = dropped * 5 / weight
    torch.testing.assert_close(fifths, fifths.round())
    assert len(fifths.round().unique()) > 3
    assert abs(float(dropped.mean()) - weight) < 0.1 * weight


def test_output_dropout_drops_outputs_in_training_only():
    attention = make_attention(D, H, dropout=0.5)
    x = torch.randn(64, S, D)

    dropped = attention(x, x, x)
    kept = attention.eval()(x, x, x)

    zero = dropped == 0
    assert 0.45 < float(zero.float().mean()) < 0.55
    torch.testing.assert_close(dropped[~zero], kept[~zero] * 2)


def test_recorded_probabilities_are_those_of_the_pass(translation_config, randomize):
    layer = randomize(EncoderLayer(translation_config))
    x = torch.randn(B, S, 16)
    mask = padding_mask(KEY_MASK)

    with record_probabilities(layer) as recorded:
        output = layer(x, mask)

    expected = layer.self_attention.with_probabilities(x, x, x, mask).probabilities
    torch.testing.assert_close(recorded["self_attention"], expected)
    torch.testing.assert_close(output, layer(x, mask))
    assert list(recorded) == ["self_attention"]
