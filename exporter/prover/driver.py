"""Plays cases through the engine's runner, one ScheduledBatch after the other, as it serves them.

The runner is asked for steps alone: rows are emptied and copied by the operations of a step, and
what they hold is seen by what they give. Items of a one-pass model are stacked as its engine does
it, and run by the graph that the engine runs.

A case has a row of the cache and, of an encoder-decoder, a row of the sources. Its prompt comes in
chunks, beside those of the other cases; then all cases decode together, one token a step. Tokens
are taken from the k likeliest that the graph gives, as the engine does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from engine.errors import CertificateError, DeviceError
from engine.one_pass.batch import Graph, stack
from engine.one_pass.item_encoder import EncodedItem
from engine.package.graph_io import LENGTHS
from engine.package.manifest import GenerationContract
from engine.sampling.logits import Floats, StepLogits
from engine.sampling.plain import SamplingInputs
from engine.slots.batch import Encode, PrefillChunk, RowOp, ScheduledBatch
from engine.slots.runner import SlotModelRunner
from exporter.prover.generation_cases import Case
from exporter.samples import Tokens

WHOLE = 0  # in place of a chunk size: the prompt in one piece

STEP = 20.0  # tokens of a prompt that take as long as a decode call

_NOTHING = ScheduledBatch()


@contextmanager
def exported_graphs() -> Iterator[None]:
    """Turn whatever goes wrong in loading or running an exported graph into CertificateError.

    But for a device that has no room or fails, which is no fault of the graph.
    """
    try:
        yield
    except DeviceError:
        raise
    except Exception as error:  # onnxruntime's own have no other class in common
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CertificateError(f"the exported graph cannot be run: {reason}") from error


@dataclass(frozen=True)
class Asked:
    """The requests to every step."""

    chunk: int = WHOLE
    num_top: int = 1
    align_every: int = 0  # the attention of every first, second, ... row of logits; 0: of none


@dataclass(frozen=True)
class Place:
    """The rows in which a case and its source are kept."""

    row: int
    source_row: int


class Replay:
    """Cases in rows of a runner, and what its steps gave for each of them."""

    def __init__(
        self,
        runner: SlotModelRunner,
        cases: Sequence[Case],
        asked: Asked,
        tokens: Sequence[Tokens] | None = None,
    ) -> None:
        """`tokens` are those that follow; without them, the likeliest ones do."""
        self._runner = runner
        self._cases = cases
        self._asked = asked
        self._tokens = tokens
        self._cut = [case.pieces(asked.chunk) for case in cases]
        self._num_decodes = [
            case.num_tokens - (not last) for case, (_, last) in zip(cases, self._cut, strict=True)
        ]
        self._steps: list[list[StepLogits]] = [[] for _ in cases]

    @property
    def order(self) -> list[int]:
        """The cases in the order of their decoding rows: those that end first come last."""
        return sorted(range(len(self._cases)), key=lambda i: -self._num_decodes[i])

    @property
    def places(self) -> list[Place]:
        """The places in which the cases decode, if nothing else is said: the first rows."""
        rows = {i: row for row, i in enumerate(self.order)}
        return [Place(rows[i], rows[i]) for i in range(len(self._cases))]

    def encode(self, places: Sequence[Place]) -> None:
        """Encode all sources in one step."""
        found = {
            place.source_row: Encode(place.source_row, case.source)
            for place, case in zip(places, self._cases, strict=True)
            if case.source
        }
        if found:
            encodes = tuple(found.values())
            _run(self._runner, _NOTHING._replace(encodes=encodes), self._asked, 0)

    def prefill(
        self,
        places: Sequence[Place],
        starts: Sequence[int] | None = None,
        *,
        beside: Sequence[int] = (),
    ) -> None:
        """Compute the prompts, from `starts` on: in every step one chunk of each.

        Rows that no case has decode the tokens `beside` in these steps, the first rows.
        """
        starts = starts or [0] * len(self._cases)
        sources = (places[0].source_row,) * len(beside) if self._cases[0].source else ()
        left = [self._chunks(i, places[i], start) for i, start in enumerate(starts)]
        while any(left):
            members = [i for i, chunks in enumerate(left) if chunks]
            chunks = tuple(left[i].pop(0) for i in members)
            num_logits = len(beside) + sum(chunk.num_logits for chunk in chunks)
            batch = _NOTHING._replace(
                chunks=chunks, decode_ids=tuple(beside), decode_sources=sources
            )
            step = _run(self._runner, batch, self._asked, num_logits)
            first = len(beside)
            for i, chunk in zip(members, chunks, strict=True):
                self._take(i, step, first, first + chunk.num_logits)
                first += chunk.num_logits

    def decode(self, source_rows: Sequence[int] | None = None) -> None:
        """Decode the tokens of all cases; case i attends to source_rows[i], else to its own row."""
        order = self.order
        sources = source_rows or [place.source_row for place in self.places]
        for number in range(max(self._num_decodes)):
            active = [i for i in order if self._num_decodes[i] > number]
            batch = _NOTHING._replace(
                decode_ids=tuple(self._next_token(i, number) for i in active),
                decode_sources=tuple(sources[i] for i in active) if self._cases[0].source else (),
            )
            step = _run(self._runner, batch, self._asked, len(active))
            for row, i in enumerate(active):
                self._take(i, step, row, row + 1)

    def seen(self, i: int) -> StepLogits:
        """Return all that was taken of case i, in order, the positions joined; at least one."""
        return joined(self._steps[i])

    def num_seen(self, i: int) -> int:
        """Return how many positions of case i have logits."""
        return sum(len(step.logits) for step in self._steps[i])

    def _chunks(self, i: int, place: Place, start: int) -> list[PrefillChunk]:
        first_wanted = len(self._cases[i].prompt) - self._cases[i].num_prompt_logits
        chunks, end = [], 0
        for piece in self._cut[i][0]:
            begin, end = end, end + len(piece)
            if begin >= start:
                num_logits = max(0, end - max(begin, first_wanted))
                chunks.append(PrefillChunk(place.row, piece, num_logits, place.source_row))
        return chunks

    def _next_token(self, i: int, number: int) -> int:
        """Return what decode call `number` takes: the prompt's last token, or a chosen one."""
        _, last = self._cut[i]
        if last and number == 0:
            return last[0]
        if self._tokens is not None:
            return self._tokens[i][number - bool(last)]
        return self._cases[i].chosen(self._steps[i][-1])[-1]

    def _take(self, i: int, step: StepLogits, first: int, last: int) -> None:
        if last > first:
            # Copied: the next step overwrites its arrays.
            self._steps[i].append(joined([part_of(step, slice(first, last))]))


