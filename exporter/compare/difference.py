"""How far two models are from each other, on lines that a person gives."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import eq
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine.errors import ConfigError
from engine.package.manifest import GenerationContract
from exporter.checkpoint import TARGET_TOKENIZER_NAME, TOKENIZER_NAME
from exporter.compare.lines import (
    Line,
    contracts_agree,
    of_both,
    random_lines,
    read_lines,
    with_reference,
)
from exporter.compare.quality import mean_exp, nats, until_end
from exporter.compare.sides import (
    BATCH_SIZE,
    Progress,
    Side,
    open_side,
    other_files,
    quantiles,
    size_of,
)
from exporter.likeness import likeness
from exporter.prover.eager import Floats
from exporter.samples import Tokens


class First(NamedTuple):
    """The first line on which the models write otherwise."""

    line: int
    token: int  # the place of the first other token, from 1
    texts: tuple[str, str]


@dataclass(frozen=True)
class OfSide:
    """Measurements of one of the two models."""

    path: str
    num_bytes: int  # bytes of its files
    tokens_per_second: float  # written, eight lines beside each other
    perplexity: float | None  # None: the text has too few tokens, inf: one of them is never written
    chrf: float | None  # to references; None: there are none
    bleu: float | None


@dataclass(frozen=True)
class Difference:
    """Measurements of the second model, compared with the first."""

    lines: int
    lines_equal: int  # both write the same
    tokens: int  # that the first writes, up to its end
    tokens_equal: int  # that the second would write in their place
    logit_quantiles: dict[str, float]  # largest difference of a position, by quantile
    chrf_between: float | None  # the second's answers, to those of the first
    one: OfSide
    other: OfSide
    first: First | None

    @property
    def token_loss(self) -> float:
        """The share of tokens that the second model would not write."""
        return (self.tokens - self.tokens_equal) / self.tokens

    @property
    def chrf_loss(self) -> float:
        """Points of chrF that are lost: to references, else to what the first model writes."""
        if self.one.chrf is not None and self.other.chrf is not None:
            return self.one.chrf - self.other.chrf
        return 0.0 if self.chrf_between is None else 100.0 - self.chrf_between


def compare(
    one: Path,
    other: Path,
    text: Path | None = None,
    new: int = 32,
    progress: Progress | None = None,
) -> Difference:
    """Compare two packages, or a package and a checkpoint, by what they write, `new` tokens a line.

    `text` has a prompt or a source in every line, and behind a tab a reference; without it random
    tokens do. Raises ConfigError for models that differ in vocabulary or tokenizer, and for lines
    that they have no room for.
    """
    sides = open_side(one), open_side(other)
    contracts = sides[0].contract, sides[1].contract
    tokenizer = target = Tokenizer.from_file(str(one / TOKENIZER_NAME))
    if (path := one / TARGET_TOKENIZER_NAME).is_file():
        target = Tokenizer.from_file(str(path))
    problems = [*contracts_agree(*contracts), *other_files(one, other)]
    if problems:
        raise ConfigError(
            f"{one} and {other} differ in {', '.join(problems)}; their tokens are not the same, "
            "give two forms of one model"
        )
    contract = of_both(*contracts)
    lines = (
        random_lines(contract, new, sides[0].defaults)
        if text is None
        else read_lines(text, contract, tokenizer, target, new, sides[0].defaults)
    )
    for side in sides:  # the first call of all is slower, whoever makes it
        side.writer.write([replace(lines[0].case, num_tokens=1)])
    counts = _Counts(sides, contract, lines, target)
    for done in counts.run():
        if progress is not None:
            progress(done, len(lines))
    return counts.difference()


class _Counts:
    """Runs both models over the lines, and counts."""

    def __init__(
        self,
        sides: tuple[Side, Side],
        contract: GenerationContract,
        lines: Sequence[Line],
        target: Tokenizer,
    ) -> None:
        self._sides = sides
        self._contract = contract
        self._lines = lines
        self._target = target
        self._written: tuple[list[Tokens], list[Tokens]] = [], []
        self._seconds = [0.0, 0.0]
        self._equal = 0
        self._largest: list[NDArray[np.float64]] = []  # differences of logits, of each position
        self._nats = [0.0, 0.0]
        self._scored = 0

    def run(self) -> Iterator[int]:
        """Run both models; yield how many lines are done."""
        for first in range(0, len(self._lines), BATCH_SIZE):
            batch = self._lines[first : first + BATCH_SIZE]
            self._compare_written(batch)
            scored = [found for line in batch if (found := with_reference(line, self._contract))]
            if scored:
                cases, tokens = zip(*scored, strict=True)
                self._scored += sum(map(len, tokens))
                for i, side in enumerate(self._sides):
                    for rows, ids in zip(side.writer.follow(cases, tokens), tokens, strict=True):
                        self._nats[i] += float(nats(rows, ids).sum())
            yield first + len(batch)

    def _compare_written(self, batch: Sequence[Line]) -> None:
        cases = [line.case for line in batch]
        logits: list[list[Floats]] = []
        for i, side in enumerate(self._sides):
            started = time.perf_counter()
            logits.append(side.writer.write(cases))
            self._seconds[i] += time.perf_counter() - started
        chosen = [
            [case.likeliest(rows) for case, rows in zip(cases, found, strict=True)]
            for found in logits
        ]
        forced = self._sides[1].writer.follow(cases, chosen[0])
        ends = self._contract.eos_token_ids
        for i, line in enumerate(batch):
            tokens = until_end(chosen[0][i], ends)
            self._written[0].append(tokens)
            self._written[1].append(until_end(chosen[1][i], ends))
            begin = line.case.num_prompt_logits - 1
            one, other = (found[i][begin:][: len(tokens)] for found in (logits[0], forced))
            self._equal += sum(map(eq, line.case.likeliest(one), line.case.likeliest(other)))
            self._largest.append(np.abs(one.astype(np.float64) - other).max(axis=-1))

    def difference(self) -> Difference:
        """Return what was found."""
        texts = [self._target.decode_batch(list(map(list, ids))) for ids in self._written]
        pairs = list(zip(*self._written, strict=True))
        largest = np.concatenate(self._largest)
        return Difference(
            lines=len(self._lines),
            lines_equal=sum(one == other for one, other in pairs),
            tokens=len(largest),
            tokens_equal=self._equal,
            logit_quantiles=quantiles(largest),
            chrf_between=likeness(texts[1], texts[0]).chrf if any(texts[0]) else None,
            one=self._side(0, texts[0]),
            other=self._side(1, texts[1]),
            first=self._first(texts),
        )

    def _side(self, i: int, texts: Sequence[str]) -> OfSide:
        pairs = [
            (text, line.reference)
            for text, line in zip(texts, self._lines, strict=True)
            if line.reference is not None
        ]
        alike = likeness([t for t, _ in pairs], [r for _, r in pairs]) if pairs else None
        written = sum(line.case.num_tokens for line in self._lines)
        return OfSide(
            path=str(self._sides[i].path),
            num_bytes=size_of(self._sides[i].path),
            tokens_per_second=written / self._seconds[i],
            perplexity=mean_exp(self._nats[i], self._scored) if self._scored else None,
            chrf=None if alike is None else alike.chrf,
            bleu=None if alike is None else alike.bleu,
        )

    def _first(self, texts: Sequence[Sequence[str]]) -> First | None:
        for i, (one, other) in enumerate(zip(*self._written, strict=True)):
            if one != other:
                same = next(
                    (k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                    min(len(one), len(other)),
                )
                return First(self._lines[i].number, same + 1, (texts[0][i], texts[1][i]))
        return None
