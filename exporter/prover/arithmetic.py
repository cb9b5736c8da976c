"""Runs an eager model in float64, with its sums in another order, or with an eye on float16.

All are modes of torch's dispatcher, so that a model of any class runs as it is, and no weight of
it is changed or copied whole.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from engine.errors import CertificateError

aten = torch.ops.aten

# Products of matrices, and the places of their two factors: the last dimension of the first is
# summed with the last but one of the second.
_FACTORS: Mapping[object, tuple[int, int]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.mv.default: (0, 1),
    aten.dot.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.addmv.default: (1, 2),
    aten.baddbmm.default: (1, 2),
}
# Operations whose results may be larger than what they are given.
_REACHING = frozenset(
    {
        *_FACTORS,
        aten.convolution.default,
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.div.Tensor,
        aten.pow.Tensor_Scalar,
        aten.exp.default,
        aten.sum.dim_IntList,
    }
)
MOST_FLOAT16 = torch.finfo(torch.float16).max
_MASKED = -0.99 * MOST_FLOAT16
_MOST_WIDENED = 2**21  # numbers of a matrix at a time
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def float64() -> Iterator[None]:
    """Let eager models compute in float64: every float is widened where an operation reads it.

    A request for a narrower type gives float64, too. Numbers that a model writes in place into a
    float32 tensor of its own are rounded to that.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings(), torch.no_grad(), _Float64():  # type: ignore[no-untyped-call]
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def reordered(seed: int) -> Iterator[None]:
    """Let eager models sum every product of matrices in a random order."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # a layer in one operation has no products
    try:  # nor has attention in one
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _Reordered(seed):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)


class _Float64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kind, written = _kind(func)
        if kind == "view":
            return func(*args, **(kwargs or {}))
        if func is aten.embedding.default:  # a table is larger than the rows that are read
            return _widened(func(*args, **(kwargs or {})))
        if func is aten.mm.default:
            return _product(*args)  # type: ignore[arg-type]
        given = [arg if i in written else _widened(arg) for i, arg in enumerate(args)]
        return func(*given, **{name: _widened(arg) for name, arg in (kwargs or {}).items()})


class _Reordered(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._random = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if places := _FACTORS.get(func):
            one, other = places
            order = torch.randperm(args[one].shape[-1], generator=self._random)
            taken = list(args)
            taken[one] = args[one].index_select(-1, order)
            taken[other] = args[other].index_select(max(0, args[other].ndim - 2), order)
            args = tuple(taken)
        return func(*args, **(kwargs or {}))


class Float16Reach(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how large numbers become in a model in float16: as a context around calls of it.

    Operations that read a mask, which has infinity or the least number, do not count. Raises
    CertificateError where an operation passes the largest number.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0.0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        if func in _REACHING and isinstance(found, Tensor) and found.dtype == torch.float16:
            given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            if not any(bool((one <= _MASKED).any() | one.isinf().any()) for one in given):
                self.largest = max(self.largest, float(found.abs().max()))
                if self.largest == math.inf:
                    raise CertificateError(
                        f"the eager model itself passes {MOST_FLOAT16:,.0f}, the largest number of "
                        f"float16, where it computes {func._schema.name.removeprefix('aten::')}; "
                        "export with --precision bf16 or fp32"
                    )
        return found


@cache
def _kind(func: Any) -> tuple[Literal["view", "in place", "plain"], tuple[int, ...]]:
    """Return what an operation does with its tensors, and the places of those it writes."""
    schema = func._schema
    written = tuple(i for i, argument in enumerate(schema.arguments) if argument.is_write)
    if written:
        return "in place", written
    is_view = any(value.alias_info is not None for value in schema.returns)
    return ("view" if is_view else "plain"), ()


def _product(one: Tensor, other: Tensor) -> Tensor:
    """Return a product in float64, of which a part at a time is widened: a head is large."""
    one = one.double()
    columns = max(1, _MOST_WIDENED // max(1, other.shape[0]))
    found = one.new_empty(one.shape[0], other.shape[1])
    parts = (torch.split(whole, columns, dim=1) for whole in (other, found))
    for part, into in zip(*parts, strict=True):
        torch.mm(one, part.double(), out=into)
    return found


def _widened(value: object) -> object:
    if isinstance(value, Tensor):
        return value.double() if value.dtype in _FLOATS else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _FLOATS else value
    return tree_map(_widened, value) if isinstance(value, list | tuple) else value
