"""Loads the graphs of a generating model."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from engine.machine import num_cores
from engine.package.manifest import GenerationContract
from engine.session import Session, create_session
from engine.slots.threads import decoder_threads

if TYPE_CHECKING:
    from engine.device.device import CudaDevice

_log = logging.getLogger(__name__)


class GenerationSessions(NamedTuple):
    """Graphs that are ready to run."""

    decoder: Session
    encoder: Session | None
    draws: tuple[Session, ...]  # all DRAW_GRAPHS or none


def load_sessions(
    contract: GenerationContract,
    decoder_path: str | os.PathLike[str],
    encoder_path: str | os.PathLike[str] | None,
    draw_paths: Sequence[str | os.PathLike[str]] = (),
    *,
    num_threads: int = 0,
    device: CudaDevice | None = None,
) -> GenerationSessions:
    """Load graphs for a device, or the CPU; PackageError if onnxruntime does not take them.

    A decoder on a CPU runs on no more threads than `decoder_threads` says.
    """
    usable = decoder_threads(contract, num_threads)
    if device is None and usable < (offered := num_threads or num_cores()):
        _log.warning(
            "%s runs on %d of %d threads: more than it has heads would make answers depend "
            "on the batch; more replicas use the others",
            decoder_path,
            usable,
            offered,
        )
    decoder = create_session(decoder_path, num_threads=usable, device=device)
    encoder = None
    if encoder_path is not None:
        encoder = create_session(encoder_path, num_threads=num_threads, device=device)
    draws = [create_session(path, num_threads=1, device=device) for path in draw_paths]
    return GenerationSessions(decoder, encoder, tuple(draws))
