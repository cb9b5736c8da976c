"""Makes and runs onnxruntime sessions on a GPU: the options and errors of its provider for CUDA."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from engine.cuda.memory import DeviceArray
from engine.cuda.runtime import CudaRuntime
from engine.errors import DeviceError, OutOfDeviceMemory, PackageError, TokenweirError
from engine.package.graph_io import READ_ON_HOST, Bound
from engine.session import NOT_CAPTURED, Binding, Session, not_loaded, usual_options
from engine.wording import listed, size_of

_CUDA = "CUDAExecutionProvider"
_ELEMENT_TYPES = {  # onnx.TensorProto.DataType
    "float32": 1,
    "int8": 3,
    "int32": 6,
    "int64": 7,
    "float16": 10,
    "float64": 11,
    "bfloat16": 16,
}

# Messages of onnxruntime, which has no class for them: its allocator's, that of CUDA's library, and
# that of cuBLAS, which takes some when it is opened (CUBLAS_STATUS_ALLOC_FAILED).
_OUT_OF_MEMORY = ("Failed to allocate memory", "out of memory", "CUBLAS failure 3:")
_WANTED = re.compile(r"requested buffer of size (\d+)")  # in the first of them

# A Split into unequal parts copies their sizes from memory of the host that is another's when a
# captured call is repeated.
DISABLED_OPTIMIZERS = ["GatherSliceToSplitFusion"]


def create_session(runtime: CudaRuntime, path: Path) -> CudaSession:
    """Load a graph with its weights onto a device, so that every call of it can be captured.

    Raises PackageError if onnxruntime does not take the graph, or would run a node of it on the CPU
    beside the device; DeviceError if it cannot use the device, OutOfDeviceMemory if there is no
    room.
    """
    try:
        session = _create(runtime, path, captures=True)
    except Exception as error:
        raise _refusal(runtime, path, error) from error
    if _CUDA not in session.get_providers():
        raise DeviceError(
            f"{path}: onnxruntime {ort.__version__} cannot load its provider for CUDA; what it has "
            "written to the log says why"
        )
    if misplaced := _misplaced(session, path):
        raise misplaced
    return CudaSession(session, path, runtime)


class CudaSession(Session):
    """A graph on a device, whose calls are queued on the stream of this process."""

    def __init__(self, session: ort.InferenceSession, path: Path, runtime: CudaRuntime) -> None:
        super().__init__(session, path)
        self._runtime = runtime
        self._on_device = _on_device(session)

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Run once and return every output by name, in new arrays on the host.

        The call waits for the stream: copies to the device and back are part of it. Raises
        OutOfDeviceMemory if a kernel wants more than there is.
        """
        with _telling_of_memory(self._runtime):
            outputs = self._session.run(None, dict(inputs), _run_options(NOT_CAPTURED))
        return dict(zip(self.outputs, outputs, strict=True))

    def bind(self) -> CudaBinding:
        """Return an empty binding of this graph."""
        return CudaBinding(self._session, self._runtime, self._on_device)


