"""The beginning of a text by which a package is judged besides, as tokens.

Models give it a perplexity. A text for an encoder-decoder has lines of source, tab, target, or of
sources alone; models answer them. The text behind it may fix scales, because a package is not
judged by a text that it is made for.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from engine.errors import ConfigError
from engine.lines import BYTE_ORDER_MARK, split_lines
from engine.package.manifest import GenerationContract
from engine.requests.generation_defaults import GenerationDefaults
from exporter.checkpoint import Checkpoint
from exporter.graphs.contracts import generation_contract
from exporter.prover.generation_cases import Case, case_of
from exporter.samples import Tokens

PIECE = 128  # tokens; nothing before a piece is seen
MAX_TOKENS = 2048
MAX_LINES = 64  # that are answered
_MAX_BYTES = 2**20  # size of the file
_PER_TOKEN, _MORE = 2, 10  # most tokens of an answer, by those of its source

Pieces = Sequence[tuple[Case, Tokens]]  # cases with the tokens that follow


class Line(NamedTuple):
    """A source that models answer."""

    case: Case
    reference: str | None  # a person's text


@dataclass(frozen=True)
class ScoredText:
    """The parts of a text that are used."""

    pieces: Pieces  # given a perplexity; (): sources alone have none
    lines: Sequence[Line]  # answered; (): the model reads no source
    tokenizer: Tokenizer  # decodes answers
    behind: Sequence[tuple[Tokens, Tokens]]  # sources and targets that are neither

    @property
    def num_behind(self) -> int:
        """How many tokens stand behind what is judged, as far as they are used."""
        return sum(len(target) for _, target in self.behind)


def read_text(path: Path, checkpoint: Checkpoint) -> ScoredText:
    """Return the first MAX_TOKENS tokens of a text in pieces, and the sources in it.

    If one line has a target, those without one are left out. The text behind is as long.

    Raises ConfigError if they are none or no UTF-8, or the model has no perplexity; OSError if the
    file cannot be read.
    """
    contract = generation_contract(checkpoint.config.model)
    tokenizer, target = checkpoint.tokenizer, checkpoint.target_tokenizer
    if contract is None or tokenizer is None or target is None:
        raise ConfigError(f"{path}: only a model that generates has a perplexity; leave out --text")
    content = _read(path)
    every = (
        _pairs(contract, tokenizer, target, content)
        if contract.cross_cache
        else _plain(contract, tokenizer, content)
    )
    parts = [part for part in every if len(part[1]) > 1]
    first = _first(parts)
    pieces = [(Case(s, t[:1], len(t) - 1), t[1:]) for s, t in first]
    lines = _lines(contract, tokenizer, checkpoint.config.generation, content)
    if not pieces and not lines:
        wanted = "lines of a source, or of source, tab, target"
        wanted = wanted if contract.cross_cache else "two tokens or more"
        raise ConfigError(f"{path} has no text to measure; give a file with {wanted}")
    judged = max(len(first), len(lines))
    return ScoredText(pieces, lines, target, _first(parts[judged:]))


def _first(parts: Sequence[tuple[Tokens, Tokens]]) -> Sequence[tuple[Tokens, Tokens]]:
    """Return the first parts with MAX_TOKENS tokens to guess, or somewhat more."""
    before = accumulate((len(target) - 1 for _, target in parts), initial=0)
    return [part for part, tokens in zip(parts, before, strict=False) if tokens < MAX_TOKENS]


def _read(path: Path) -> str:
    """Return the beginning of a file, up to a whole letter."""
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES)
        is_whole = not file.read(1)
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(content, final=is_whole)
        return text.removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 at its byte {error.start}; write it in that code"
        ) from error


def _plain(
    contract: GenerationContract, tokenizer: Tokenizer, content: str
) -> Iterator[tuple[Tokens, Tokens]]:
    ids = tokenizer.encode(content).ids
    size = min(PIECE, contract.cache.max_len)
    for first in range(0, len(ids), size):
        yield (), tuple(ids[first : first + size])


def _pairs(
    contract: GenerationContract, tokenizer: Tokenizer, target_tokenizer: Tokenizer, content: str
) -> Iterator[tuple[Tokens, Tokens]]:
    start, cross = contract.decoder_start_token_id, contract.cross_cache
    assert start is not None and cross is not None, "an encoder-decoder has both"
    for line in split_lines(content):
        source, tab, target = line.partition("\t")
        source_ids = tuple(tokenizer.encode(source).ids[: cross.max_len])
        if tab and source_ids:
            target_ids = [
                i for i in target_tokenizer.encode(target).ids if i not in contract.eos_token_ids
            ]
            yield (
                source_ids,
                (start, *target_ids, *contract.eos_token_ids[:1])[: contract.cache.max_len],
            )


def _lines(
    contract: GenerationContract, tokenizer: Tokenizer, defaults: GenerationDefaults, content: str
) -> list[Line]:
    """Return the first sources, up to MAX_TOKENS: those with targets, if there are any."""
    cross, begin, banned = contract.cross_cache, defaults.forced_begin, defaults.banned_tokens
    if cross is None or len(begin) >= contract.cache.max_len:
        return []
    lines = []
    for line in split_lines(content):
        source, tab, target = line.partition("\t")
        ids = tuple(tokenizer.encode(source).ids[: cross.max_len]) if source.strip() else ()
        if ids:
            case = case_of(contract, ids, _PER_TOKEN * len(ids) + _MORE, begin, banned)
            lines.append(Line(case, target if tab else None))
    with_target = [line for line in lines if line.reference is not None]
    chosen = (with_target or lines)[:MAX_LINES]
    before = accumulate((len(line.case.source) for line in chosen), initial=0)
    return [line for line, tokens in zip(chosen, before, strict=False) if tokens < MAX_TOKENS]
