"""What is told by the class that saved an encoder: whether it classifies, labels or embeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from engine.package.manifest import LabelScores
from engine.wording import listed, shortened
from exporter.huggingface.family import OriginalConfig
from exporter.huggingface.sentence_texts import SentenceTexts
from exporter.huggingface.sentences import MODULES_NAME, SentenceModules
from exporter.models.config import TransformerConfig

Head = Literal["classify", "label", "embed"]
_HEADS: Mapping[str, Head] = {  # by the end of the class's name
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "label",
    "Model": "embed",
    "ForMaskedLM": "embed",
    "ForPreTraining": "embed",
}
_Label = Annotated[str, Field(coerce_numbers_to_str=True)]  # ratings are published as numbers
_USUAL_LABELS = 2  # where an original says nothing of them
_MOST_LABELS = 2**20  # that have no names
DENSE = "linear"  # the name of sentence-transformers for the layer in a Dense module


class LabelledConfig(OriginalConfig):
    """`config.json` of a model that may have classes."""

    id2label: dict[int, _Label] | None = None
    label2id: dict[str, Any] | None = None
    num_labels: Annotated[int, Field(gt=0, le=_MOST_LABELS)] | None = None  # names count before it

    @model_validator(mode="after")
    def _counts_labels_from_zero(self) -> Self:
        ids = self.id2label
        if ids is None or not self.has_labels:
            return self
        missing = next((i for i in range(max(1, len(ids))) if i not in ids), None)
        if missing is not None:
            raise ValueError(
                f"id2label has no {missing}, it names {listed(sorted(ids)) or 'nothing'}; the rows "
                "of the classifier count from 0, so give each the label that it was trained for"
            )
        return self

    @property
    def has_labels(self) -> bool:
        """Whether its class has a head of labels."""
        return True

    def notes(self) -> list[str]:
        """Say where the second table of labels is another than the first, which counts."""
        if not self.has_labels:
            return []
        pairs = {(label, str(i)) for i, label in enumerate(self.labels)}
        others = [
            f"{name} {given}"
            for name, given in (self.label2id or {}).items()
            if (name, str(given)) not in pairs
        ]
        said = f"label2id names others, {listed(others)}; as in transformers id2label counts"
        return [said] if others else []

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its classes, by their number."""
        if self.id2label is None:
            return tuple(f"LABEL_{i}" for i in range(self.num_labels or _USUAL_LABELS))
        return tuple(self.id2label[i] for i in sorted(self.id2label))


class HeadedConfig(LabelledConfig):
    """`config.json` of an encoder with any head."""

    architectures: tuple[str, ...] | None = None
    problem_type: str | None = None
    modules: SentenceModules | None = None  # of sentence-transformers
    texts: SentenceTexts | None = None  # likewise

    @field_validator("architectures")
    @classmethod
    def _is_known(cls, given: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if given and _head_named(given[0]) is None:
            raise ValueError(
                f"architectures is {shortened(given[0])}; supported: classes that end in "
                f"{', '.join(_HEADS)}"
            )
        return given

    @model_validator(mode="after")
    def _pools(self) -> Self:
        if self.head == "embed" and self.modules and self.modules.pooling is None:
            raise ValueError(f"{MODULES_NAME} has no Pooling, which makes the vector of a text")
        return self

    @property
    def head(self) -> Head:
        """What the model does; a body alone embeds."""
        named = _head_named(self.architectures[0]) if self.architectures else None
        return named or "embed"

    @property
    def has_labels(self) -> bool:
        """Whether its class has a head of labels."""
        return self.head != "embed"

    @property
    def label_scores(self) -> LabelScores:
        """How transformers, or sentence-transformers, makes probabilities of logits."""
        chosen = self.texts.activation_fn if self.texts else ""
        if self.problem_type == "regression" or chosen.endswith("Identity"):
            return "none"
        several = self.problem_type == "multi_label_classification"
        return "sigmoid" if several or len(self.labels) == 1 else "softmax"

    def head_options(self, **options: Any) -> dict[str, Any]:
        """Return the options of the head; `options` are the family's own of one with labels."""
        if self.head == "classify":
            scores = self.label_scores
            return {"family": "bert", "labels": self.labels, "label_scores": scores, **options}
        if self.head == "label":
            return {"family": "labeller", "labels": self.labels, **options}
        found = self.modules or SentenceModules()  # as sentence-transformers does without any
        vectors = {"family": "bert", "pooling": found.pooling, "normalize": found.normalize}
        if found.dense is None:
            return {**vectors, "pooler": "none"}
        return {
            **vectors,
            "pooler": found.dense.activation,
            "pooler_bias": found.dense.bias,
            "embedding_dim": found.dense.out_features,
        }


def pooler(config: TransformerConfig, theirs: str) -> dict[str, str]:
    """Return the name of what stands before the classifier, or makes the vector of a text."""
    return {"pooler": theirs if config.labels else DENSE}


def _head_named(architecture: str) -> Head | None:
    return next((head for end, head in _HEADS.items() if architecture.endswith(end)), None)
