"""Compares a generating package with its eager model, step by step, through the engine's runner.

Every case runs alone in a clean row on one thread, then on all threads in batches of mixed lengths
whose rows still hold what others left in them, with its prompt whole and in chunks. The other side
is the eager model's plain forward pass over the whole sequence: no code of it knows of a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from engine.batch import RowOp
from engine.model_runner import SlotModelRunner
from engine.package import GenerationContract
from engine.session import Session, create_session
from exporter.cases import (
    BATCH_SIZES,
    SEED,
    Covered,
    Progress,
    Tokens,
    affordable_prompts,
    prefill_chunk,
    random_tokens,
    spread_lengths,
)
from exporter.certify_alignment import certify_alignment
from exporter.comparison import Comparison, Floats, exported_graphs
from exporter.models import GPT, EncoderDecoder

BLOCK_SIZE = 40  # cases compared together: a multiple of every batch size
MAX_STEPS = 32
WHOLE = 0  # in place of a chunk size: the prompt in one piece

_EAGER_LOGITS = 2**24  # computed at a time, to bound the memory
_LEFT_BEHIND = 1e4  # in every row of a batch, before its first sequence
_SMALL = 2**26  # bytes of a decoder's weights: below, threads gain nothing for one row


@dataclass(frozen=True)
class Case:
    """A prompt, behind a source or not, and how many tokens are to follow it."""

    source: Tokens  # empty: a model without encoder
    prompt: Tokens
    num_tokens: int

    def pieces(self, chunk: int) -> tuple[list[Tokens], Tokens]:
        """Cut the prompt as the engine does: chunks, and apart a last token that stands alone."""
        step = chunk or len(self.prompt)
        pieces = [self.prompt[i : i + step] for i in range(0, len(self.prompt), step)]
        if len(pieces[-1]) > 1:
            return pieces, ()
        return pieces[:-1], pieces[-1]

    def __str__(self) -> str:
        source = f"source of {len(self.source)} tokens, " if self.source else ""
        return f"{source}prompt of {len(self.prompt)}"


def certify_generation(
    model: nn.Module,
    contract: GenerationContract,
    directory: Path,
    samples: Sequence[Tokens],
    comparison: Comparison,
    progress: Progress,
) -> tuple[int, Covered]:
    """Compare all cases; return their number and what they covered.

    `samples` are prompts (or sources) to try besides random ones. Raises CertificateError at the
    first difference that `comparison` refuses.
    """
    num_parameters = sum(weight.numel() for weight in model.parameters())
    per_length = affordable_prompts(
        num_parameters, lambda n: _num_tokens(make_cases(contract, samples, n))
    )
    cases = make_cases(contract, samples, per_length)
    np.random.default_rng(SEED).shuffle(cases)
    certifier = _Certifier(model, contract, directory, comparison)
    starts = range(0, len(cases), BLOCK_SIZE)
    blocks = [_Block(certifier, cases[i : i + BLOCK_SIZE]) for i in starts]
    total, done = sum(block.num_runs for block in blocks), 0
    for block in blocks:
        for num_runs in block.check():
            done += num_runs
            progress(done, total)
    covered: Covered = {
        "prompt_lengths": sorted({len(case.prompt) for case in cases}),
        "batch_sizes": [1, *BATCH_SIZES],
        "prefill_chunks": [WHOLE, certifier.chunk],
        "prompts_per_length": per_length,
        "steps": max(case.num_tokens for case in cases),
        "undecided_tokens": comparison.tokens_undecided,
    }
    if contract.cross_cache:
        covered["source_lengths"] = sorted({len(case.source) for case in cases})
    if contract.alignment:
        covered["alignment_cases"] = certifier.check_alignment(cases)
    return len(cases), covered


def make_cases(
    contract: GenerationContract, samples: Sequence[Tokens], per_length: int
) -> list[Case]:
    """Return `per_length` random cases of every length that is tried, and the samples."""
    rng = np.random.default_rng(SEED)
    limit, start = contract.cache.max_len, contract.decoder_start_token_id

    def case(source: Tokens, prompt: Tokens) -> Case:
        return Case(source, prompt, min(MAX_STEPS, limit - len(prompt) + 1))

    def draw(length: int) -> Tokens:
        return random_tokens(rng, contract.vocab_size, length)

    if contract.cross_cache is None or start is None:
        lengths = [length for length in spread_lengths(limit) for _ in range(per_length)]
        return [case((), draw(length)) for length in lengths] + [case((), s) for s in samples]
    cases = [case(source, (start,)) for source in samples]
    given = cycle(spread_lengths(limit))
    for length in spread_lengths(contract.cross_cache.max_len):
        for i in range(per_length):
            # Every fourth target, and the last one, begins with given tokens, so that the decoder
            # has a prompt too.
            has_prompt = i % 4 == 3 or i == per_length - 1
            forced = draw(next(given) - 1) if has_prompt else ()
            cases.append(case(draw(length), (start, *forced)))
    return cases


def _num_tokens(cases: Sequence[Case]) -> int:
    return sum(len(case.source) + len(case.prompt) + case.num_tokens for case in cases)


def generate(
    runner: SlotModelRunner, cases: Sequence[Case], chunk: int, tokens: Sequence[Tokens] | None
) -> list[Floats]:
    """Run cases as one batch; return for each the logits [num_tokens, vocab_size] of its tokens.

    The tokens are the likeliest ones, or those given.
    """
    logits: list[list[Floats]] = [[] for _ in cases]
    cut = [case.pieces(chunk) for case in cases]
    num_decodes = [case.num_tokens - (not last) for case, (_, last) in zip(cases, cut, strict=True)]
    # Rows that end first come last: what is left of the batch is always its first rows.
    order = sorted(range(len(cases)), key=lambda i: -num_decodes[i])

    for row, i in enumerate(order):
        if cases[i].source:
            runner.encode(row, cases[i].source)
        pieces, last = cut[i]
        for piece in pieces:
            newest = runner.prefill(row, piece)[0].copy()
        if not last:
            logits[i].append(newest)

    def next_token(i: int) -> int:
        if not logits[i]:
            return cut[i][1][0]
        position = len(logits[i]) - 1
        return tokens[i][position] if tokens else int(logits[i][position].argmax())

    for step in range(max(num_decodes)):
        active = [i for i in order if num_decodes[i] > step]
        newest = runner.decode([next_token(i) for i in active])
        for i, row_logits in zip(active, newest, strict=True):
            logits[i].append(row_logits.copy())
    return [np.stack(rows) for rows in logits]


def eager_logits(
    model: nn.Module, cases: Sequence[Case], tokens: Sequence[Tokens], pad_token_id: int = 0
) -> list[Floats]:
    """Return what the eager model gives for the same tokens: [num_tokens, vocab_size] a case.

    One plain forward pass over prompt and tokens gives what the output head reads at every step.
    The head, the largest product of most models, computes only the positions that are compared.
    """
    assert isinstance(model, GPT | EncoderDecoder)
    targets = [(*case.prompt, *chosen[:-1]) for case, chosen in zip(cases, tokens, strict=True)]
    target_ids, _ = _padded(targets, pad_token_id)
    with torch.inference_mode():
        memory, mask = None, None
        if isinstance(model, EncoderDecoder):
            source_ids, mask = _padded([case.source for case in cases], pad_token_id)
            memory = model.encode(source_ids, mask)
        hidden = model.decoder.hidden_states(target_ids, memory, mask)  # [B, T, d_model]
        return [
            model.decoder.output(hidden[row, len(case.prompt) - 1 :][: case.num_tokens]).numpy()
            for row, case in enumerate(cases)
        ]


def _padded(rows: Sequence[Tokens], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Return ids [B, S], padded on the right, and the mask that tells the real ones."""
    ids = torch.full((len(rows), max(map(len, rows))), pad_token_id)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
    return ids, mask


