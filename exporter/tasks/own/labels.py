"""The labels of a person's examples, and how well a model has to tell them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from engine.errors import ConfigError
from exporter.models.config import TransformerConfig
from exporter.training.evaluation import Evaluation
from exporter.training.task import Outcome

MAX_LABELS = 10_000
# The options of a model of texts that had another head before: a bare body under its head.
_BARE = {
    "head.pooler": "none",
    "head.pooler_bias": True,
    "head.pooler_norm": False,
    "head.embedding_dim": None,
    "head.normalize": False,
}


def known_labels(training: Iterable[str], *judged: Iterable[str]) -> tuple[str, ...]:
    """Return the labels to learn, in order; ConfigError for ones that occur nowhere but in the
    parts that a model is judged by, and for fewer than two.
    """
    found = sorted(set(training))
    unknown = sorted(set().union(*judged).difference(found))
    if unknown:
        raise ConfigError(
            f"no example to learn from has the label {unknown[0]!r}"
            + (f" (nor {len(unknown) - 1:,} other labels)" if len(unknown) > 1 else "")
            + "; give more examples of it, or none"
        )
    if not 2 <= len(found) <= MAX_LABELS:
        raise ConfigError(
            f"the examples have {len(found):,} different labels, wanted 2 to {MAX_LABELS:,}; "
            "is the label in the last column?"
        )
    return tuple(found)


def telling(
    config: TransformerConfig, labels: tuple[str, ...], *, each_token: bool = False
) -> TransformerConfig:
    """Return a model of texts that tells other labels, of texts or of each token."""
    changed: dict[str, Any] = {
        "cut_at": None,
        "cuts_left": False,
        "prompts": {},
        "default_prompt": None,
        "labels": labels,
        "head.label_scores": "softmax",
    }
    if config.head.each_token != each_token:
        pooling = "first" if each_token else "mean"
        changed |= {**_BARE, "head.each_token": each_token, "head.pooling": pooling}
    return config.changed(changed)


def better_than(
    baseline: float,
    what: str,
    rival: str,
    metric: Literal["exact_match", "label_accuracy"] = "exact_match",
) -> Callable[[Evaluation], Outcome]:
    """Return a judge that wants more of `what` right than `baseline`, the share of a rival."""

    def judge(evaluation: Evaluation) -> Outcome:
        value: float = getattr(evaluation, metric)
        summary = (
            f"{value:.2%} of the held-out {what} right; {rival} gets {baseline:.2%} "
            "(target: above it)"
        )
        metrics = {metric: value, "loss": evaluation.loss, "baseline": baseline}
        return Outcome(metrics, summary, value > baseline)

    return judge
