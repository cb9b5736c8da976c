"""Constants of a graph: their numbers, and new ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike, NDArray
from onnx_ir.tape import Tape


def add_constant(graph: ir.Graph, name: str, numbers: ArrayLike) -> ir.Value:
    """Return a new constant of a graph, of the type that the numbers have in numpy."""
    return Tape(graph).initializer(ir.tensor(np.asarray(numbers), name=name))


def array_of(value: ir.Value | None) -> NDArray[Any]:
    """Return the numbers of a value that is known to be a constant."""
    assert value is not None and value.const_value is not None, "it is a constant"
    array: NDArray[Any] = value.const_value.numpy()
    return array


def integers_of(value: ir.Value | None) -> list[int]:
    """Return the numbers of a constant in one row; of what is computed, none."""
    constant = None if value is None else value.const_value
    return [] if constant is None else constant.numpy().reshape(-1).tolist()


def rank_of(value: ir.Value | None) -> int | None:
    """Return how many axes a constant has; None of what is computed."""
    return None if value is None or value.const_value is None else len(value.const_value.shape)
