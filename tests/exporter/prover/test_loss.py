"""A format that rounds weights or cache loses something, and some of it is allowed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.errors import CertificateError
from engine.package.manifest import Answers
from engine.sampling.top_k import step_logits
from exporter.prover.eager import Eager, Floats
from exporter.prover.judge import At
from exporter.prover.loss import LossJudge, LossLimits, TextQuality

LOGITS = np.array([[1.0, 3.0, 2.0], [5.0, 4.0, 0.0]], np.float32)
ROUNDED = np.array([[1.0, 3.0, 2.0], [4.0, 5.0, 0.0]], np.float32)
ANY_LOSS = LossLimits(1, 100, 100, 100)


def judged(
    seen: Floats, exact: Floats, what: str = "logits", *, banned: tuple[int, ...] = ()
) -> LossJudge:
    judge = LossJudge(banned=banned)
    take(judge, seen, exact, what)
    return judge


def take(judge: LossJudge, seen: Floats, exact: Floats, what: str, *, counts: bool = True) -> None:
    numbers = np.arange(len(seen))
    at = At(numbers, numbers, numbers, "position {}".format)
    judge.numbers("alone", what, seen, Eager(exact, []), at, counts=counts)


def test_what_is_lost_is_counted_and_refused_by_no_play() -> None:
    judge = judged(ROUNDED, LOGITS)

    judge.bits(ROUNDED, LOGITS, str)
    judge.check()

    loss = judge.result(ANY_LOSS)
    assert (judge.tokens_compared, judge.tokens_equal, judge.batch_invariant) == (2, 1, False)
    assert loss.max_abs_logit_diff == 1 and loss.mean_abs_logit_diff == pytest.approx(2 / 6)
    assert loss.logit_std == pytest.approx(np.sqrt(np.mean([2 / 3, 14 / 3])))
    assert loss.max_abs_alignment_diff is None and not loss.has_text
    assert LossLimits.of(loss) == ANY_LOSS and not judge.judged


def test_copies_count_in_no_mean_but_in_the_largest_difference() -> None:
    judge = judged(LOGITS, LOGITS)

    take(judge, ROUNDED, LOGITS, "logits", counts=False)

    loss = judge.result(ANY_LOSS)
    assert (judge.tokens_compared, judge.tokens_equal) == (2, 2)
    assert (loss.max_abs_logit_diff, loss.mean_abs_logit_diff) == (1, 0)


def test_tokens_are_counted_that_may_be_written() -> None:
    exact = np.array([[9.0, 3.0, 2.0], [9.0, 2.0, 3.0]], np.float32)
    rounded = np.array([[9.0, 3.0, 3.5], [9.0, 2.0, 3.5]], np.float32)

    found = [judged(rounded, exact, banned=ids) for ids in ((), (0,), (0, 1))]

    assert [(one.tokens_equal, one.tokens_compared) for one in found] == [(2, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize("banned_logit", [8.0, 1e6])  # rounded by an eighth of itself
def test_a_banned_token_neither_causes_a_refusal_nor_hides_one(banned_logit: float) -> None:
    exact, rounded = (np.c_[one, [[0.0], [0.0]]] for one in (LOGITS, ROUNDED))
    exact[:, 3], rounded[:, 3] = banned_logit, banned_logit * 9 / 8

    judge = judged(rounded, exact, banned=(3,))

    loss, alone = judge.result(ANY_LOSS), judged(ROUNDED, LOGITS).result(ANY_LOSS)
    assert (loss.max_abs_logit_diff, loss.logit_std) == (1, pytest.approx(alone.logit_std))
    assert (judge.tokens_compared, judge.tokens_equal) == (2, 1)


def test_two_tokens_that_the_eager_model_does_not_tell_apart_are_not_compared() -> None:
    judge = judged(np.array([[2.000001, 2.0, 0.0]]), np.array([[2.0, 2.000001, 0.0]]))

    assert (judge.tokens_compared, judge.tokens_undecided) == (0, 1)


def test_a_token_that_is_never_written_counts_in_no_mean() -> None:
    never = np.array([[1.0, 3.0, -1e30]], np.float32)

    loss = judged(never, never).result(ANY_LOSS)

    assert loss.logit_std == pytest.approx(1)
    assert loss.max_abs_logit_diff == loss.mean_abs_logit_diff == 0


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"max_token_loss": 0.4}, "1 of 2 greedy tokens are not the eager model's, a share of 0.5"),
        ({"max_logit_loss": 0.6}, "largest logit difference is 1, in standard deviations .* 0.612"),
    ],
)
def test_more_than_is_allowed_is_refused_with_the_option_that_allows_more(
    limits: dict[str, float], told: str
) -> None:
    judge = judged(ROUNDED, LOGITS)
    (name, limit), *_ = limits.items()
    option = name.replace("_", "-")

    with pytest.raises(CertificateError, match=f"{told}, allowed {limit:g}; .* with --{option}$"):
        judge.result(replace(ANY_LOSS, **limits))


def test_labels_are_told_as_labels() -> None:
    none = replace(ANY_LOSS, max_token_loss=0)

    with pytest.raises(CertificateError, match="^1 of 2 labels are not the eager model's"):
        judged(ROUNDED, LOGITS).result(none, answers=Answers(items=2))


def test_vectors_are_held_to_the_largest_angle_whatever_their_numbers_are_off() -> None:
    answers = Answers(items=2, max_vector_loss=0.02, max_number_diff=9)
    judge = judged(LOGITS * 3, LOGITS, "vectors")

    with pytest.raises(CertificateError, match="^1 less the cosine .* 0.02, allowed 0.01; "):
        judge.result(replace(ANY_LOSS, max_vector_loss=0.01), answers=answers)
    assert judge.result(ANY_LOSS, answers=answers).logit_std == 0


def test_perplexity_may_rise_by_a_share() -> None:
    text = TextQuality(text_tokens=9, perplexity=11, eager_perplexity=10, chrf_between=50)
    judge = judged(LOGITS, LOGITS)

    with pytest.raises(CertificateError, match="rises from 10 to 11, by 0.1, allowed 0.09;"):
        judge.result(replace(ANY_LOSS, max_perplexity_loss=0.09), text)
    loss = judge.result(ANY_LOSS, text)
    assert loss.has_text and (loss.perplexity, loss.chrf_between) == (11, 50)
    no_number = replace(text, perplexity=np.nan)
    with pytest.raises(CertificateError, match="perplexity rises"):
        judge.result(ANY_LOSS, no_number)


SHARES = np.array([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]], np.float32)


def test_an_alignment_may_be_off_by_a_share_of_what_logits_may() -> None:
    judge = judged(SHARES[:, [1, 0, 2]], SHARES, "alignment")

    assert judge.result(ANY_LOSS).max_abs_alignment_diff == 1
    with pytest.raises(CertificateError, match="share of the attention .* is 1, allowed 0.2; "):
        judge.result(replace(ANY_LOSS, max_logit_loss=1))


@pytest.mark.parametrize(
    ("factors", "told"),
    [
        ([0.99, 0.99, 1], "alignment is not shares of one: they add up to 0.99"),
        ([-1, 5 / 3, 1], "alignment is not shares of one: they add up to 1"),
        ([np.inf, 1, 1], "not a finite number"),
    ],
)
def test_an_alignment_has_to_be_shares(factors: list[float], told: str) -> None:
    with pytest.raises(CertificateError, match=f"^position 0: .*{told}"):
        judged(SHARES[:1] * factors, SHARES[:1], "alignment")


def test_how_far_a_step_depends_on_its_batch_is_told() -> None:
    alone = step_logits(LOGITS, 1)._replace(alignment=np.array([[0.5, 0.5]] * 2, np.float32))
    batched = alone._replace(alignment=np.array([[0.5, 0.5], [0.25, 0.75]], np.float32))
    judge = LossJudge()

    assert not judge.step_bits(batched, alone, str) and not judge.batch_invariant
