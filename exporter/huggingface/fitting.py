"""Takes the weights of a model out of a source, naming all that does not fit at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.wording import listed
from exporter.checkpoint import CONFIG_NAME
from exporter.huggingface.conversion import Conversion
from exporter.huggingface.stored import StoredWeights


def fit_weights(
    stored: StoredWeights,
    conversion: Conversion,
    shapes: Mapping[str, tuple[int, ...]],
    source: Path,
) -> dict[str, Tensor]:
    """Return our weights, of these shapes; CheckpointError names all that does not fit at once."""
    problems: dict[str, list[str]] = {}
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    for ours, weight in conversion.weights.items():
        names = [name for name in weight.names if name in stored]
        used.update(names)
        if names:
            problem = _misfit(stored, names, weight.stored_shape(shapes[ours]))
            if problem is None:
                found[ours] = weight.extract(stored.read(names[0]))
            else:
                problems.setdefault(problem[0], []).append(problem[1])
        elif weight.optional:
            found[ours] = torch.zeros(shapes[ours])
        else:
            problems.setdefault("missing weights", []).append(weight.names[0])
    extra = [name for name in stored if name not in used and not conversion.ignored.fullmatch(name)]
    if extra:
        problems["unexpected weights"] = extra
    if problems:
        found_wrong = "; ".join(
            f"{what}: {listed(dict.fromkeys(names))}" for what, names in problems.items()
        )
        raise CheckpointError(
            f"{source} does not fit its {CONFIG_NAME}: {found_wrong}; "
            "give the weights that were saved with this configuration"
        )
    return found


def _misfit(
    stored: StoredWeights, names: list[str], shape: tuple[int, ...]
) -> tuple[str, str] | None:
    """Say what is wrong with the tensors that are to be one weight: the kind of problem, where."""
    for name in names:
        if stored.shape(name) != shape:
            return (
                "wrong shapes",
                f"{name} is {list(stored.shape(name))}, the configuration asks for {list(shape)}",
            )
    first, *others = names
    for other in others:
        if not torch.equal(stored.read(first), stored.read(other)):
            return "weights that must be equal", f"{first} and {other}"
    return None
