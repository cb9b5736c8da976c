"""How much a graph may lose, beside what the eager model loses itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from torch import nn

from engine.errors import CertificateError
from engine.package.manifest import Precision
from engine.sampling.logits import StepLogits
from engine.sampling.top_k import step_logits
from exporter.prover.eager import Eager, EagerModel, Floats, Origin
from exporter.prover.judge import KINDS, At, ExactJudge, Judge
from exporter.prover.loss import LossJudge

LOGITS = np.array([[1.0, 3.0, 2.0], [5.0, 4.0, 0.0]], np.float32)


def at(
    num_positions: int,
    *,
    cases: Floats | None = None,
    lengths: Floats | None = None,
    kinds: Floats | None = None,
) -> At:
    """Return where positions belong: unless it is said, to a case each, all of one kind."""
    zeros = np.zeros(num_positions, np.int64)
    return At(
        np.arange(num_positions) if cases is None else np.asarray(cases),
        zeros if lengths is None else np.asarray(lengths),
        zeros if kinds is None else np.asarray(kinds),
        "position {}".format,
    )


def numbers_of(ours: Floats, theirs: Floats, exact: float = 4.0) -> tuple[Floats, Eager]:
    """Return numbers [N, 1] of a graph and of an eager model that lose so much."""
    wide = np.full((len(ours), 1), exact)
    return wide + np.reshape(ours, (-1, 1)), Eager(wide, [wide + np.reshape(theirs, (-1, 1))])


def judge_losses(
    ours: Floats,
    theirs: Floats,
    place: At | None = None,
    *,
    what: str = "vectors",
    judge: ExactJudge | None = None,
) -> ExactJudge:
    """Judge a graph that loses so much at each position."""
    judge = judge or ExactJudge()
    judge.numbers("alone", what, *numbers_of(ours, theirs), place or at(len(ours)))
    judge.check()
    return judge


def drawn(count: int, size: float = 1e-4, seed: int = 0) -> Floats:
    """Return losses as rounding makes them."""
    return size * np.abs(np.random.default_rng(seed).normal(size=count))


def scaled(losses: Floats, above: float, factor: float) -> Floats:
    """Return losses of which the largest, above a quantile, are so many times as large."""
    return np.where(losses >= np.quantile(losses, above), losses * factor, losses)


# By play


@pytest.mark.parametrize(
    ("above", "taken", "refused", "name", "factor"),
    [
        (0.0, 2.4, 2.6, "median", "2.5"),
        (0.88, 2.4, 2.7, "90th percentile", "2.5"),
        (0.985, 9.5, 10.5, "99th percentile", "10"),
        (0.9999, 9.5, 10.5, "largest", "10"),
    ],
)
def test_every_quantile_of_a_play_has_its_bound(
    above: float, taken: float, refused: float, name: str, factor: str
) -> None:
    theirs = drawn(20_000)

    judge_losses(scaled(theirs, above, taken), theirs)
    with pytest.raises(CertificateError) as caught:
        judge_losses(scaled(theirs, above, refused), theirs)

    assert f"; the {name} of all positions (alone) is " in str(caught.value)
    assert f", where {factor} times are allowed: " in str(caught.value)


@pytest.mark.parametrize(("largest", "is_taken"), [(9.5, True), (10.5, False)])
def test_the_largest_is_held_against_that_of_all_plays(largest: float, *, is_taken: bool) -> None:
    """Hard attention loses much at one position of 100, and a play of 30 may have none of these."""
    many, few = drawn(3000), drawn(30)
    many[7], ours = 1.0, few.copy()
    ours[3] = largest
    judge = judge_losses(many, many)
    judge.numbers("prompt in one piece", "vectors", *numbers_of(ours, few), at(30))

    with (
        nullcontext()
        if is_taken
        else pytest.raises(CertificateError, match="times PyTorch's own 1,")
    ):
        judge.check()


@pytest.mark.parametrize(
    ("count", "above", "factor", "message"),
    [
        (99, 0.88, 9, None),
        (99, 0.88, 11, "largest"),
        (100, 0.88, 9, "90th percentile"),
        (999, 0.97, 9, None),
        (999, 0.985, 40, "largest"),
        (1000, 0.985, 40, "99th percentile"),
        (1, 0.0, 2.4, None),
        (1, 0.0, 2.6, "median"),
    ],
)
def test_of_few_positions_fewer_quantiles_mean_something(
    count: int, above: float, factor: float, message: str | None
) -> None:
    theirs = drawn(count)
    ours = scaled(theirs, above, factor)

    if message is None:
        judge_losses(ours, theirs)
    else:
        with pytest.raises(CertificateError, match=f"{message} of all positions"):
            judge_losses(ours, theirs)


def test_plays_are_judged_each_by_itself() -> None:
    judge, theirs = ExactJudge(), drawn(200)
    judge.numbers("alone", "vectors", *numbers_of(theirs, theirs), at(200))
    judge.numbers("batches", "vectors", *numbers_of(3 * theirs, theirs), at(200))

    with pytest.raises(CertificateError, match=r"the median of all positions \(batches\)"):
        judge.check()

    assert [(one.play, one.positions) for one in judge.judged] == [("alone", 200), ("batches", 200)]
    assert judge.judged[1].exported.median == pytest.approx(3 * judge.judged[1].eager.median)


def test_what_is_off_differs_by_its_kind() -> None:
    judge, theirs = ExactJudge(), drawn(50)
    judge.numbers("alone", "logits", *numbers_of(theirs, theirs), at(50))
    judge.numbers("alone", "alignment", *numbers_of(3 * theirs, theirs), at(50))

    with pytest.raises(CertificateError, match=r"alignment is .* of all positions \(alone\)"):
        judge.check()


# By class


def test_a_length_at_which_a_graph_loses_more_is_refused_where_all_together_are_within() -> None:
    theirs, lengths = drawn(2000), np.repeat([3, 5, 9, 12], 500)
    ours = np.where(lengths == 9, 2.6 * theirs, theirs)

    with pytest.raises(CertificateError, match=r"^position 1\d*: .* at length 9 \(alone\)"):
        judge_losses(ours, theirs, at(2000, lengths=lengths))
    judge_losses(ours, theirs)


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_kind_of_position_at_which_a_graph_loses_more_is_told_in_words(kind: int) -> None:
    kinds = np.arange(9000) % 9
    theirs = drawn(9000)
    ours = np.where(kinds == kind, 2.6 * theirs, theirs)

    with pytest.raises(CertificateError, match=f"the median {KINDS[kind]} \\(alone"):
        judge_losses(ours, theirs, at(9000, kinds=kinds))


@pytest.mark.parametrize(("factor", "is_taken"), [(3.9, True), (4.2, False)])
def test_the_90th_percentile_of_a_class_has_a_bound_of_its_own(
    factor: float, *, is_taken: bool
) -> None:
    theirs, lengths = drawn(20_000), np.repeat(range(20), 1000)
    ours = np.where(lengths == 7, scaled(theirs, 0.88, factor), theirs)
    place = at(20_000, lengths=lengths)

    if is_taken:
        judge_losses(ours, theirs, place)
    else:
        with pytest.raises(CertificateError, match="the 90th percentile at length 7 "):
            judge_losses(ours, theirs, place)


@pytest.mark.parametrize(
    ("sizes", "faulty", "num_cases", "told"),
    [
        ([1000, 64, 1000], {1}, 8, "length 1"),
        ([1000, 63, 1000], {1}, 8, None),  # joined with the one behind it
        ([1000, 64, 1000], {1}, 7, None),
        ([1000, 40, 40, 1000], {1, 2}, 8, "length 1"),  # both together are one
        ([1000, 64], {1}, 8, "length 1"),
        ([1000, 63], {1}, 8, None),  # the last one, with the one before it
    ],
)
def test_classes_of_few_positions_or_cases_are_joined_with_their_neighbours(
    sizes: list[int], faulty: set[int], num_cases: int, told: str | None
) -> None:
    lengths = np.repeat(range(len(sizes)), sizes)
    cases = lengths * 1000 + np.arange(len(lengths)) % num_cases
    theirs = np.full(len(lengths), 1e-4)
    ours = np.where(np.isin(lengths, list(faulty)), 2.6, 1) * theirs
    place = at(len(lengths), cases=cases, lengths=lengths)

    if told is None:
        judge_losses(ours, theirs, place)
    else:
        with pytest.raises(CertificateError, match=f"the median at {told} "):
            judge_losses(ours, theirs, place)


# The floor, and what is no number


@pytest.mark.parametrize(
    ("precision", "unit"), [("fp32", 2.0**-21), ("fp16", 2.0**-8), ("bf16", 2.0**-5)]
)
def test_four_units_in_the_last_place_of_the_largest_number_are_no_loss(
    precision: Precision, unit: float
) -> None:
    """The largest number is 4; the eager model is exact."""
    theirs, ours = np.zeros(200), np.full(200, 4 * unit)

    judged = judge_losses(ours, theirs, judge=ExactJudge(precision=precision)).judged
    with pytest.raises(CertificateError, match="inf times PyTorch's own 0, where 2.5 times "):
        judge_losses(ours * 1.001, theirs, judge=ExactJudge(precision=precision))

    assert judged[0].floor == 4 * unit


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("judge", [ExactJudge, LossJudge])
def test_what_is_no_number_is_refused_at_once(judge: type[Judge], wrong: float) -> None:
    seen = LOGITS.copy()
    seen[1, 1] = wrong

    with pytest.raises(CertificateError, match="^position 1: .* what is not a finite number"):
        judge().numbers("alone", "logits", seen, Eager(LOGITS, [LOGITS]), at(2))


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("has_graph_none", [False, True])
def test_an_eager_model_that_gives_no_numbers_excuses_nothing(
    *, is_exact: bool, has_graph_none: bool
) -> None:
    none = LOGITS.copy()
    none[0, 0] = np.nan
    eager = Eager(none, [LOGITS]) if is_exact else Eager(LOGITS, [none])
    seen = none if has_graph_none else LOGITS

    with pytest.raises(
        CertificateError, match="^position 0: PyTorch itself gives .*; look for NaN"
    ):
        ExactJudge().numbers("alone", "logits", seen, eager, at(2))
    with pytest.raises(CertificateError, match="; export with --precision bf16 or fp32, and look "):
        ExactJudge(precision="fp16").numbers("alone", "logits", seen, eager, at(2))


# Other orders of sums


class Orders(EagerModel):
    """An eager model that loses other amounts in other orders of its sums."""

    def __init__(self, *of_runs: Floats) -> None:
        super().__init__(nn.Module(), nn.Module())
        object.__setattr__(self, "of_runs", of_runs)
        object.__setattr__(self, "asked", [])

    def with_all_orders(self, forward: Callable[..., Any]) -> list[Eager]:
        self.asked.append(1)  # type: ignore[attr-defined]
        wide = np.full((len(self.of_runs[0]), 1), 4.0)  # type: ignore[attr-defined]
        return [Eager(wide, [wide + run[:, None] for run in self.of_runs])]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("times", "orders", "num_runs", "is_taken"),
    [
        (1.5, [1.0, 1.0, 1.0, 1.0], 1, True),
        (4.0, [1.0, 1.7, 1.0, 1.2], 4, True),
        (4.0, [1.0, 1.2, 1.5, 1.1], 4, False),
        (2.5 * 20.5, [1.0, 99.0, 1.0, 1.0], 1, False),  # nothing makes up for so much
    ],
)
def test_the_eager_model_runs_in_other_orders_only_where_the_first_would_refuse(
    times: float, orders: list[float], num_runs: int, *, is_taken: bool
) -> None:
    theirs = drawn(500)
    model = Orders(*(factor * theirs for factor in orders))
    seen, eager = numbers_of(times * theirs, theirs)
    origin = Origin(partial(model.with_all_orders, lambda _: []), 0, np.arange(500))
    judge = ExactJudge()
    judge.numbers("alone", "vectors", seen, Eager(eager.exact, eager.runs, origin), at(500))

    if is_taken:
        judge.check()
        judge.check()  # the next play asks again
    else:
        with pytest.raises(CertificateError, match="the median of all positions"):
            judge.check()

    assert judge.judged[0].runs == num_runs
    assert len(model.asked) == (num_runs > 1)  # type: ignore[attr-defined]
    largest = max(orders) if num_runs > 1 else 1
    assert judge.judged[0].eager.median == pytest.approx(largest * np.median(theirs))


# Tokens


def logits_losing(size: float, seed: int = 0) -> tuple[Floats, Eager]:
    """Return logits [400, 30] of a graph and of an eager model, which both lose so much."""
    rng = np.random.default_rng(seed)
    exact = rng.normal(size=(400, 30))
    ours, theirs = (exact + size * rng.normal(size=exact.shape) for _ in range(2))
    return ours, Eager(exact, [theirs])


def test_tokens_are_compared_where_the_lead_is_above_four_times_the_99th_percentile() -> None:
    seen, eager = logits_losing(1e-2)
    exact = np.sort(eager.exact, axis=-1)
    limit = 4 * np.quantile(np.abs(eager.runs[0] - eager.exact).max(-1), 0.99)
    judge = ExactJudge()

    judge.numbers("alone", "logits", seen, eager, at(400))
    judge.check()

    decided = int((exact[:, -1] - exact[:, -2] > limit).sum())
    assert 0 < decided < 400
    assert (judge.tokens_compared, judge.tokens_undecided) == (decided, 400 - decided)
    assert judge.tokens_equal == decided


def test_another_token_at_a_larger_lead_is_refused_with_both_numbers() -> None:
    """It costs no more than rounding does elsewhere in the play."""
    seen, eager = logits_losing(1e-2)
    order = np.argsort(eager.exact, axis=-1)
    leads = np.sort(eager.exact, axis=-1)[:, -1] - np.sort(eager.exact, axis=-1)[:, -2]
    limit = 4 * np.quantile(np.abs(eager.runs[0] - eager.exact).max(-1), 0.99)
    i = int(np.where(leads > limit, leads, np.inf).argmin())
    best, second = order[i, -1], order[i, -2]
    seen[i, [best, second]] = seen[i].max(), seen[i].max() + 1e-3
    judge = ExactJudge()
    judge.numbers("alone", "logits", seen, eager, at(400))

    with pytest.raises(CertificateError) as caught:
        judge.check()

    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"position {i}: the graph's likeliest token is another")
    assert f"leads by {leads[i]:.3g}; rounding turns no lead above {limit:.3g}" in line


def test_a_token_that_another_order_of_sums_may_turn_is_not_decided() -> None:
    exact = np.tile([3.0, 2.9, 0.0], (400, 1))
    seen = exact.copy()
    seen[7, 0] = 2.89
    rng = np.random.default_rng(0)
    own, other = (exact + size * rng.normal(size=exact.shape) for size in (5e-3, 3e-2))
    model = EagerModel(nn.Module(), nn.Module())
    object.__setattr__(model, "with_all_orders", lambda _: [Eager(exact, [own, other])])
    judge = ExactJudge()

    judge.numbers("alone", "logits", seen, Eager(exact, [own]), at(400))
    with pytest.raises(CertificateError, match="^position 7: the graph's likeliest token is anoth"):
        judge.check()
    judge = ExactJudge()
    origin = Origin(partial(model.with_all_orders, lambda _: []), 0, np.arange(400))
    judge.numbers("alone", "logits", seen, Eager(exact, [own], origin), at(400))
    judge.check()

    assert (judge.tokens_compared, judge.tokens_undecided) == (0, 400)


def test_a_token_is_not_decided_where_the_eager_model_itself_loses_as_much() -> None:
    """One position in a hundred loses so much if two keys are equal but for rounding."""
    exact = np.tile([3.0, 2.0], (400, 1))
    seen, own = exact + 1e-5, exact - 1e-5
    seen[7] = 2.0, 3.0
    own[7] += 0.3
    judge = ExactJudge()

    judge.numbers("alone", "logits", seen, Eager(exact, [own]), at(400))
    judge.check()

    assert (judge.tokens_compared, judge.tokens_undecided) == (399, 1)


def test_tokens_count_once_and_never_of_vectors_or_of_a_single_number() -> None:
    judge = ExactJudge()
    eager = Eager(LOGITS, [LOGITS])

    judge.numbers("alone", "logits", LOGITS, eager, at(2))
    judge.numbers("batches", "logits", LOGITS, eager, at(2), counts=False)
    judge.numbers("alone", "vectors", LOGITS, eager, at(2))
    judge.numbers("scores", "logits", LOGITS[:, :1], Eager(LOGITS[:, :1], [LOGITS[:, :1]]), at(2))
    judge.check()

    assert (judge.tokens_compared, judge.tokens_undecided) == (2, 0)
    assert len(judge.judged) == 4


def test_a_banned_token_decides_for_none_of_the_others_and_is_itself_compared() -> None:
    exact = np.tile([9.0, 3.0, 2.0], (10, 1))
    second = exact.copy()
    second[4, [1, 2]] = 2.4, 2.6
    rng = np.random.default_rng(0)
    eager = Eager(exact, [exact + rng.normal(0, 0.05, exact.shape)])

    def judged(seen: Floats, *banned: int) -> ExactJudge:
        judge = ExactJudge(banned=banned)
        judge.numbers("alone", "logits", seen, eager, at(10))
        judge.check()
        return judge

    assert judged(second).tokens_compared == 10
    with pytest.raises(CertificateError, match="position 4: .* likeliest token .* leads by 1;"):
        judged(second, 0)
    assert judged(second, 0, 1, 2).tokens_compared == 0
    with pytest.raises(CertificateError, match="logits of banned tokens are 5 .* largest .* is 5,"):
        judged(exact + [[5, 0, 0]] * (np.arange(10)[:, None] == 3), 0)


def test_a_banned_token_with_a_huge_logit_hides_no_fault_of_the_others() -> None:
    rng = np.random.default_rng(0)
    exact = 3 * rng.normal(size=(400, 20))
    exact[:, 7] = 1e6
    off = exact + 1e-4

    def judged(seen: Floats) -> None:
        judge = ExactJudge(banned=(7,))
        judge.numbers("alone", "logits", seen, Eager(exact, [exact.astype("f4")]), at(400))
        judge.check()

    judged(exact.astype("f4"))
    with pytest.raises(CertificateError, match="logits are .* the median of all positions"):
        judged(off.astype("f4"))


# Tokens that are never written


NEVER = np.array([[1.0, -1e30, 3.0], [2.0, -1e30, 0.0]])


@pytest.mark.parametrize("bias", [-1e9, -65504.0, -3.4e38])
@pytest.mark.parametrize("what", ["logits", "log-probabilities"])
def test_a_bias_that_keeps_tokens_from_being_written_hides_no_fault_of_the_others(
    bias: float, what: str
) -> None:
    """Its own last place is larger than all that the others lose."""
    rng = np.random.default_rng(0)
    exact = 3 * rng.normal(size=(400, 20))
    exact[:, 4:15] += bias

    def judged(seen: StepLogits) -> ExactJudge:
        judge = ExactJudge()
        judge.step("alone", seen, Eager(exact, [exact.astype("f4")]), at(400))
        judge.check()
        return judge

    assert judged(step_logits(exact.astype("f4"), 20)).tokens_compared == 400
    off = exact + (1e-4 if what == "logits" else 0)
    step = step_logits(off.astype("f4"), 20)
    if what != "logits":
        step = step._replace(top_logprobs=step.top_logprobs + np.float32(2e-5))
    with pytest.raises(CertificateError, match=f"{what} are .* the median of all positions"):
        judged(step)


def test_a_token_that_is_never_written_is_held_to_a_share_of_itself() -> None:
    exact = np.array([[1.0, -2e4, 3.0]])

    ExactJudge().numbers("alone", "logits", exact + [[0, 19, 0]], Eager(exact, [exact]), at(1))
    with pytest.raises(CertificateError, match="^position 0: a token that is never written may be"):
        ExactJudge().numbers("alone", "logits", exact + [[0, 21, 0]], Eager(exact, [exact]), at(1))


def test_tokens_that_are_never_written_count_in_no_loss_lead_or_size() -> None:
    theirs = NEVER + [[1e-4, 1e24, 0], [0, -1e24, 1e-4]]
    ours = NEVER + [[0, 1e25, 1e-4], [1e-4, 0, 0]]
    judge = ExactJudge()

    judge.numbers("alone", "logits", ours, Eager(NEVER, [theirs]), at(2))
    judge.check()

    (found,) = judge.judged
    assert found.exported.largest == pytest.approx(1e-4)
    assert found.eager.largest == pytest.approx(1e-4)
    assert found.floor == 4 * 2.0**-22  # rounding of 3
    assert judge.tokens_compared == 2


def test_a_token_that_is_never_written_and_may_be_is_refused() -> None:
    ours = NEVER.copy()
    ours[1, 1] = -1000.0

    with pytest.raises(CertificateError, match="^position 1: a token that is never written may be"):
        ExactJudge().numbers("alone", "logits", ours, Eager(NEVER, [NEVER]), at(2))


# Words of a refusal


def test_a_refusal_tells_place_both_losses_and_what_to_do() -> None:
    theirs = drawn(300)
    ours = 3 * theirs
    ours[77] = 9 * theirs.max()

    with pytest.raises(CertificateError) as caught:
        judge_losses(ours, theirs)

    median, own = np.median(ours), np.median(theirs)
    assert str(caught.value) == (
        f"position 77: vectors are {ours[77]:.3g} from float64, PyTorch's own {theirs[77]:.3g}; "
        f"the median of all positions (alone) is {median:.3g}, {median / own:.3g} times PyTorch's "
        f"own {own:.3g}, where 2.5 times are allowed: the graph computes something else than this "
        "checkpoint's model; if it was exported from it, please report that with the model's "
        "configuration"
    )


# Steps, and rows in a batch


def step_with(**wrong: Any) -> StepLogits:
    step = step_logits(LOGITS, 2)
    arrays = {name: np.array(v, getattr(step, name).dtype) for name, v in wrong.items()}
    return step._replace(**arrays)


def test_a_step_as_the_graph_should_give_it_is_equal_for_any_number_of_tokens() -> None:
    tied = np.array([[1.0, 3.0, 3.0, -1e30]], np.float32)

    for k in (1, 2, 4):
        for judge in (ExactJudge(), LossJudge()):
            judge.step("alone", step_logits(tied, k), Eager(tied, [tied]), at(1))
            judge.check()


@pytest.mark.parametrize("judge", [ExactJudge, LossJudge])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"top_ids": [[2, 1], [0, 1]]}, "position 0: top_ids 1 of 2 is 2, by .* logits it is 1"),
        ({"top_logits": [[3, 2], [5, 4.5]]}, "position 1: top_logits 2 of 2 is 4.5, .* it is 4"),
        ({"top_logprobs": [[3, 2], [5, 4]]}, "position 0: top_logprobs 1 of 2 is 3, .* it is -0.4"),
    ],
)
def test_likeliest_tokens_that_do_not_follow_from_the_logits_are_refused(
    judge: type[Judge], wrong: dict[str, list[list[float]]], message: str
) -> None:
    with pytest.raises(CertificateError, match=message):
        judge().step("alone", step_with(**wrong), Eager(LOGITS, [LOGITS]), at(2))


def test_equal_logits_are_given_with_the_lower_id_first() -> None:
    tied = np.array([[1.0, 3.0, 3.0]], np.float32)
    other = step_logits(tied, 1)._replace(top_ids=np.array([[2]]))

    with pytest.raises(CertificateError, match="top_ids 1 of 1 is 2"):
        ExactJudge().step("alone", other, Eager(tied, [tied]), at(1))


def test_log_probabilities_are_judged_as_logits_are() -> None:
    """They may not be those of the graph's own logits to the last bit, but hardly differ."""
    rng = np.random.default_rng(0)
    exact = rng.normal(size=(500, 20)) * 3
    own = exact.astype(np.float32)
    step = step_logits(own, 3)
    off = step._replace(top_logprobs=step.top_logprobs + np.float32(2e-5))
    judge = ExactJudge()

    judge.step("alone", step, Eager(exact, [own]), at(500))
    judge.check()
    judge.step("batches", off, Eager(exact, [own]), at(500))

    with pytest.raises(CertificateError, match=r"log-probabilities are .* \(batches\)"):
        judge.check()


