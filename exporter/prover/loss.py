"""Counts what a format that rounds weights or cache loses, and judges whether that is too much."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from engine.errors import CertificateError, ConfigError
from engine.package.manifest import Answers, Loss, Weights
from exporter.prover.eager import Eager, Floats, far_below, losses
from exporter.prover.judge import At, Judge, lead_of, refuse_no_number

# If the eager model's two best tokens are nearer than this, for every 16 of the largest logit,
# the order in which a processor sums decides; such a position says nothing of a format.
UNDECIDED = 1e-5
_FULL_SIZE = 16.0
# A share of the attention to the source may differ by this part of max_logit_loss. Tiny models of
# every family came to 0.006 in int8.
SHARE_LOSS = 0.2
_SHARES = 1e-4  # from which shares of attention may add up to another sum than one


@dataclass(frozen=True)
class LossLimits:
    """The most that is taken; a random model has no favourite tokens, so give 1 for its tokens."""

    max_token_loss: float  # share of greedy tokens, or of labels, that are not the eager model's
    max_logit_loss: float  # largest difference, in standard deviations of a position's logits
    max_perplexity_loss: float  # rise on the given text, as a share of the eager model's
    max_vector_loss: float = 0.03  # 1 - cosine of an embedding to the eager model's

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} ({value}) must be a number from 0 on")

    @classmethod
    def of(cls, loss: Loss) -> LossLimits:
        """Return the limits that a certificate was made with."""
        return cls(**{field.name: getattr(loss, field.name) for field in fields(cls)})


# The last: three times what all-MiniLM-L6-v2 loses on random tokens, 0.0094 in int8, 0.21 in int4.
_IN_8_BITS = LossLimits(0.1, 1.0, 0.05, 0.03)
DEFAULT_LIMITS = MappingProxyType[Weights, LossLimits](
    {
        **dict.fromkeys(("fp32", "fp16", "bf16"), _IN_8_BITS),  # an 8-bit cache
        **dict.fromkeys(("int8", "int8-fixed", "int8-blocks"), _IN_8_BITS),
        "int4": LossLimits(0.3, 4.0, 0.25, 0.6),
    }
)


@dataclass(frozen=True)
class TextQuality:
    """The results of both sides on a text, by the names that a certificate has for them."""

    text_tokens: int = 0
    perplexity: float | None = None  # exp of the mean negative log-likelihood of a token
    eager_perplexity: float | None = None
    text_lines: int = 0
    chrf: float | None = None  # Popović 2015, 0 to 100: to references; None: there are none
    eager_chrf: float | None = None
    chrf_between: float | None = None  # None: the eager model writes nothing


class LossJudge(Judge):
    """Counts what is lost; only what is no number, or no choice by its own logits, is refused."""

    needs_own = False

    def __init__(self, *, banned: tuple[int, ...] = ()) -> None:
        super().__init__(banned=banned, needs_equal_bits=False)
        self._largest: dict[str, float] = {}
        self._num_logits = 0
        self._sum_of_diffs = 0.0
        self._sum_of_squares = 0.0  # squares of the eager logits, around the mean of their position

    def numbers(
        self, play: str, what: str, seen: Floats, eager: Eager, at: At, *, counts: bool = True
    ) -> None:
        """See Judge; of the best entry in each row, count whether it is the same.

        A banned token is never written: its logit neither counts nor makes those of others small.
        """
        refuse_no_number(seen, at.place)
        if what == "alignment":
            _refuse_no_shares(seen, at.place)
        view = self.choosable if what == "logits" else np.asarray
        ours, theirs = view(seen), view(eager.exact)
        largest = float(losses(ours, theirs).max())
        self._largest[what] = max(self._largest.get(what, 0.0), largest)
        if what != "logits" or not counts:
            return
        written = np.where(far_below(theirs), np.nan, theirs)
        self._num_logits += theirs.size
        self._sum_of_diffs += float(np.nansum(np.abs(ours - written)))
        self._sum_of_squares += float(np.nanvar(written, axis=-1).sum()) * theirs.shape[-1]
        if theirs.shape[1] == 1:
            return
        growth = np.maximum(np.nanmax(np.abs(written), axis=-1) / _FULL_SIZE, 1)
        decided = lead_of(theirs) > UNDECIDED * growth
        equal = decided & (ours.argmax(-1) == theirs.argmax(-1))
        self.tokens_compared += int(decided.sum())
        self.tokens_equal += int(equal.sum())
        self.tokens_undecided += int((~decided).sum())

    def check(self) -> None:
        """Judge nothing yet: what is lost is counted to the end."""

    def result(
        self, limits: LossLimits, text: TextQuality | None = None, answers: Answers | None = None
    ) -> Loss:
        """Return what was lost; CertificateError if it is more than the limits allow."""
        logit_std = math.sqrt(self._sum_of_squares / max(1, self._num_logits))
        for one in self._parts(limits, logit_std, text, answers):
            if not one.value <= one.limit:
                raise CertificateError(
                    f"{one.text} {one.value:.3g}, allowed {one.limit:g}; export with a format that "
                    f"loses less, or allow more with --max-{one.name}-loss"
                )
        return Loss(
            max_abs_logit_diff=self._largest.get("logits", 0.0),
            mean_abs_logit_diff=self._sum_of_diffs / max(1, self._num_logits),
            logit_std=logit_std,
            max_abs_alignment_diff=self._largest.get("alignment"),
            **(asdict(text) if text else {}),
            **asdict(limits),
        )

    def _parts(
        self,
        limits: LossLimits,
        logit_std: float,
        text: TextQuality | None,
        answers: Answers | None,
    ) -> Iterator[_Part]:
        turned, compared = self.tokens_compared - self.tokens_equal, self.tokens_compared
        what = "labels" if answers else "greedy tokens"
        words = f"{turned:,} of {compared:,} {what} are not the eager model's, a share of"
        yield _Part("token", turned / max(1, compared), limits.max_token_loss, words)
        largest = self._largest.get("logits", 0.0)
        words = f"the largest logit difference is {largest:.3g}, in standard deviations of logits"
        yield _Part("logit", largest / (logit_std or 1), limits.max_logit_loss, words)
        words = "the largest difference of a share of the attention to the source is"
        most = SHARE_LOSS * limits.max_logit_loss
        yield _Part("logit", self._largest.get("alignment", 0.0), most, words)
        if answers and answers.max_vector_loss is not None:
            words = "1 less the cosine of an embedding to the eager model's is at the most"
            yield _Part("vector", answers.max_vector_loss, limits.max_vector_loss, words)
        if text and text.perplexity is not None and text.eager_perplexity is not None:
            words = (
                f"perplexity rises from {text.eager_perplexity:.4g} to {text.perplexity:.4g}, by"
            )
            rise = text.perplexity / text.eager_perplexity - 1
            yield _Part("perplexity", rise, limits.max_perplexity_loss, words)


class _Part(NamedTuple):
    """One of the losses, and how to tell of it."""

    name: str
    value: float
    limit: float
    text: str  # in front of the value


def _refuse_no_shares(exported: Floats, place: Callable[[int], str]) -> None:
    total = exported.sum(axis=-1)
    bad = (np.abs(total - 1) > _SHARES) | (exported < 0).any(axis=-1)
    if bad.any():
        i = int(bad.argmax())
        raise CertificateError(
            f"{place(i)}: the alignment is not shares of one: they add up to {total[i]:.6g}"
        )
