"""The options that encoders share: BERT's, unless a family has others; and what their heads do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from engine.package.manifest import LabelScores
from engine.wording import listed, shortened
from exporter.huggingface.family import Options, Original
from exporter.huggingface.sentences import MODULES_NAME, SentenceModules
from exporter.models.config import TransformerConfig

LAYERS = {
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "d_ff": "intermediate_size",
    "num_encoder_layers": "num_hidden_layers",
    "feed_forward.activation": "hidden_act",
    "norm_eps": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
    "attention.dropout": "attention_probs_dropout_prob",
}
ENCODER = {
    **LAYERS,
    "vocab_size": "vocab_size",
    "max_source_len": "max_position_embeddings",
}
FIXED = {
    "architecture": "encoder",
    "norm_position": "last",
    "positions.kind": "learned",
    "scale_embeddings": False,
    "embedding_norm": True,
}
Head = Literal["classify", "label", "embed"]
_HEADS: Mapping[str, Head] = {  # by the end of the class's name
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "label",
    "Model": "embed",
    "ForMaskedLM": "embed",
    "ForPreTraining": "embed",
}
DENSE = "linear"  # the name of sentence-transformers for the layer in a Dense module


def head_of(original: Original) -> Head:
    """Return what a model does; a body alone embeds."""
    named = original.architecture
    if not named:
        return "embed"
    heads = [head for end, head in _HEADS.items() if named.endswith(end)]
    if not heads:
        raise ValueError(
            f"architectures is {shortened(named)}; supported: classes that end in "
            f"{', '.join(_HEADS)}"
        )
    return heads[0]


def labels_of(original: Original) -> tuple[Any, ...]:
    """Return the names of its classes, by their number; some are published as numbers."""
    names = original.config.id2label
    missing = next((i for i in range(max(1, len(names))) if i not in names), None)
    if missing is not None:
        raise ValueError(
            f"id2label has no {missing}, it names {listed(sorted(names)) or 'nothing'}; the rows "
            "of the classifier count from 0, so give each the label that it was trained for"
        )
    every = (names[i] for i in range(len(names)))
    return tuple(str(name) if isinstance(name, int | float) else name for name in every)


def head_options(original: Original, **of_labels: Any) -> Options:
    """Return the options of the head; `of_labels` are the family's own of one with labels."""
    head = head_of(original)
    if head != "embed" and original.modules and original.modules.pooling:
        raise ValueError(
            f"architectures is {shortened(original.architecture)}, which has labels, and "
            f"{MODULES_NAME} makes vectors; take that file away, or save the body alone beside it"
        )
    own = {f"head.{name}": value for name, value in of_labels.items()}
    if head == "classify":
        return {**classes(original), **own}
    if head == "label":
        return {"labels": labels_of(original), "head.each_token": True, **own}
    found = original.modules or SentenceModules()  # as sentence-transformers does without any
    if found.pooling is None:
        raise ValueError(f"{MODULES_NAME} has no Pooling, which makes the vector of a text")
    vectors = {"head.pooling": found.pooling, "head.normalize": found.normalize}
    if found.dense is None:
        return {**vectors, "head.pooler": "none"}
    return {
        **vectors,
        "head.pooler": found.dense.activation,
        "head.pooler_bias": found.dense.bias,
        "head.embedding_dim": found.dense.out_features,
    }


def classes(original: Original) -> Options:
    """Return the labels of a classifier, and how its scores are made."""
    return {"labels": labels_of(original), "head.label_scores": _label_scores(original)}


def _label_scores(original: Original) -> LabelScores:
    """Return how transformers, or sentence-transformers, makes probabilities of logits."""
    chosen = original.texts.label_scores if original.texts else None
    if chosen is not None:
        return chosen
    kind = original.config.problem_type
    if kind == "regression":
        return "none"
    is_several = kind == "multi_label_classification"
    return "sigmoid" if is_several or len(original.config.id2label) == 1 else "softmax"


def pooler(config: TransformerConfig, theirs: str) -> dict[str, str]:
    """Return the name of what stands before the classifier, or makes the vector of a text."""
    return {"pooler": theirs if config.labels else DENSE}


def encoder(original: Original, **of_labels: Any) -> Options:
    """Return the head and the padding; `of_labels` are options of a head that has labels."""
    padding = original.config.pad_token_id or 0
    return {**head_options(original, **of_labels), "pad_token_id": padding}
