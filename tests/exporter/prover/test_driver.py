"""The certificate of a model that generates asks for steps, and for nothing else."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

from engine.package.manifest import GenerationContract, PackageFormat
from engine.sampling.logits import StepLogits
from engine.session import Session
from engine.slots.batch import ScheduledBatch
from engine.slots.runner import SlotModelRunner
from exporter.checkpoint import load_checkpoint
from exporter.graphs.package_graphs import write_graphs
from exporter.graphs.torch_export import Graphs
from exporter.progress import no_progress
from exporter.prover import driver
from exporter.prover.execution import OnCpu
from exporter.prover.judge import ExactJudge
from exporter.prover.players import ReferenceModel, load, play_all, program_of
from exporter.prover.plays.program import Scope
from exporter.prover.progress import Meter

OTHERS = {"subprocess.run", "play.run", "pair.run", "self.run"}  # the last two ask the driver
OTHERS |= {"eager.run", "self.eager.run"}
TinyGraphs = Callable[[str], tuple[Path, Graphs]]


class StepsOnly:
    """Runs steps, and has nothing that could be read or written besides."""

    def __init__(self, runner: SlotModelRunner) -> None:
        self.num_slots = runner.num_slots
        self.buckets = runner.buckets
        self.has_sampling_graphs = self.is_on_device = False
        self.run: Callable[[ScheduledBatch], StepLogits] = runner.run


class OfStepsOnly:
    """Loads graphs for a CPU, behind runners of steps only."""

    def load_runners(
        self, contract: GenerationContract, directory: Path
    ) -> tuple[StepsOnly, StepsOnly]:
        batch, alone = OnCpu().load_runners(contract, directory)
        return StepsOnly(batch), StepsOnly(alone)

    def load_session(self, directory: Path) -> Session:
        raise AssertionError("it is not a one-pass model")

    def as_options(self) -> dict[str, object]:
        raise AssertionError("there is no other process")


def test_a_certificate_is_found_by_steps_only(tiny_graphs: TinyGraphs, tmp_path: Path) -> None:
    path, graphs = tiny_graphs("encoder-decoder")
    write_graphs(graphs, tmp_path)
    reference, judge = ReferenceModel.of(load_checkpoint(path), PackageFormat()), ExactJudge()
    program = program_of(reference, Scope("quick"))

    players = load(reference, tmp_path, judge, OfStepsOnly())
    outcome = play_all(players, program, judge, Meter(no_progress, 1, 1))

    assert outcome.num_cases > 30
    assert outcome.covered["batch_sizes"] == [1, 2, 5, 8]
    assert judge.batch_invariant and judge.tokens_compared > 100


def test_graphs_are_run_by_the_driver_only() -> None:
    home = Path(driver.__file__).parent
    calls = [
        f"{path.name}:{node.lineno}: {ast.unparse(node.func)}"
        for path in home.rglob("*.py")
        if path.name != "driver.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr == "run" and ast.unparse(node.func) not in OTHERS
    ]

    assert not calls
