"""How many sequences have room in the memory of a device.

A process may use a share of the device, `gpu_memory_utilization`, and never more than is free. The
weights of its graphs and the memory of a step beside the rows come off that:

    room  = min(total memory x gpu_memory_utilization - weights, free memory)
    rows  = (room - beside) / row
    row   = keys and values of a sequence and of its source at their longest, its logits and draw
    beside = 1 GB, a row of each kind to exchange two, and the logits of the longest prompt's step

Free memory is read when the weights are there. An engine without a number of sequences gets as many
rows as that gives, up to 256.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from engine.config import EngineConfig
from engine.cuda.cache_memory import row_bytes
from engine.cuda.runtime import CudaRuntime
from engine.errors import OutOfDeviceMemory
from engine.package.manifest import GenerationContract
from engine.wording import size_of

_WORKSPACES = 10**9  # bytes: CUDA, the workspaces of kernels and captured calls
_LOGIT = 16  # bytes: a logit, in the graph's type and its log-probability, and room to sort them
_DRAW = 104  # bytes: what the graphs for draws, each with memory of its own, take on a CPU
_SMALL = 8192  # bytes of a row: its ids and lengths, and 128 of the largest logits


@dataclass(frozen=True)
class DeviceRoom:
    """The memory of a device that a process may use, in bytes."""

    free: int  # when the weights were loaded
    total: int
    utilization: float  # the share of the total that this process may use
    weights: int  # that it has loaded

    @classmethod
    def read(cls, runtime: CudaRuntime, utilization: float, weights: int) -> DeviceRoom:
        """Return what there is now, when the weights are loaded."""
        return cls(*runtime.free_memory(), utilization, weights)

    @property
    def usable(self) -> int:
        """The bytes left for rows and all else."""
        return max(0, min(math.floor(self.total * self.utilization) - self.weights, self.free))


@dataclass(frozen=True)
class RoomNeeds:
    """The memory that the sequences of a model take, in bytes."""

    row: int  # each of them
    beside: int  # all together, whatever their number

    @classmethod
    def of(cls, contract: GenerationContract, max_num_batched_tokens: int) -> RoomNeeds:
        """Return the needs of a model; a step has at most so many tokens."""
        rows = row_bytes(contract.cache)
        rows += row_bytes(contract.cross_cache) if contract.cross_cache else 0
        logits = contract.vocab_size * _LOGIT
        beside = _WORKSPACES + rows + max_num_batched_tokens * logits
        draw = contract.vocab_size * _DRAW
        return cls(row=rows + logits + draw + _SMALL, beside=beside)

    def of_rows(self, num_slots: int) -> int:
        """Return what so many take."""
        return num_slots * self.row + self.beside


class Fit(NamedTuple):
    """Settings of an engine whose sequences have room, and how that was found."""

    config: EngineConfig
    needs: RoomNeeds
    room: DeviceRoom

    @contextmanager
    def explained(self, runtime: CudaRuntime) -> Iterator[None]:
        """Say of a device that turns out to be full, for others use it too, what would fit."""
        try:
            yield
        except OutOfDeviceMemory as error:
            traceback.clear_frames(error.__traceback__)  # frees the parts made until then
            room = DeviceRoom.read(runtime, self.room.utilization, self.room.weights)
            why = without_room(self.config.max_num_seqs, self.needs, room)
            raise OutOfDeviceMemory(f"{error}; {why}") from error


def fit(config: EngineConfig, contract: GenerationContract, room: DeviceRoom) -> Fit:
    """Return the settings with a number of sequences; OutOfDeviceMemory if they have no room."""
    needs = RoomNeeds.of(contract, config.max_num_batched_tokens)
    most = config.most_num_seqs
    chosen = choose_num_slots(config.max_num_seqs, needs, room, most=most)
    return Fit(config.with_num_seqs(chosen), needs, room)


def choose_num_slots(wanted: int, needs: RoomNeeds, room: DeviceRoom, *, most: int) -> int:
    """Return how many sequences run at once: `wanted`, or, for 0, all that fit up to `most`.

    Raises OutOfDeviceMemory, naming what would fit, if that many or not even one has room.
    """
    fitting = _fitting(needs, room)
    if fitting < max(1, wanted):
        raise OutOfDeviceMemory(without_room(max(1, wanted), needs, room))
    return wanted or min(fitting, most)


def without_room(num_slots: int, needs: RoomNeeds, room: DeviceRoom) -> str:
    """Say why so many sequences do not fit, and what would."""
    needed = needs.of_rows(num_slots)
    fewer = min(num_slots - 1, _fitting(needs, room))
    ways = [f"--max-num-seqs {fewer}"] if fewer else []
    utilization = math.ceil(100 * (needed + room.weights) / room.total) / 100
    if room.utilization < utilization <= 1 and needed <= room.free:
        ways.append(f"--gpu-memory-utilization {utilization}")
    return (
        f"the GPU has no room for {num_slots} sequences: {size_of(needed)} are needed, "
        f"{size_of(needs.row)} for each and {size_of(needs.beside)} beside them, and "
        f"{size_of(room.usable)} may be used: {size_of(room.free)} of {size_of(room.total)} are "
        f"free, and gpu_memory_utilization is {room.utilization:g}, of which the weights take "
        f"{size_of(room.weights)}; "
        + (f"this would fit: {' or '.join(ways)}" if ways else "a GPU with more memory is needed")
    )


def fewer(num_slots: int, contract: GenerationContract, lacking: int) -> str:
    """Say with how many sequences a call has room that lacks so many bytes beside `num_slots`."""
    row = RoomNeeds.of(contract, 0).row
    fitting = num_slots - -(-lacking // row)
    if fitting < 1:
        return "a GPU with more memory is needed"
    return (
        f"beside {num_slots} sequences there is no room; this would fit: --max-num-seqs {fitting}"
    )


def _fitting(needs: RoomNeeds, room: DeviceRoom) -> int:
    return max(0, room.usable - needs.beside) // needs.row
