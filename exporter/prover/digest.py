"""A digest of what a package gives where it is run, which another process there finds again.

SHA-256 over the bytes of all outputs, as they lie in memory. A model that generates: cases of
increasing length beside each other, as many as there are rows for, first with the likeliest token
of each position asked for, then with 128 and the attention to the source; of every case the
logits, then ids, logits and log-probabilities of the likeliest tokens, then the attention. A
one-pass model: texts of every second length that is tried, or images, all of a length in one call;
logits, then embeddings.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.config import EngineConfig
from engine.errors import CertificateError, TokenweirError
from engine.one_pass.batch import Graph
from engine.package.graph_io import EMBEDDING, LOGITS
from engine.package.manifest import GenerationContract, Manifest
from engine.package.package import Package, load_package
from engine.slots.runner import SlotModelRunner
from exporter.prover.cases import prefill_chunk
from exporter.prover.driver import Asked, exported_graphs, generate, predict
from exporter.prover.execution import Execution, OnCpu, OnDevice
from exporter.prover.generation_cases import make_cases
from exporter.prover.item_cases import draw_images, random_groups

_NUM_STEPS = 8
_MOST_CASES = 16
_NUM_TOPS = (1, 128)  # as a captured step has them
_SECONDS = 1800  # that another process may take

Array = NDArray[Any]


class Found(NamedTuple):
    """The findings of a process."""

    digest: str
    buckets: tuple[int, ...]  # the numbers of rows of its decode calls


def find(package: Package, execution: Execution) -> Found:
    """Load a package and run it."""
    manifest = package.manifest
    if manifest.generation is None:
        with exported_graphs():
            graph = execution.load_session(package.path)
        return Found(_sha256(_computed(graph, manifest)), ())
    with exported_graphs():
        runner, _ = execution.load_runners(manifest.generation, package.path)
    return Found(_sha256(_generated(runner, manifest.generation)), runner.buckets)


def find_elsewhere(package: Package, execution: Execution) -> Found:
    """Let another process do so, which gives all memory back; CertificateError if it fails."""
    options = json.dumps(execution.as_options())
    command = [sys.executable, "-P", "-m", __name__, str(package.path), options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise CertificateError(
            f"{package.path}: another process did not end in {_SECONDS} s"
        ) from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise CertificateError(f"{package.path}: another process cannot run it: {reason}")
    found = json.loads(done.stdout)
    return Found(found["digest"], tuple(found["buckets"]))


def _generated(runner: SlotModelRunner, contract: GenerationContract) -> Iterator[Array]:
    every = make_cases(contract, (), 1, _NUM_STEPS)  # logits at the prompt's end only
    places = np.linspace(0, len(every) - 1, min(_MOST_CASES, len(every))).astype(int)
    cases = [every[place] for place in dict.fromkeys(places.tolist())]
    chunk = prefill_chunk(contract.cache.max_len)
    for num_top in _NUM_TOPS:
        asked = Asked(chunk, num_top, int(contract.alignment and num_top > 1))
        for first in range(0, len(cases), runner.num_slots):
            found = generate(runner, cases[first : first + runner.num_slots], asked)
            for seen in found:
                yield from (
                    np.asarray(seen.logits),
                    seen.top_ids,
                    seen.top_logits,
                    seen.top_logprobs,
                )
                if seen.alignment is not None:
                    yield seen.alignment


def _computed(graph: Graph, manifest: Manifest) -> Iterator[Array]:
    if manifest.image is not None:
        batches = [draw_images(manifest.image)]
    else:
        assert manifest.encoding is not None, "a model generates, encodes text, or sees images"
        batches = random_groups(manifest.encoding)[::2]
    for items in batches:
        outputs = predict(graph, items)
        yield from (outputs[name] for name in (LOGITS, EMBEDDING) if name in outputs)


def _sha256(arrays: Iterator[Array]) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def main(path: str, options: str) -> None:
    """Print as JSON what a package gives here, run by what `as_options` of an Execution returns."""
    package, given = load_package(path), json.loads(options)
    buckets = tuple(given["decode_buckets"])
    execution: Execution = OnCpu(buckets)
    if (device := given.pop("device", None)) is not None:
        from engine.cuda.device import open_device

        config = EngineConfig(**{**given, "decode_buckets": buckets})
        execution = OnDevice(package, config, open_device(device))
    print(json.dumps(find(package, execution)._asdict()))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except TokenweirError as error:
        sys.exit(str(error))
