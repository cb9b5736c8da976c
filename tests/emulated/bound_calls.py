"""Memory on the emulated device for a call of a graph, and what a run of it makes the host do."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from engine.device.device import CudaDevice
from engine.session import Binding, Session

ON_HOST = {"num_top": np.int64, "total_seq": np.int32}  # inputs that kernels read there


def bound(session: Session, device: CudaDevice, sizes: Mapping[str, int]) -> Binding:
    """Bind zeros to everything; `sizes` are those of the open ones, others are 0."""
    binding, memory = session.bind(), {}

    def shape_of(shape: tuple[int | str | None, ...]) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else sizes.get(str(size), 0) for size in shape)

    for name, value in session.inputs.items():
        if name in ON_HOST:
            binding.input(name, np.ones(1, ON_HOST[name]))
        else:
            memory[name] = device.memory.zeros(shape_of(value.shape), value.dtype)
            binding.input(name, memory[name])
    for name, value in session.outputs.items():
        past = memory.get(name.replace("present.", "past_key_values.").replace("present_", "past_"))
        binding.output(name, past or device.memory.zeros(shape_of(value.shape), value.dtype))
    return binding


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
