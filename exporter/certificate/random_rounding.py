"""Computes a model in half precision anew, with results rounded at random near halfway.

What an eager model loses in a type depends on which roundings happen to meet. One run shows one
such loss; runs with other roundings show how far it may be. This is Monte Carlo arithmetic (Parker,
"Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic", 1997) of one bit more
than the type has: a result is moved by up to a quarter of what lies between its two neighbours, and
then rounded to the nearest. To round every one up or down by chance alone loses a fifth to a third
more than the type does, where nothing but the size of the errors counts; this, hardly more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from exporter.certificate.comparison import Floats

_BITS = {torch.float16: 13, torch.bfloat16: 16}  # of a float32's fraction, that the type lacks


class Rounded(NamedTuple):
    """What the eager model gives in half precision, [N, V]."""

    nearest: Floats
    at_random: Callable[[int], Floats]  # with other roundings, by a seed

    def part(self, positions: slice) -> Rounded:
        """Return some of the positions."""
        return Rounded(self.nearest[positions], lambda seed: self.at_random(seed)[positions])

    def of(self, ids: NDArray[np.int64]) -> Rounded:
        """Return some of the numbers of every position."""
        return Rounded(self.nearest[:, ids], lambda seed: self.at_random(seed)[:, ids])

    @classmethod
    def joined(cls, parts: Sequence[Rounded]) -> Rounded:
        """Return the positions of several cases as one."""
        return cls(
            np.concatenate([part.nearest for part in parts]),
            lambda seed: np.concatenate([part.at_random(seed) for part in parts]),
        )


class RandomRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets every operation on tensors of `dtype` compute in float32, and rounds what it gives.

    As a context manager around calls of a model; what is neither computed nor rounded (views, what
    is written in place, changes of type) stays as it is.
    """

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype, self._bits = dtype, _BITS[dtype]
        self._random = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Compute one operation, which rounds at random where its result is of the type."""
        kwargs = kwargs or {}
        if not self._gives_the_type(func, args, kwargs):
            return func(*args, **kwargs)
        wide_args, wide_kwargs = tree_map(self._wide, (args, kwargs))
        return tree_map(self._rounded, func(*wide_args, **wide_kwargs))

    def _gives_the_type(self, func: Any, args: object, kwargs: dict[str, object]) -> bool:
        """Tell whether an operation computes from tensors of the type alone, and gives such."""
        schema = func._schema
        if schema.is_mutable or any(value.alias_info for value in schema.returns):
            return False
        given = tree_leaves((args, kwargs))
        if any(isinstance(value, torch.dtype) for value in given):
            return False
        tensors = (value for value in given if isinstance(value, Tensor))
        types = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        return types == {self._dtype}

    def _wide(self, value: object) -> object:
        return value.float() if isinstance(value, Tensor) and value.dtype == self._dtype else value

    def _rounded(self, value: object) -> object:
        """Return float32 in the type, laid out alike: a random number is added to what is cut."""
        if not (isinstance(value, Tensor) and value.dtype == torch.float32):
            return value
        unit = 1 << self._bits
        least, most = unit // 4, 3 * unit // 4
        added = torch.randint(least, most, value.shape, generator=self._random, dtype=torch.int32)
        cut = (value.view(torch.int32) + added) & ~(unit - 1)
        return cut.view(torch.float32).to(self._dtype)
