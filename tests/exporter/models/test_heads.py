"""Every head of a one-pass model, alone, against what torch computes of its last layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from exporter.models import ImageConfig, TransformerConfig, build_model

Randomize = Callable[[nn.Module], nn.Module]

MASK = torch.arange(7) < torch.tensor([7, 3, 1])[:, None]
TEXT: dict[str, Any] = {
    "architecture": "encoder",
    "d_model": 16,
    "num_heads": 2,
    "d_ff": 24,
    "num_encoder_layers": 1,
    "vocab_size": 29,
    "max_source_len": 8,
    "positions.kind": "learned",
    "labels": ("a", "b"),
}
IMAGE: dict[str, Any] = {
    **{name: TEXT[name] for name in ("d_model", "num_heads", "d_ff", "num_encoder_layers")},
    "architecture": "vision-encoder",
    "norm_position": "first",
    "positions.kind": "learned",
    "labels": ("a", "b"),
}


def make(randomize: Randomize, **options: Any) -> Any:
    return randomize(build_model(TransformerConfig.of({**TEXT, **options})))


def last_layer(model: Any) -> tuple[Tensor, Tensor]:
    """Return token ids, and the last layer's vectors of them."""
    ids = torch.randint(1, 29, (3, 7))
    return ids, model.encoder(model.embeddings(ids), MASK)


@torch.no_grad()
@pytest.mark.parametrize("name", ["tanh", "relu", "gelu", "silu"])
def test_pooler_is_a_dense_layer_and_its_activation(name: str, randomize: Randomize) -> None:
    model = make(randomize, head={"pooler": name})
    ids, hidden = last_layer(model)

    logits, vector = model(ids, MASK)

    dense = hidden[:, 0] @ model.pooler.weight.T + model.pooler.bias
    expected = {"tanh": torch.tanh, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}[name](dense)
    torch.testing.assert_close(vector, expected)
    torch.testing.assert_close(logits, model.classifier(expected))


@torch.no_grad()
def test_pooler_may_have_a_norm_and_no_bias(randomize: Randomize) -> None:
    head = {"pooler": "gelu", "pooler_norm": True, "pooler_bias": False}
    model = make(randomize, head=head, norm_eps=1e-2)
    ids, hidden = last_layer(model)

    vector = model(ids, MASK).embedding

    norm = model.pooler.norm
    expected = F.layer_norm(
        F.gelu(hidden[:, 0] @ model.pooler.weight.T), (16,), norm.weight, norm.bias, 1e-2
    )
    torch.testing.assert_close(vector, expected)


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_mean_and_maximum_are_of_real_tokens_only(pooling: str, randomize: Randomize) -> None:
    model = make(randomize, head={"pooling": pooling, "pooler": "none"})
    ids, hidden = last_layer(model)

    vector = model(ids, MASK).embedding

    for b, length in enumerate(MASK.sum(1).tolist()):
        real = hidden[b, :length]
        expected = real.mean(dim=0) if pooling == "mean" else real.max(dim=0).values
        torch.testing.assert_close(vector[b], expected)
        alone = model(ids[b : b + 1, :length]).embedding[0]
        torch.testing.assert_close(vector[b], alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_model_without_labels_gives_vectors_of_length_one(randomize: Randomize) -> None:
    head = {"pooler": "linear", "embedding_dim": 5, "normalize": True}
    model = make(randomize, labels=(), head=head)
    ids, hidden = last_layer(model)

    logits, vector = model(ids, MASK)

    assert logits is None
    expected = F.normalize(F.linear(hidden[:, 0], model.pooler.weight, model.pooler.bias))
    torch.testing.assert_close(vector, expected)
    assert vector.shape == (3, 5)


@torch.no_grad()
def test_pooler_of_a_labeller_is_on_every_token(randomize: Randomize) -> None:
    model = make(randomize, head={"each_token": True, "pooler": "gelu", "pooler_norm": True})
    ids, hidden = last_layer(model)

    logits, vector = model(ids, MASK)

    torch.testing.assert_close(logits, model.classifier(model.pooler(hidden)))
    torch.testing.assert_close(vector[1], hidden[1, :3].mean(dim=0))


@torch.no_grad()
def test_first_layer_may_have_no_norm_before_its_attention(randomize: Randomize) -> None:
    options = {"norm_position": "first", "first_norm": False, "num_encoder_layers": 2}
    model = make(randomize, **options)
    first, second = model.encoder.layers
    hidden = torch.randn(2, 5, 16)

    found = first(hidden)

    names = [name for name, _ in first.named_parameters()]
    assert not any(name.startswith("self_attention_residual.norm") for name in names)
    attended = hidden + first.self_attention(hidden, hidden, hidden)
    expected = attended + first.feed_forward(first.feed_forward_residual.norm(attended))
    torch.testing.assert_close(found, expected)
    assert isinstance(second.self_attention_residual.norm, nn.LayerNorm)


@torch.no_grad()
@pytest.mark.parametrize("distillation", ["token", "head"])
def test_distillation_token_stands_behind_the_class_token(
    distillation: str, randomize: Randomize
) -> None:
    image = ImageConfig(size=4, patch_size=2, distillation=distillation)
    model: Any = randomize(build_model(TransformerConfig.of({**IMAGE, "image": image})))
    pixels = torch.randn(2, 3, 4, 4)

    logits, vector = model(pixels)

    embeddings = model.embeddings
    special = torch.stack([embeddings.class_token, embeddings.distillation_token])
    patches = embeddings.projection(pixels).flatten(2).transpose(1, 2)
    tokens = torch.cat([special.expand(2, 2, 16), patches], dim=1) + embeddings.positions.weight
    hidden = model.encoder(tokens)
    expected = model.classifier(hidden[:, 0])
    if distillation == "head":
        expected = (expected + model.distillation_classifier(hidden[:, 1])) / 2
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(vector, hidden[:, 0])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"head": {"embedding_dim": 5, "pooler": "none"}}, "(5) other than d_model (16)"),
        ({"head.each_token": True, "labels": ()}, "head.each_token needs labels"),
        (
            {"head.each_token": True, "head.pooler": "tanh", "head.embedding_dim": 5},
            "head.embedding_dim and cut_at are for one label or vector a text",
        ),
    ],
)
def test_head_that_cannot_be_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError) as refused:
        TransformerConfig.of({**TEXT, **options})

    assert problem in refused.value.errors()[0]["msg"]
