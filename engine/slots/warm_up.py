"""Runs every kind of call once before anybody is served; a package that fails at one is refused."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import numpy as np

from engine.errors import DeviceError, OutOfDeviceMemory, PackageError
from engine.package.manifest import GenerationContract
from engine.requests.request import SamplingParams
from engine.sampling.logits import StepLogits
from engine.sampling.plain import SamplingGraph, SamplingInputs, Scope
from engine.sampling.truncation import Truncations
from engine.slots.batch import Encode, PrefillChunk, RowOp, ScheduledBatch
from engine.slots.calls.source_index import group_widths
from engine.slots.runner import SlotModelRunner

_NUM_TOKENS = 4  # in a prompt
_NUM_ROWS = 3  # decoded together
_NUM_TOP = 128  # the most that a request without a top_k of its own asks for
_NOTHING = ScheduledBatch()


def warm_up(
    runner: SlotModelRunner,
    contract: GenerationContract,
    path: str | os.PathLike[str],
    *,
    progress: Callable[[str], None] = lambda line: None,
) -> None:
    """Encode, prefill and decode a few tokens in every way; the cache is empty afterwards.

    The largest steps run first on a device: the memory that kernels want is taken now or refused,
    in pieces that smaller steps fit in. Decode calls are captured, in the thread that is to
    run them: `progress` gets a line for each. Raises PackageError, saying at what, if a call fails
    or gives what no request could use; DeviceError if the device fails, OutOfDeviceMemory, saying
    how many sequences would fit, if kernels have no room beside the rows.
    """
    for what, batch in _largest(contract, runner):
        try_out(runner, contract, what, batch, path)
    for rows, k in runner.captured:
        name = f"a decode call of {rows} rows with their {_likeliest(k)}"
        started = time.perf_counter()
        step = _captured(contract, rows, k)
        try_out(runner, contract, f"capturing {name}", step, path)
        for kind in SamplingGraph if runner.has_sampling_graphs else ():
            draws = _draws(rows, k, kind)
            try_out(runner, contract, f"drawing behind {name}", step, path, draws)
        progress(f"captured {name} in {time.perf_counter() - started:.1f} s")
    for what, batch in _steps(contract, runner):
        try_out(runner, contract, what, batch, path)
    runner.reset()


def try_out(
    runner: SlotModelRunner,
    contract: GenerationContract,
    what: str,
    batch: ScheduledBatch,
    path: str | os.PathLike[str],
    draws: SamplingInputs | None = None,
) -> None:
    """Run a step; raises as `warm_up`, saying at what."""
    try:
        problem = _problem(runner.run(batch, draws), contract.vocab_size)
    except OutOfDeviceMemory as error:
        ways = runner.fewer(error.lacking)
        raise OutOfDeviceMemory(f"{path}: {what} failed: {error}; {ways}") from error
    except DeviceError:
        raise
    except Exception as error:  # onnxruntime's own have no other class in common
        problem = str(error).partition("\n")[0] or type(error).__name__
    if problem:
        raise PackageError(f"{path}: {what} failed: {problem}; export the model again")


def _largest(
    contract: GenerationContract, runner: SlotModelRunner
) -> Iterator[tuple[str, ScheduledBatch]]:
    """Yield the steps that want most memory on a device."""
    if not runner.most_tokens:
        return
    if contract.cross_cache:
        longest = contract.cross_cache.max_len
        count = max(1, min(runner.most_tokens // longest, runner.num_slots))
        ids = _ids(contract.prompt_vocab_size, longest)
        encodes = tuple(Encode(row, ids) for row in range(count))
        yield f"encoding {count} sources of {longest} tokens", _NOTHING._replace(encodes=encodes)
    ids = _ids(contract.vocab_size, min(runner.most_tokens, contract.cache.max_len))
    chunks = (PrefillChunk(0, ids, len(ids), 0),)
    step = _NOTHING._replace(row_ops=(RowOp("cut", 0, 0),), chunks=chunks, num_top=_NUM_TOP)
    yield f"a prompt of {len(ids)} tokens with all positions wanted", step


def _captured(contract: GenerationContract, num_rows: int, num_top: int) -> ScheduledBatch:
    """Return a step that decodes so many rows, all of them from their beginning."""
    return _NOTHING._replace(
        row_ops=tuple(RowOp("cut", row, row) for row in range(num_rows)),
        decode_ids=_ids(contract.vocab_size, num_rows),
        decode_sources=tuple(range(num_rows)) if contract.cross_cache else (),
        num_top=num_top,
    )


def _draws(num_rows: int, num_top: int, kind: SamplingGraph) -> SamplingInputs:
    """Return draws of all rows, from all of the likeliest tokens, by one of the graphs."""
    return SamplingInputs(
        np.arange(num_rows),
        Truncations.of([SamplingParams("sampling")] * num_rows, [num_top] * num_rows),
        np.full(num_rows, 0.5),
        np.full(num_rows, Scope.NOTHING if kind is SamplingGraph.COLUMNS else Scope.GO_ON),
        kind,
    )


def _likeliest(k: int) -> str:
    return "likeliest token" if k == 1 else f"{k} likeliest tokens"


def _steps(
    contract: GenerationContract, runner: SlotModelRunner
) -> Iterator[tuple[str, ScheduledBatch]]:
    """Yield every kind of call that the engine makes, and what it is called."""
    rows = tuple(range(min(_NUM_ROWS, runner.num_slots)))
    if contract.cross_cache:
        yield "encoding sources", _NOTHING._replace(encodes=_encodes(contract, len(rows)))
    yield from _prompts(contract, rows)
    yield "decoding one row", _decode(contract, rows[:1], 1)
    yield f"decoding {len(rows)} rows", _decode(contract, rows, _NUM_TOP)
    if contract.cross_cache:
        for width in group_widths(runner.widest_group):
            step = _decode(contract, (0,) * width, 2)
            yield f"decoding {width} sequences of one source", step


def _prompts(
    contract: GenerationContract, rows: tuple[int, ...]
) -> Iterator[tuple[str, ScheduledBatch]]:
    ids = _ids(contract.vocab_size, min(_NUM_TOKENS, contract.cache.max_len))
    for row, num_logits, wanted in ((0, 1, "one position"), (rows[-1], len(ids), "all positions")):
        source = row if contract.cross_cache else 0
        yield (
            f"a prompt of {len(ids)} tokens with {wanted} wanted",
            _NOTHING._replace(
                row_ops=(RowOp("cut", row, row),),
                chunks=(PrefillChunk(row, ids, num_logits, source),),
                num_top=num_logits,
                aligned=tuple(range(num_logits)) if contract.alignment else (),
            ),
        )


def _decode(contract: GenerationContract, sources: tuple[int, ...], num_top: int) -> ScheduledBatch:
    """Return a step that decodes a row behind a few tokens for each of these sources."""
    longest = min(_NUM_TOKENS, contract.cache.max_len - 1)
    rows = tuple(range(len(sources)))
    return _NOTHING._replace(
        row_ops=tuple(RowOp("cut", row, row, start=longest) for row in rows),
        decode_ids=_ids(contract.vocab_size, len(rows)),
        decode_sources=sources if contract.cross_cache else (),
        num_top=num_top,
        aligned=rows if contract.alignment else (),
    )


def _encodes(contract: GenerationContract, num_rows: int) -> tuple[Encode, ...]:
    """Return sources for so many rows: the last of them the longest, those before it short."""
    assert contract.cross_cache is not None
    longest = contract.cross_cache.max_len
    lengths = [min(_NUM_TOKENS, longest)] * (num_rows - 1) + [longest]
    ids = _ids(contract.prompt_vocab_size, longest)
    return tuple(Encode(row, ids[:length]) for row, length in enumerate(lengths))


def _ids(vocab_size: int, count: int) -> tuple[int, ...]:
    """Return ids of the vocabulary, its last one first."""
    return tuple((vocab_size - 1 + i) % vocab_size for i in range(count))


def _problem(step: StepLogits, vocab_size: int) -> str | None:
    """Return what is wrong with the results; of another type or shape they are not taken at all."""
    for name in ("logits", "top_logits", "top_logprobs", "alignment"):
        values = getattr(step, name)
        if values is not None and not np.isfinite(values).all():
            return f"{name} are not finite"
    drawn_ids = step.top_ids[:0] if step.drawn is None else step.drawn.ids
    for name, ids in (("top_ids", step.top_ids), ("drawn_ids", drawn_ids)):
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            return f"{name} are {ids.min()} to {ids.max()}, the vocabulary is 0 to {vocab_size - 1}"
    return None
