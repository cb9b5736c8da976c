"""Proves the graphs of a package equal to their eager model: a table of stages, each with a judge.

A format that rounds weights or cache gives something else than its model. Its graphs are proven
before they round; what they lose then is counted, and held to limits. Graphs for a device are
computed in float32 here, by the same bodies; those in float16 as they are, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.errors import CertificateError
from engine.package.graph_io import DRAW_GRAPHS
from engine.package.manifest import Answers, Certificate, PackageFormat, Precision, Proof
from exporter.checkpoint import Checkpoint
from exporter.compare.answers import compare_answers
from exporter.compare.quality import measure_text
from exporter.compare.scored_text import ScoredText
from exporter.files import scratch_directory, writing_scratch
from exporter.graphs.contracts import Contract, contract_of
from exporter.graphs.package_graphs import write_package_graphs
from exporter.graphs.target import DTYPES, target_of
from exporter.graphs.torch_export import copy_in
from exporter.prover.cases import Covered
from exporter.prover.draws import certify_draws
from exporter.prover.driver import exported_graphs
from exporter.prover.eager import EagerModel, Forward, logits_of, num_parameters
from exporter.prover.execution import Execution, OnCpu
from exporter.prover.generation_cases import Case
from exporter.prover.item_cases import draw_images, eager_inputs, random_groups
from exporter.prover.items import ItemPair, forward_of
from exporter.prover.judge import ExactJudge, Judge
from exporter.prover.loss import LossJudge, LossLimits
from exporter.prover.pair import GeneratingPair
from exporter.prover.plays import (
    Program,
    Scope,
    generation_program,
    image_program,
    text_program,
)
from exporter.prover.progress import Meter, Progress, no_progress, seconds_for
from exporter.samples import Tokens, encode_samples

# The words in front of what a stage refuses.
_UNROUNDED, _MAIN, _IN_HALF = "before anything is rounded", "", "in float16"
_PLAIN = PackageFormat()


_BYTES_PER_NUMBER = 4  # of weights at most
_SECONDS_A_LAYER = 1.3  # to be traced, and written


class UnroundedError(CertificateError):
    """The graphs of a format that rounds are not equal to the eager model before they round."""


@dataclass(frozen=True)
class Subject:
    """An eager model, and what it is tried with."""

    model: nn.Module
    contract: Contract
    samples: list[Tokens]  # prompts, sources or texts to try besides random ones
    banned: Tokens  # which the package does not write, however likely they are

    @classmethod
    def of(cls, checkpoint: Checkpoint, form: PackageFormat) -> Subject:
        """Return the subject of a package in a format."""
        contract = contract_of(checkpoint.config.model, form)
        samples = encode_samples(checkpoint.samples, checkpoint.tokenizer, contract.most_tokens)
        banned = checkpoint.config.generation.banned_tokens
        return cls(checkpoint.model.eval(), contract, samples, banned)

    @property
    def num_parameters(self) -> int:
        """How many weights the model has."""
        return num_parameters(self.model)


class Stage(NamedTuple):
    """Graphs that are played, how much, and what judges them."""

    graphs: Callable[[], AbstractContextManager[Path]]
    form: PackageFormat  # of these graphs
    judge: ExactJudge | LossJudge
    scope: Scope
    precision: Precision = "fp32"  # that the eager model runs in, beside float64


def prove(
    checkpoint: Checkpoint,
    directory: Path,
    form: PackageFormat = _PLAIN,
    *,
    proof: Proof = "standard",
    limits: LossLimits | None = None,
    text: ScoredText | None = None,
    is_proven_unrounded: bool = False,
    progress: Progress = no_progress,
) -> Certificate:
    """Compare the graphs in `directory` with the checkpoint's eager model, and return what is so.

    With `limits` the differences of a format that rounds are counted and held to them; perplexity
    and chrF are measured on `text`, too. Before it rounds such a format is proven first, unless it
    is already. Raises CertificateError at the first play in which the graphs do not compute what
    the model does, saying where; UnroundedError if that is before they round.
    """
    subject = Subject.of(checkpoint, form)
    stages = _stages(checkpoint, directory, form, proof, subject.banned)
    if is_proven_unrounded:
        del stages[_UNROUNDED]
    programs = {name: program_of(subject, stage.scope) for name, stage in stages.items()}
    work = sum(program.work for program in programs.values())
    meter = Meter(progress, work, seconds_for(work, subject.num_parameters))
    found: dict[str, Outcome] = {}
    for name, stage in stages.items():
        contract = contract_of(checkpoint.config.model, stage.form)
        shown = replace(subject, contract=contract)
        with _told_as(name), stage.graphs() as graphs:
            players = load(shown, graphs, stage.judge, OnCpu(), stage.precision)
            found[name] = play_all(players, contract, programs[name], stage.judge, meter)
    main, judge = found[_MAIN], stages[_MAIN].judge
    loss = None
    if isinstance(judge, LossJudge):
        assert limits is not None, "a format that rounds is held to some"
        quality = None
        if subject.contract.generation and text:
            quality = measure_text(subject.model, subject.contract.generation, directory, text)
        loss = judge.result(limits, quality, main.answers)
    half = stages[_IN_HALF].judge.judged if _IN_HALF in stages else ()
    return Certificate(
        cases=main.num_cases,
        tokens_compared=judge.tokens_compared,
        tokens_equal=judge.tokens_equal,
        judged=judge.judged,
        # On a device the bits are others, and shown there.
        batch_invariant=judge.batch_invariant and target_of(form).runs_here,
        proof=proof,
        dtype=str(form),
        reference="float64" if main.has_float64 else "mean of runs",
        half=half,
        largest_float16=found[_IN_HALF].largest_float16 if _IN_HALF in found else None,
        answers=main.answers,
        loss=loss,
        covered=main.covered,
    )


def expected_seconds(checkpoint: Checkpoint, form: PackageFormat, proof: Proof) -> float:
    """Return about how long an export takes that has loaded its checkpoint."""
    subject = Subject.of(checkpoint, form)
    stages = _stages(checkpoint, checkpoint.path, form, proof, subject.banned)
    work = sum(program_of(subject, stage.scope).work for stage in stages.values())
    config = checkpoint.config.model
    layers = config.num_encoder_layers + config.num_decoder_layers
    traced = 1 + sum(stage.form != form for stage in stages.values())
    return _SECONDS_A_LAYER * layers * traced + seconds_for(work, subject.num_parameters)


@contextmanager
def _told_as(name: str) -> Iterator[None]:
    try:
        yield
    except CertificateError as error:
        if not name:
            raise
        kind = UnroundedError if name == _UNROUNDED else CertificateError
        raise kind(f"{name}: {error}") from error


def _stages(
    checkpoint: Checkpoint, directory: Path, form: PackageFormat, proof: Proof, banned: Tokens
) -> dict[str, Stage]:
    """Return the table of a format: what is proven, by the words in front of what is refused."""
    few = proof == "quick"
    scope, runs_here = Scope(proof, few=few), target_of(form).runs_here
    plain = PackageFormat(form.target)
    in_it = _runnable(form)
    exact = partial(ExactJudge, banned=banned, needs_equal_bits=runs_here)
    graphs = partial(_graphs, checkpoint, directory, form)
    stages = {}
    if form.is_lossy:
        stages[_UNROUNDED] = Stage(partial(graphs, plain), plain, exact(), Scope("quick", few=few))
    judge = LossJudge(banned=banned) if form.is_lossy else exact()
    stages[_MAIN] = Stage(partial(graphs, in_it), in_it, judge, scope)
    if form.has_half_stage:
        in_half = exact(precision="fp16", needs_equal_bits=False)
        only_blocks = replace(scope, blocks_only=True)
        stages[_IN_HALF] = Stage(partial(graphs, form), form, in_half, only_blocks, "fp16")
    return stages


def _runnable(form: PackageFormat) -> PackageFormat:
    """Return the format in which a CPU computes graphs: their own, or the same in float32.

    Graphs that round further in float16 run as they are.
    """
    if form.precision == "fp32" or (form.precision == "fp16" and form.is_lossy):
        return form
    weights = "fp32" if form.weights == form.precision else form.weights
    kv_cache = "fp32" if form.kv_cache == form.precision else form.kv_cache
    return PackageFormat(form.target, "fp32", weights, kv_cache)


@contextmanager
def _graphs(
    checkpoint: Checkpoint, directory: Path, form: PackageFormat, in_it: PackageFormat
) -> Iterator[Path]:
    """Give the graphs in `directory`, or twins of them: the same bodies with other numbers."""
    if in_it == form:
        yield directory
        return
    bodies, model = target_of(form).functions[form.precision], checkpoint.model
    with scratch_directory("twin") as twins:
        with writing_scratch(num_parameters(model) * _BYTES_PER_NUMBER):
            write_package_graphs(checkpoint, in_it, twins, functions=bodies, draws=False)
        for draws in DRAW_GRAPHS:  # the package's own are proven
            if (directory / draws).exists():
                shutil.copy(directory / draws, twins)
        yield twins


class Outcome(NamedTuple):
    """What plays came to."""

    num_cases: int
    covered: Covered
    has_float64: bool
    largest_float16: float | None  # number that the eager model computes in float16, if it does
    answers: Answers | None = None  # of a one-pass model


Players = GeneratingPair | ItemPair


def program_of(subject: Subject, scope: Scope, players: Players | None = None) -> Program:
    """Return what is played of a model, on a CPU or by players that were loaded elsewhere."""
    contract, samples = subject.contract, subject.samples
    if contract.generation:
        own: dict[str, Any] = {}
        if isinstance(players, GeneratingPair):
            own = {"num_rows": players.num_rows, "buckets": players.batch.buckets}
        return generation_program(
            contract.generation, subject.num_parameters, samples, subject.banned, scope, **own
        )
    if contract.encoding:
        return text_program(contract.encoding, samples, scope)
    assert contract.image is not None, "a model generates, encodes text, or sees images"
    return image_program(contract.image, subject.num_parameters, scope)


def load(
    subject: Subject,
    directory: Path,
    judge: Judge,
    execution: Execution,
    precision: Precision = "fp32",
) -> Players:
    """Load graphs, and set the eager model beside them, which runs in a type besides float64."""
    model, contract = subject.model, subject.contract
    own = model if precision == "fp32" else copy_in(DTYPES[precision], model)
    eager = EagerModel.of(model, own, _probe(contract))
    with exported_graphs():
        if contract.generation:
            return GeneratingPair(eager, contract.generation, directory, judge, execution)
        return ItemPair(eager, execution.load_session(directory), judge)


def _probe(contract: Contract) -> Forward:
    """Return what shows whether a model runs in a type."""
    if contract.generation:
        has_source = contract.generation.cross_cache is not None
        start = contract.generation.decoder_start_token_id or 0
        return logits_of([Case((0,) if has_source else (), (start,), 1)], [(0,)])
    if contract.encoding:
        return forward_of(eager_inputs(random_groups(contract.encoding)[0][:1]))
    assert contract.image is not None, "a model generates, encodes text, or sees images"
    return forward_of((torch.from_numpy(draw_images(contract.image, 1)),))


def play_all(
    players: Players,
    contract: Contract,
    program: Program,
    judge: ExactJudge | LossJudge,
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
            covered |= _draws(players)
    judge.check()
    if isinstance(players, ItemPair):
        covered["undecided_labels"] = judge.tokens_undecided
        answers = compare_answers(contract, players.num_items, *players.told())
        return Outcome(program.num_cases, covered, *players.eager.facts, answers)
    covered["undecided_tokens"] = judge.tokens_undecided
    return Outcome(program.num_cases, covered, *players.eager.facts)


def _draws(players: GeneratingPair) -> Covered:
    """Hold graphs for draws, if there are any, against the engine's sampler."""
    if not players.batch.has_draws:
        return {}
    return {"draws": certify_draws(players.batch, players.contract)}