def test_one_bit_is_a_difference_between_a_row_alone_and_in_a_batch() -> None:
    batched = LOGITS.copy()
    batched[1, 2] = np.nextafter(batched[1, 2], np.float32(1))
    judge = ExactJudge(needs_equal_bits=False)

    with pytest.raises(CertificateError, match="^position 1: the row differs by 1.4e-45 from "):
        ExactJudge().bits(batched, LOGITS, "position {}".format)
    assert not judge.bits(batched, LOGITS, "position {}".format)
    assert judge.bits(LOGITS, LOGITS, "position {}".format) and not judge.batch_invariant


def test_a_step_in_a_batch_is_compared_in_all_that_it_was_asked_for() -> None:
    alone = step_logits(LOGITS, 3)._replace(alignment=np.array([[0.5], [1.0]], np.float32))
    batched = step_logits(LOGITS, 2)._replace(alignment=np.array([[np.nan], [1.0]], np.float32))

    assert ExactJudge().step_bits(batched, alone, "position {}".format)
    for name in ("top_ids", "top_logits", "top_logprobs", "alignment"):
        array = getattr(batched, name).copy()
        array[1, 0] += 1
        other = batched._replace(**{name: array})
        with pytest.raises(CertificateError, match=f"^position 1, {name}: the row differs by 1 "):
            ExactJudge().step_bits(other, alone, "position {}".format)
        assert not LossJudge().step_bits(other, alone, "position {}".format)
