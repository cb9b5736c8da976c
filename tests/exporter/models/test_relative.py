from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from exporter.checkpoint import unique_weights
from exporter.models import TransformerConfig, build_model
from exporter.models.attention import MultiHeadAttention, padding_mask
from exporter.models.cache import LayerCache
from exporter.models.config import AttentionConfig
from exporter.models.positions import RelativePositions, relative_buckets
from exporter.operators.cross_attention import SourceRow
from tests.exporter.models.conftest import make_attention

B, S, D, H = 2, 11, 12, 3
OPTIONS = {
    "architecture": "encoder-decoder",
    "d_model": D,
    "num_heads": H,
    "key_dim": 5,
    "value_dim": 5,
    "d_ff": 20,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "vocab_size": 29,
    "max_source_len": 40,
    "max_target_len": 40,
    "bos_token_id": 1,
    "positions.kind": "relative",
    "positions.relative_buckets": 8,
    "positions.relative_max_distance": 20,
}


def config_of(**options: object) -> TransformerConfig:
    return TransformerConfig.of({**OPTIONS, **options})


def attention_pair(*, causal: bool) -> tuple[MultiHeadAttention, T5Attention]:
    """An attention with relative positions and its twin of Hugging Face."""
    config = T5Config(
        d_model=D,
        d_kv=5,
        num_heads=H,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        is_decoder=causal,
    )
    twin = T5Attention(config, has_relative_attention_bias=True, layer_idx=0, is_causal=causal)
    relative = RelativePositions(config_of(), 40, causal=causal)
    options = AttentionConfig(bias=False, scale=1.0)
    ours = make_attention(D, H, options, key_dim=5, value_dim=5, relative=relative)
    names = {"q": ours.q_proj, "k": ours.k_proj, "v": ours.v_proj, "o": ours.out_proj}
    with torch.no_grad():
        relative.weight.normal_()
        for name, projection in names.items():
            getattr(twin, name).weight.copy_(projection.weight)
        twin.relative_attention_bias.weight.copy_(relative.weight)
    return ours.eval(), twin.eval()


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (64, 1000)])
@pytest.mark.parametrize("both_sides", [True, False])
def test_buckets_are_those_of_t5(num_buckets: int, max_distance: int, both_sides: bool) -> None:
    distances = torch.arange(-3000, 3000)
    expected = T5Attention._relative_position_bucket(
        -distances, both_sides, num_buckets, max_distance
    )

    found = relative_buckets(distances, num_buckets, max_distance, both_sides=both_sides)

    assert torch.equal(found, expected)


@torch.no_grad()
def test_an_encoders_attention_is_that_of_t5() -> None:
    attention, twin = attention_pair(causal=False)
    hidden = torch.randn(B, S, D)
    mask = padding_mask(torch.arange(S) < torch.tensor([S, 4])[:, None])

    output = attention(hidden, hidden, hidden, mask)
    traced = attention.with_probabilities(hidden, hidden, hidden, mask).output

    expected = twin(hidden, mask=torch.where(mask, 0.0, -1e9).expand(B, 1, S, S))[0]
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(traced, expected)


@torch.no_grad()
def test_a_decoders_attention_is_that_of_t5() -> None:
    attention, twin = attention_pair(causal=True)
    hidden = torch.randn(B, S, D)

    output = attention(hidden, hidden, hidden, is_causal=True)

    causal = torch.ones(S, S).tril().bool()
    expected = twin(hidden, mask=torch.where(causal, 0.0, -1e9).expand(B, 1, S, S))[0]
    torch.testing.assert_close(output, expected)


@torch.no_grad()
def test_cached_steps_and_chunks_are_the_whole_pass(randomize) -> None:
    decoder = randomize(build_model(config_of())).decoder
    ids, memory = torch.randint(0, 29, (1, S)), torch.randn(1, 4, D)
    whole = decoder(ids, memory)
    empty = torch.zeros(1, H, 40, decoder.cache_head_dim)
    rows = decoder.cross_key_values(memory)
    pairs = [(empty, empty)] * 2

    parts = []
    for start, stop in ((0, 4), (4, 9), (9, 10), (10, 11)):
        last = torch.tensor([stop - 1], dtype=torch.int32)
        positions = torch.arange(start, stop)[None]
        caches = [LayerCache(k, v, last, last + 1, positions) for k, v in pairs]
        for cache, (key, value) in zip(caches, rows, strict=True):
            cache.cross = SourceRow.one_each(key, value, torch.tensor([4]))
        parts.append(decoder(ids[:, start:stop], position_ids=positions, caches=caches))
        pairs = [(cache.key, cache.value) for cache in caches]

    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-5)


def test_all_layers_of_a_stack_have_one_bias_and_it_is_stored_once() -> None:
    model = build_model(config_of())

    assert [name for name in unique_weights(model) if "relative" in name] == [
        "encoder.relative.weight",
        "decoder.relative.weight",
    ]


def test_a_sequence_beyond_the_limit_is_refused() -> None:
    relative = RelativePositions(config_of(), 4, causal=True)

    with pytest.raises(ValueError, match="5 positions is longer than the 4 of this model"):
        relative.between(5, 5)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"positions.relative_buckets": 6}, "multiple of 4"),
        ({"positions.relative_max_distance": 4}, "above the half of them, got 8 and 4"),
        (
            {"architecture": "decoder", "num_encoder_layers": 0},
            "are for encoder-decoder, got decoder",
        ),
    ],
)
def test_options_that_make_no_buckets_are_refused(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        config_of(**options)
