"""Compares two models that generate by what they write on lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from engine.package.manifest import GenerationContract
from exporter.checkpoint import TARGET_TOKENIZER_NAME, TOKENIZER_NAME
from exporter.compare.difference import Compared, Comparison, First
from exporter.compare.lines import Line, random_lines, read_lines, with_reference
from exporter.compare.quality import mean_exp, nats, until_end
from exporter.compare.sides import Side
from exporter.likeness import likeness
from exporter.prover.eager import Floats
from exporter.samples import Tokens

_ALIKE = ("vocab_size", "prompt_vocab_size", "decoder_start_token_id", "eos_token_ids")


def differing(one: GenerationContract, other: GenerationContract) -> list[str]:
    """Return what keeps two models from being compared token by token."""
    return [
        f"{name} ({getattr(one, name)} and {getattr(other, name)})"
        for name in _ALIKE
        if getattr(one, name) != getattr(other, name)
    ]


class Writing(Comparison[Line, Floats]):
    """Counts the tokens that the second model would write in the place of the first's."""

    def __init__(self, sides: tuple[Side, Side], text: Path | None, new: int) -> None:
        """Read `text`, with a line's reference behind a tab; without it take random tokens."""
        self.sides = sides
        path, defaults = sides[0].path, sides[0].defaults
        tokenizer = self._target = Tokenizer.from_file(str(path / TOKENIZER_NAME))
        if (target := path / TARGET_TOKENIZER_NAME).is_file():
            self._target = Tokenizer.from_file(str(target))
        self._writers = [side.writer for side in sides if side.writer]
        contracts = [side.contract.generation for side in sides if side.contract.generation]
        self._contract = _room_of_both(*contracts)
        self.items = (
            random_lines(self._contract, new, defaults)
            if text is None
            else read_lines(text, self._contract, tokenizer, self._target, new, defaults)
        )
        self.amount = sum(line.case.num_tokens for line in self.items)
        self._written: tuple[list[Tokens], list[Tokens]] = [], []
        self._nats = [0.0, 0.0]
        self._scored = 0

    def warm_up(self, side: int) -> None:
        """See Comparison."""
        self._writers[side].write([replace(self.items[0].case, num_tokens=1)])

    def size(self, item: Line) -> int:
        """See Comparison: lines of all lengths are asked together."""
        return 0

    def ask(self, side: int, items: Sequence[Line]) -> list[Floats]:
        """See Comparison."""
        return self._writers[side].write([line.case for line in items])

    def compare(
        self, items: Sequence[Line], one: Sequence[Floats], other: Sequence[Floats]
    ) -> Iterator[Compared]:
        """See Comparison; the second is asked behind the tokens of the first."""
        self._score(items)
        cases = [line.case for line in items]
        chosen = [
            [case.likeliest(rows) for case, rows in zip(cases, found, strict=True)]
            for found in (one, other)
        ]
        forced, ends = self._writers[1].follow(cases, chosen[0]), self._contract.eos_token_ids
        for i, line in enumerate(items):
            written = [until_end(ids[i], ends) for ids in chosen]
            for side in range(2):
                self._written[side].append(written[side])
            begin = line.case.num_prompt_logits - 1
            ours, theirs = (found[i][begin:][: len(written[0])] for found in (one, forced))
            likeliest = [np.array(line.case.likeliest(logits)) for logits in (ours, theirs)]
            largest = np.abs(ours.astype(np.float64) - theirs).max(axis=-1)
            yield Compared(
                likeliest[0] == likeliest[1], {"logits": largest}, self._first(line, *written)
            )

    def of_side(self, side: int) -> dict[str, Any]:
        """See Comparison."""
        texts = zip(self._texts(side), self.items, strict=True)
        pairs = [(text, line.reference) for text, line in texts if line.reference is not None]
        alike = likeness(*zip(*pairs, strict=True)) if pairs else None
        return {
            "perplexity": mean_exp(self._nats[side], self._scored) if self._scored else None,
            "chrf": alike and alike.chrf,
            "bleu": alike and alike.bleu,
        }

    def of_both(self) -> dict[str, Any]:
        """See Comparison."""
        one, other = (self._texts(side) for side in range(2))
        return {"chrf_between": likeness(other, one).chrf if any(one) else None}

    def _score(self, lines: Sequence[Line]) -> None:
        scored = [found for line in lines if (found := with_reference(line, self._contract))]
        if scored:
            cases, tokens = zip(*scored, strict=True)
            self._scored += sum(map(len, tokens))
            for side in range(2):
                rows = self._writers[side].follow(cases, tokens)
                self._nats[side] += sum(
                    float(nats(*pair).sum()) for pair in zip(rows, tokens, strict=True)
                )

    def _first(self, line: Line, one: Tokens, other: Tokens) -> First | None:
        if one == other:
            return None
        pairs = enumerate(zip(one, other, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
        texts = self._target.decode(list(one)), self._target.decode(list(other))
        return First(f"line {line.number}, token {same + 1}", texts)

    def _texts(self, side: int) -> list[str]:
        texts: list[str] = self._target.decode_batch(list(map(list, self._written[side])))
        return texts


def _room_of_both(one: GenerationContract, other: GenerationContract) -> GenerationContract:
    """Return the contract of models that agree, with room for the texts that both have room for."""
    shorter = {
        name: min(getattr(one, name), getattr(other, name), key=lambda cache: cache.max_len)
        for name in ("cache", "cross_cache")
        if getattr(one, name) is not None
    }
    return one.model_copy(update=shorter)
