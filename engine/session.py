"""Makes and runs onnxruntime sessions: the one place that knows its options and its errors."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.device.distributions import check_distributions
from engine.device.memory import DeviceArray
from engine.errors import DeviceError, OutOfDeviceMemory, PackageError, TokenweirError
from engine.machine import instruction_sets, num_cores
from engine.mapped_weights import MappedWeights
from engine.package.graph_io import INPUT_IDS, READ_ON_HOST, GraphValue
from engine.wording import listed, size_of

check_distributions()  # two of them, installed over each other, may fail anywhere at import
import onnxruntime as ort  # noqa: E402

if TYPE_CHECKING:
    from engine.device.device import CudaDevice

NOT_CAPTURED = -1  # the id of no captured graph

_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_VNNI = {"avx_vnni", "avx512_vnni"}  # either has products of 8 bits with sums of 32
_ERRORS_ONLY = 3
_NUMPY_NAMES = {"float": "float32", "double": "float64"}  # onnxruntime's names; others agree
_ELEMENT_TYPES = {  # onnx.TensorProto.DataType
    "float32": 1,
    "int8": 3,
    "int32": 6,
    "int64": 7,
    "float16": 10,
    "float64": 11,
    "bfloat16": 16,
}
# Parts of its messages, as it has no class for them: its allocator's, CUDA's, and those of cuBLAS,
# which takes memory when it is opened (CUBLAS_STATUS_ALLOC_FAILED).
_OUT_OF_MEMORY = ("Failed to allocate memory", "out of memory", "CUBLAS failure 3:")
_WANTED = re.compile(r"requested buffer of size (\d+)")  # in the first of them
# The fused kernel takes 7 times as long as an addition and a LayerNormalization at 32 rows of 512
# numbers, 19 times at 800 rows.
_DISABLED_ON_CPU = ["SkipLayerNormFusion"]
# A Split into unequal parts copies their sizes from memory of the host that is another's when a
# captured call is repeated.
DISABLED_ON_CUDA = ["GatherSliceToSplitFusion"]


def create_session(
    path: str | os.PathLike[str],
    *,
    num_threads: int = 0,
    device: CudaDevice | None = None,
    profile: Path | None = None,
) -> Session:
    """Load a graph for the CPU, or with its weights onto a device.

    `num_threads` are those of the CPU; 0 means one per core that this process may use. `profile` is
    the beginning of the name of a file that says when each kernel ran on a CPU, see `end_profile`.
    Raises PackageError if onnxruntime does not take the graph, or would run a node of it on the CPU
    beside the device; DeviceError if it cannot use the device, OutOfDeviceMemory if there is no
    room.
    """
    path = Path(path)
    if device is not None:
        return Session(_create_on(device, path), path, device=device)
    try:
        weights = MappedWeights.of(path)
        session = _create_on_cpu(path, num_threads or num_cores(), weights, profile)
        return Session(session, path, weights)
    except Exception as error:  # onnxruntime has a dozen of its own, without a common base
        raise _not_loaded(path, error) from error


class Session:
    """A graph that is ready to run."""

    def __init__(
        self,
        session: ort.InferenceSession,
        path: Path,
        weights: MappedWeights | None = None,
        *,
        device: CudaDevice | None = None,
    ) -> None:
        """`weights` is the memory that the graph reads them in, if that is not its own."""
        self._session = session
        self._weights = weights
        self._device = device
        self._on_device = frozenset() if device is None else _on_device(session)
        self.path = path
        self.inputs = {value.name: _described(value) for value in session.get_inputs()}
        self.outputs = {value.name: _described(value) for value in session.get_outputs()}

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Run once and return every output by name, in new arrays.

        A call on a device waits for its stream: copies to it and back are part of the call.
        Raises OutOfDeviceMemory if a kernel wants more than it has, PackageError if somebody has
        written to the weights that are read where their file lies.
        """
        options = None if self._device is None else _run_options(NOT_CAPTURED)
        with _telling_of_memory(self._device):
            outputs = self._session.run(None, dict(inputs), options)
        if self._weights is not None:
            _have_been_read(self._weights)
        return dict(zip(self.outputs, outputs, strict=True))

    def bind(self) -> Binding:
        """Return an empty binding of this graph."""
        return Binding(self._session, self._weights, self._device, self._on_device)

    def end_profile(self) -> tuple[Path, int]:
        """Return onnxruntime's file of what ran when, and the `time.time_ns` that it counts from.

        The session is one that was created with a profile, and writes nothing from then on.
        """
        return Path(self._session.end_profiling()), self._session.get_profiling_start_time_ns()