def run_step(
    runner: SlotModelRunner, batch: ScheduledBatch, draws: SamplingInputs | None = None
) -> StepLogits:
    """Run a step; CertificateError if it fails."""
    with exported_graphs():
        return runner.run(batch, draws)


def change(runner: SlotModelRunner, ops: Iterable[RowOp]) -> None:
    """Change rows, in a step that computes nothing."""
    run_step(runner, _NOTHING._replace(row_ops=tuple(ops)))


def empty(runner: SlotModelRunner, *, has_source: bool) -> None:
    """Empty all rows; in memory they keep what the engine leaves there."""
    rows = range(runner.num_slots)
    ops = [RowOp("cut", row, row) for row in rows]
    change(runner, ops + [RowOp("cut_source", row, row) for row in rows if has_source])


def begin(runner: SlotModelRunner, contract: GenerationContract) -> None:
    """Empty all rows; let the first source have a token, if there are sources."""
    has_source = contract.cross_cache is not None
    empty(runner, has_source=has_source)
    if has_source:
        source = Encode(0, (contract.prompt_vocab_size - 1,))
        run_step(runner, _NOTHING._replace(encodes=(source,)))


def decode(
    runner: SlotModelRunner, tokens: Sequence[int], asked: Asked, *, has_source: bool
) -> StepLogits:
    """Decode a token in each of the first rows, and attend to the source of the same number.

    The arrays are overwritten by the next step.
    """
    rows = tuple(range(len(tokens)))
    sources = rows if has_source else ()
    batch = _NOTHING._replace(decode_ids=tuple(tokens), decode_sources=sources)
    return _run(runner, batch, asked, len(rows))


def generate(
    runner: SlotModelRunner,
    cases: Sequence[Case],
    asked: Asked,
    tokens: Sequence[Tokens] | None = None,
) -> list[StepLogits]:
    """Empty all rows, and run cases as one batch in the first ones; return what each one gave.

    `num_logits` positions a case; the tokens are the likeliest ones, or those given.
    """
    empty(runner, has_source=bool(cases[0].source))
    replay = Replay(runner, cases, asked, tokens)
    replay.encode(replay.places)
    replay.prefill(replay.places)
    replay.decode()
    return [replay.seen(i) for i in range(len(cases))]


def predict(
    graph: Graph, items: Sequence[EncodedItem], lengths: Sequence[int] = ()
) -> dict[str, Floats]:
    """Run items of one length as a batch; return what the graph has of logits and embeddings.

    `lengths` say how much of each counts, if not all: the engine pads nothing, but graphs may.
    """
    inputs = stack(items)
    if lengths:
        inputs[LENGTHS][:] = lengths
    with exported_graphs():
        return graph.run(inputs)


def joined(steps: Sequence[StepLogits]) -> StepLogits:
    """Return the positions of several steps as one."""
    attended = [step.alignment for step in steps if step.alignment is not None]
    return StepLogits(
        np.concatenate([step.logits for step in steps]),
        np.concatenate([step.top_ids for step in steps]),
        np.concatenate([step.top_logits for step in steps]),
        np.concatenate([step.top_logprobs for step in steps]),
        np.concatenate(attended) if attended else None,
    )


def part_of(seen: StepLogits, positions: slice) -> StepLogits:
    """Return some of the positions."""
    return StepLogits(
        seen.logits[positions],
        seen.top_ids[positions],
        seen.top_logits[positions],
        seen.top_logprobs[positions],
        None if seen.alignment is None else seen.alignment[positions],
    )


def _run(
    runner: SlotModelRunner, batch: ScheduledBatch, asked: Asked, num_logits: int
) -> StepLogits:
    """Run a step of which this is asked besides; the attention of rows not asked for is NaN."""
    every = asked.align_every
    aligned = tuple(range(0, num_logits, every)) if every else ()
    step = run_step(runner, batch._replace(num_top=asked.num_top, aligned=aligned))
    if step.alignment is None:
        return step
    spread = np.full((num_logits, step.alignment.shape[1]), np.nan, np.float32)
    spread[list(aligned)] = step.alignment
    return step._replace(alignment=spread)
