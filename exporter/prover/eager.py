"""The eager model's numbers, in float64 and in its own type, from one plain forward pass.

No code of it knows of a cache. A model that does not run in float64 is held against the mean of
its runs with other orders of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryFile
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from exporter.files import writing_scratch
from exporter.models.attention import record_probabilities
from exporter.models.protocol import generator
from exporter.prover.arithmetic import Float16Reach, float64, reordered
from exporter.prover.generation_cases import Case
from exporter.samples import Tokens

NEVER = -1e20  # log-probabilities below are of tokens that imports keep from being written
NUM_ORDERS = 3  # orders of sums, besides that of the model as it is

Floats = NDArray[np.floating]
Forward = Callable[[nn.Module], list[Floats]]  # gives an array of positions [N, V] for each case
View = Callable[[Floats], Floats]  # the part of the numbers of positions that is compared

# A number of a row that is so many times the size of the best one below it, or of 10, is never
# chosen at any temperature, but its own rounding would hide that of all others.
_FAR, _LEAST = 1000.0, 10.0
_MOST_TOKENS = 1024  # a forward pass has them, to bound the memory
_PADDING = 32  # tokens for nobody that a pass may have
_LARGE = 2**20  # bytes of numbers that wait in a file
_CALL = 10**8  # parameters times tokens that take as long as torch's calls of a pass


@dataclass(frozen=True, eq=False)
class Eager:
    """The eager model's numbers at some positions of a case, [N, V]."""

    exact: Floats  # in float64, or the mean of the runs
    runs: Sequence[Floats]  # in its own type: as it is, and with other orders of sums
    origin: Origin | None = None  # the way to compute it again; None: it has all orders
    is_mean: bool = False  # `exact` is the mean

    def part(self, positions: slice | NDArray[np.int64]) -> Eager:
        """Return some of the positions."""
        origin = self.origin
        return replace(
            self,
            exact=self.exact[positions],
            runs=[run[positions] for run in self.runs],
            origin=origin and origin._replace(positions=origin.positions[positions]),
        )

    def losses(self, view: View) -> Floats:
        """Return the most that a run loses at each position: [N]."""
        runs, exact = [view(run) for run in self.runs], view(self.exact)
        found = np.stack([losses(run, exact) for run in runs])
        if self.is_mean:
            total, others = np.sum(runs, axis=0, dtype=np.float64), len(runs) - 1
            found = np.stack([losses(run, (total - run) / others) for run in runs])
        most: Floats = found.max(axis=0)
        return most


@dataclass(frozen=True, eq=False)
class EagerModel:
    """A model in float32, and in the type that graphs have."""

    model: nn.Module
    own: nn.Module
    has_float64: bool = True
    reach: Float16Reach | None = None  # the numbers that `own` has in float16

    @classmethod
    def of(cls, model: nn.Module, own: nn.Module, forward: Forward) -> EagerModel:
        """Return it, with what `forward` shows of whether it runs in float64."""
        is_in_float16 = any(weight.dtype == torch.float16 for weight in own.parameters())
        reach = Float16Reach() if is_in_float16 else None
        try:
            with float64():
                forward(model)
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return cls(model, own, False, reach)
        return cls(model, own, True, reach)

    @property
    def facts(self) -> tuple[bool, float | None]:
        """Return whether it runs in float64, and the largest number that it had in float16."""
        return self.has_float64, self.reach.largest if self.reach else None

    def run(self, forward: Forward, *, in_own: bool = True) -> list[Eager]:
        """Return what all cases of a forward pass give.

        Without `in_own` in float64 alone, where a format is judged by what it loses.
        """
        if not self.has_float64:
            return self.with_all_orders(forward)
        with float64():
            exact = [waiting(one) for one in forward(self.model)]
        if not in_own:
            return [Eager(one, []) for one in exact]
        with torch.no_grad(), self.reach or nullcontext():
            own = [waiting(one) for one in forward(self.own)]
        again = partial(self.with_all_orders, forward)
        return [
            Eager(one, [other], Origin(again, i, np.arange(len(one))))
            for i, (one, other) in enumerate(zip(exact, own, strict=True))
        ]

    def with_all_orders(self, forward: Forward) -> list[Eager]:
        """Return what they give in float64, and in every order of sums."""
        runs = []
        for order in range(1 + NUM_ORDERS):
            with reordered(order) if order else torch.no_grad():
                runs.append([waiting(one) for one in forward(self.own)])
        of_cases = list(zip(*runs, strict=True))
        if not self.has_float64:
            means = (np.asarray(np.mean(one, axis=0, dtype=np.float64)) for one in of_cases)
            return [Eager(m, one, is_mean=True) for m, one in zip(means, of_cases, strict=True)]
        with float64():
            exact = [waiting(one) for one in forward(self.model)]
        return [Eager(one, others) for one, others in zip(exact, of_cases, strict=True)]


