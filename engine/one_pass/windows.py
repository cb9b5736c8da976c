"""Windows of a text that has more tokens than a model takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.requests.text import Encoding


def windows(text: Encoding, starts: range, room: int) -> Iterator[tuple[Encoding, Sequence[int]]]:
    """Yield windows as a tokenizer makes them, and the places in each that it answers for.

    `room` is how many tokens of the text are in one. A token that neighbours share is answered for
    by the window in which it stands farther from the edge.
    """
    num_tokens = text.special.count(False)
    before = (*text.special, False).index(False)  # special tokens
    behind = before + num_tokens
    half = (room - starts.step + 1) // 2
    for start in starts:
        first = half if start else 0
        last = num_tokens - start if start == starts[-1] else starts.step + half
        at, end = before + start, min(before + start + room, behind)
        parts = {
            name: values[:before] + values[at:end] + values[behind:]
            for name, values in vars(text).items()
        }
        yield Encoding(**parts), range(before + first, before + last)
