"""Kernels of a decoder: against the CPU, among neighbours, in other ways than ours.

A small model of a known shape is called directly, so that options of onnxruntime can be tried that
the engine does not offer. Only the engine's use of it is judged; the rest is there to be compared.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.cuda.device import CudaDevice, open_device
from engine.package.graph_io import (
    INPUT_IDS,
    LOGIT_IDX,
    LOGITS,
    NUM_TOP,
    PAST,
    POSITION_IDS,
    PRESENT,
    SEQLENS_K,
    TOTAL_SEQ,
    decoder_shape,
    layer_names,
)
from engine.package.manifest import PackageFormat, Precision
from engine.session import NOT_CAPTURED, Session, create_session
from loadtest.gpu_check.child import elsewhere
from loadtest.gpu_check.contract_file import read_contract, write_contract
from loadtest.gpu_check.device_decoder import DeviceDecoder, create_variant, zeros_of
from loadtest.gpu_check.formats import weights_of
from loadtest.gpu_check.models import make_checkpoint
from loadtest.gpu_check.part import Found, Outcome, Settings
from loadtest.gpu_check.timing import time_in_turns

_SEED = 0
_BUCKETS, _QUICK_BUCKETS = (1, 8, 32, 64, 256), (1, 4)
_BUCKET = 8  # rows of the call that invariance is looked at in
_CHUNK = 64  # tokens of a prompt in one call
_PROMPTS = (5, 100, 31, 64, 7, 65, 12, 90)  # tokens
_STEPS = 8  # tokens decoded behind a prompt
_CPU_STEPS = 16
_TURN_SECONDS = 0.2
# Limits to the CPU's result in the same type; both round, so twice the error that one may have.
_MOST_DIFFERENCE = {"fp32": 1e-4, "fp16": 0.04}  # in standard deviations of the logits

Floats = NDArray[np.float32]


def probe(
    settings: Settings,
    model: str,
    precision: Precision,
    weights: str = "",
    body: str = "",
    options: str = "",
    entries: str = "",
    judged: str = "",
) -> Outcome:
    """Look at a model's decoder on the device; `options` and `entries` are "name=value,...".

    With `judged` it is loaded as the engine does, and another process must give the same outputs.
    """
    path = _graphs(settings, model, precision, weights, body)
    device = open_device()
    decoder = _load(path, device, options, entries, settings.quick)
    found: Found = {}
    if precision != "bf16":
        found["against_cpu"] = _against_cpu(path, decoder)
    found |= _invariance(decoder, settings.quick)
    tables = {"decode steps, us": _times(decoder, device, settings.quick)}
    passed: bool | None = None
    if judged:
        again = elsewhere(f"{__name__}:digest", settings, model=model, precision=precision)
        found["digest_again"] = again.found["digest"]
        passed = _is_right(found, precision)
    return Outcome(_summary(found), {**found, "tables": tables}, passed)


def digest(settings: Settings, model: str, precision: Precision) -> Outcome:
    """Return the digest of what a decoder gives, as the engine uses it."""
    path = _graphs(settings, model, precision, "", "")
    decoder = _load(path, open_device(), "", "", settings.quick)
    found = _digest(_alone(decoder))
    return Outcome(found, {"digest": found})


def _graphs(settings: Settings, model: str, precision: Precision, weights: str, body: str) -> Path:
    """Return the directory of the decoder's graph, made if it is not there."""
    from exporter.checkpoint import load_checkpoint
    from exporter.graphs.contracts import generation_contract
    from exporter.graphs.package_graphs import write_graphs
    from exporter.graphs.target import target_of
    from exporter.graphs.torch_export import build_graphs
    from exporter.graphs.weights import quantize

    path = settings.work / model / f"probe-{precision}-{weights or 'plain'}-{body or 'own'}"
    if path.is_dir():
        return path
    checkpoint = load_checkpoint(make_checkpoint(model, settings.work, quick=settings.quick))
    form = PackageFormat.of("cuda", precision, weights_of(weights))
    contract = generation_contract(checkpoint.config.model, form)
    assert contract is not None, "only models that generate are looked at"
    target = target_of(form)
    if body == "unfused":
        target = replace(target, fuse=None)
    functions = target.functions["fp32"] if body == "attention24" else None
    graphs = build_graphs(checkpoint.model, target=target, precision=precision, functions=functions)
    for graph in graphs.values():
        quantize(graph, form)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    write_graphs(graphs, unfinished)
    write_contract(contract, unfinished)
    unfinished.rename(path)
    return path


