"""Lists what is played of a model, in the order in which most faults show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.package.manifest import EncodingContract, GenerationContract, ImageContract, Proof
from exporter.prover.cases import (
    BATCH_SIZES,
    LEVELS,
    MOST_ROWS,
    NUM_TOPS,
    Covered,
    counted_length,
    largest_batch,
    prefill_chunk,
)
from exporter.prover.driver import STEP, WHOLE
from exporter.prover.generation_cases import Case, affordable_cases, first_of_each_length
from exporter.prover.item_cases import NUM_IMAGES, draw_images, given_texts, random_groups
from exporter.prover.plays.beams import NUM_STEPS, layouts, num_beams, play_beams
from exporter.prover.plays.blocks import blocks_work, choose_aligned, play_blocks
from exporter.prover.plays.items import (
    PADDED_PER_LENGTH,
    image_batches,
    play_images,
    play_texts,
    texts_work,
)
from exporter.prover.plays.rows import (
    num_short_cases,
    play_row_counts,
    play_threads,
    row_counts,
    thread_counts,
)
from exporter.prover.plays.sources import group_sizes, play_sources
from exporter.samples import Tokens


class Play(NamedTuple):
    """Part of what is played."""

    what: str
    work: float  # about the tokens that the model computes
    run: Callable[[Any], Iterator[float]]  # with a pair; yields the work of each part that is done


@dataclass(frozen=True)
class Scope:
    """How much of a model is played."""

    proof: Proof = "standard"
    few: bool = False  # fewer widths of groups, and fewer numbers of rows
    blocks_only: bool = False


class Program(NamedTuple):
    """The plays of a model, and the cases that they cover."""

    plays: list[Play]
    num_cases: int
    covered: Covered

    @property
    def work(self) -> float:
        """The work of all plays."""
        return sum(play.work for play in self.plays)


def generation_program(
    contract: GenerationContract,
    num_parameters: int,
    samples: Sequence[Tokens],
    banned: Tokens,
    scope: Scope,
    *,
    num_rows: int = MOST_ROWS,
    buckets: Sequence[int] = (),
) -> Program:
    """Return what is played of a model that generates, in so many rows of a cache.

    `samples` are prompts or sources to try besides random ones; no `banned` token follows any.
    """
    cases = affordable_cases(contract, num_parameters, samples, scope.proof, banned)
    chunk, few = prefill_chunk(contract.cache.max_len), scope.few
    rest_in_batch = cases.rest
    if cases.per_length < LEVELS["standard"].per_length:
        # Prompts longer than a chunk count once for each length.
        rest_in_batch = [case for case in cases.rest if len(case.prompt) <= chunk]
        long = (case for case in first_of_each_length(cases.rest) if len(case.prompt) > chunk)
        rest_in_batch += long
    covered: Covered = {
        "prompt_lengths": sorted({len(case.prompt) for case in cases.all}),
        "batch_sizes": [1, *BATCH_SIZES],
        "prefill_chunks": [WHOLE, chunk],
        "prompts_per_length": cases.per_length,
        "steps": max(case.num_tokens for case in cases.all),
        "top_k": sorted({min(k, contract.vocab_size) for k in NUM_TOPS}),
    }
    if banned:
        covered["banned_tokens"] = len(banned)
    if contract.alignment:
        covered["alignment_cases"] = len(choose_aligned(cases.first))
    plays = [_blocks("the first prompts", cases.first, cases.first, chunk)]
    num_cases = len(cases.all)
    if not scope.blocks_only:
        tried, counts = layouts(num_rows, few=few), row_counts(num_rows, buckets, few=few)
        covered["beam_groups"] = sorted({width for layout in tried for _, width in layout})
        covered["row_counts"] = counts
        num_cases += num_beams(tried) + num_short_cases(num_rows)
        if contract.cross_cache:
            sources = [case.source for case in cases.all]
            covered["source_lengths"] = sorted(set(map(len, sources)))
            covered["source_groups"] = group_sizes(sources, num_rows, few=few)
            work = STEP * len(sources) + 3 * sum(map(len, sources))
            plays.append(
                Play("sources in groups", work, lambda pair: play_sources(pair, sources, few=few))
            )
        plays += [
            Play(
                "beams",
                STEP * NUM_STEPS * (num_beams(tried) + len(tried)),
                lambda pair: play_beams(pair, tried),
            ),
            Play("numbers of rows", STEP * len(counts), lambda pair: play_row_counts(pair, counts)),
        ]
    if cases.rest:
        plays.append(_blocks("all prompts", cases.rest, rest_in_batch, chunk))
    if not scope.blocks_only and not buckets:  # a device has no threads to choose
        threads = thread_counts(contract)
        covered["threads"] = threads
        num_cases += 1
        work = (1 + len(threads)) * float(contract.cache.max_len)
        plays.append(
            Play("numbers of threads", work, lambda pair: play_threads(pair, threads, few=few))
        )
    return Program(plays, num_cases, covered)


def text_program(contract: EncodingContract, samples: Sequence[Tokens], scope: Scope) -> Program:
    """Return what is played of a one-pass model that reads texts, `samples` among them."""
    groups = random_groups(contract, scope.proof)
    counted = 0 if scope.few else counted_length(group[0].length for group in groups)
    groups += [[text] for text in given_texts(samples, contract)]
    covered: Covered = {
        "lengths": sorted({group[0].length for group in groups}),
        "padded_rows": sum(min(PADDED_PER_LENGTH, len(group)) for group in groups),
        "batch_sizes": [1, *BATCH_SIZES],
        "row_counts": list(range(1, largest_batch(counted) + 1)) if counted else [1, *BATCH_SIZES],
    }
    play = Play(
        "texts",
        texts_work(groups),
        lambda pair: play_texts(pair, groups, contract.vocab_size, counted),
    )
    return Program([play], sum(map(len, groups)), covered)


def image_program(contract: ImageContract, num_parameters: int, scope: Scope) -> Program:
    """Return what is played of a model that sees images, of different brightness and contrast."""
    images = draw_images(contract, NUM_IMAGES // 2 if scope.few else NUM_IMAGES)
    sizes = [] if scope.few else image_batches(contract, num_parameters)
    covered: Covered = {
        "images": len(images),
        "batch_sizes": [1, *BATCH_SIZES],
        "row_counts": sorted({1, *BATCH_SIZES, *sizes}),
    }
    play = Play("images", float(len(images)), lambda pair: play_images(pair, images, sizes))
    return Program([play], len(images), covered)


def _blocks(what: str, cases: Sequence[Case], in_batch: Sequence[Case], chunk: int) -> Play:
    work = blocks_work(cases, in_batch, chunk)
    return Play(what, work, lambda pair: play_blocks(pair, cases, in_batch))