class Origin(NamedTuple):
    """The case that positions come from, and the way to compute its forward pass again."""

    again: Callable[[], list[Eager]]  # with every order of sums; one for all cases of the pass
    case: int  # place in the pass
    positions: NDArray[np.int64]  # places in the case


def far_below(numbers: Floats) -> NDArray[np.bool_]:
    """Say which numbers [N, V] are too far below the best of their row to be chosen.

    They are of tokens that a bias keeps from being written: -1e9, or the least of a type.
    """
    best = numbers.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        found: NDArray[np.bool_] = numbers < best - _FAR * np.maximum(np.abs(best), _LEAST)
    return found


def losses(numbers: Floats, exact: Floats) -> Floats:
    """Return the largest difference at each position [N, V], of numbers that may be chosen: [N].

    A NaN on either side is one here.
    """
    with np.errstate(invalid="ignore"):
        differences = np.abs(numbers - exact)
    if (never := far_below(exact)).any():
        differences = np.where(never, 0, differences)
    found: Floats = differences.max(axis=-1, initial=0)
    return found


def logits_of(cases: Sequence[Case], tokens: Sequence[Tokens], pad_token_id: int = 0) -> Forward:
    """Return what gives the logits behind the positions of cases that are followed by tokens.

    The head, the largest product of most models, computes only the positions that are compared.
    """
    targets = [(*case.prompt, *chosen[:-1]) for case, chosen in zip(cases, tokens, strict=True)]
    target_ids, _ = padded(targets, pad_token_id)
    source_ids, mask = padded([case.source for case in cases], pad_token_id)

    def forward(model: nn.Module) -> list[Floats]:
        ours = generator(model)
        hidden = ours.decoder.hidden_states(target_ids, ours.encode(source_ids, mask), mask)
        parts = [
            hidden[row, case.first_logit :][: case.num_logits] for row, case in enumerate(cases)
        ]
        logits = ours.decoder.logits_in_float32(torch.cat(parts))  # the weights are read once
        return [as_array(one) for one in torch.split(logits, [len(part) for part in parts])]

    return forward


def alignment_of(case: Case, tokens: Tokens, width: int) -> Forward:
    """Return what gives the attention to the source behind each position, [N, width].

    That is the cross-attention of the last layer, mean over the heads.
    """
    target_ids = torch.tensor([(*case.prompt, *tokens[:-1])])
    source_ids = torch.tensor([case.source])

    def forward(model: nn.Module) -> list[Floats]:
        ours = generator(model)
        with record_probabilities(model.get_submodule("decoder")) as recorded:
            ours.decoder.hidden_states(target_ids, ours.encode(source_ids))
        last = [part for name, part in recorded.items() if name.endswith("cross_attention")][-1]
        attended = as_array(last.mean(dim=1)[0, case.first_logit :])  # last: (1, h, T, S)
        return [np.pad(attended, ((0, 0), (0, width - attended.shape[1])))]

    return forward


def waiting(numbers: Floats) -> Floats:
    """Return the same numbers; many of them lie in a file without a name, which ends with them."""
    if numbers.nbytes < _LARGE:
        return numbers
    with writing_scratch(), TemporaryFile() as file:
        numbers.tofile(file)
        return np.asarray(np.memmap(file, numbers.dtype, "r", shape=numbers.shape))


def alike(cases: Sequence[Case], num_weights: int) -> list[list[int]]:
    """Return the numbers of cases, those together that need little padding for one length."""
    # To read the weights once more takes about as long as some tokens; a call, as small models do.
    padding = max(_PADDING, _CALL // num_weights)
    groups: list[list[int]] = []
    for i in sorted(range(len(cases)), key=lambda i: cases[i].lengths):
        members = [*groups[-1], i] if groups else [i]
        lengths = [cases[j].lengths for j in members]
        padded = len(members) * sum(map(max, zip(*lengths, strict=True)))
        if len(members) > 1 and padded <= min(_MOST_TOKENS, sum(map(sum, lengths)) + padding):
            groups[-1] = members
        else:
            groups.append([i])
    return groups


def num_parameters(model: nn.Module) -> int:
    """Return how many weights a model has."""
    return sum(weight.numel() for weight in model.parameters())


def as_array(values: Tensor) -> Floats:
    """Return an array; NumPy lacks bfloat16."""
    array: Floats = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return array


def padded(rows: Sequence[Tokens], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Return ids (B, S), padded on the right, and the mask that tells the real ones."""
    given = [torch.tensor(row, dtype=torch.int64) for row in rows]
    ids = pad_sequence(given, batch_first=True, padding_value=pad_token_id)
    return ids, torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
