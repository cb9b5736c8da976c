"""Makes and runs onnxruntime sessions: the one place that knows its options and its errors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from engine.errors import PackageError
from engine.threads import num_cores

_ERRORS_ONLY = 3
_NUMPY_NAMES = {"float": "float32", "double": "float64"}  # of onnxruntime's types; others agree
# The fused kernel takes 7 times as long as an addition and a LayerNormalization at 32 rows of 512
# numbers, 19 times at 800 rows.
_DISABLED = ["SkipLayerNormFusion"]


def create_session(path: str | os.PathLike[str], *, num_threads: int = 0) -> Session:
    """Load a graph for the CPU; `num_threads` 0 means one per core that this process may use.

    Raises PackageError if onnxruntime does not take it.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads or num_cores()
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = _ERRORS_ONLY
    # Else the threads of the graph that ran before spin on the cores that this one needs: encoder
    # and decoder in turns took twice as long. One graph alone takes the same time either way.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        session = ort.InferenceSession(
            os.fspath(path), options, ["CPUExecutionProvider"], disabled_optimizers=_DISABLED
        )
    except Exception as error:  # onnxruntime has a dozen of its own, without a common base
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PackageError(
            f"{path}: onnxruntime {ort.__version__} cannot load this graph: {reason}; "
            "export the model again"
        ) from error
    return Session(session, Path(path))


class GraphValue(NamedTuple):
    """Type and shape of an input or output of a graph."""

    dtype: str  # numpy's name
    shape: tuple[int | str | None, ...]  # an open size has a name or None

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join('?' if n is None else str(n) for n in self.shape)}]"


class Session:
    """A graph that is ready to run."""

    def __init__(self, session: ort.InferenceSession, path: Path) -> None:
        self._session = session
        self.path = path
        self.inputs = {value.name: _described(value) for value in session.get_inputs()}
        self.outputs = {value.name: _described(value) for value in session.get_outputs()}

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Run once and return every output by name, in new arrays."""
        outputs = self._session.run(None, dict(inputs))
        return dict(zip(self.outputs, outputs, strict=True))

    def bind(self) -> Binding:
        """Return an empty binding of this graph."""
        return Binding(self._session)


class Binding:
    """Inputs and outputs of a graph tied to memory: run() reads and writes the arrays in place.

    What is bound once and run often costs 0.03 ms a run; binding anew costs three times that.
    Binding a name again replaces what was bound to it.
    """

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._arrays: dict[tuple[str, str], NDArray[Any]] = {}  # alive as long as they are bound

    def input(self, name: str, array: NDArray[Any]) -> None:
        """Bind an input to an array, which must be contiguous."""
        self._binding.bind_ortvalue_input(name, self._value("input", name, array))

    def output(self, name: str, array: NDArray[Any]) -> None:
        """Bind an output to an array of exactly its shape, which must be contiguous."""
        self._binding.bind_ortvalue_output(name, self._value("output", name, array))

    def run(self) -> None:
        """Run the graph on what is bound."""
        self._session.run_with_iobinding(self._binding)

    def _value(self, kind: str, name: str, array: NDArray[Any]) -> ort.OrtValue:
        # onnxruntime copies a view with gaps without a word, and what it writes is lost.
        if not array.flags.c_contiguous:
            raise ValueError(f"{kind} {name}: an array of shape {array.shape} is not contiguous")
        self._arrays[kind, name] = array
        return ort.OrtValue.ortvalue_from_numpy(np.asarray(array))


def _described(value: ort.NodeArg) -> GraphValue:
    kind = value.type.removeprefix("tensor(").removesuffix(")")
    return GraphValue(_NUMPY_NAMES.get(kind, kind), tuple(value.shape))