class CudaBinding(Binding):
    """A Binding to DeviceArrays, but for inputs that kernels read on the host."""

    def __init__(
        self,
        session: ort.InferenceSession,
        runtime: CudaRuntime,
        on_device: frozenset[tuple[str, str]],
    ) -> None:
        super().__init__(session)
        self._runtime = runtime
        self._on_device = on_device  # kind and name of what lies there
        self._options: dict[int, ort.RunOptions] = {}  # by id of captured graph

    def input(self, name: str, array: Bound) -> None:
        """See Binding."""
        if isinstance(array, DeviceArray) and self._is_unread(name):
            array = np.zeros(array.shape, array.dtype)
        if ("input", name) in self._on_device:
            self._binding.bind_input(name, *self._placed("input", name, array))
        else:
            super().input(name, array)

    def output(self, name: str, array: Bound) -> None:
        """See Binding."""
        if ("output", name) in self._on_device:
            self._binding.bind_output(name, *self._placed("output", name, array))
        else:
            super().output(name, array)

    def run(self, graph_id: int = NOT_CAPTURED) -> None:
        """Queue a run of the graph on what is bound, and return; raises as `CudaSession.run`.

        The first run with an id of 0 and above records what it queues, the next ones queue that
        as it was: at the same addresses, with the same inputs on the host, and from the same
        thread, whose own the ids are.
        """
        if graph_id not in self._options:
            self._options[graph_id] = _run_options(graph_id, waits=False)
        with _telling_of_memory(self._runtime):
            self._session.run_with_iobinding(self._binding, self._options[graph_id])

    def _is_unread(self, name: str) -> bool:
        """Return if the graph wants an input on the host because no node of it reads it.

        It would be copied there in every run: rotary positions are those of the lengths.
        """
        return ("input", name) not in self._on_device and name not in READ_ON_HOST

    def _placed(self, kind: str, name: str, array: Bound) -> tuple[str, int, int, list[int], int]:
        if not isinstance(array, DeviceArray):
            raise ValueError(f"{kind} {name} is to lie on the device; bind an array there")
        self._arrays[kind, name] = array
        element = _ELEMENT_TYPES[array.dtype]
        return "cuda", self._runtime.device, element, list(array.shape), array.address


def cuda_options(runtime: CudaRuntime, *, captures: bool = True) -> dict[str, str]:
    """Return what onnxruntime's provider for CUDA is told."""
    return {
        "device_id": str(runtime.device),
        "user_compute_stream": str(runtime.stream),
        "use_tf32": "0",
        # Flash, for cuDNN plans anew for every length. It has no float32 and no masks: those are
        # computed without fusion, for the memory-efficient kernel is another bit, 2.
        "sdpa_kernel": "1",
        "arena_extend_strategy": "kSameAsRequested",
        "enable_cuda_graph": str(int(captures)),
    }


def _create(runtime: CudaRuntime, path: Path, *, captures: bool) -> ort.InferenceSession:
    options = usual_options()
    options.intra_op_num_threads = 1  # nothing is computed there
    options.use_deterministic_compute = True
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return ort.InferenceSession(
        os.fspath(path),
        options,
        [(_CUDA, cuda_options(runtime, captures=captures))],
        disabled_optimizers=DISABLED_OPTIMIZERS,
        enable_fallback=0,
    )


def _run_options(graph_id: int, *, waits: bool = True) -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    options.add_run_config_entry("disable_synchronize_execution_providers", str(int(not waits)))
    return options


@contextlib.contextmanager
def _telling_of_memory(runtime: CudaRuntime) -> Iterator[None]:
    """Raise OutOfDeviceMemory for an error of onnxruntime that says so."""
    try:
        yield
    except Exception as error:
        if not _is_of_memory(error):
            raise
        free, total = runtime.free_memory()
        found = _WANTED.search(str(error))
        wanted = int(found[1]) if found else 0
        amount = size_of(wanted) if wanted else "more"
        raise OutOfDeviceMemory(
            f"kernels want {amount} of {runtime.device_name()}, of whose {size_of(total)} "
            f"{size_of(free)} are left",
            lacking=wanted - free,
        ) from error


def _is_of_memory(error: Exception) -> bool:
    return any(words in str(error) for words in _OUT_OF_MEMORY)


def _refusal(runtime: CudaRuntime, path: Path, error: Exception) -> TokenweirError:
    """Return why a graph was not taken: onnxruntime does not say which node cannot be captured."""
    if _is_of_memory(error):
        free, total = map(size_of, runtime.free_memory())
        return OutOfDeviceMemory(
            f"{path}: its weights have no room on {runtime.device_name()}, of whose {total} "
            f"{free} are left; end what else uses it, or export with --weights int8-blocks or int4"
        )
    try:
        session = _create(runtime, path, captures=False)
    except Exception:
        return not_loaded(path, error)
    return _misplaced(session, path) or not_loaded(path, error)


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
