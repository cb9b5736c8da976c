from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from exporter.models import RotaryScaling, TransformerConfig, build_model
from exporter.models.positions import RotaryPositions

OPTIONS = {
    "architecture": "decoder",
    "d_model": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "key_dim": 16,
    "value_dim": 16,
    "attention.bias": False,
    "d_ff": 40,
    "num_decoder_layers": 2,
    "feed_forward.activation": "silu",
    "feed_forward.gated": True,
    "feed_forward.bias": False,
    "norm": "rms",
    "norm_position": "first",
    "norm_eps": 1e-3,
    "vocab_size": 29,
    "max_target_len": 12,
    "positions.kind": "rotary",
    "positions.rotary_base": 100.0,
    "scale_embeddings": False,
    "tie_output": False,
}
HUGGING_FACE_NAMES = {
    "embeddings.token": "model.embed_tokens",
    "final_norm": "model.norm",
    "output": "lm_head",
    "layers": "model.layers",
    "self_attention_residual.norm": "input_layernorm",
    "feed_forward_residual.norm": "post_attention_layernorm",
    "self_attention": "self_attn",
    "out_proj": "o_proj",
    "feed_forward": "mlp",
}


def config_of(**options: object) -> TransformerConfig:
    return TransformerConfig.of({**OPTIONS, **options})


def copy_to_hugging_face(model: nn.Module, twin: nn.Module) -> None:
    renamed = {}
    for name, weight in model.decoder.state_dict().items():
        for ours, theirs in HUGGING_FACE_NAMES.items():
            name = name.replace(ours, theirs)
        renamed[name] = weight
    twin.load_state_dict(renamed)


@torch.no_grad()
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_gpt_with_the_options_of_llama_equals_hugging_face(num_kv_heads, bias, randomize):
    options = {"num_kv_heads": num_kv_heads, "attention.bias": bias, "feed_forward.bias": bias}
    model = randomize(build_model(config_of(**options)))
    twin = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=29,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=num_kv_heads,
            head_dim=16,
            rms_norm_eps=1e-3,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            attention_bias=bias,
            mlp_bias=bias,
        )
    ).eval()
    copy_to_hugging_face(model, twin)
    ids = torch.randint(0, 29, (3, 12))

    logits = model(ids)

    torch.testing.assert_close(logits, twin(ids).logits, rtol=1e-4, atol=1e-5)


def test_scores_of_turned_heads_depend_on_their_distance_alone():
    rotary = RotaryPositions(9, 16, base=100.0)
    query, key = torch.randn(16), torch.randn(16)

    queries, keys = (rotary(head.expand(1, 1, 9, 16))[0, 0] for head in (query, key))

    scores = queries @ keys.T
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_a_text_longer_than_the_rotary_table_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="13 positions is longer than the 12"):
        build_model(config_of())(torch.zeros(1, 13, dtype=torch.long))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"),
        ({"key_dim": 8, "value_dim": 8}, "key_dim is a multiple of 16 .* got 8 and 8"),
        ({"value_dim": 32}, "at least value_dim, got 16 and 32"),
        ({"positions.rotary_base": 0}, "rotary_base"),
        (
            {
                "positions.kind": "learned",
                "positions.rotary_scaling": RotaryScaling(frequencies=(1.0,) * 8),
            },
            "rotary_scaling needs rotary positions, got learned",
        ),
    ],
)
def test_impossible_options_are_refused_with_their_values(options, message):
    with pytest.raises(ValidationError, match=message):
        config_of(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"architecture": "encoder-decoder", "positions.kind": "rotary"},
            "rotary positions are for decoder and encoder, got encoder-decoder",
        ),
        (
            {"num_kv_heads": 1},
            r"num_kv_heads \(1\) below num_heads \(2\) is for decoder, got encoder",
        ),
    ],
)
def test_options_are_refused_in_families_that_do_not_have_them(options, message):
    bert = {
        "architecture": "encoder",
        "d_model": 32,
        "num_heads": 2,
        "d_ff": 8,
        "num_encoder_layers": 1,
        "vocab_size": 9,
        "max_source_len": 4,
        "labels": ("a",),
    }

    with pytest.raises(ValidationError, match=message):
        TransformerConfig.of({**bert, **options})
