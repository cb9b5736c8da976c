"""Sets a model and its graphs beside each other, and plays them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from engine.package.manifest import Contract, PackageFormat, Precision
from exporter.checkpoint import Checkpoint
from exporter.graphs.contracts import contract_of
from exporter.graphs.target import DTYPES
from exporter.graphs.torch_export import copy_in
from exporter.prover.cases import Covered
from exporter.prover.draws import certify_draws
from exporter.prover.driver import exported_graphs
from exporter.prover.eager import EagerModel, Forward, logits_of, num_parameters
from exporter.prover.execution import Execution
from exporter.prover.generation_cases import case_of
from exporter.prover.item_cases import draw_images, random_groups
from exporter.prover.judge import Judge
from exporter.prover.pair import GeneratingPair
from exporter.prover.plays.items import ItemPair, Outputs, forward_of
from exporter.prover.plays.program import (
    Program,
    Scope,
    generation_program,
    image_program,
    text_program,
)
from exporter.prover.progress import Meter
from exporter.samples import Tokens, encode_samples


@dataclass(frozen=True)
class ReferenceModel:
    """An eager model, and what it is run on."""

    model: nn.Module
    contract: Contract
    samples: list[Tokens]  # prompts, sources or texts to try besides random ones
    banned: Tokens  # which the package does not write, however likely they are

    @classmethod
    def of(cls, checkpoint: Checkpoint, form: PackageFormat) -> ReferenceModel:
        """Return the model of a package in a format."""
        contract = contract_of(checkpoint.config.model, form)
        samples = encode_samples(checkpoint.samples, checkpoint.tokenizer, contract.most_tokens)
        banned = checkpoint.config.generation.banned_tokens
        return cls(checkpoint.model.eval(), contract, samples, banned)

    @property
    def num_parameters(self) -> int:
        """How many weights the model has."""
        return num_parameters(self.model)


class Outcome(NamedTuple):
    """The outcome of plays."""

    num_cases: int
    covered: Covered
    has_float64: bool
    largest_float16: float | None  # number that the eager model computes in float16, if it does
    num_items: int = 0  # one-pass models only
    told: tuple[Outputs, Outputs] | None = None  # by the graph of these, and in float64


Players = GeneratingPair | ItemPair


def program_of(reference: ReferenceModel, scope: Scope, players: Players | None = None) -> Program:
    """Return what is played of a model, on a CPU or by players that were loaded elsewhere."""
    contract, samples = reference.contract, reference.samples
    if contract.generation:
        own: dict[str, Any] = {}
        if isinstance(players, GeneratingPair):
            own = {"num_rows": players.num_rows, "buckets": players.batch.buckets}
        return generation_program(
            contract.generation, reference.num_parameters, samples, reference.banned, scope, **own
        )
    if contract.encoding:
        return text_program(contract.encoding, samples, scope)
    assert contract.image is not None, "a model generates, encodes text, or sees images"
    return image_program(contract.image, reference.num_parameters, scope)


def load(
    reference: ReferenceModel,
    directory: Path,
    judge: Judge,
    execution: Execution,
    precision: Precision = "fp32",
) -> Players:
    """Load graphs, and set the eager model beside them, which runs in a type besides float64."""
    model, contract = reference.model, reference.contract
    own = model if precision == "fp32" else copy_in(DTYPES[precision], model)
    eager = EagerModel.of(model, own, _probe(contract))
    if contract.generation:
        return GeneratingPair(eager, contract.generation, directory, judge, execution)
    with exported_graphs():
        return ItemPair(eager, execution.load_session(directory), judge)


def _probe(contract: Contract) -> Forward:
    """Return what shows whether a model runs in a type."""
    if contract.generation:
        return logits_of([case_of(contract.generation, (0,), 1)], [(0,)])
    if contract.encoding:
        return forward_of(random_groups(contract.encoding)[0][:1])
    assert contract.image is not None, "a model generates, encodes text, or sees images"
    return forward_of(draw_images(contract.image, 1))


def play_all(
    players: Players,
    program: Program,
    judge: Judge,
    meter: Meter,
    *,
    all_at_once: bool = False,
) -> Outcome:
    """Play a program; CertificateError at the first play that the judge refuses, or for all."""
    covered = dict(program.covered)
    for play in program.plays:
        for work in play.run(players):
            meter.add(work, play.what, program.num_cases)
        if not all_at_once:
            judge.check()
        if play is program.plays[0] and isinstance(players, GeneratingPair):
            if players.batch.has_sampling_graphs:
                covered["draws"] = certify_draws(players.batch, players.contract)
    judge.check()
    if isinstance(players, ItemPair):
        covered["undecided_labels"] = judge.tokens_undecided
        facts = (*players.eager.facts, players.num_items, players.told())
        return Outcome(program.num_cases, covered, *facts)
    covered["undecided_tokens"] = judge.tokens_undecided
    return Outcome(program.num_cases, covered, *players.eager.facts)
