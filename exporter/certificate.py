"""Proves the graphs of a package equal to their eager model: a table of stages, each with a judge.

A format that rounds weights or cache gives something else than its model. Its graphs are proven
before they round; what they lose then is counted, and held to limits. Graphs for a device are
computed in float32 here, by the same bodies; those in float16 as they are, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from engine.errors import CertificateError
from engine.machine import give_back_freed_memory
from engine.package.graph_io import SAMPLING_GRAPHS
from engine.package.manifest import Answers, Certificate, Contract, PackageFormat, Precision, Proof
from exporter.checkpoint import Checkpoint
from exporter.compare.answers import compare_answers
from exporter.compare.quality import measure_text
from exporter.compare.scored_text import ScoredText
from exporter.files import scratch_directory, writing_scratch
from exporter.graphs.contracts import contract_of
from exporter.graphs.package_graphs import write_package_graphs
from exporter.graphs.target import target_of
from exporter.progress import Progress, no_progress
from exporter.prover.eager import num_parameters
from exporter.prover.execution import OnCpu
from exporter.prover.judge import ExactJudge, Judge
from exporter.prover.loss import LossJudge, LossLimits
from exporter.prover.players import Outcome, ReferenceModel, load, play_all, program_of
from exporter.prover.plays.program import Scope
from exporter.prover.progress import Meter, seconds_for
from exporter.samples import Tokens

# The words in front of what a stage refuses.
_UNROUNDED, _MAIN, _IN_HALF = "before anything is rounded", "", "in float16"
_PLAIN = PackageFormat()
_BYTES_PER_NUMBER = 4  # weights take at most so many
_SECONDS_A_LAYER = 1.3  # to be traced, and written


class UnroundedError(CertificateError):
    """The graphs of a format that rounds are not equal to the eager model before they round."""


class Stage(NamedTuple):
    """Graphs that are played, how much, and what judges them."""

    graphs: Callable[[], AbstractContextManager[Path]]
    form: PackageFormat
    judge: Judge
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
    reference = ReferenceModel.of(checkpoint, form)
    stages = _stages(checkpoint, directory, form, proof, reference.banned)
    if is_proven_unrounded:
        del stages[_UNROUNDED]
    programs = {name: program_of(reference, stage.scope) for name, stage in stages.items()}
    work = sum(program.work for program in programs.values())
    meter = Meter(progress, work, seconds_for(work, reference.num_parameters))
    found: dict[str, Outcome] = {}
    for name, stage in stages.items():
        contract = contract_of(checkpoint.config.model, stage.form)
        shown = replace(reference, contract=contract)
        with _told_as(name), stage.graphs() as graphs:
            players = load(shown, graphs, stage.judge, OnCpu(), stage.precision)
            found[name] = play_all(players, programs[name], stage.judge, meter)
            del players  # its graphs, before others take memory
            give_back_freed_memory()
    main, judge = found[_MAIN], stages[_MAIN].judge
    answers = answers_of(main, reference.contract)
    loss = None
    if isinstance(judge, LossJudge):
        assert limits is not None, "a format that rounds is held to some"
        quality = None
        if reference.contract.generation and text:
            quality = measure_text(reference.model, reference.contract.generation, directory, text)
        loss = judge.result(limits, quality, answers)
    half = tuple(stages[_IN_HALF].judge.judged) if _IN_HALF in stages else ()
    return Certificate(
        cases=main.num_cases,
        tokens_compared=judge.tokens_compared,
        tokens_equal=judge.tokens_equal,
        judged=tuple(judge.judged),
        # On a device the bits are others, and shown there.
        batch_invariant=judge.batch_invariant and target_of(form).runs_here,
        proof=proof,
        dtype=str(form),
        reference="float64" if main.has_float64 else "mean of runs",
        half=half,
        largest_float16=found[_IN_HALF].largest_float16 if _IN_HALF in found else None,
        answers=answers,
        original=checkpoint.config.original,
        loss=loss,
        covered=main.covered,
    )


def expected_seconds(checkpoint: Checkpoint, form: PackageFormat, proof: Proof) -> float:
    """Return about how long an export takes that has loaded its checkpoint."""
    reference = ReferenceModel.of(checkpoint, form)
    stages = _stages(checkpoint, checkpoint.path, form, proof, reference.banned)
    work = sum(program_of(reference, stage.scope).work for stage in stages.values())
    config = checkpoint.config.model
    layers = config.num_encoder_layers + config.num_decoder_layers
    traced = 1 + sum(stage.form != form for stage in stages.values())
    return _SECONDS_A_LAYER * layers * traced + seconds_for(work, reference.num_parameters)


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
    """Give the graphs in `directory`, or reference graphs: the same bodies with other numbers."""
    if in_it == form:
        yield directory
        return
    bodies, model = target_of(form).functions[form.precision], checkpoint.model
    with scratch_directory("reference") as reference:
        with writing_scratch(num_parameters(model) * _BYTES_PER_NUMBER):
            write_package_graphs(checkpoint, in_it, reference, functions=bodies, draws=False)
        for draws in SAMPLING_GRAPHS:  # the package's own are proven
            if (directory / draws).exists():
                shutil.copy(directory / draws, reference)
        yield reference


def answers_of(outcome: Outcome, contract: Contract) -> Answers | None:
    """Return how far what items are told is from what the eager model tells; None: it generates."""
    if outcome.told is None:
        return None
    return compare_answers(contract, outcome.num_items, *outcome.told)
