"""Shows that a source is encoded to the same bits alone and in a group of sources of its length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from engine.sampling.logits import StepLogits
from exporter.certificate.cases import BATCH_SIZES, largest_batch
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
    sizes = {1}
    for members in by_length.values():
        alone = [_seen(sides, sides.alone, [source], 0)[0] for source in members]
        most = min(largest_batch(len(members[0])), sides.num_rows)
        for numbers in _groups(len(members), most):
            group = [members[i] for i in numbers]
            found = _seen(sides, sides.batch, group, sides.num_rows - len(group))
            for i, number in enumerate(numbers):
                sides.comparison.step_bits(found[i], alone[number], _place(group, i))
            sizes.add(len(group))
    return sorted(sizes)


def _groups(count: int, most: int) -> Iterator[list[int]]:
    """Yield groups of `count` members of every size, and some in which they come several times."""
    for size in BATCH_SIZES:
        if size <= most:
            for first in range(0, count, size):
                yield list(range(first, min(first + size, count)))
    for size in (*_OTHER_SIZES, most):
        if size <= most:
            yield [i % count for i in range(size)]


def _seen(sides: Sides, runner: Runner, sources: Sequence[Tokens], first: int) -> list[StepLogits]:
    """Encode sources in one step, into rows from `first` on; return what one token sees of each."""
    start = sides.contract.decoder_start_token_id
    assert start is not None, "an encoder-decoder has it"
    cases = [Case(source, (start,), 1) for source in sources]
    replay = Replay(runner, cases, Asked())
    empty(runner, has_source=True)
    rows = range(first, first + len(sources))
    replay.encode([Place(i, row) for i, row in enumerate(rows)])
    replay.decode(rows)
    return [replay.seen(i) for i in range(len(sources))]


def _place(group: Sequence[Tokens], i: int) -> Callable[[int], str]:
    return lambda _: (
        f"source of {len(group[0])} tokens, encoded as number {i + 1} of {len(group)} in one step"
    )
