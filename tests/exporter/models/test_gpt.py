from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from exporter.models import TransformerConfig, build_model


@torch.no_grad()
def copy_to_hugging_face(model: nn.Module, twin: nn.Module) -> None:
    """Give a Hugging Face GPT-2 the weights of ours; its linear layers are transposed."""
    decoder, body = model.decoder, twin.transformer
    body.wte.weight.copy_(decoder.embeddings.token.weight)
    body.wpe.weight.copy_(decoder.embeddings.positions.weight)
    body.ln_f.load_state_dict(decoder.final_norm.state_dict())
    for layer, block in zip(decoder.layers, body.h, strict=True):
        attention = layer.self_attention
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        block.attn.c_attn.weight.copy_(torch.cat([p.weight for p in parts]).T)
        block.attn.c_attn.bias.copy_(torch.cat([p.bias for p in parts]))
        for linear, conv in (
            (attention.out_proj, block.attn.c_proj),
            (layer.feed_forward.up_proj, block.mlp.c_fc),
            (layer.feed_forward.down_proj, block.mlp.c_proj),
        ):
            conv.weight.copy_(linear.weight.T)
            conv.bias.copy_(linear.bias)
        block.ln_1.load_state_dict(layer.self_attention_residual.norm.state_dict())
        block.ln_2.load_state_dict(layer.feed_forward_residual.norm.state_dict())
    if not model.config.tie_output:
        twin.lm_head.weight.copy_(decoder.output.weight)


@torch.no_grad()
@pytest.mark.parametrize("tie_output", [True, False])
def test_gpt_equals_hugging_face(tie_output, gpt_config, randomize):
    model = randomize(build_model(gpt_config.model_copy(update={"tie_output": tie_output})))
    twin = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=29,
            n_positions=12,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_inner=24,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=tie_output,
        )
    ).eval()
    copy_to_hugging_face(model, twin)
    ids = torch.randint(0, 29, (3, 12))

    logits = model(ids)

    torch.testing.assert_close(logits, twin(ids).logits, rtol=1e-4, atol=1e-5)


def test_output_head_has_no_bias(gpt_config):
    assert build_model(gpt_config).decoder.output.bias is None


@torch.no_grad()
def test_narrow_tokens_go_through_a_product_on_either_side(gpt_config, randomize):
    config = gpt_config.model_copy(update={"token_dim": 6})
    model = randomize(build_model(config))
    wide = build_model(gpt_config.model_copy(update={"tie_output": False}))
    decoder, weights = model.decoder, model.state_dict()
    to_model = weights.pop("decoder.embeddings.token_in.weight")
    to_tokens = weights.pop("decoder.token_out.weight")
    weights["decoder.embeddings.token.weight"] = decoder.embeddings.token.weight @ to_model.T
    weights["decoder.output.weight"] = decoder.output.weight @ to_tokens
    wide.load_state_dict(weights)
    ids = torch.randint(0, 29, (3, 12))

    assert decoder.embeddings.token.weight.shape == (29, 6)
    torch.testing.assert_close(model(ids), wide.eval()(ids), rtol=1e-4, atol=1e-5)


def test_narrow_tokens_are_for_decoders_alone(translation_config):
    options = {**translation_config.model_dump(), "token_dim": 6}

    with pytest.raises(ValueError, match="token_dim is for decoder, got encoder-decoder"):
        TransformerConfig.of(options)


@torch.no_grad()
def test_padding_on_the_right_needs_no_mask(gpt_config, randomize):
    model = randomize(build_model(gpt_config))
    ids = torch.randint(0, 29, (1, 12))
    padded = ids.clone()
    padded[:, 7:] = 0

    torch.testing.assert_close(model(padded)[:, :7], model(ids[:, :7]))


def test_text_longer_than_learned_is_refused_with_both_numbers(gpt_config):
    model = build_model(gpt_config)

    with pytest.raises(ValueError, match="13 positions is longer than the 12"):
        model(torch.zeros(1, 13, dtype=torch.long))