def _load(path: Path, device: CudaDevice, options: str, entries: str, quick: bool) -> DeviceDecoder:
    graph = path / "decoder.onnx"
    session: Session
    if options or entries:
        session = create_variant(graph, device, _pairs(options), _pairs(entries))
    else:
        session = device.create_session(graph)
    rows = max((*(_QUICK_BUCKETS if quick else _BUCKETS), _BUCKET))
    return DeviceDecoder(session, read_contract(path), device, rows)


def _pairs(text: str) -> dict[str, str]:
    return dict(part.split("=") for part in text.split(",") if part)


def _prompts(decoder: DeviceDecoder) -> list[list[int]]:
    rng = np.random.default_rng(_SEED)
    vocabulary, room = decoder.contract.vocab_size, decoder.capacity - _STEPS - 1
    return [rng.integers(0, vocabulary, min(n, room)).tolist() for n in _PROMPTS]


def _against_cpu(path: Path, decoder: DeviceDecoder) -> Found:
    """Compare with the same file on the CPU: prompts in chunks, then likeliest tokens."""
    cpu = create_session(path / "decoder.onnx")
    largest = spread = 0.0
    equal = total = 0
    for prompt in _prompts(decoder):
        steps = min(_CPU_STEPS, decoder.capacity - len(prompt))
        seen = [decoder.prefill(0, prompt, _CHUNK)]
        tokens = []
        for _ in range(steps):
            tokens.append(int(seen[-1].argmax()))
            seen.append(decoder.decode(tokens[-1:], 1)[0])
        ours, theirs = np.stack(seen), _cpu_logits(cpu, decoder, prompt, tokens)
        difference = np.abs(ours - theirs).max()
        largest = max(largest, float(np.nan_to_num(difference, nan=np.inf)))
        spread = max(spread, float(theirs.std(-1).mean()))
        equal += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        total += len(ours)
    return {"max_diff": largest, "logit_std": spread, "tokens_equal": equal, "tokens": total}


def _cpu_logits(
    cpu: Session, decoder: DeviceDecoder, prompt: Sequence[int], tokens: Sequence[int]
) -> Floats:
    """Return the logits behind the prompt and behind each token, [1 + tokens, V]."""
    inputs, num_layers = decoder_shape(decoder.contract).inputs, decoder.contract.cache.num_layers
    past_names, present_names = (layer_names(prefix, num_layers) for prefix in (PAST, PRESENT))
    caches = [zeros_of(inputs[name], {"batch": 1}) for name in past_names]
    ids, found = [*prompt, *tokens], []
    cuts = [*range(0, len(prompt), _CHUNK), *range(len(prompt), len(ids) + 1)]
    for start, stop in itertools.pairwise(cuts):
        given = {
            INPUT_IDS: [ids[start:stop]],
            POSITION_IDS: [range(start, stop)],
            LOGIT_IDX: [stop - start - 1],
            NUM_TOP: [1],
            SEQLENS_K: [stop - 1],
            TOTAL_SEQ: [stop],
        }
        feeds = {name: np.array(value, inputs[name].dtype) for name, value in given.items()}
        outputs = cpu.run(feeds | dict(zip(past_names, caches, strict=True)))
        caches = [outputs[name] for name in present_names]
        found.append(outputs[LOGITS][0])
    return np.stack(found[-len(tokens) - 1 :])


def _alone(decoder: DeviceDecoder, bucket: int = _BUCKET) -> list[Floats]:
    """Return the logits of every prompt's steps, [steps, V], in row 0 of a call of `bucket`."""
    return [_row(decoder, i, 0, bucket) for i in range(len(_PROMPTS))]


