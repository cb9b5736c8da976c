"""Tiny random encoders of Hugging Face, saved as their users save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn

from tests.exporter.huggingface.sources import save_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "new", "york", "is", "far", "##ther", "##s", "micro"]
WORDS += ["##soft", "al", "##ex", "from", "in", ",", ".", "the", "##er", "sun", "##day", "berlin"]
VOCAB_SIZE = len(WORDS) + 6  # ids that no word has, as published models have them
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 14,
    "layer_norm_eps": 1e-3,
}
LABELS = {"id2label": {0: "O", 1: "B-LOC", 2: "I-LOC", 3: "B-ORG"}}
OPTIONS: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "roberta": {**SIZES, "pad_token_id": 1, "type_vocab_size": 1},
    "xlm-roberta": {**SIZES, "pad_token_id": 1, "type_vocab_size": 1},
    "camembert": {**SIZES, "pad_token_id": 1, "type_vocab_size": 1},
    "distilbert": {
        "vocab_size": VOCAB_SIZE,
        "dim": 16,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 24,
        "max_position_embeddings": 14,
    },
    "modernbert": {
        **{name: size for name, size in SIZES.items() if name != "layer_norm_eps"},
        "num_hidden_layers": 4,  # the first and the last see all
        "local_attention": 4,
        "classifier_pooling": "mean",
        **{"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2},
        **{"eos_token_id": 3, "sep_token_id": 3},
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 50.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        },
    },
}
NAMES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "distilbert": "DistilBert",
    "modernbert": "ModernBert",
}
HEADS = {
    "classify": "ForSequenceClassification",
    "label": "ForTokenClassification",
    "embed": "Model",
}
IMAGE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
    "id2label": {0: "cat", 1: "dog", 2: "owl"},
}


def save_encoder(path: Path, name: str, head: str, **options: Any) -> Any:
    """Make an encoder with a head and save it, and its tokenizer, at `path`."""
    labels = LABELS if head != "embed" else {}
    config = getattr(transformers, f"{NAMES[name]}Config")(**{**OPTIONS[name], **labels, **options})
    model = getattr(transformers, f"{NAMES[name]}{HEADS[head]}")(config)
    save(model, path)
    save_tokenizer(path, tokenizer())
    return model


def save_vision(path: Path, class_name: str, processor: Any, **options: Any) -> Any:
    """Make an image model and save it with an image processor."""
    kind = "DeiTConfig" if class_name.startswith("DeiT") else "ViTConfig"
    model = getattr(transformers, class_name)(getattr(transformers, kind)(**{**IMAGE, **options}))
    save(model, path)
    processor.save_pretrained(path)
    return model


def save_sentence_modules(
    path: Path, pooling: str, *, dense: nn.Linear | None = None, normalize: bool = False
) -> None:
    """Write what sentence-transformers writes beside the model at `path`."""
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else [])]
    kinds += ["Normalize"] if normalize else []
    modules = []
    for i, kind in enumerate(kinds):
        folder = "" if kind == "Transformer" else f"{i}_{kind}"
        (path / folder).mkdir(exist_ok=True)
        of = f"sentence_transformers.models.{kind}"
        modules.append({"idx": i, "name": str(i), "path": folder, "type": of})
    (path / "modules.json").write_text(json.dumps(modules))
    modes = {name: name == pooling for name in ("cls_token", "mean_tokens", "max_tokens")}
    fields = {f"pooling_mode_{name}": is_on for name, is_on in modes.items()}
    (path / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 16, **fields})
    )
    if dense is not None:
        sizes = {"in_features": dense.in_features, "out_features": dense.out_features}
        activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
        (path / "2_Dense" / "config.json").write_text(
            json.dumps({**sizes, "bias": dense.bias is not None, **activation})
        )
        weights = {f"linear.{name}": part for name, part in dense.state_dict().items()}
        safetensors.torch.save_file(weights, path / "2_Dense" / "model.safetensors")


def tokenizer() -> Tokenizer:
    """Return a tokenizer of pieces of words, as BERT has it."""
    made = Tokenizer(models.WordPiece({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return made


@torch.no_grad()
def save(model: Any, path: Path) -> None:
    """Draw weights so large that any fault shows, and save the model."""
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.3)
        else:
            weight.add_(0.2 * torch.randn(weight.shape))
    model.eval().save_pretrained(path)
