"""Plays sources in groups of their length, which give the same bits as sources alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from engine.sampling.logits import StepLogits
from engine.slots.runner import SlotModelRunner
from exporter.prover.cases import BATCH_SIZES, counted_length, largest_batch
from exporter.prover.driver import STEP, Asked, Place, Replay, empty
from exporter.prover.generation_cases import case_of
from exporter.prover.pair import Alone, GeneratingPair
from exporter.samples import Tokens

_OTHER_SIZES = (3, 4, 7)


def play_sources(pair: GeneratingPair, sources: Sequence[Tokens], *, few: bool) -> Iterator[float]:
    """Encode all in groups of their length; yield the work of each group."""
    for members, tried in _tried(sources, pair.num_rows, few=few):
        alone = [_seen(pair, pair.alone, [source], 0)[0] for source in members]
        for numbers in tried:
            group = [members[i] for i in numbers]
            found = _seen(pair, pair.batch, group, pair.num_rows - len(group))
            for i, number in enumerate(numbers):
                how = f"encoded as number {i + 1} of {len(group)} in one step"
                case = case_of(pair.contract, group[i], 1)
                if pair.judge.step_bits(found[i], alone[number], pair.at(case, how).place):
                    continue
                # It may depend on the group, and does; a source comes in many and does not count.
                tokens = (int(found[i].top_ids[0, 0]),)
                one = Alone(case, tokens, alone[number], pair.eager_of_one(case, tokens))
                pair.take("sources in groups", found[i], one, how, counts=False)
            yield STEP + sum(map(len, group))


def group_sizes(sources: Sequence[Tokens], num_rows: int, *, few: bool) -> list[int]:
    """Return how many sources there are in the groups."""
    groups = (numbers for _, tried in _tried(sources, num_rows, few=few) for numbers in tried)
    return sorted({1, *map(len, groups)})


def _tried(
    sources: Sequence[Tokens], num_rows: int, *, few: bool
) -> Iterator[tuple[list[Tokens], list[list[int]]]]:
    """Yield the sources of each length, and the groups of them that are tried, by number."""
    by_length: dict[int, list[Tokens]] = defaultdict(list)
    for source in sources:
        by_length[len(source)].append(source)
    counted = counted_length(by_length)
    for length, members in by_length.items():
        most = min(largest_batch(length), num_rows)
        others: Iterable[int] = (*_OTHER_SIZES, most)
        if length == counted and not few:
            others = range(1, most + 1)
        yield members, list(_groups(len(members), most, others))


def _groups(count: int, most: int, others: Iterable[int]) -> Iterator[list[int]]:
    """Yield groups of `count` members, and of `others` in which they come several times."""
    for size in BATCH_SIZES:
        if size <= most:
            for first in range(0, count, size):
                yield list(range(first, min(first + size, count)))
    for size in others:
        if size <= most:
            yield [i % count for i in range(size)]


def _seen(
    pair: GeneratingPair, runner: SlotModelRunner, sources: Sequence[Tokens], first: int
) -> list[StepLogits]:
    """Encode sources in one step, into rows from `first` on; return what one token sees of each."""
    cases = [case_of(pair.contract, source, 1) for source in sources]
    replay = Replay(runner, cases, Asked())
    empty(runner, has_source=True)
    rows = range(first, first + len(sources))
    replay.encode([Place(i, row) for i, row in enumerate(rows)])
    replay.decode(rows)
    return [replay.seen(i) for i in range(len(sources))]
