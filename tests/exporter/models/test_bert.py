from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

from exporter.models import TransformerConfig, build_model
from exporter.models.config import FeedForwardConfig, HeadConfig, PositionConfig

MASK = torch.arange(9) < torch.tensor([9, 4, 1])[:, None]


def make_config(*, each_token: bool = False) -> TransformerConfig:
    return TransformerConfig(
        architecture="encoder",
        d_model=16,
        num_heads=2,
        d_ff=24,
        num_encoder_layers=2,
        feed_forward=FeedForwardConfig(activation="gelu"),
        norm_eps=1e-12,
        vocab_size=29,
        max_source_len=14,
        positions=PositionConfig(kind="learned"),
        scale_embeddings=False,
        embedding_norm=True,
        num_token_types=2,
        head=HeadConfig(each_token=each_token),
        labels=("a", "b", "c"),
    )


@torch.no_grad()
def copy_to_hugging_face(model: nn.Module, twin: nn.Module) -> None:
    """Give a Hugging Face BERT the weights of ours."""
    pairs = {
        "bert.embeddings.word_embeddings": model.embeddings.token,
        "bert.embeddings.position_embeddings": model.embeddings.positions,
        "bert.embeddings.token_type_embeddings": model.embeddings.token_type,
        "bert.embeddings.LayerNorm": model.embeddings.norm,
        "classifier": model.classifier,
    }
    for i, layer in enumerate(model.encoder.layers):
        prefix = f"bert.encoder.layer.{i}"
        pairs |= {
            f"{prefix}.attention.self.query": layer.self_attention.q_proj,
            f"{prefix}.attention.self.key": layer.self_attention.k_proj,
            f"{prefix}.attention.self.value": layer.self_attention.v_proj,
            f"{prefix}.attention.output.dense": layer.self_attention.out_proj,
            f"{prefix}.attention.output.LayerNorm": layer.self_attention_residual.norm,
            f"{prefix}.intermediate.dense": layer.feed_forward.up_proj,
            f"{prefix}.output.dense": layer.feed_forward.down_proj,
            f"{prefix}.output.LayerNorm": layer.feed_forward_residual.norm,
        }
    if not model.config.head.each_token:
        pairs["bert.pooler.dense"] = model.pooler
    for name, module in pairs.items():
        twin.get_submodule(name).load_state_dict(module.state_dict())


def hugging_face_config() -> BertConfig:
    return BertConfig(
        vocab_size=29,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=14,
        num_labels=3,
    )


@pytest.mark.parametrize(
    ("each_token", "cut_at", "problem"),
    [
        (False, 15, r"cut_at \(15\) must be 1 to max_source_len \(14\)"),
        (False, 0, r"cut_at \(0\) must be 1 to"),
        (True, 3, "cut_at are for one label or vector a text, got head.each_token"),
    ],
)
def test_texts_are_cut_to_what_a_model_takes(each_token: bool, cut_at: int, problem: str) -> None:
    config = make_config(each_token=each_token)

    with pytest.raises(ValueError, match=problem):
        config.changed({"cut_at": cut_at})


@torch.no_grad()
@pytest.mark.parametrize("typed", [True, False])
def test_bert_equals_hugging_face(typed, randomize):
    model = randomize(build_model(make_config()))
    twin = BertForSequenceClassification(hugging_face_config()).eval()
    copy_to_hugging_face(model, twin)
    ids = torch.randint(1, 29, (3, 9))
    types = torch.randint(0, 2, (3, 9)) if typed else None

    logits, embedding = model(ids, MASK, types)

    inputs = {"input_ids": ids, "attention_mask": MASK.long(), "token_type_ids": types}
    torch.testing.assert_close(logits, twin(**inputs).logits, rtol=1e-4, atol=1e-5)
    pooled = twin.bert(**inputs).pooler_output
    torch.testing.assert_close(embedding, pooled, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_labeller_equals_hugging_face(randomize):
    model = randomize(build_model(make_config(each_token=True)))
    twin = BertForTokenClassification(hugging_face_config()).eval()
    copy_to_hugging_face(model, twin)
    ids = torch.randint(1, 29, (3, 9))

    logits, embedding = model(ids, MASK)

    expected = twin(ids, attention_mask=MASK.long(), output_hidden_states=True)
    torch.testing.assert_close(logits[MASK], expected.logits[MASK], rtol=1e-4, atol=1e-5)
    for b in range(3):
        mean = expected.hidden_states[-1][b][MASK[b]].mean(dim=0)
        torch.testing.assert_close(embedding[b], mean, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("each_token", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"attention.score": "additive"},
        {"attention.normalizer": "relu"},
        {"attention.score": "additive", "attention.normalizer": "relu"},
        {"key_dim": 3, "value_dim": 11, "attention.bias": False},
    ],
)
def test_padding_changes_nothing(each_token, options, randomize):
    model = randomize(build_model(make_config(each_token=each_token).changed(options)))
    ids = torch.randint(1, 29, (3, 9))

    together = model(ids, MASK)

    for b, length in enumerate(MASK.sum(1).tolist()):
        alone = model(ids[b : b + 1, :length])
        logits = together.logits[b : b + 1]
        if each_token:
            logits = logits[:, :length]
        torch.testing.assert_close(logits, alone.logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            together.embedding[b : b + 1], alone.embedding, rtol=1e-4, atol=1e-5
        )


@torch.no_grad()
@pytest.mark.parametrize("each_token", [False, True])
def test_fully_padded_row_gives_numbers(each_token):
    model = build_model(make_config(each_token=each_token)).eval()
    mask = torch.tensor([[True, True], [False, False]])

    logits, embedding = model(torch.ones(2, 2, dtype=torch.long), mask)

    assert logits.isfinite().all() and embedding.isfinite().all()
