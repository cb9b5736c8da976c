"""What a format that rounds may lose against the eager model, and whether it lost more."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import CertificateError, ConfigError
from engine.package.manifest import MAX_CASE_RATIO, Loss, Precision, Weights
from exporter.certificate.comparison import LossyComparison
from exporter.certificate.half_comparison import MAX_DIFF
from exporter.certificate.perplexity import Perplexity

if TYPE_CHECKING:
    from exporter.certificate.answers import Answers


@dataclass(frozen=True)
class LossLimits:
    """The most that is taken; a random model has no favourite tokens, so give 1 for its tokens."""

    max_token_loss: float  # share of greedy tokens that are others than the eager model's
    max_logit_loss: float  # largest difference, in standard deviations of a position's logits
    max_perplexity_loss: float  # rise on the given text, as a share of the eager model's

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} ({value}) must be a number from 0 on")


# Of max_logit_loss: how far an embedding may be off, as a share of its length, and a share of the
# attention to the source. Tiny models of every family came to 0.02 and 0.006 in int8.
SHARE_LOSS = 0.2

DEFAULT_LIMITS = MappingProxyType[Weights, LossLimits](
    {
        **dict.fromkeys(("fp32", "fp16", "bf16"), LossLimits(0.1, 1.0, 0.05)),  # an 8-bit cache
        **dict.fromkeys(("int8", "int8-fixed", "int8-blocks"), LossLimits(0.1, 1.0, 0.05)),
        "int4": LossLimits(0.3, 4.0, 0.25),
    }
)


def check_loss(
    comparison: LossyComparison,
    perplexity: Perplexity | None,
    limits: LossLimits,
    answers: Answers | None = None,
) -> Loss:
    """Return what was lost; CertificateError if it is more than allowed."""
    for one in _parts(comparison, perplexity, limits):
        if not one.value <= one.limit:
            raise CertificateError(
                f"{one.text} {one.value:.3g}, allowed {one.limit:g}; export with a format that "
                f"loses less, or allow more with --max-{one.name}-loss"
            )
    return Loss(
        mean_abs_logit_diff=comparison.mean_abs_logit_diff,
        logit_std=comparison.logit_std,
        text_tokens=perplexity.num_tokens if perplexity else 0,
        perplexity=perplexity.exported if perplexity else None,
        eager_perplexity=perplexity.eager if perplexity else None,
        text_lines=answers.num_lines if answers else 0,
        chrf=answers.exported if answers else None,
        eager_chrf=answers.eager if answers else None,
        chrf_between=answers.between if answers else None,
        max_token_loss=limits.max_token_loss,
        max_logit_loss=limits.max_logit_loss,
        max_perplexity_loss=limits.max_perplexity_loss,
    )


def check_no_more(comparison: LossyComparison, loss: Loss, precision: Precision) -> None:
    """Raise CertificateError if kernels elsewhere lose much more than the graphs' own stage did.

    The same weights are rounded, so the mean difference is about the same, however much a person
    has allowed: half as much again, and what the type of activations may add.
    """
    of_type = MAX_DIFF.get(precision, MAX_DIFF["fp16"]) * loss.logit_std
    allowed = MAX_CASE_RATIO * loss.mean_abs_logit_diff + of_type
    if not comparison.mean_abs_logit_diff <= allowed:
        raise CertificateError(
            f"logits are {comparison.mean_abs_logit_diff:.3g} from the eager model's in the mean, "
            f"and were {loss.mean_abs_logit_diff:.3g} where the package was exported; allowed are "
            f"{allowed:.3g}: a kernel computes something else here"
        )


def limits_of(loss: Loss) -> LossLimits:
    """Return the limits that a certificate was made with."""
    return LossLimits(loss.max_token_loss, loss.max_logit_loss, loss.max_perplexity_loss)


class _Part(NamedTuple):
    """One of the losses, and how to tell of it."""

    name: str
    value: float
    limit: float
    text: str  # in front of the value


def _parts(
    comparison: LossyComparison, perplexity: Perplexity | None, limits: LossLimits
) -> list[_Part]:
    different = comparison.tokens_compared - comparison.tokens_equal
    parts = [
        _Part(
            "token",
            different / max(1, comparison.tokens_compared),
            limits.max_token_loss,
            f"{different:,} of {comparison.tokens_compared:,} greedy tokens are not the eager "
            "model's, a share of",
        ),
        _Part(
            "logit",
            comparison.max_abs_logit_diff / (comparison.logit_std or 1),
            limits.max_logit_loss,
            f"the largest logit difference is {comparison.max_abs_logit_diff:.3g}, in standard "
            "deviations of the logits",
        ),
    ]
    most = SHARE_LOSS * limits.max_logit_loss
    text = "the largest difference of an embedding is, as a share of its length,"
    parts.append(_Part("logit", comparison.max_value_loss, most, text))
    text = "the largest difference of a share of the attention to the source is"
    parts.append(_Part("logit", comparison.max_abs_alignment_diff or 0, most, text))
    if perplexity is not None:
        text = f"perplexity rises from {perplexity.eager:.4g} to {perplexity.exported:.4g}, by"
        parts.append(_Part("perplexity", perplexity.loss, limits.max_perplexity_loss, text))
    return parts
