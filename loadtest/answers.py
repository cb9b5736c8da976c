"""Compares answers with what they are to be: known ones, or those to the same request alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenweir.compare import differences

from loadtest.work.ask import Answer, Ask

_MAX_SHOWN = 200  # characters of a value in a message
_MAX_KEPT = 100  # wrong answers in a report


@dataclass(frozen=True)
class KeptAnswer:
    """A request as it was sent, and its answer."""

    index: int
    turn: int
    ask: Ask
    answer: Answer
    seed: int = 0  # seed of the sampling; 0: nothing was sampled
    is_sample: bool = False  # it is to be asked again


@dataclass(frozen=True)
class WrongAnswer:
    """A difference between an answer and the expected one."""

    index: int
    field: str  # the answer's, such as "text"
    wanted: str
    got: str

    def __str__(self) -> str:
        return f"request {self.index}: {self.field} is {self.got}, not {self.wanted}"


@dataclass(frozen=True)
class Checks:
    """How many answers were compared, and which were wrong."""

    num_expected: int = 0  # compared with a known answer
    num_wrong_expected: int = 0
    num_verified: int = 0  # asked again, alone
    num_wrong_verified: int = 0
    num_unverified: int = 0  # to be asked again, but not answered or not asked
    wrong: tuple[WrongAnswer, ...] = ()  # the first of them
    num_not_compared: int = 0  # answers to requests without a known one, where others have one


def difference(index: int, wanted: Answer, got: Answer) -> WrongAnswer | None:
    """Return the first field of `wanted` that is another one in `got`, bit for bit."""
    found = next(differences(wanted, got), None)
    if found is None:
        return None
    return WrongAnswer(index, found.field, _short(found.wanted), _short(found.got))


def checks_of(
    expected: Sequence[WrongAnswer | None],
    verified: Sequence[WrongAnswer | None] = (),
    num_unverified: int = 0,
) -> Checks:
    """Return the counts; each of `expected` and `verified` stands for one comparison."""
    wrong = [one for one in (*expected, *verified) if one is not None]
    return Checks(
        num_expected=len(expected),
        num_wrong_expected=sum(one is not None for one in expected),
        num_verified=len(verified),
        num_wrong_verified=sum(one is not None for one in verified),
        num_unverified=num_unverified,
        wrong=tuple(wrong[:_MAX_KEPT]),
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
