from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from exporter.models import EncoderDecoder, TransformerConfig, build_model

B, S, T = 3, 9, 6
LENGTHS = torch.tensor([9, 4, 1])
MASK = torch.arange(S) < LENGTHS[:, None]


@torch.no_grad()
def torch_logits(model: EncoderDecoder, source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """The same model, put together from layers and functions of torch."""
    config = model.config
    encoder, decoder = _torch_stacks(config)
    weights = _renamed(model)
    for name, stack in (("encoder.", encoder), ("decoder.", decoder)):
        stack.load_state_dict(
            {k.removeprefix(name): v for k, v in weights.items() if k.startswith(name)}
        )
    memory = encoder(
        _embed(model.source_embeddings.token.weight, source), src_key_padding_mask=~mask
    )
    hidden = decoder(
        _embed(model.decoder.embeddings.token.weight, target),
        memory,
        tgt_mask=torch.ones(T, T).triu(1).bool(),  # torch: True = may not attend
        memory_key_padding_mask=~mask,
    )
    return hidden @ model.decoder.output.weight.T + (
        model.decoder.output.bias if config.output_bias else 0.0
    )


def _torch_stacks(
    config: TransformerConfig,
) -> tuple[nn.TransformerEncoder, nn.TransformerDecoder]:
    norm_first = config.norm_position == "first"
    sizes = (config.d_model, config.num_heads, config.d_ff, 0.0, config.feed_forward.activation)
    options = {"batch_first": True, "norm_first": norm_first}
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(*sizes, **options),
        config.num_encoder_layers,
        norm=nn.LayerNorm(config.d_model) if norm_first else None,
        enable_nested_tensor=False,
    )
    decoder = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(*sizes, **options),
        config.num_decoder_layers,
        norm=nn.LayerNorm(config.d_model) if norm_first else None,
    )
    return encoder.eval(), decoder.eval()


def _embed(weight: Tensor, ids: Tensor) -> Tensor:
    width = weight.shape[1]
    angles = torch.arange(ids.shape[1])[:, None] * torch.exp(
        -math.log(10000.0) * torch.arange(0, width, 2) / width
    )
    positions = torch.zeros(ids.shape[1], width)
    positions[:, 0::2], positions[:, 1::2] = angles.sin(), angles.cos()
    return weight[ids] * math.sqrt(width) + positions


def _renamed(model: EncoderDecoder) -> dict[str, Tensor]:
    """Our weights under the names of torch.nn."""
    found = {}
    for stack in ("encoder", "decoder"):
        layers = getattr(model, stack).layers
        for i, layer in enumerate(layers):
            norms = ["self_attention", "feed_forward"]
            attentions = {"self_attention": "self_attn"}
            if stack == "decoder":
                norms.insert(1, "cross_attention")
                attentions["cross_attention"] = "multihead_attn"
            prefix = f"{stack}.layers.{i}"
            for ours, theirs in attentions.items():
                attention = getattr(layer, ours)
                for kind in ("weight", "bias"):
                    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
                    joined = torch.cat([getattr(p, kind) for p in parts])
                    found[f"{prefix}.{theirs}.in_proj_{kind}"] = joined
                    found[f"{prefix}.{theirs}.out_proj.{kind}"] = getattr(attention.out_proj, kind)
            for kind in ("weight", "bias"):
                found[f"{prefix}.linear1.{kind}"] = getattr(layer.feed_forward.up_proj, kind)
                found[f"{prefix}.linear2.{kind}"] = getattr(layer.feed_forward.down_proj, kind)
                for n, name in enumerate(norms, start=1):
                    norm = getattr(layer, f"{name}_residual").norm
                    found[f"{prefix}.norm{n}.{kind}"] = getattr(norm, kind)
        final = getattr(model, stack).final_norm
        if isinstance(final, nn.LayerNorm):
            found[f"{stack}.norm.weight"], found[f"{stack}.norm.bias"] = final.weight, final.bias
    return found


