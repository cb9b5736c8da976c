"""Shows that a source is encoded to the same bits alone and in a group of sources of its length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from engine.sampling.logits import StepLogits
from exporter.certificate.cases import BATCH_SIZES, counted_length, largest_batch
from exporter.certificate.driver import Asked, Place, Replay, Runner, empty
from exporter.certificate.generation_cases import Case
from exporter.certificate.sides import Sides
from exporter.samples import Tokens

_OTHER_SIZES = (3, 4, 7)


def certify_sources(sides: Sides, sources: Sequence[Tokens]) -> list[int]:
    """Encode all in groups of their length; return how many sources there were in the groups.

    Raises CertificateError at the first difference that the comparison refuses.
    """
    by_length: dict[int, list[Tokens]] = defaultdict(list)
    for source in sources:
        by_length[len(source)].append(source)
    sizes, counted = {1}, counted_length(by_length)
    for length, members in by_length.items():
        alone = [_seen(sides, sides.alone, [source], 0)[0] for source in members]
        most = min(largest_batch(length), sides.num_rows)
        others = range(1, most + 1) if length == counted else (*_OTHER_SIZES, most)
        for numbers in _groups(len(members), most, others):
            group = [members[i] for i in numbers]
            found = _seen(sides, sides.batch, group, sides.num_rows - len(group))
            for i, number in enumerate(numbers):
                _check(sides, found[i], alone[number], group[i], f"number {i + 1} of {len(group)}")
            sizes.add(len(group))
    return sorted(sizes)


def _check(sides: Sides, found: StepLogits, alone: StepLogits, source: Tokens, which: str) -> None:
    """Hold what one token sees of a source against what it sees of it alone.

    Where a format may depend on the group and does, it is held against the eager model.
    """
    case, how = _case(sides, source), f"encoded as {which} in one step"
    if not sides.comparison.step_bits(found, alone, lambda _: f"{case}, {how}"):
        (eager,) = sides.eager([case], [(int(found.top_ids[0, 0]),)])
        with sides.comparison.copies():  # a source comes in many groups
            sides.compare(found, eager, case, how)


def _groups(count: int, most: int, others: Iterable[int]) -> Iterator[list[int]]:
    """Yield groups of `count` members, and of `others` in which they come several times."""
    for size in BATCH_SIZES:
        if size <= most:
            for first in range(0, count, size):
                yield list(range(first, min(first + size, count)))
    for size in others:
        if size <= most:
            yield [i % count for i in range(size)]


def _seen(sides: Sides, runner: Runner, sources: Sequence[Tokens], first: int) -> list[StepLogits]:
    """Encode sources in one step, into rows from `first` on; return what one token sees of each."""
    cases = [_case(sides, source) for source in sources]
    replay = Replay(runner, cases, Asked())
    empty(runner, has_source=True)
    rows = range(first, first + len(sources))
    replay.encode([Place(i, row) for i, row in enumerate(rows)])
    replay.decode(rows)
    return [replay.seen(i) for i in range(len(sources))]


def _case(sides: Sides, source: Tokens) -> Case:
    start = sides.contract.decoder_start_token_id
    assert start is not None, "an encoder-decoder has it"
    return Case(source, (start,), 1)
