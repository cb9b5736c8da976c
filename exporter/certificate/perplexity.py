"""Perplexity of a package and of its eager model, on the beginning of a text.

The package decodes the given tokens step by step as it does when it serves, so that a cache in
8 bits counts too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from engine.errors import ConfigError
from engine.package.manifest import GenerationContract
from exporter.certificate.comparison import NEVER, Floats, exported_graphs
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
    """Measure both sides on a text; ConfigError if the model can never write a token of it."""
    exported = eager = 0.0
    with exported_graphs():
        runner = load_for_cpu(contract, directory, 0, BATCH_SIZE)
    for first in range(0, len(text), BATCH_SIZE):
        cases, tokens = zip(*text[first : first + BATCH_SIZE], strict=True)
        found = [seen.all_logits for seen in generate(runner, cases, Asked(), tokens)]
        for case, given, ours in zip(cases, tokens, found, strict=True):
            (theirs,) = eager_logits(model, [case], [given])
            exported += float(nats(ours, given).sum())
            eager += float(_refuse_never(nats(theirs, given), given).sum())
    num_tokens = sum(case.num_tokens for case, _ in text)
    return Perplexity(num_tokens, mean_exp(exported, num_tokens), mean_exp(eager, num_tokens))


def nats(logits: Floats, tokens: Tokens) -> NDArray[np.float64]:
    """Return the negative log-likelihood of each token by its row of logits, [T, vocab_size]."""
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=-1, keepdims=True)
    normalizer: NDArray[np.float64] = np.log(np.exp(exact).sum(axis=-1))
    return normalizer - exact[np.arange(len(tokens)), list(tokens)]


def mean_exp(total: float, count: int) -> float:
    """Return the perplexity of `count` tokens that have `total` nats; inf above all numbers."""
    try:
        return math.exp(total / count)
    except OverflowError:
        return math.inf


def _refuse_never(found: NDArray[np.float64], tokens: Tokens) -> NDArray[np.float64]:
    worst = int(found.argmax())
    if found[worst] > -NEVER:
        raise ConfigError(
            f"the model never writes token {tokens[worst]}, so that a text with it has no "
            "perplexity; leave what becomes this token out of --text"
        )
    return found
