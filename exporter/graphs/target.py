"""The targets of graphs: kinds of devices, and all that is done otherwise for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import onnx_ir as ir
import torch

from engine.package.manifest import DEFAULT_TARGET, PackageFormat, Precision
from engine.package.manifest import Target as TargetName
from exporter.graphs.fuse import fuse
from exporter.graphs.reductions import replace_reductions
from exporter.graphs.shapes import replace_shapes
from exporter.graphs.sums import replace_sums
from exporter.operators import bodies
from exporter.operators.domain import Functions

DTYPES: Mapping[Precision, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
)


@dataclass(frozen=True)
class Target:
    """A kind of device; the default of a field asks for nothing beside the plain graph."""

    name: TargetName
    functions: Mapping[Precision, Functions]  # compute the operators, by type of activations
    accuracy_level: int  # the type in which MatMulNBits multiplies
    rewrites: tuple[Callable[[ir.Model], None], ...] = ()  # made of each graph, in this order
    patches_as_product: bool = False  # its convolutions need a library that nothing else asks for
    rows_in_pieces: bool = False  # the sum of a row of logits depends on where it begins
    # Query heads that share a key head, where it has a kernel for an int8 cache; None: any number.
    int8_cache_groups: tuple[int, ...] | None = None
    int8_cache_widths: tuple[int, ...] | None = None  # widths of a head, likewise
    int8_cache_unbounded: bool = False  # it has none where scores have a bound
    has_faster_int8_cache: bool = False  # beside weights in int8, steps take less time with one
    has_unit_scales: bool = False  # a query of a source is read faster where scores have no factor
    has_sampling_graphs: bool = False  # a graph draws tokens, too: no step waits for the host
    runs_here: bool = True  # the bits that a CPU computes are those that are served


CPU = Target(
    "cpu",
    MappingProxyType({"fp32": bodies.CPU}),
    accuracy_level=4,  # in integers, at a scale for each block of a row
    rewrites=(replace_sums,),
    has_faster_int8_cache=True,
    has_unit_scales=True,
)
CUDA = Target(
    "cuda",
    MappingProxyType(
        {"fp32": bodies.CUDA_FLOAT, "fp16": bodies.CUDA_HALF, "bf16": bodies.CUDA_HALF}
    ),
    accuracy_level=0,  # in the type of its input
    # Reductions need the library of convolutions; sizes of tensors are known on the host alone.
    rewrites=(replace_reductions, replace_shapes, fuse),
    patches_as_product=True,
    rows_in_pieces=True,
    int8_cache_groups=(4, 8, 16, 32),
    int8_cache_widths=(64, 128, 256),
    int8_cache_unbounded=True,
    has_sampling_graphs=True,
    runs_here=False,
)
TARGETS: Mapping[TargetName, Target] = MappingProxyType({one.name: one for one in (CPU, CUDA)})
DEFAULT = TARGETS[DEFAULT_TARGET]


def target_of(form: PackageFormat) -> Target:
    """Return the target of a format."""
    return TARGETS[form.target]