class _Certifier:
    """The two sides, and what was found so far."""

    def __init__(
        self,
        model: nn.Module,
        contract: GenerationContract,
        directory: Path,
        comparison: Comparison,
    ) -> None:
        self.comparison = comparison
        self.model = model
        self.chunk = prefill_chunk(contract.cache.max_len)
        self.vocab_size = contract.vocab_size
        # A case alone runs on one thread, a batch on all: a row depends on neither. Where one
        # thread would take much longer, both share the sessions, and the memory of the weights.
        names = ["decoder.onnx", *(["encoder.onnx"] if contract.cross_cache else [])]
        with exported_graphs():
            on_all = [create_session(directory / name) for name in names]
            is_small = (directory / "decoder.onnx.data").stat().st_size < _SMALL
            on_one = [create_session(s.path, num_threads=1) for s in on_all] if is_small else on_all
            self._alone = SlotModelRunner(contract, *_with_encoder(on_one), num_slots=1)
            self._batch = SlotModelRunner(
                contract, *_with_encoder(on_all), num_slots=max(BATCH_SIZES)
            )
        cache = self._batch.cache
        for layer in (*cache.layers, *cache.cross_layers):
            for rows in layer:
                rows.fill(127 if rows.dtype == np.int8 else _LEFT_BEHIND)

    def run_alone(self, case: Case, chunk: int, tokens: Tokens | None) -> Floats:
        """Run a case in a row that holds zeros."""
        self._alone.cache.apply([RowOp("clear", 0, 0)])
        with exported_graphs():
            return generate(self._alone, [case], chunk, [tokens] if tokens else None)[0]

    def run_batch(self, cases: Sequence[Case], chunk: int, tokens: list[Tokens]) -> list[Floats]:
        """Run cases in rows that hold what was in them before."""
        self._batch.cache.lengths[:] = self._batch.cache.source_lengths[:] = 0
        with exported_graphs():
            return generate(self._batch, cases, chunk, tokens)

    def check_alignment(self, cases: Sequence[Case]) -> int:
        """Compare the attention to the source of some of the cases; return how many."""
        assert isinstance(self.model, EncoderDecoder), "another model has no source"
        return certify_alignment(self.model, self._batch, cases, self.chunk, self.comparison)


