"""Holds what the exported graphs give against what the eager model gives, and stops at a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from engine.errors import CertificateError

Floats = NDArray[np.float32]

TOLERANCE = 1e-4  # of a logit, or of a value of an embedding, in float32

# Where the eager model's two best tokens are nearer than this, it has not decided: the order in
# which a processor sums decides. Such a position is held to the tolerance, not to the token.
UNDECIDED = 1e-5


@contextmanager
def exported_graphs() -> Iterator[None]:
    """Turn whatever goes wrong in loading or running an exported graph into CertificateError."""
    try:
        yield
    except Exception as error:  # onnxruntime's own have no other class in common
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CertificateError(f"the exported graph cannot be run: {reason}") from error


class Comparison:
    """Counts what was compared; every method raises CertificateError at the first difference."""

    def __init__(self) -> None:
        self.tokens_compared = 0
        self.tokens_undecided = 0
        self.max_abs_logit_diff = 0.0

    def logits(self, exported: Floats, eager: Floats, place: Callable[[int], str]) -> None:
        """Compare logits [N, V]: each within the tolerance, and the same best entry in each row.

        `place(i)` tells where row i comes from.
        """
        diff = _differences(exported, eager)
        self.max_abs_logit_diff = max(self.max_abs_logit_diff, float(diff.max()))
        decided = _lead(eager) > UNDECIDED
        got, expected = exported.argmax(-1), eager.argmax(-1)
        bad = ~(diff < TOLERANCE) | (decided & (got != expected))  # a NaN is bad too
        if bad.any():
            i = int(bad.argmax())
            raise CertificateError(
                f"{place(i)}: the exported model's best entry is {got[i]}, the eager model's "
                f"{expected[i]}; largest logit difference {diff[i]:.3g}, allowed {TOLERANCE:g}"
            )
        self.tokens_compared += int(decided.sum())
        self.tokens_undecided += int((~decided).sum())

    def values(self, exported: Floats, eager: Floats, place: Callable[[int], str]) -> None:
        """Compare embeddings [N, D]: each value within the tolerance."""
        diff = _differences(exported, eager)
        bad = ~(diff < TOLERANCE)
        if bad.any():
            i = int(bad.argmax())
            raise CertificateError(
                f"{place(i)}: the embedding differs by {diff[i]:.3g}, allowed {TOLERANCE:g}"
            )

    def bits(self, batched: Floats, alone: Floats, place: Callable[[int], str]) -> None:
        """Compare rows [N, ...] computed in a batch with the same rows computed alone."""
        differs = (batched != alone).reshape(len(alone), -1).any(axis=1)
        if differs.any():
            i = int(differs.argmax())
            with np.errstate(invalid="ignore"):
                diff = np.abs(batched[i] - alone[i]).max()
            raise CertificateError(
                f"{place(i)}: the row differs by {diff:.3g} from the same row computed alone; "
                "it must not depend on its neighbours, nor on what its memory held before"
            )


def _differences(exported: Floats, eager: Floats) -> Floats:
    """Return the largest difference in each row [N, V]."""
    with np.errstate(invalid="ignore"):  # infinity less infinity: NaN, which is no agreement
        diff: Floats = np.abs(exported - eager).max(axis=-1)
    return diff


def _lead(logits: Floats) -> Floats:
    """Return by how much the best entry of each row [V] is ahead of the second."""
    if logits.shape[1] == 1:
        return np.full(len(logits), np.inf, np.float32)
    second_and_best = np.partition(logits, -2, axis=-1)[:, -2:]
    return second_and_best[:, 1] - second_and_best[:, 0]
