"""What counts as a difference between the exported graphs and the eager model."""

from __future__ import annotations

import numpy as np
import pytest
from exporter.certificate.comparison import Comparison, LossyComparison, exported_graphs

from engine.errors import CertificateError
from engine.sampling.logits import StepLogits
from engine.sampling.top_k import step_logits

LOGITS = np.array([[1.0, 3.0, 2.0], [5.0, 4.0, 0.0]], np.float32)


def place(row: int) -> str:
    return f"row {row}"


def test_equal_logits_are_counted() -> None:
    comparison = Comparison()

    comparison.logits(LOGITS + np.float32(5e-5), LOGITS, place)

    assert comparison.tokens_compared == 2
    assert comparison.max_abs_logit_diff == pytest.approx(5e-5, rel=0.01)


def test_the_first_difference_is_told_with_both_tokens() -> None:
    exported = LOGITS.copy()
    exported[1, 1] = 6.0

    with pytest.raises(CertificateError, match=r"row 1: .* is 1, the eager model's 0; .* 2, "):
        Comparison().logits(exported, LOGITS, place)


def test_a_format_that_rounds_loses_tokens_that_may_be_written() -> None:
    eager = np.array([[9.0, 3.0, 2.0], [9.0, 2.0, 3.0]], np.float32)
    rounded = np.array([[9.0, 3.0, 3.5], [9.0, 2.0, 3.5]], np.float32)
    counts = LossyComparison(), LossyComparison(banned=(0,)), LossyComparison(banned=(0, 1, 2))

    for comparison in counts:
        comparison.logits(rounded, eager, place)

    assert [(one.tokens_equal, one.tokens_compared) for one in counts] == [(2, 2), (1, 2), (0, 0)]
    assert {one.max_abs_logit_diff for one in counts} == {1.5}


def test_a_banned_token_excuses_nothing_and_is_itself_compared() -> None:
    eager = np.array([[9.0, 3.00004, 3.0]], np.float32)
    second = np.array([[9.0, 3.0, 3.00003]], np.float32)  # within the tolerance
    of_all = np.array([[3.0, 9.00003, 9.0]], np.float32)
    Comparison().logits(second, eager, place)

    with pytest.raises(CertificateError, match="best entry is 2, the eager model's 1"):
        Comparison(banned=(0,)).logits(second, eager, place)
    with pytest.raises(CertificateError, match="best entry is 2, the eager model's 1"):
        Comparison(banned=(1,)).logits(of_all[:, [0, 2, 1]], of_all, place)
    with pytest.raises(CertificateError, match="largest logit difference 0.001"):
        Comparison(banned=(0,)).logits(eager + np.float32([0.001, 0, 0]), eager, place)


def test_the_tolerance_grows_with_logits_above_16() -> None:
    small, large = LOGITS, LOGITS - np.float32(161)  # of up to 160 in the second row

    with pytest.raises(CertificateError, match="difference 0.0005, allowed 0.0001"):
        Comparison().logits(small + np.float32(5e-4), small, place)
    comparison = Comparison()
    comparison.logits(large + np.float32(5e-4), large, place)
    with pytest.raises(CertificateError, match=r"difference 0.00\d+, allowed 0.001"):
        comparison.logits(large + np.float32(2e-3), large, place)

    assert comparison.max_abs_logit == 161
    assert comparison.tolerance == pytest.approx(1e-4 * 161 / 16)


def test_alignment_that_differs_is_told_with_its_tolerance() -> None:
    eager = np.array([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]], np.float32)
    exported = eager + np.float32([[2e-5], [2e-3]])
    comparison = Comparison()

    comparison.alignment(exported[:1], eager[:1], place)
    with pytest.raises(CertificateError, match="row 1: the alignment differs by 0.002, allowed"):
        comparison.alignment(exported, eager, place)
    with pytest.raises(CertificateError, match="row 0: the alignment differs by nan"):
        comparison.alignment(eager * np.float32(np.nan), eager, place)


def test_alignment_of_a_format_with_loss_is_only_measured_but_must_be_numbers() -> None:
    eager = np.array([[0.25, 0.75, 0.0]], np.float32)
    other = np.array([[0.375, 0.625, 0.0]], np.float32)
    comparison = LossyComparison()
    assert comparison.max_abs_alignment_diff is None

    comparison.alignment(other, eager, place)

    assert comparison.max_abs_alignment_diff == 0.125
    with pytest.raises(CertificateError, match="row 0: .* not a finite number"):
        comparison.alignment(eager + np.float32(np.inf), eager, place)


@pytest.mark.parametrize("kind", [Comparison, LossyComparison])
def test_a_token_that_is_never_written_makes_no_tolerance_larger(kind: type[Comparison]) -> None:
    never = np.array([[1.0, 3.0, -1e30]], np.float32)
    comparison = kind()

    comparison.logits(never, never, place)

    assert (comparison.tolerance, comparison.max_abs_logit) == (1e-4, 3)
    if isinstance(comparison, LossyComparison):
        assert comparison.logit_std == pytest.approx(1)


def test_a_lossy_comparison_counts_what_is_lost() -> None:
    exported = LOGITS.copy()
    exported[1] = [4.0, 5.0, 0.0]
    comparison = LossyComparison()

    comparison.logits(exported, LOGITS, place)
    comparison.bits(exported, LOGITS, place)

    assert (comparison.tokens_compared, comparison.tokens_equal) == (2, 1)
    assert comparison.max_abs_logit_diff == 1
    assert comparison.mean_abs_logit_diff == pytest.approx(2 / 6)
    assert not comparison.batch_invariant


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_lossy_comparison_refuses_what_is_no_number(wrong: float) -> None:
    exported = LOGITS.copy()
    exported[1, 1] = wrong

    for compare in (LossyComparison().logits, LossyComparison().values, LossyComparison().bits):
        with pytest.raises(CertificateError, match="row 1: .* not a finite number"):
            compare(exported, LOGITS, place)


