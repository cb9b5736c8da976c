"""Perplexity of a package and of its eager model, on the beginning of a text.

The package decodes the given tokens step by step as it does when it serves, so that a cache in
8 bits counts too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from engine.package.manifest import GenerationContract
from exporter.certificate.comparison import Floats, exported_graphs
from exporter.certificate.driver import Asked, generate
from exporter.certificate.eager import eager_logits
from exporter.certificate.execution import load_for_cpu
from exporter.certificate.scored_text import Pieces
from exporter.samples import Tokens

BATCH_SIZE = 8


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
    text: Pieces,
) -> Perplexity:
    """Measure both sides on a text."""
    exported = eager = 0.0
    with exported_graphs():
        runner = load_for_cpu(contract, directory, 0, BATCH_SIZE)
    for first in range(0, len(text), BATCH_SIZE):
        cases, tokens = zip(*text[first : first + BATCH_SIZE], strict=True)
        found = [seen.all_logits for seen in generate(runner, cases, Asked(), tokens)]
        exported += _negative_log_likelihood(found, tokens)
        for case, given in zip(cases, tokens, strict=True):
            eager += _negative_log_likelihood(eager_logits(model, [case], [given]), [given])
    num_tokens = sum(case.num_tokens for case, _ in text)
    return Perplexity(num_tokens, math.exp(exported / num_tokens), math.exp(eager / num_tokens))


def _negative_log_likelihood(logits: Sequence[Floats], tokens: Sequence[Tokens]) -> float:
    total = 0.0
    for rows, given in zip(logits, tokens, strict=True):  # [T, V]
        exact = rows.astype(np.float64)
        exact -= exact.max(axis=-1, keepdims=True)
        normalizer = np.log(np.exp(exact).sum(axis=-1))
        total += float((normalizer - exact[np.arange(len(given)), list(given)]).sum())
    return total
