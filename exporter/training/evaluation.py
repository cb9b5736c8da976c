"""How well a model does on examples that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import nn

from engine.requests.generation_defaults import GenerationDefaults
from exporter.models import EncoderDecoder
from exporter.models.config import TransformerConfig
from exporter.training.data import IGNORED, Example, collate, pack
from exporter.training.losses import batch_logits, cross_entropy

EVALUATION_BATCH_TOKENS = 4096  # positions in one batch; nothing is kept for a backward pass


@dataclass(frozen=True)
class Evaluation:
    """Counts over a set of examples. A label is a target token, a token's tag or a class."""

    num_examples: int
    num_labels: int
    negative_log_likelihood: float  # in nats, summed over the labels, without smoothing
    labels_right: int
    examples_right: int  # all labels of the example are right
    chrf: float = 0.0  # the model's outputs, if examples have texts; 0 to 100
    bleu: float = 0.0

    @property
    def loss(self) -> float:
        """Nats a label."""
        return self.negative_log_likelihood / self.num_labels

    @property
    def label_accuracy(self) -> float:
        """Fraction of the labels that get the highest logit."""
        return self.labels_right / self.num_labels

    @property
    def exact_match(self) -> float:
        """Fraction of the examples with all labels right.

        For a sequence this equals the fraction that greedy decoding gets right: as long as every
        token so far is the target's, the decoder reads the target's tokens.
        """
        return self.examples_right / self.num_examples


@torch.no_grad()
def evaluate(
    model: nn.Module,
    config: TransformerConfig,
    examples: Sequence[Example],
    tokenizer: Tokenizer | None = None,
    generation: GenerationDefaults = GenerationDefaults(),  # frozen
) -> Evaluation:
    """Run the model over `examples` in eval mode; it is left in the mode that it came in.

    If examples have texts, the model's outputs are compared with them, by `tokenizer`, that
    of the targets; see `write_greedily` for `generation`.
    """
    was_training = model.training
    model.eval()
    nats, num_labels, labels_right, examples_right = 0.0, 0, 0, 0
    for group in pack(examples, config.architecture, EVALUATION_BATCH_TOKENS):
        batch = collate(group, config)
        logits = batch_logits(model, batch)
        counted = batch.labels != IGNORED
        right = (logits.argmax(-1) == batch.labels) & counted
        wrong = counted & ~right
        nats += cross_entropy(logits, batch.labels).item() * int(counted.sum())
        num_labels += int(counted.sum())
        labels_right += int(right.sum())
        examples_right += int((~wrong.view(len(group), -1).any(1)).sum())
    chrf, bleu = _likeness(model, config, examples, tokenizer, generation)
    model.train(was_training)
    return Evaluation(
        len(examples), num_labels, nats, labels_right, examples_right, chrf=chrf, bleu=bleu
    )


def _likeness(
    model: nn.Module,
    config: TransformerConfig,
    examples: Sequence[Example],
    tokenizer: Tokenizer | None,
    generation: GenerationDefaults,
) -> tuple[float, float]:
    """Return chrF and BLEU of what the model writes for the examples that have texts."""
    with_text = [(example, example.text) for example in examples if example.text is not None]
    if tokenizer is None or not with_text:
        return 0.0, 0.0
    from exporter.likeness import likeness  # loads sacrebleu
    from exporter.training.writing import write_greedily

    sources = [cast(NDArray[np.int64], example.source) for example, _ in with_text]
    written = write_greedily(cast(EncoderDecoder, model), config, sources, generation)
    return likeness(tokenizer.decode_batch(written), [text for _, text in with_text])
