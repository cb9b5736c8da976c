"""Loads the graphs of a generating model."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

from engine.machine import num_cores
from engine.package.manifest import GenerationContract
from engine.session import Session, create_session
from engine.slots.device import Device

_log = logging.getLogger(__name__)


def decoder_threads(contract: GenerationContract, num_threads: int = 0) -> int:
    """Return on how many of `num_threads` threads (0: one a core) a decoder runs.

    It has no more than it has query heads. If there are more threads than heads and rows together,
    onnxruntime's attention divides the keys of a long row (head_dim 64: from 512 to 2,048 positions
    on, by the processor's L2 cache) among threads and adds up the parts: the sum then depends on
    how many rows run and how long they are.
    """
    return min(num_threads or num_cores(), contract.num_heads)


class GenerationSessions(NamedTuple):
    """Graphs that are ready to run."""

    decoder: Session
    encoder: Session | None


def load_sessions(
    contract: GenerationContract,
    decoder_path: str | os.PathLike[str],
    encoder_path: str | os.PathLike[str] | None,
    *,
    num_threads: int = 0,
    device: Device | None = None,
) -> GenerationSessions:
    """Load graphs for a device, or the CPU; PackageError if onnxruntime does not take them.

    A decoder on a CPU runs on no more threads than `decoder_threads` says.
    """
    if device is not None:
        load = device.create_session
        decoder = load(Path(decoder_path))
        encoder = None if encoder_path is None else load(Path(encoder_path))
        return GenerationSessions(decoder, encoder)
    usable = decoder_threads(contract, num_threads)
    if usable < (offered := num_threads or num_cores()):
        _log.warning(
            "%s runs on %d of %d threads: more than it has heads would make answers depend "
            "on the batch; more replicas use the others",
            decoder_path,
            usable,
            offered,
        )
    decoder = create_session(decoder_path, num_threads=usable)
    encoder = None
    if encoder_path is not None:
        encoder = create_session(encoder_path, num_threads=num_threads)
    return GenerationSessions(decoder, encoder)
