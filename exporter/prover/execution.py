"""The device and shapes in which the graphs of a package are run to be compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.config import EngineConfig
from engine.factory import load_runner
from engine.package.graph_io import SAMPLING_GRAPHS
from engine.package.manifest import GenerationContract
from engine.package.package import Package
from engine.session import Session, create_session
from engine.slots.generation_sessions import decoder_threads
from engine.slots.runner import SlotModelRunner
from engine.slots.warm_up import warm_up
from exporter.prover.cases import MOST_ROWS

if TYPE_CHECKING:
    from engine.cuda.device import CudaDevice

_SMALL = 2**26  # bytes of a decoder's weights: below, threads gain nothing for one row


class Execution(Protocol):
    """Loads graphs where they are to be run."""

    def load_runners(
        self, contract: GenerationContract, directory: Path
    ) -> tuple[SlotModelRunner, SlotModelRunner]:
        """Load the graphs of a generating model: a runner for batches, and one for a row alone."""

    def load_session(self, directory: Path) -> Session:
        """Load the graph of a one-pass model."""

    def as_options(self) -> dict[str, Any]:
        """Return what tells exporter/prover/digest.py to run graphs likewise, for JSON."""


@dataclass(frozen=True)
class OnCpu:
    """The CPU; with `buckets` decode calls are padded to one of these numbers of rows."""

    buckets: tuple[int, ...] = ()  # rising; the last is the number of rows of the cache

    def load_runners(
        self, contract: GenerationContract, directory: Path
    ) -> tuple[SlotModelRunner, SlotModelRunner]:
        """See Execution.

        A case alone runs on one thread, a batch on all that the engine would take: a row depends on
        neither. If one thread would take much longer, both share the graphs, and their memory.
        With buckets a row alone is the only one that counts of a padded call.
        """
        threads = decoder_threads(contract)
        if self.buckets:
            batch = load_for_cpu(
                contract, directory, threads, self.buckets[-1], buckets=self.buckets
            )
            return batch, batch
        batch = load_for_cpu(contract, directory, threads, MOST_ROWS)
        if (directory / "decoder.onnx.data").stat().st_size < _SMALL:
            return batch, load_for_cpu(contract, directory, 1, 1)
        return batch, batch.beside(num_slots=1)

    def load_session(self, directory: Path) -> Session:
        """See Execution."""
        return create_session(directory / "model.onnx")

    def as_options(self) -> dict[str, Any]:
        """See Execution."""
        return {"decode_buckets": self.buckets}


@dataclass
class OnDevice:
    """A GPU, as a worker with these settings runs the package there; it is loaded once."""

    package: Package
    config: EngineConfig
    device: CudaDevice
    _runner: SlotModelRunner | None = field(default=None, init=False)
    _session: Session | None = field(default=None, init=False)

    def load_runners(
        self, contract: GenerationContract, directory: Path
    ) -> tuple[SlotModelRunner, SlotModelRunner]:
        """See Execution: a row alone is the only one that counts of a padded call."""
        assert directory == self.package.path, "what is served is compared"
        if self._runner is None:
            self._runner = load_runner(self.package, contract, self.config, self.device)
            warm_up(self._runner, contract, directory)
        self._runner.reset()
        return self._runner, self._runner

    def load_session(self, directory: Path) -> Session:
        """See Execution."""
        assert directory == self.package.path, "what is served is compared"
        if self._session is None:
            self._session = self.device.create_session(directory / "model.onnx")
        return self._session

    def as_options(self) -> dict[str, Any]:
        """See Execution."""
        names = ("max_num_seqs", "gpu_memory_utilization", "decode_buckets")
        found = {name: getattr(self.config, name) for name in names}
        return {"device": self.device.index, **found}


def load_for_cpu(
    contract: GenerationContract,
    directory: Path,
    num_threads: int,
    num_slots: int,
    *,
    buckets: tuple[int, ...] = (),
) -> SlotModelRunner:
    """Load the graphs for a CPU as the engine does."""
    encoder = directory / "encoder.onnx" if contract.cross_cache else None
    paths = [directory / name for name in SAMPLING_GRAPHS]
    sampling = None
    if all(path.exists() for path in paths):  # the package is for a GPU
        from engine.cuda.sampling_calls import sampling_calls_of

        graphs = [create_session(path, num_threads=1) for path in paths]
        sampling = sampling_calls_of(graphs, contract.vocab_size)
    return SlotModelRunner.load(
        contract,
        directory / "decoder.onnx",
        encoder,
        sampling,
        num_slots=num_slots,
        num_threads=num_threads,
        buckets=buckets,
    )
