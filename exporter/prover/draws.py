"""Compares what a package's graphs for draws draw with what the engine's sampler does.

The draws are those of a decode call, as the engine asks for them: of every kind, in most of its
rows, with as many of the likeliest tokens as calls have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import cycle, islice, product
from typing import NamedTuple

import numpy as np

from engine.errors import CertificateError
from engine.package.graph_io import SAMPLING_GRAPHS
from engine.package.manifest import GenerationContract
from engine.requests.request import SamplingParams
from engine.sampling.logits import StepLogits
from engine.sampling.plain import (
    SampledColumns,
    SamplingBatch,
    SamplingGraph,
    SamplingInputs,
    first_columns,
)
from engine.sampling.random_stream import RandomStream, SequenceDraws
from engine.sampling.sampler import Sampler
from engine.slots.batch import RowOp, ScheduledBatch
from engine.slots.runner import SlotModelRunner
from exporter.prover.driver import begin, run_step
from exporter.samples import SEED

NUM_DRAWS = 256  # each graph

_MOST_ROWS = 8  # that attend to one source, of an encoder-decoder
# The likeliest tokens of a decode call; no draw begins with more of them than its call has.
_NUM_TOPS: Mapping[SamplingGraph, tuple[int, ...]] = {
    SamplingGraph.COLUMNS: (128, 1, 256, 16),
    SamplingGraph.ROW: (128, 1, 256, 16),
    SamplingGraph.NUCLEUS: (128, 256),
}
# Two exponentials of a number may differ in their last bit. If a draw hangs on it, either is
# right: both limits, and the number, are moved by so much.
_ROUNDING = 1e-6


class AskedDraws(NamedTuple):
    """Draws of some rows of a decode call."""

    params: list[SamplingParams]
    draws: SamplingInputs


class _Draw(NamedTuple):
    """How a token is drawn, and the number that says which."""

    params: SamplingParams
    uniform: float


def certify_draws(runner: SlotModelRunner, contract: GenerationContract) -> int:
    """Compare draws behind random tokens; return how many, or raise CertificateError."""
    rng = np.random.default_rng(SEED)
    num_rows = min(_MOST_ROWS, runner.num_slots)
    begin(runner, contract)
    number = 0
    for kind in SamplingGraph:
        num_steps = -(-NUM_DRAWS // max(1, num_rows - 1))
        for num_top in islice(cycle(_NUM_TOPS[kind]), num_steps):
            batch = ScheduledBatch(  # a random token in each row, from its beginning
                row_ops=tuple(RowOp("cut", row, row) for row in range(num_rows)),
                decode_ids=tuple(rng.integers(0, contract.vocab_size, num_rows).tolist()),
                decode_sources=(0,) * num_rows if contract.cross_cache else (),
                num_top=num_top,
            )
            vocab_size = contract.vocab_size
            asked = ask_draws(rng, num_rows, min(num_top, vocab_size), vocab_size, kind)
            check_draws(run_step(runner, batch, asked.draws), asked)
            number += len(asked.params)
    return number


def ask_draws(
    rng: np.random.Generator, num_rows: int, num_top: int, vocab_size: int, kind: SamplingGraph
) -> AskedDraws:
    """Return draws of every kind in all rows but one, if there are others."""
    rows = np.delete(np.arange(num_rows), rng.integers(num_rows)) if num_rows > 1 else np.arange(1)
    params = [_params(rng, num_top, vocab_size, kind) for _ in rows]
    uniform = rng.random(len(rows)).tolist()
    draws = _plain(rows.tolist(), params, uniform, vocab_size).for_graph(RandomStream())
    assert draws is not None
    return AskedDraws(params, draws._replace(kind=kind))


def _params(
    rng: np.random.Generator, num_top: int, vocab_size: int, kind: SamplingGraph
) -> SamplingParams:
    """Return how a token is drawn where so many of the likeliest are at hand."""

    def choose(*numbers: float) -> float:
        return numbers[rng.integers(len(numbers))]

    is_cut = kind is SamplingGraph.COLUMNS or rng.random() < 0.2
    params = SamplingParams(
        "sampling",
        temperature=choose(0.05, 0.7, 1.0, 1.0, 1.9, 20.0),
        top_k=int(rng.integers(1, num_top + 1)) if is_cut else 0,
        top_p=choose(1.0, 0.95, 0.5, 0.1) if is_cut or kind is SamplingGraph.NUCLEUS else 1.0,
        min_p=choose(0.0, 0.0, 0.02, 0.3, 0.9),
    )
    if first_columns(params, vocab_size) > num_top:
        return replace(params, top_p=1.0, min_p=0.0)
    return params


def _plain(
    rows: list[int], params: list[SamplingParams], uniform: list[float], vocab_size: int
) -> SamplingBatch:
    """Return the draws with these numbers as the sampler gets them."""
    numbers = [SequenceDraws(0, 0) for _ in rows]
    for one, number in zip(numbers, uniform, strict=True):
        one.put(0, [number])
    sampled = SampledColumns.of(range(len(rows)), params, numbers, vocab_size)
    return SamplingBatch(np.array(rows), sampled, [0] * len(rows))


def check_draws(step: StepLogits, asked: AskedDraws) -> None:
    """Raise CertificateError unless every row has the token that the sampler draws for it."""
    if step.drawn is None:
        raise CertificateError("a graph for draws has drawn nothing")
    drawn = zip(step.drawn.ids.tolist(), step.drawn.logprobs.tolist(), strict=True)
    likeliest = zip(step.top_ids[:, 0].tolist(), step.top_logprobs[:, 0].tolist(), strict=True)
    numbers = map(_Draw, asked.params, asked.draws.uniform.tolist())
    draws = dict(zip(asked.draws.rows.tolist(), numbers, strict=True))
    for row, (found, wanted) in enumerate(zip(drawn, likeliest, strict=True)):
        near: Iterator[_Draw] = iter(())
        if row in draws:
            wanted, near = _drawn_by_sampler(step, row, draws[row]), _moved(draws[row])
        if found != wanted and all(found != _drawn_by_sampler(step, row, one) for one in near):
            raise CertificateError(
                f"{SAMPLING_GRAPHS[asked.draws.kind]}: the graph draws {found[0]} with "
                f"log-probability {found[1]:.6g}, the sampler {wanted[0]} with {wanted[1]:.6g}"
            )


def _drawn_by_sampler(step: StepLogits, row: int, draw: _Draw) -> tuple[int, float]:
    plain = _plain([row], [draw.params], [draw.uniform], step.logits.shape[1])
    found = Sampler().choose(step._replace(drawn=None), plain)
    return found.token_ids[0], found.logprobs[0]


def _moved(draw: _Draw) -> Iterator[_Draw]:
    """Yield a draw with its numbers a little off."""
    params = draw.params
    for by, limits_by in product((0.0, -_ROUNDING, _ROUNDING), repeat=2):
        top_p = params.top_p if params.top_p == 1 else params.top_p * (1 - limits_by)
        moved = replace(params, top_p=top_p, min_p=params.min_p * (1 + limits_by))
        yield _Draw(moved, min(max(draw.uniform + by, 0.0), 1 - 2.0**-53))
