from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from exporter.models import ImageConfig, TransformerConfig, build_model
from exporter.models.config import FeedForwardConfig, PositionConfig


def make_config(channels: int) -> TransformerConfig:
    middle = (0.5,) * channels
    return TransformerConfig(
        architecture="vision-encoder",
        d_model=16,
        num_heads=2,
        d_ff=24,
        num_encoder_layers=2,
        feed_forward=FeedForwardConfig(activation="gelu"),
        norm_position="first",
        norm_eps=1e-12,
        positions=PositionConfig(kind="learned"),
        labels=("a", "b", "c"),
        image=ImageConfig(size=12, patch_size=4, channels=channels, mean=middle, std=middle),
    )


@torch.no_grad()
def copy_to_hugging_face(model: nn.Module, twin: nn.Module) -> None:
    """Give a Hugging Face ViT the weights of ours."""
    embeddings = twin.vit.embeddings
    embeddings.cls_token.copy_(model.embeddings.class_token.view(1, 1, -1))
    embeddings.position_embeddings.copy_(model.embeddings.positions.weight[None])
    pairs = [
        (model.embeddings.projection, embeddings.patch_embeddings.projection),
        (model.encoder.final_norm, twin.vit.layernorm),
        (model.classifier, twin.classifier),
    ]
    for ours, theirs in zip(model.encoder.layers, twin.vit.layers, strict=True):
        pairs += [
            (ours.self_attention.q_proj, theirs.attention.q_proj),
            (ours.self_attention.k_proj, theirs.attention.k_proj),
            (ours.self_attention.v_proj, theirs.attention.v_proj),
            (ours.self_attention.out_proj, theirs.attention.o_proj),
            (ours.self_attention_residual.norm, theirs.layernorm_before),
            (ours.feed_forward_residual.norm, theirs.layernorm_after),
            (ours.feed_forward.up_proj, theirs.mlp.fc1),
            (ours.feed_forward.down_proj, theirs.mlp.fc2),
        ]
    for source, target in pairs:
        target.load_state_dict(source.state_dict())


@torch.no_grad()
@pytest.mark.parametrize("channels", [1, 3])
def test_vit_equals_hugging_face(channels, randomize):
    model = randomize(build_model(make_config(channels)))
    twin = ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            image_size=12,
            patch_size=4,
            num_channels=channels,
            num_labels=3,
        )
    ).eval()
    copy_to_hugging_face(model, twin)
    pixels = torch.randn(2, channels, 12, 12)

    logits, embedding = model(pixels)

    expected = twin(pixels, output_hidden_states=True)
    torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-5)
    class_token = twin.vit.layernorm(expected.hidden_states[-1])[:, 0]
    torch.testing.assert_close(embedding, class_token, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_patches_stand_in_reading_order():
    model = build_model(make_config(1)).eval()
    pixels = torch.randn(1, 1, 12, 12)

    hidden = model.embeddings(pixels)

    kernel = model.embeddings.projection.weight.flatten(1)
    fourth = pixels[0, 0, 4:8, 0:4].flatten() @ kernel.T  # second row, first column
    torch.testing.assert_close(hidden[0, 4], fourth + model.embeddings.positions.weight[4])