class Binding:
    """Inputs and outputs of a graph tied to memory: run() reads and writes the arrays in place.

    A run of what was bound before costs 0.03 ms; binding anew costs three times that.
    Binding a name again replaces what was bound to it.

    Everything on a device is a DeviceArray, but for inputs that kernels read on the host.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        weights: MappedWeights | None,
        device: CudaDevice | None,
        on_device: frozenset[tuple[str, str]],
    ) -> None:
        self._session = session
        self._weights = weights  # alive while the graph reads them
        self._device = device
        self._on_device = on_device  # kind and name of what lies there
        self._binding = session.io_binding()
        self._arrays: dict[tuple[str, str], NDArray[Any] | DeviceArray] = {}  # alive while bound
        self._options: dict[int, ort.RunOptions] = {}  # by id of captured graph
        self._num_tokens: tuple[int, ...] = ()  # token ids in a run, if it has some

    def input(self, name: str, array: NDArray[Any] | DeviceArray) -> None:
        """Bind an input to an array, which must be contiguous.

        Raises ValueError for an array where the graph does not read it: it would be copied once,
        now, and what is written to it later would never be seen.
        """
        if self._is_unread(name, array):
            array = np.zeros(array.shape, array.dtype)
        self._keep("input", name, array)
        if isinstance(array, DeviceArray):
            self._binding.bind_input(name, *self._described(array))
            return
        if name == INPUT_IDS:
            self._num_tokens = (array.size,)
        self._binding.bind_ortvalue_input(name, _value(array))

    def output(self, name: str, array: NDArray[Any] | DeviceArray) -> None:
        """Bind an output to an array of exactly its shape, which must be contiguous.

        Raises ValueError for an array where the graph does not write it.
        """
        self._keep("output", name, array)
        if isinstance(array, DeviceArray):
            self._binding.bind_output(name, *self._described(array))
        else:
            self._binding.bind_ortvalue_output(name, _value(array))

    def run(self, graph_id: int = NOT_CAPTURED) -> None:
        """Run the graph on what is bound; on a device, queue it on the stream and return.

        Raises as `Session.run`.

        The first run with an id of 0 and above records what it queues, the next ones queue that
        as it was: at the same addresses, with the same inputs on the host, and from the same
        thread, whose own the ids are.
        """
        if self._device is None:
            self._session.run_with_iobinding(self._binding)
            if self._weights is not None:
                _have_been_read(self._weights, *self._num_tokens)
            return
        if graph_id not in self._options:
            self._options[graph_id] = _run_options(graph_id, waits=False)
        with _telling_of_memory(self._device):
            self._session.run_with_iobinding(self._binding, self._options[graph_id])

    def _is_unread(self, name: str, array: NDArray[Any] | DeviceArray) -> bool:
        """Return if the graph wants an input on the host because no node of it reads it.

        It would be copied there in every run: rotary positions are those of the lengths.
        """
        there = isinstance(array, DeviceArray) and ("input", name) not in self._on_device
        return there and self._device is not None and name not in READ_ON_HOST

    def _keep(self, kind: str, name: str, array: NDArray[Any] | DeviceArray) -> None:
        place = "device" if (kind, name) in self._on_device else "host"
        if isinstance(array, DeviceArray) != (place == "device"):
            raise ValueError(f"{kind} {name} is to lie on the {place}; bind an array there")
        # onnxruntime copies a view with gaps without a word, and what it writes is lost.
        if not isinstance(array, DeviceArray) and not array.flags.c_contiguous:
            raise ValueError(f"{kind} {name}: an array of shape {array.shape} is not contiguous")
        self._arrays[kind, name] = array

    def _described(self, array: DeviceArray) -> tuple[str, int, int, list[int], int]:
        assert self._device is not None, "the graph wants it there"
        element = _ELEMENT_TYPES[array.dtype]
        return "cuda", self._device.index, element, list(array.shape), array.address


def _create_on_cpu(
    path: Path, num_threads: int, weights: MappedWeights | None, profile: Path | None
) -> ort.InferenceSession:
    options = _options()
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, os.fspath(profile)
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
            os.fspath(path), options, [_CPU], disabled_optimizers=_DISABLED_ON_CPU
        )


def _create_on(device: CudaDevice, path: Path) -> ort.InferenceSession:
    """Return a session of which every node runs on the device and every call can be captured."""
    try:
        session = _create_on_cuda(device, path, captures=True)
    except Exception as error:
        raise _refusal(device, path, error) from error
    if _CUDA not in session.get_providers():
        raise DeviceError(
            f"{path}: onnxruntime {ort.__version__} cannot load its provider for CUDA; what it has "
            "written to the log says why"
        )
    if misplaced := _misplaced(session, path):
        raise misplaced
    return session


def _create_on_cuda(device: CudaDevice, path: Path, *, captures: bool) -> ort.InferenceSession:
    options = _options()
    options.intra_op_num_threads = 1  # nothing is computed there
    options.use_deterministic_compute = True
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return ort.InferenceSession(
        os.fspath(path),
        options,
        [(_CUDA, cuda_options(device, captures=captures))],
        disabled_optimizers=DISABLED_ON_CUDA,
        enable_fallback=0,
    )


def cuda_options(device: CudaDevice, *, captures: bool = True) -> dict[str, str]:
    """Return what onnxruntime's provider for CUDA is told."""
    return {
        "device_id": str(device.index),
        "user_compute_stream": str(device.runtime.stream),
        "use_tf32": "0",
        # Flash, for cuDNN plans anew for every length. It has no float32 and no masks: those are
        # computed without fusion, for the memory-efficient kernel is another bit, 2.
        "sdpa_kernel": "1",
        "arena_extend_strategy": "kSameAsRequested",
        "enable_cuda_graph": str(int(captures)),
    }


