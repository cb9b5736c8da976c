"""One call of a graph in a step, as it is planned before any call of the step runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from engine.package.graph_io import LOGITS, TOPS, Bound
from engine.session import NOT_CAPTURED, Binding
from engine.slots.memory import LayerCache
from engine.slots.step_block import CallOutputs

_OUTPUTS = (LOGITS, *TOPS)


class GraphCall(NamedTuple):
    """A binding, what is bound to it before it runs, and what differs between its runs."""

    binding: Binding
    inputs: Mapping[str, Bound]
    outputs: Mapping[str, Bound]
    total_seq: int = 0  # decoder: no row is longer after the call
    graph_id: int = NOT_CAPTURED

    def run(self) -> None:
        """Bind and run."""
        for name, array in self.inputs.items():
            self.binding.input(name, array)
        for name, array in self.outputs.items():
            self.binding.output(name, array)
        self.binding.run(self.graph_id)


def rows_of(layers: Sequence[LayerCache], first: int, last: int) -> Iterator[Bound]:
    """Give keys and values of all layers in the order of `layer_names`."""
    for layer in layers:
        yield layer.key[first:last]
        yield layer.value[first:last]


def named_outputs(outputs: CallOutputs) -> dict[str, Bound]:
    """Return the outputs of a decoder by the names that it has for them."""
    return dict(zip(_OUTPUTS, outputs, strict=True))