@torch.no_grad()
@pytest.mark.parametrize("norm_position", ["first", "last"])
@pytest.mark.parametrize("share_embeddings", [True, False])
@pytest.mark.parametrize(("tie_output", "output_bias"), [(True, False), (False, True)])
def test_encoder_decoder_equals_torch(
    norm_position, share_embeddings, tie_output, output_bias, translation_config, randomize
):
    config = translation_config.model_copy(
        update={
            "norm_position": norm_position,
            "share_embeddings": share_embeddings,
            "tie_output": tie_output,
            "output_bias": output_bias,
        }
    )
    model = randomize(build_model(config))
    source, target = torch.randint(0, 29, (B, S)), torch.randint(0, 29, (B, T))

    logits = model(source, target, MASK)

    expected = torch_logits(model, source, target, MASK)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=5e-5)


def test_shared_and_tied_weights_are_one_parameter(translation_config):
    model = build_model(translation_config)
    parameters = dict(model.named_parameters(remove_duplicate=False))

    names = {n for n, p in parameters.items() if p is model.source_embeddings.token.weight}

    assert names == {
        "source_embeddings.token.weight",
        "decoder.embeddings.token.weight",
        "decoder.output.weight",
    }


def test_separate_and_untied_weights_are_three_parameters(translation_config):
    options = {"share_embeddings": False, "tie_output": False}
    model = build_model(translation_config.model_copy(update=options))
    parameters = dict(model.named_parameters())

    assert {n for n, p in parameters.items() if p.shape == (29, 16)} == {
        "source_embeddings.token.weight",
        "decoder.embeddings.token.weight",
        "decoder.output.weight",
    }


@torch.no_grad()
def test_padding_changes_nothing(translation_config, randomize):
    model = randomize(build_model(translation_config))
    source, target = torch.randint(0, 29, (B, S)), torch.randint(0, 29, (B, T))

    together = model(source, target, MASK)

    for b, length in enumerate(LENGTHS.tolist()):
        alone = model(source[b : b + 1, :length], target[b : b + 1])
        torch.testing.assert_close(together[b : b + 1], alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_token_sees_no_later_token(translation_config, randomize):
    model = randomize(build_model(translation_config))
    source, target = torch.randint(0, 29, (B, S)), torch.randint(0, 29, (B, T))
    changed = target.clone()
    changed[:, 3:] = (changed[:, 3:] + 1) % 29

    before, after = model(source, target, MASK), model(source, changed, MASK)

    torch.testing.assert_close(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3:], after[:, 3:])


@torch.no_grad()
def test_sources_may_have_a_vocabulary_of_their_own(translation_config):
    options = {"source_vocab_size": 41, "share_embeddings": False}
    model = build_model(translation_config.model_copy(update=options)).eval()

    logits = model(torch.tensor([[40, 3]]), torch.tensor([[28]]))

    assert logits.shape == (1, 1, 29)
    assert model.source_embeddings.token.weight.shape == (41, 16)


@torch.no_grad()
def test_what_the_output_reads_is_scaled(translation_config, randomize):
    plain = randomize(build_model(translation_config))
    scaled = build_model(translation_config.model_copy(update={"output_scale": 0.25})).eval()
    scaled.load_state_dict(plain.state_dict())
    source, target = torch.randint(0, 29, (2, B, 9))

    torch.testing.assert_close(scaled(source, target), plain(source, target) * 0.25)


def test_shared_embeddings_are_of_one_vocabulary(translation_config):
    options = {**translation_config.model_dump(), "source_vocab_size": 41}

    with pytest.raises(ValidationError, match=r"needs source_vocab_size \(41\) to be vocab_size"):
        TransformerConfig.of(options)


@torch.no_grad()
def test_first_losses_are_those_of_a_uniform_guess():
    """Embeddings scaled by sqrt(d_model) must not make the first logits large."""
    config = TransformerConfig(
        architecture="encoder-decoder",
        d_model=128,
        num_heads=4,
        d_ff=256,
        num_encoder_layers=2,
        num_decoder_layers=2,
        vocab_size=200,
        max_source_len=20,
        max_target_len=20,
        bos_token_id=1,
    )
    model = build_model(config).eval()
    ids = torch.randint(0, 200, (16, 20))

    loss = nn.functional.cross_entropy(
        model(ids, ids).flatten(0, 1), torch.randint(0, 200, (16 * 20,))
    )

    assert float(loss) == pytest.approx(math.log(200) + 0.5, abs=0.4)