def test_the_tolerance_of_small_logits_is_the_same_for_all() -> None:
    comparison = Comparison()

    comparison.logits(LOGITS, LOGITS, place)

    assert comparison.tolerance == 1e-4


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_a_difference(wrong: float) -> None:
    exported, eager = LOGITS.copy(), LOGITS.copy()
    exported[0, 0] = eager[0, 0] = wrong

    with pytest.raises(CertificateError, match="row 0"):
        Comparison().logits(exported, eager, place)


def test_two_tokens_that_the_eager_model_does_not_tell_apart_are_not_compared() -> None:
    eager = np.array([[2.0, 2.000001, 0.0]], np.float32)
    exported = np.array([[2.000001, 2.0, 0.0]], np.float32)
    comparison = Comparison()

    comparison.logits(exported, eager, place)

    assert (comparison.tokens_compared, comparison.tokens_undecided) == (0, 1)


def test_a_model_with_one_label_is_compared() -> None:
    comparison = Comparison()

    comparison.logits(LOGITS[:, :1], LOGITS[:, :1], place)

    assert comparison.tokens_compared == 2


def test_one_bit_is_a_difference_between_a_row_alone_and_in_a_batch() -> None:
    batched = LOGITS.copy()
    batched[1, 2] = np.nextafter(batched[1, 2], np.float32(1))

    with pytest.raises(CertificateError, match="row 1: the row differs"):
        Comparison().bits(batched, LOGITS, place)


def test_embeddings_are_held_to_the_tolerance() -> None:
    Comparison().values(LOGITS + np.float32(5e-5), LOGITS, place)

    with pytest.raises(CertificateError, match="row 0: the embedding differs by 0.0002"):
        Comparison().values(LOGITS + np.float32(2e-4), LOGITS, place)


def test_a_graph_that_does_not_run_gets_no_certificate() -> None:
    with pytest.raises(CertificateError, match="cannot be run: out of bounds"), exported_graphs():
        raise RuntimeError("out of bounds\nand more")


def test_a_step_as_the_graph_should_give_it_is_equal_for_any_number_of_tokens() -> None:
    tied = np.array([[1.0, 3.0, 3.0, -1e30]], np.float32)

    for k in (1, 2, 4):
        for comparison in (Comparison(), LossyComparison()):
            comparison.step(step_logits(tied, k), tied, place)


@pytest.mark.parametrize("kind", [Comparison, LossyComparison])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"top_ids": [[2, 1], [0, 1]]}, r"row 0: top_ids 1 of 2 is 2, by .* logits it is 1"),
        ({"top_logits": [[3, 2], [5, 4.5]]}, r"row 1: top_logits 2 of 2 is 4.5, .* it is 4"),
        ({"top_logprobs": [[3, 2], [5, 4]]}, r"row 0: top_logprobs 1 of 2 is 3, .* it is -0.4"),
    ],
)
def test_likeliest_tokens_that_do_not_follow_from_the_logits_are_refused(
    kind: type[Comparison], wrong: dict[str, list[list[float]]], message: str
) -> None:
    step = step_logits(LOGITS, 2)
    arrays = {name: np.array(v, getattr(step, name).dtype) for name, v in wrong.items()}

    with pytest.raises(CertificateError, match=message):
        kind().step(step._replace(**arrays), LOGITS, place)


def test_equal_logits_are_given_with_the_lower_id_first() -> None:
    tied = np.array([[1.0, 3.0, 3.0]], np.float32)
    other = step_logits(tied, 1)._replace(top_ids=np.array([[2]]))

    with pytest.raises(CertificateError, match="top_ids 1 of 1 is 2"):
        Comparison().step(other, tied, place)


def test_a_step_in_a_batch_is_compared_in_all_that_it_was_asked_for() -> None:
    alone = step_logits(LOGITS, 3)._replace(alignment=np.array([[0.5], [1.0]], np.float32))
    batched = step_logits(LOGITS, 2)._replace(alignment=np.array([[np.nan], [1.0]], np.float32))

    assert Comparison().step_bits(batched, alone, place)
    for name in ("top_ids", "top_logits", "top_logprobs", "alignment"):
        array = getattr(batched, name).copy()
        array[1, 0] += 1
        other: StepLogits = batched._replace(**{name: array})
        with pytest.raises(CertificateError, match=f"row 1, {name}: the row differs by 1 "):
            Comparison().step_bits(other, alone, place)
        if name != "alignment":
            assert not LossyComparison().step_bits(other, alone, place)
    with pytest.raises(CertificateError, match="row 1, alignment: .* is not shares of one"):
        LossyComparison().step_bits(other, alone, place)


def test_of_a_format_that_rounds_it_is_told_how_far_an_alignment_depends_on_the_batch() -> None:
    alone = step_logits(LOGITS, 1)._replace(alignment=np.array([[0.5, 0.5]] * 2, np.float32))
    batched = alone._replace(alignment=np.array([[0.5, 0.5], [0.25, 0.75]], np.float32))
    comparison = LossyComparison()

    assert not comparison.step_bits(batched, alone, place)

    assert comparison.max_abs_alignment_diff == 0.25
    assert not comparison.batch_invariant
