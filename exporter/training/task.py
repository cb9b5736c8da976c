"""A task: a model's configuration, its data, and when it is good enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tokenizers import Tokenizer
from torch import Tensor

from engine.requests.generation_defaults import GenerationDefaults
from exporter.checkpoint import TextFiles
from exporter.models.config import TransformerConfig
from exporter.training.data import ChunkSource, Example
from exporter.training.evaluation import Evaluation

Selection = Literal["exact_match", "label_accuracy", "chrf", "loss"]


@dataclass(frozen=True)
class Recipe:
    """How a model is trained; the optimizer is AdamW with the betas of the paper."""

    steps: int
    batch_tokens: int  # positions in a batch, padding included; images: how many
    peak_learning_rate: float  # reached at the end of warm-up
    warmup_steps: int
    label_smoothing: float = 0.0
    weight_decay: float = 0.0
    average_decay: float = 0.99  # weights are kept as a moving average; 0: no average
    validate_every: int = 200  # steps; the state of the run is saved as often, or more

    def learning_rate(self, step: int, steps: int) -> float:
        """Return the rate of update `step`, the first is 1, in a run of `steps`.

        Section 5.3 of "Attention Is All You Need", written by the peak that warm-up ends in: its
        factor * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5) is this with
        peak = factor * (d_model * warmup_steps)**-0.5. A shorter run has the same share of warm-up.
        """
        warmup = max(1, self.warmup_steps * min(steps, self.steps) // self.steps)
        return self.peak_learning_rate * min(step / warmup, math.sqrt(warmup / step))


@dataclass(frozen=True)
class Outcome:
    """The results of the trained model on the held-out examples."""

    metrics: dict[str, float]
    summary: str  # one line with the target in it
    reached: bool


@dataclass(frozen=True)
class Task:
    """Everything that `train` needs to know. Held-out examples never occur in training."""

    name: str
    config: TransformerConfig
    tokenizer: Tokenizer | None
    recipe: Recipe
    chunks: ChunkSource  # the training examples, an endless stream in chunks
    validation: Sequence[Example]  # chooses the best checkpoint
    held_out: Sequence[Example]  # judged once, at the end
    selection: Selection  # chooses the best checkpoint
    judge: Callable[[Evaluation], Outcome]
    samples: tuple[tuple[str, str], ...] = ()  # input and expected output, to try the model on
    data_fingerprint: str = ""  # given files: a resumed run must have the same
    data_summary: str = ""  # given files: how much they hold
    # The model starts from these, by the names of its weights; others are freshly drawn.
    initial_weights: Mapping[str, Tensor] = field(default_factory=dict)
    generation: GenerationDefaults = GenerationDefaults()  # the starting checkpoint's
    text: TextFiles = TextFiles()  # likewise

    @property
    def target_tokenizer(self) -> Tokenizer | None:
        """The tokenizer of what is written."""
        return self.text.target_tokenizer or self.tokenizer


def accuracy_judge(
    metric: Literal["exact_match", "label_accuracy"], what: str, target: float
) -> Callable[[Evaluation], Outcome]:
    """Return a judge that wants at least `target` of `what` right."""

    def judge(evaluation: Evaluation) -> Outcome:
        value: float = getattr(evaluation, metric)
        summary = f"{value:.2%} of the held-out {what} right (target {target:.0%})"
        return Outcome({metric: value, "loss": evaluation.loss}, summary, value >= target)

    return judge
