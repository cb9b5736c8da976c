"""Compares what a package's graph for draws draws with what the engine's sampler does.

The draws are those of a decode call, as the engine asks for them: of every kind, in most of its
rows, with as many of the likeliest tokens as calls have.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import CertificateError
from engine.package.manifest import GenerationContract
from engine.requests.request import SamplingParams
from engine.sampling.logits import StepLogits
from engine.sampling.plain import GraphDraws
from engine.sampling.sampler import drawn_columns
from engine.sampling.truncation import Truncations
from engine.slots.batch import RowOp, ScheduledBatch
from exporter.certificate.driver import Runner, begin, run_step
from exporter.samples import SEED

NUM_DRAWS = 256

_MOST_ROWS = 8  # that attend to one source, of an encoder-decoder
_NUM_TOPS = (128, 1, 256, 16)
# Two exponentials of a number may differ in their last bit. Where a draw hangs on it, either is
# right: both limits are moved by so much.
_ROUNDING = 1e-5


def certify_draws(runner: Runner, contract: GenerationContract) -> int:
    """Compare draws behind random tokens; return how many, or raise CertificateError."""
    rng = np.random.default_rng(SEED)
    num_rows = min(_MOST_ROWS, runner.num_slots)
    begin(runner, contract)
    number, tops = 0, cycle(_NUM_TOPS)
    while number < NUM_DRAWS:
        batch = _batch(rng, contract, num_rows, next(tops))
        draws = _draws(rng, min(batch.num_top, contract.vocab_size), num_rows)
        _check(run_step(runner, batch, draws), draws)
        number += len(draws.rows)
    return number


def _batch(
    rng: np.random.Generator, contract: GenerationContract, num_rows: int, num_top: int
) -> ScheduledBatch:
    """Return a step that decodes a random token in each row, from its beginning."""
    return ScheduledBatch(
        row_ops=tuple(RowOp("cut", row, row) for row in range(num_rows)),
        decode_ids=tuple(rng.integers(0, contract.vocab_size, num_rows).tolist()),
        decode_sources=(0,) * num_rows if contract.cross_cache else (),
        num_top=num_top,
    )


def _draws(rng: np.random.Generator, num_columns: int, num_rows: int) -> GraphDraws:
    """Return draws of every kind in all rows but one, if there are others."""
    rows = np.delete(np.arange(num_rows), rng.integers(num_rows)) if num_rows > 1 else np.arange(1)
    widths = rng.integers(1, num_columns + 1, len(rows)).tolist()

    def choose(*numbers: float) -> Any:
        return numbers[rng.integers(len(numbers))]

    params = [
        SamplingParams(
            "sampling",
            temperature=choose(0.05, 0.7, 1.0, 1.9, 20.0),
            top_k=width,
            top_p=choose(1.0, 1.0, 0.95, 0.5, 0.1),
            min_p=choose(0.0, 0.0, 0.02, 0.3, 0.9),
        )
        for width in widths
    ]
    return GraphDraws(rows, Truncations.of(params, widths), rng.random(len(rows)))


def _check(step: StepLogits, draws: GraphDraws) -> None:
    """Raise CertificateError unless every row has the token that the sampler draws for it."""
    if step.drawn is None:
        raise CertificateError("the graph for draws has drawn nothing")
    columns = np.zeros((len(step.top_ids), 3), np.intp)  # that are right; else the likeliest
    with np.errstate(over="ignore"):
        for i, moved in enumerate((0.0, -_ROUNDING, _ROUNDING)):
            columns[draws.rows, i] = _columns(step, draws, moved)
    rows = np.arange(len(columns))[:, None]
    is_right = (step.top_ids[rows, columns] == step.drawn.ids[:, None]) & (
        step.top_logprobs[rows, columns] == step.drawn.logprobs[:, None]
    )
    if not is_right.any(axis=1).all():
        row = int(is_right.any(axis=1).argmin())
        raise CertificateError(
            f"a draw from the likeliest tokens: the graph draws {step.drawn.ids[row]} with "
            f"log-probability {step.drawn.logprobs[row]:.6g}, the sampler "
            f"{step.top_ids[row, columns[row, 0]]} with "
            f"{step.top_logprobs[row, columns[row, 0]]:.6g}"
        )


def _columns(step: StepLogits, draws: GraphDraws, moved: float) -> NDArray[np.intp]:
    """Return what the sampler draws where its number, or its limits, are a little off."""
    how = draws.how._replace(top_p=draws.how.top_p * (1 - moved), least=draws.how.least + moved)
    uniform = np.clip(draws.uniform + moved, 0, 1 - 2.0**-53)
    totals = np.full(len(draws.rows), np.nan)
    columns, _ = drawn_columns(step.top_logits, draws.rows, totals, uniform, how)
    return np.minimum(columns, how.num_columns - 1)
