"""Where the graphs of a package are run to be compared, and in which shapes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.device import CudaDevice
from engine.model_runner import SlotModelRunner
from engine.package import GenerationContract
from engine.session import Session, create_session
from engine.threads import decoder_threads
from exporter.cases import MOST_ROWS

_SMALL = 2**26  # bytes of a decoder's weights: below, threads gain nothing for one row


@dataclass(frozen=True)
class Execution:
    """The CPU with calls of any number of rows, or calls that are padded to one of `buckets`."""

    buckets: tuple[int, ...] = ()  # rising; the last is the number of rows of the cache
    device: CudaDevice | None = None

    @property
    def num_rows(self) -> int:
        """How many rows a batch may have."""
        return self.buckets[-1] if self.buckets else MOST_ROWS

    def load_runners(
        self, contract: GenerationContract, directory: Path
    ) -> tuple[SlotModelRunner, SlotModelRunner]:
        """Load the graphs of a generating model; return a runner for batches, one for a row alone.

        Without buckets a case alone runs on one thread, a batch on all that the engine would take:
        a row depends on neither. Where one thread would take much longer, both share the graphs,
        and their memory. With buckets a row alone is the only one that counts of a padded call.
        """
        if self.buckets:
            batch = load_runner(contract, directory, decoder_threads(contract), self.num_rows)
            return batch, batch
        batch = load_runner(contract, directory, decoder_threads(contract), self.num_rows)
        if (directory / "decoder.onnx.data").stat().st_size < _SMALL:
            return batch, load_runner(contract, directory, 1, 1)
        return batch, batch.beside(num_slots=1)

    def load_session(self, directory: Path) -> Session:
        """Load the graph of a one-pass model."""
        return create_session(directory / "model.onnx")


def load_runner(
    contract: GenerationContract, directory: Path, num_threads: int, num_slots: int
) -> SlotModelRunner:
    """Load the graphs for a CPU as the engine does."""
    encoder = directory / "encoder.onnx" if contract.cross_cache else None
    decoder = directory / "decoder.onnx"
    return SlotModelRunner.load(
        contract, decoder, encoder, num_slots=num_slots, num_threads=num_threads
    )