def _have_been_read(weights: MappedWeights, *num_tokens: int) -> None:
    """Record a run; raise PackageError if the weights file changed."""
    weights.have_been_read(*num_tokens)
    if weights.were_written_to:
        raise PackageError(
            f"{weights.path} was written to while it was in use, and what is "
            "computed with it is wrong; replace a package by renaming its whole directory, and "
            "load it again"
        )


def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = _ERRORS_ONLY
    return options


def _run_options(graph_id: int, *, waits: bool = True) -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    options.add_run_config_entry("disable_synchronize_execution_providers", str(int(not waits)))
    return options


@contextlib.contextmanager
def _telling_of_memory(device: CudaDevice | None) -> Iterator[None]:
    """Raise OutOfDeviceMemory for an error of onnxruntime that says so."""
    try:
        yield
    except Exception as error:
        if device is None or not _is_of_memory(error):
            raise
        free, total = device.runtime.free_memory()
        found = _WANTED.search(str(error))
        wanted = int(found[1]) if found else 0
        amount = size_of(wanted) if wanted else "more"
        raise OutOfDeviceMemory(
            f"kernels want {amount} of {device.gpu_name}, of whose {size_of(total)} "
            f"{size_of(free)} are left",
            lacking=wanted - free,
        ) from error


def _is_of_memory(error: Exception) -> bool:
    return any(words in str(error) for words in _OUT_OF_MEMORY)


def _refusal(device: CudaDevice, path: Path, error: Exception) -> TokenweirError:
    """Return why a graph was not taken: onnxruntime does not say which node cannot be captured."""
    if _is_of_memory(error):
        free, total = map(size_of, device.runtime.free_memory())
        return OutOfDeviceMemory(
            f"{path}: its weights have no room on {device.gpu_name}, of whose {total} {free} are "
            "left; end what else uses it, or export with --weights int8-blocks or int4"
        )
    try:
        session = _create_on_cuda(device, path, captures=False)
    except Exception:
        return _not_loaded(path, error)
    return _misplaced(session, path) or _not_loaded(path, error)


def _misplaced(session: ort.InferenceSession, path: Path) -> PackageError | None:
    """Return what to raise if nodes run on the CPU beside a device."""
    nodes = [
        f"{node.op_type} {node.name!r}" if node.name else f"{node.op_type} without a name"
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name != _CUDA
        for node in part.get_nodes()
    ]
    if not nodes:
        return None
    return PackageError(
        f"{path}: onnxruntime {ort.__version__} would run nodes of this graph on the CPU beside "
        f"CUDA: {listed(dict.fromkeys(nodes))}; export the model again with --target cuda, or "
        "serve it with --device cpu"
    )


def _not_loaded(path: Path, error: Exception) -> PackageError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return PackageError(
        f"{path}: onnxruntime {ort.__version__} cannot load this graph: {reason}; "
        "export the model again"
    )


def _on_device(session: ort.InferenceSession) -> frozenset[tuple[str, str]]:
    """Return kind and name of what kernels read or write in the memory of a device."""
    inputs = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    outputs = zip(session.get_outputs(), session.get_output_memory_infos(), strict=True)
    return frozenset(
        (kind, value.name)
        for kind, values in (("input", inputs), ("output", outputs))
        for value, memory in values
        if memory.name == "Cuda"
    )


def _value(array: NDArray[Any]) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(np.asarray(array))


def _described(value: ort.NodeArg) -> GraphValue:
    kind = value.type.removeprefix("tensor(").removesuffix(")")
    return GraphValue(_NUMPY_NAMES.get(kind, kind), tuple(value.shape))
