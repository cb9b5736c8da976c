"""Makes and runs onnxruntime sessions: the one place that knows its options and its errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.distributions import check_distributions
from engine.errors import PackageError
from engine.machine import instruction_sets, num_cores
from engine.mapped_weights import MappedWeights
from engine.package.graph_io import INPUT_IDS, Bound, GraphValue

check_distributions()  # two of them, installed over each other, may fail anywhere at import
import onnxruntime as ort  # noqa: E402

NOT_CAPTURED = -1  # the id of no captured graph

_VNNI = {"avx_vnni", "avx512_vnni"}  # either has products of 8 bits with sums of 32
_ERRORS_ONLY = 3
_NUMPY_NAMES = {"float": "float32", "double": "float64"}  # onnxruntime's type names; others agree
# The fused kernel takes 7 times as long as an addition and a LayerNormalization at 32 rows of 512
# numbers, 19 times at 800 rows.
_DISABLED_ON_CPU = ["SkipLayerNormFusion"]


def create_session(path: str | os.PathLike[str], *, num_threads: int = 0) -> Session:
    """Load a graph for the CPU; PackageError if onnxruntime does not take it.

    `num_threads` 0 means one per core that this process may use.
    """
    path = Path(path)
    try:
        weights = MappedWeights.of(path)
        session = _create_on_cpu(path, num_threads or num_cores(), weights)
        return Session(session, path, weights)
    except Exception as error:  # onnxruntime has a dozen of its own, without a common base
        raise not_loaded(path, error) from error


class Session:
    """A graph that is ready to run; CudaSession is one on a GPU."""

    def __init__(
        self, session: ort.InferenceSession, path: Path, weights: MappedWeights | None = None
    ) -> None:
        """`weights` is the memory that the graph reads them in, if that is not its own."""
        self._session = session
        self._weights = weights
        self.path = path
        self.inputs = {value.name: _described(value) for value in session.get_inputs()}
        self.outputs = {value.name: _described(value) for value in session.get_outputs()}

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Run once and return every output by name, in new arrays.

        Raises PackageError if somebody has written to the weights that are read where their file
        lies.
        """
        outputs = self._session.run(None, dict(inputs))
        if self._weights is not None:
            _have_been_read(self._weights)
        return dict(zip(self.outputs, outputs, strict=True))

    def bind(self) -> Binding:
        """Return an empty binding of this graph."""
        return Binding(self._session, self._weights)


class Binding:
    """Inputs and outputs of a graph tied to memory: run() reads and writes the arrays in place.

    A run of what was bound before costs 0.03 ms; binding anew costs three times that.
    Binding a name again replaces what was bound to it.
    """

    def __init__(self, session: ort.InferenceSession, weights: MappedWeights | None = None) -> None:
        self._session = session
        self._weights = weights  # alive while the graph reads them
        self._binding = session.io_binding()
        self._arrays: dict[tuple[str, str], Bound] = {}  # by kind and name; alive while bound
        self._num_tokens: tuple[int, ...] = ()  # per run, if it has token ids

    def input(self, name: str, array: Bound) -> None:
        """Bind an input to an array, which must be contiguous.

        Raises ValueError for an array where the graph does not read it: it would be copied once,
        now, and what is written to it later would never be seen.
        """
        array = self._kept("input", name, array)
        if name == INPUT_IDS:
            self._num_tokens = (array.size,)
        self._binding.bind_ortvalue_input(name, _value(array))

    def output(self, name: str, array: Bound) -> None:
        """Bind an output to an array of exactly its shape, which must be contiguous.

        Raises ValueError for an array where the graph does not write it.
        """
        self._binding.bind_ortvalue_output(name, _value(self._kept("output", name, array)))

    def run(self, graph_id: int = NOT_CAPTURED) -> None:
        """Run the graph on what is bound; raises as `Session.run`. A CPU captures nothing."""
        self._session.run_with_iobinding(self._binding)
        if self._weights is not None:
            _have_been_read(self._weights, *self._num_tokens)

    def _kept(self, kind: str, name: str, array: Bound) -> NDArray[Any]:
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{kind} {name} is to lie on the host; bind an array there")
        # onnxruntime copies a view with gaps without a word, and what it writes is lost.
        if not array.flags.c_contiguous:
            raise ValueError(f"{kind} {name}: an array of shape {array.shape} is not contiguous")
        self._arrays[kind, name] = array
        return array


def _create_on_cpu(
    path: Path, num_threads: int, weights: MappedWeights | None
) -> ort.InferenceSession:
    options = usual_options()
    options.intra_op_num_threads = num_threads
    # Else the threads of the graph that ran before spin on the cores that this one needs: encoder
    # and decoder in turns took twice as long. One graph alone takes the same time either way.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Sums of two products of 8 bits would be cut to 16 bits without VNNI. This makes them exact and
    # 1.3 times as long; onnxruntime would do so with VNNI, too, where it gains nothing.
    if not _VNNI & set(instruction_sets()):
        options.add_session_config_entry("session.x64quantprecision", "1")
    if weights is not None:
        options.add_external_initializers_from_files_in_memory(
            [weights.path.name], [weights.memory], [len(weights.memory)]
        )
        # Else it would copy what it does not pack.
        options.add_session_config_entry(
            "session.use_external_initializer_file_buffers_directly", "1"
        )
    with contextlib.nullcontext() if weights is None else weights.being_loaded():
        return ort.InferenceSession(
            os.fspath(path), options, ["CPUExecutionProvider"], disabled_optimizers=_DISABLED_ON_CPU
        )


def _have_been_read(weights: MappedWeights, *num_tokens: int) -> None:
    """Record a run; raise PackageError if the weights file changed."""
    weights.have_been_read(*num_tokens)
    if weights.were_written_to:
        raise PackageError(
            f"{weights.path} was written to while it was in use, and what is "
            "computed with it is wrong; replace a package by renaming its whole directory, and "
            "load it again"
        )


def usual_options() -> ort.SessionOptions:
    """Return the options of every session, wherever it runs."""
    options = ort.SessionOptions()
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = _ERRORS_ONLY
    return options


def not_loaded(path: Path, error: Exception) -> PackageError:
    """Return what to raise for a graph that onnxruntime did not take."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return PackageError(
        f"{path}: onnxruntime {ort.__version__} cannot load this graph: {reason}; "
        "export the model again"
    )


def _value(array: NDArray[Any]) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(np.asarray(array))


def _described(value: ort.NodeArg) -> GraphValue:
    kind = value.type.removeprefix("tensor(").removesuffix(")")
    return GraphValue(_NUMPY_NAMES.get(kind, kind), tuple(value.shape))
