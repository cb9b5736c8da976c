"""Memory on the emulated device for a call of a graph, and what a run of it makes the host do."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from engine.cuda.device import CudaDevice
from engine.package.graph_io import NUM_TOP, PAST, TOTAL_SEQ, layer_names
from engine.session import Binding, Session

ON_HOST = {NUM_TOP: np.int64, TOTAL_SEQ: np.int32}  # inputs that kernels read there


def bound(session: Session, device: CudaDevice, sizes: Mapping[str, int]) -> Binding:
    """Bind zeros to everything; `sizes` are those of the open ones, others are 0.

    A row may be as long as there is room for, which decoders are told by the engine, too.
    """
    binding, memory = session.bind(), {}
    on_host = {NUM_TOP: 1, TOTAL_SEQ: _row_length(session)}

    def shape_of(shape: tuple[int | str | None, ...]) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else sizes.get(str(size), 0) for size in shape)

    for name, value in session.inputs.items():
        if name in ON_HOST:
            binding.input(name, np.full(1, on_host[name], ON_HOST[name]))
        else:
            memory[name] = device.memory.zeros(shape_of(value.shape), value.dtype)
            binding.input(name, memory[name])
    for name, value in session.outputs.items():
        past = memory.get(name.replace("present.", "past_key_values.").replace("present_", "past_"))
        binding.output(name, past or device.memory.zeros(shape_of(value.shape), value.dtype))
    return binding


def _row_length(session: Session) -> int:
    """Return how many positions a row of a decoder has; 1 of a graph without a cache."""
    row = session.inputs.get(layer_names(PAST, 1)[0])
    length = 1 if row is None else row.shape[2]
    assert isinstance(length, int), "rows have one length"
    return length


def counts(binding: Binding, graph_id: int) -> dict[str, int]:
    """Run; return how many kernels and graphs were launched, and how often it used the host.

    A copy from the host in a captured graph would be made again of memory that is free by then.
    """
    library = ctypes.CDLL(None)
    names = ("launches", "graphs", "syncs", "hostcopies")
    counters = {name: getattr(library, f"emu_{name}") for name in names}
    for counter in counters.values():
        counter()  # begins anew
    binding.run(graph_id)
    return {name: counter() for name, counter in counters.items()}
