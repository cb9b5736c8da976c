"""One call of a graph in a step, as it is planned before any call of the step runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from engine.session import NOT_CAPTURED, Binding
from engine.slots.memory import LayerCache
from engine.slots.step_block import Bound, CallOutputs


class GraphCall(NamedTuple):
    """A binding, what is bound to it before it runs, and what differs between its runs."""

    binding: Binding
    inputs: Mapping[str, Bound]
    outputs: Mapping[str, Bound]
    total_seq: int = 0  # of a decoder: no row is longer after the call
    graph_id: int = NOT_CAPTURED

    def run(self) -> None:
        """Bind and run."""
        for name, array in self.inputs.items():
            self.binding.input(name, array)
        for name, array in self.outputs.items():
            self.binding.output(name, array)
        self.binding.run(self.graph_id)


def named_rows(layers: Sequence[LayerCache], first: int, last: int) -> Iterable[tuple[str, Bound]]:
    """Give keys and values of all layers by the names that graphs have for them."""
    for i, layer in enumerate(layers):
        yield f"{i}.key", layer.key[first:last]
        yield f"{i}.value", layer.value[first:last]


def named_outputs(outputs: CallOutputs) -> dict[str, Bound]:
    """Return the outputs of a decoder by the names that it has for them."""
    return outputs._asdict()