def _with_encoder(sessions: Sequence[Session]) -> tuple[Session, Session | None]:
    decoder, *encoder = sessions
    return decoder, encoder[0] if encoder else None


class _Block:
    """Cases whose logits are held in memory together."""

    def __init__(self, certifier: _Certifier, cases: Sequence[Case]) -> None:
        self._certifier = certifier
        self._cases = cases
        self._chunked = [i for i, case in enumerate(cases) if len(case.prompt) > certifier.chunk]
        self.num_runs = (1 + len(BATCH_SIZES)) * (len(cases) + len(self._chunked))

    def check(self) -> Iterator[int]:
        """Compare all of the block; yield the number of runs after each part."""
        certifier, cases = self._certifier, self._cases
        tokens: list[Tokens] = []
        alone = []
        for case in cases:
            logits = certifier.run_alone(case, WHOLE, None)
            tokens.append(tuple(logits.argmax(-1).tolist()))
            alone.append(logits)
            yield 1
        eager = list(self._eager(tokens))
        self._compare(range(len(cases)), WHOLE, alone, eager)
        yield from self._check_batches(range(len(cases)), WHOLE, alone, tokens)

        if self._chunked:
            members = self._chunked
            alone = [certifier.run_alone(cases[i], certifier.chunk, tokens[i]) for i in members]
            yield len(members)
            self._compare(members, certifier.chunk, alone, [eager[i] for i in members])
            chosen = [tokens[i] for i in members]
            yield from self._check_batches(members, certifier.chunk, alone, chosen)

    def _eager(self, tokens: Sequence[Tokens]) -> Iterator[Floats]:
        cases, model = self._cases, self._certifier.model
        longest = max(len(case.prompt) + case.num_tokens for case in cases)
        size = max(1, _EAGER_LOGITS // (longest * self._certifier.vocab_size))
        for i in range(0, len(cases), size):
            yield from eager_logits(model, cases[i : i + size], tokens[i : i + size])

    def _compare(
        self, members: Sequence[int], chunk: int, exported: list[Floats], eager: list[Floats]
    ) -> None:
        for i, ours, theirs in zip(members, exported, eager, strict=True):
            self._certifier.comparison.logits(ours, theirs, self._place(i, chunk, "alone"))

    def _check_batches(
        self, members: Sequence[int], chunk: int, alone: list[Floats], tokens: list[Tokens]
    ) -> Iterator[int]:
        for size in BATCH_SIZES:
            for first in range(0, len(members), size):
                part = slice(first, first + size)
                batch = [self._cases[i] for i in members[part]]
                found = self._certifier.run_batch(batch, chunk, tokens[part])
                for i, ours, solo in zip(members[part], found, alone[part], strict=True):
                    place = self._place(i, chunk, f"in a batch of {len(batch)}")
                    self._certifier.comparison.bits(ours, solo, place)
                yield len(batch)

    def _place(self, i: int, chunk: int, where: str) -> Callable[[int], str]:
        case = self._cases[i]
        how = f"prefill in chunks of {chunk}" if chunk else "whole prefill"
        return lambda step: f"{case}, {where}, {how}, step {step}"