def _row(decoder: DeviceDecoder, number: int, row: int, bucket: int) -> Floats:
    """Decode a prompt in `row`; the rows before it decode other prompts meanwhile."""
    prompts = _prompts(decoder)
    rng = np.random.default_rng(_SEED + 1)
    forced = rng.integers(0, decoder.contract.vocab_size, (len(prompts), _STEPS))
    members = [(number + 1 + i) % len(prompts) for i in range(row)] + [number]
    decoder.lengths[:] = 0
    for i, member in enumerate(members):
        decoder.prefill(i, prompts[member], _CHUNK)
    steps = [
        decoder.decode([int(forced[member, step]) for member in members], bucket)[row]
        for step in range(_STEPS)
    ]
    return np.stack(steps)


def _invariance(decoder: DeviceDecoder, quick: bool) -> Found:
    alone, again = _alone(decoder), _alone(decoder)
    others = [_row(decoder, i, 1 + i % (_BUCKET - 1), _BUCKET) for i in range(len(_PROMPTS))]
    buckets = _QUICK_BUCKETS if quick else _BUCKETS
    return {
        "same_again": _are_equal(alone, again),
        "same_among_others": _are_equal(alone, others),
        "max_diff_by_bucket": {
            str(bucket): max(
                float(np.abs(one - other).max())
                for one, other in zip(alone, _alone(decoder, bucket), strict=True)
            )
            for bucket in buckets
        },
        "computes": _computes(alone),
        "digest": _digest(alone),
    }


def _computes(alone: Sequence[Floats]) -> bool:
    """Say whether there are numbers that depend on the prompt: else all are equal for nothing."""
    are_numbers = all(np.isfinite(one).all() and one.std() > 0 for one in alone)
    return are_numbers and not np.array_equal(alone[0], alone[1])


def _are_equal(ones: Sequence[Floats], others: Sequence[Floats]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(ones, others, strict=True))


def _digest(arrays: Sequence[Floats]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def _times(decoder: DeviceDecoder, device: CudaDevice, quick: bool) -> list[dict[str, object]]:
    return [
        _time_bucket(decoder, device, bucket, number, 0.0 if quick else _TURN_SECONDS)
        for number, bucket in enumerate(_QUICK_BUCKETS if quick else _BUCKETS)
    ]


def _time_bucket(
    decoder: DeviceDecoder, device: CudaDevice, bucket: int, graph_id: int, seconds: float
) -> dict[str, object]:
    ids = np.zeros((bucket, 1), np.int64)
    positions = np.full((bucket, 1), decoder.capacity // 2)

    def queue(graph: int) -> Callable[[], object]:
        return lambda: decoder.run(0, ids, positions, graph_id=graph)

    works = {"eager": queue(NOT_CAPTURED), "captured": queue(graph_id)}
    wait = device.runtime.synchronize
    seen = time_in_turns(works, wait, seconds=seconds)
    return {"rows": bucket, **{name: asdict(timed)["total"] for name, timed in seen.items()}}


def _is_right(found: Found, precision: Precision) -> bool:
    right: bool = found["computes"] and found["same_again"] and found["same_among_others"]
    right &= found["digest"] == found["digest_again"]
    if against := found.get("against_cpu"):
        right &= against["max_diff"] <= _MOST_DIFFERENCE[precision] * against["logit_std"]
    return right


def _summary(found: Found) -> str:
    said = []
    if against := found.get("against_cpu"):
        said.append(
            f"{against['max_diff'] / (against['logit_std'] or 1):.2g} std from the CPU, "
            f"{against['tokens_equal']} of {against['tokens']} tokens equal"
        )
    if not found["computes"]:
        said.append("NOTHING computed")
    for key, text in (("same_again", "again"), ("same_among_others", "among others")):
        said.append(f"{'equal' if found[key] else 'NOT equal'} {text}")
    if "digest_again" in found:
        same = found["digest"] == found["digest_again"]
        said.append(f"{'equal' if same else 'NOT equal'} in another process")
    furthest = max(found["max_diff_by_bucket"].values())
    return ", ".join([*said, f"other calls' rows at most {furthest:.2g} off"])
