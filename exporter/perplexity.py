"""Perplexity of a package and of its eager model, on the beginning of a text.

The package decodes the given tokens step by step as it does when it serves, so that a cache in
8 bits counts too. A text for an encoder-decoder has lines of source, tab, target.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from torch import nn

from engine.errors import CertificateError
from engine.model_runner import SlotModelRunner
from engine.package import GenerationContract
from exporter.cases import Tokens
from exporter.comparison import Floats, exported_graphs
from exporter.eager import eager_logits
from exporter.generation_cases import Case
from exporter.replay import Asked, generate

PIECE = 128  # tokens; nothing before a piece is seen
MAX_TOKENS = 2048
BATCH_SIZE = 8
_MAX_BYTES = 2**20  # of the file


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood of a token."""

    num_tokens: int
    exported: float
    eager: float

    @property
    def loss(self) -> float:
        """Return the rise, as a share of the eager model's."""
        return self.exported / self.eager - 1


def measure_perplexity(
    model: nn.Module,
    contract: GenerationContract,
    directory: Path,
    tokenizer: Tokenizer,
    text: Path,
) -> Perplexity:
    """Measure both sides on the first MAX_TOKENS tokens; CertificateError if there are none."""
    pieces = _pieces(contract, tokenizer, text)
    encoder = directory / "encoder.onnx" if contract.cross_cache else None
    exported = eager = 0.0
    with exported_graphs():
        runner = SlotModelRunner.load(
            contract, directory / "decoder.onnx", encoder, num_slots=BATCH_SIZE
        )
    for first in range(0, len(pieces), BATCH_SIZE):
        runner.reset()
        cases, tokens = zip(*pieces[first : first + BATCH_SIZE], strict=True)
        with exported_graphs():
            found = [seen.all_logits for seen in generate(runner, cases, Asked(), tokens)]
        exported += _negative_log_likelihood(found, tokens)
        for case, given in zip(cases, tokens, strict=True):
            eager += _negative_log_likelihood(eager_logits(model, [case], [given]), [given])
    num_tokens = sum(case.num_tokens for case, _ in pieces)
    return Perplexity(num_tokens, math.exp(exported / num_tokens), math.exp(eager / num_tokens))


def _pieces(
    contract: GenerationContract, tokenizer: Tokenizer, text: Path
) -> list[tuple[Case, Tokens]]:
    """Return cases with the tokens that follow, as many as MAX_TOKENS allows."""
    with text.open("rb") as file:
        content = file.read(_MAX_BYTES).decode("utf-8", errors="ignore")
    found = _pairs(contract, tokenizer, content) if contract.cross_cache else None
    pieces, num_tokens = [], 0
    for source, tokens in found or _plain(contract, tokenizer, content):
        if len(tokens) > 1 and num_tokens < MAX_TOKENS:
            pieces.append((Case(source, tokens[:1], len(tokens) - 1), tokens[1:]))
            num_tokens += len(tokens) - 1
    if not pieces:
        wanted = "lines of source, tab, target" if contract.cross_cache else "two tokens or more"
        raise CertificateError(f"{text} has no text to measure; give a file with {wanted}")
    return pieces


def _plain(
    contract: GenerationContract, tokenizer: Tokenizer, content: str
) -> Iterator[tuple[Tokens, Tokens]]:
    ids = tokenizer.encode(content).ids
    size = min(PIECE, contract.cache.max_len)
    for first in range(0, len(ids), size):
        yield (), tuple(ids[first : first + size])


def _pairs(
    contract: GenerationContract, tokenizer: Tokenizer, content: str
) -> Iterator[tuple[Tokens, Tokens]]:
    start, cross = contract.decoder_start_token_id, contract.cross_cache
    assert start is not None and cross is not None, "an encoder-decoder has both"
    for line in content.splitlines():
        source, tab, target = line.partition("\t")
        source_ids = tuple(tokenizer.encode(source).ids[: cross.max_len])
        if tab and source_ids:
            target_ids = [
                i for i in tokenizer.encode(target).ids if i not in contract.eos_token_ids
            ]
            yield (
                source_ids,
                (start, *target_ids, *contract.eos_token_ids[:1])[: contract.cache.max_len],
            )


def _negative_log_likelihood(logits: Sequence[Floats], tokens: Sequence[Tokens]) -> float:
    total = 0.0
    for rows, given in zip(logits, tokens, strict=True):  # [T, V]
        exact = rows.astype(np.float64)
        exact -= exact.max(axis=-1, keepdims=True)
        normalizer = np.log(np.exp(exact).sum(axis=-1))
        total += float((normalizer - exact[np.arange(len(given)), list(given)]).sum())
    return total
