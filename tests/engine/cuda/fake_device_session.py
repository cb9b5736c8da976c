"""Graphs on a fake device: kernels of the CPU run on its memory when their turn comes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.cuda.memory import DeviceArray
from engine.cuda.sampling_calls import sampling_calls_of
from engine.package.graph_io import SAMPLING_GRAPHS
from engine.session import NOT_CAPTURED, Session, create_session
from engine.slots.runner import SlotModelRunner
from exporter.graphs.package_graphs import write_graphs
from exporter.graphs.sampling_graphs import sampling_graphs
from tests.engine.cuda.fake_cuda import FakeCuda
from tests.engine.slots.test_model_runner import VOCAB, TinyModel

ON_HOST = ("num_top", "total_seq")

Arrays = dict[tuple[str, str], Any]  # by kind and name


class FakeDeviceSession:
    """A graph whose runs are queued on a stream; see Session."""

    def __init__(self, path: Path, cuda: FakeCuda) -> None:
        self._session = create_session(path, num_threads=1)
        self._cuda = cuda
        self.path, self.inputs, self.outputs = path, self._session.inputs, self._session.outputs
        self.captured: dict[int, Arrays] = {}
        self.replays = 0

    def bind(self) -> FakeDeviceBinding:
        return FakeDeviceBinding(self, self._session, self._cuda)

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return self._session.run(inputs)


class FakeDeviceBinding:
    """Runs what is bound now, or, for an id that was captured, what was bound then."""

    def __init__(self, graph: FakeDeviceSession, session: Session, cuda: FakeCuda) -> None:
        self._graph, self._session, self._cuda = graph, session, cuda
        self.arrays: Arrays = {}

    def input(self, name: str, array: Any) -> None:
        assert isinstance(array, DeviceArray) == (name not in ON_HOST), name
        self.arrays["input", name] = array

    def output(self, name: str, array: DeviceArray) -> None:
        self.arrays["output", name] = array

    def run(self, graph_id: int = NOT_CAPTURED) -> None:
        # Arrays on the host are read now, and a captured run reads them only once.
        bound = {
            key: array.copy() if isinstance(array, np.ndarray) else array
            for key, array in self.arrays.items()
        }
        if graph_id != NOT_CAPTURED:
            self._graph.replays += graph_id in self._graph.captured
            bound = self._graph.captured.setdefault(graph_id, bound)
        self._cuda.queue(lambda: self._compute(bound))

    def _compute(self, arrays: Arrays) -> None:
        binding = self._session.bind()
        for (kind, name), array in arrays.items():
            host = array if isinstance(array, np.ndarray) else _on_host(array)
            binding.input(name, host) if kind == "input" else binding.output(name, host)
        binding.run()


def load_on(
    cuda: FakeCuda, model: TinyModel, directory: Path, *, num_slots: int, **options: Any
) -> tuple[SlotModelRunner, FakeDeviceSession]:
    """Return a runner on a fake device, and its decoder.

    It draws by the graphs for it if they are in the directory, see `write_sampling_graphs`.
    """
    decoder, encoder = (
        FakeDeviceSession(path, cuda) if path else None for path in model.write(directory)
    )
    paths = [directory / name for name in SAMPLING_GRAPHS if (directory / name).exists()]
    draws: Any = [FakeDeviceSession(path, cuda) for path in paths]
    runner = SlotModelRunner(
        model.contract,
        decoder,  # type: ignore[arg-type]
        encoder,  # type: ignore[arg-type]
        sampling_calls_of(draws, model.contract.vocab_size),
        num_slots=num_slots,
        device=cuda.device(),
        **options,
    )
    assert decoder is not None
    return runner, decoder


def write_sampling_graphs(directory: Path, vocab_size: int = VOCAB) -> None:
    write_graphs(sampling_graphs(vocab_size), directory)


def _on_host(array: DeviceArray) -> NDArray[Any]:
    size = max(1, array.num_bytes)
    buffer = (ctypes.c_uint8 * size).from_address(array.address)
    flat = np.frombuffer(buffer, np.uint8)[: array.num_bytes]
    return flat.view(array.dtype).reshape(array.shape)
