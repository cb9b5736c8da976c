"""The seam between an engine and a device that computes its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from engine.package.graph_io import Bound
from engine.package.manifest import CacheShape, GenerationContract
from engine.session import Session
from engine.slots.memory import CacheMemory
from engine.slots.step_block import StepBlock, StepSize


class Device(Protocol):
    """A device as an engine uses it: CudaDevice of engine.cuda, which the factory passes in.

    Work is queued there, and done in turn.
    """

    def create_session(self, path: Path) -> Session:
        """Load a graph with its weights; raises as the device's own function."""

    def cache_memory(self, num_rows: int, shape: CacheShape) -> CacheMemory:
        """Take memory for rows of the cache; OutOfDeviceMemory if it is not there."""

    def step_block(
        self,
        contract: GenerationContract,
        num_slots: int,
        *,
        num_tokens: int,
        size: StepSize | None = None,
    ) -> StepBlock:
        """Take memory for steps of about `num_tokens`, or of this `size`; raises likewise."""

    def feed(self, targets: Bound, ids: Bound, origins: Sequence[int]) -> None:
        """Queue copies of ids in the first column to where tokens are read.

        Target i gets that of row origins[i]; -1: it keeps what it has.
        """

    def synchronize(self) -> None:
        """Wait until everything that was queued is done."""

    def fewer(self, num_slots: int, contract: GenerationContract, lacking: int) -> str:
        """Say with how many sequences a call has room that lacks so many bytes beside these."""
