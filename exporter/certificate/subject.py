"""What a certificate is of: a model, what the engine knows of it, and what it is tried with."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import nn

from engine.package.manifest import PackageFormat
from exporter.checkpoint import Checkpoint
from exporter.graphs.contracts import Contract, contract_of
from exporter.samples import Tokens, encode_samples


@dataclass(frozen=True)
class Subject:
    """The eager model and the contract of its graphs."""

    model: nn.Module  # in float64, so that only the graphs' rounding counts
    contract: Contract
    samples: list[Tokens]  # prompts, sources or texts to try besides random ones
    banned: Tokens = ()  # which the package does not write, however likely they are


def subject_of(checkpoint: Checkpoint, form: PackageFormat, *, bans: bool = True) -> Subject:
    """Return the subject of a certificate for a format; without `bans`, one that bans nothing.

    The eager model's own rounding is as large as the graphs': in float64 the largest difference of
    a date model's 518 cases went from 5.4e-5 to 3.3e-5.
    """
    contract = contract_of(checkpoint.config.model, form)
    samples = encode_samples(checkpoint.samples, checkpoint.tokenizer, contract.most_tokens)
    model = copy.deepcopy(checkpoint.model).eval().double()
    banned = checkpoint.config.generation.banned_tokens if bans else ()
    return Subject(model, contract, samples, banned)
