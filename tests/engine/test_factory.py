"""load_engine: from a directory on disk to answers, for every architecture."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers

from engine.config import EngineConfig, RequestLimits
from engine.cuda.room import DeviceRoom, Fit, fit
from engine.errors import ConfigError, OutOfDeviceMemory, PackageError
from engine.factory import load_engine, load_parts
from engine.generation.async_engine import AsyncEngine
from engine.lifecycle.lifecycle import WarmUpResult
from engine.one_pass.engine import EncoderEngine
from engine.one_pass.prediction import PredictionItem
from engine.one_pass.warm_up import warm_up_one_pass
from engine.package.files import hash_file
from engine.package.manifest import FORMAT_VERSION, GenerationContract
from engine.package.package import load_package, seal
from engine.requests.events import RequestFinished, SequenceFinished
from engine.requests.request import GenerationRequest, SamplingParams
from engine.session import create_session
from engine.text.tokenizer import Tokenizer
from tests.engine.cuda.fake_device_session import FakeDeviceSession, write_sampling_graphs
from tests.fakes import fake_gpu
from tests.fakes.stand_in_certificate import certificate

VOCAB = 258  # bytes, start, end
START, END = 256, 257
CACHE = {"num_layers": 1, "num_kv_heads": 1, "max_len": 16, "head_dim": 8}
CACHE_SHAPE = ["B", 1, 16, 8]
FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32
CONFIG = EngineConfig(num_threads=1, max_num_seqs=2)

Values = Sequence[tuple[str, int, Sequence[str | int]]]


def _model(nodes: list[NodeProto], inputs: Values, outputs: Values, **weights: Any) -> ModelProto:
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def _alphabet_decoder(*, cross: bool) -> ModelProto:
    """Every byte is followed by the next one; start by "a"; "e" by the end."""
    table = np.zeros((VOCAB, VOCAB), dtype=np.float32)
    table[np.arange(VOCAB), (np.arange(VOCAB) + 1) % 256] = 1
    table[START], table[ord("e")] = np.eye(VOCAB)[ord("a")], np.eye(VOCAB)[END]
    kinds = ("key", "value")
    names = [f"key_values.0.{kind}" for kind in kinds]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["all"]),  # (B, S, VOCAB)
        helper.make_node("Reshape", ["all", "rows"], ["flat"]),  # (B * S, VOCAB)
        helper.make_node("Gather", ["flat", "logit_idx"], ["logits"]),
        helper.make_node("TopK", ["logits", "num_top"], ["top_logits", "top_ids"]),
        helper.make_node("LogSoftmax", ["logits"], ["logprobs"]),
        helper.make_node("GatherElements", ["logprobs", "top_ids"], ["top_logprobs"], axis=1),
        *(
            helper.make_node("Identity", [f"past_{name}"], [f"present.{name[11:]}"])
            for name in names
        ),
    ]
    inputs: list[tuple[str, int, Sequence[str | int]]] = [
        ("input_ids", INT64, ["B", "S"]),
        ("position_ids", INT64, ["B", "S"]),
        ("logit_idx", INT64, ["N"]),
        ("num_top", INT64, [1]),
        ("seqlens_k", INT32, ["B"]),
        ("total_seq", INT32, [1]),
        *((f"past_{name}", FLOAT, CACHE_SHAPE) for name in names),
    ]
    if cross:
        inputs += [("source_lengths", INT64, ["C"]), ("beam_rows", INT64, ["C", "G"])]
        inputs += [("row_queries", INT64, ["B", "S"])]
        inputs += [(f"cross_{name}", FLOAT, CACHE_SHAPE) for name in names]
    outputs: list[tuple[str, int, Sequence[str | int]]] = [
        ("logits", FLOAT, ["N", VOCAB]),
        ("top_ids", INT64, ["N", "k"]),
        *((name, FLOAT, ["N", "k"]) for name in ("top_logits", "top_logprobs")),
        *((f"present.0.{kind}", FLOAT, CACHE_SHAPE) for kind in kinds),
    ]
    return _model(nodes, inputs, outputs, table=table, rows=np.array([-1, VOCAB]))


def _idle_encoder() -> ModelProto:
    names = [f"cross_key_values.0.{kind}" for kind in ("key", "value")]
    return _model(
        [helper.make_node("Identity", [f"past_{name}"], [f"present_{name}"]) for name in names],
        [("input_ids", INT64, ["B", "S"]), *((f"past_{n}", FLOAT, CACHE_SHAPE) for n in names)],
        [(f"present_{name}", FLOAT, CACHE_SHAPE) for name in names],
    )


def _one_pass(name: str, shape: Sequence[str | int], *, extra: Values = ()) -> ModelProto:
    """Both outputs are the sum of the input."""
    nodes = [
        helper.make_node("Cast", [name], ["x"], to=FLOAT),
        helper.make_node("Flatten", ["x"], ["flat"], axis=1),
        helper.make_node("ReduceSum", ["flat", "axes"], ["logits"], keepdims=1),
        helper.make_node("Identity", ["logits"], ["embedding"]),
    ]
    kind = FLOAT if name == "pixel_values" else INT64
    outputs = [("logits", FLOAT, ["B", 1]), ("embedding", FLOAT, ["B", 1])]
    return _model(nodes, [(name, kind, shape), *extra], outputs, axes=np.array([1]))


def _save_tokenizer(path: Path, *, extra: int = 0) -> None:
    chars = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (ord(c) > 255, c))
    # Printable ASCII keeps its place, so that ids of letters are their bytes.
    order = {ord(c): c for c in chars if 0x21 <= ord(c) <= 0x7E}
    others = iter(c for c in chars if not 0x21 <= ord(c) <= 0x7E)
    vocab = {order.get(i) or next(others): i for i in range(256)}
    made = tokenizers.Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", *(f"<{i}>" for i in range(extra))])
    made.save(str(path))


def _write(directory: Path, graphs: dict[str, ModelProto], **manifest: Any) -> Path:
    directory.mkdir(exist_ok=True)
    for name, graph in graphs.items():
        (directory / name).write_bytes(graph.SerializeToString())
    if "image" not in manifest and not (directory / "tokenizer.json").exists():
        _save_tokenizer(directory / "tokenizer.json")
    fields = {
        "format_version": FORMAT_VERSION,
        "name": "tiny",
        "target": "cpu",
        "layout": "slots" if "generation" in manifest else None,
        "weights": "fp32",
        "labels": [] if "generation" in manifest else ["only"],
        "files": {
            path.name: hash_file(path).model_dump()
            for path in directory.iterdir()
            if path.name != "manifest.json"
        },
        "toolchain": {},
        "certificate": certificate(task=manifest["task"]).model_dump(mode="json"),
    }
    (directory / "manifest.json").write_bytes(seal(fields | manifest))
    return directory


def _text_package(
    directory: Path, graph: ModelProto | None = None, vocab: int = VOCAB, **manifest: Any
) -> Path:
    graph = graph or _one_pass("input_ids", ["B", "S"], extra=[("lengths", INT64, ["B"])])
    contract = {"vocab_size": vocab, "max_len": 8, "pad_token_id": 0, "embedding_dim": 1}
    return _write(
        directory,
        {"model.onnx": graph},
        architecture="encoder",
        task="classify",
        encoding=contract,
        **manifest,
    )


def _generating_package(
    directory: Path, *, cross: bool, decoder: ModelProto | None = None, **manifest: Any
) -> Path:
    graphs = {"decoder.onnx": decoder or _alphabet_decoder(cross=cross)}
    if cross:
        graphs["encoder.onnx"] = _idle_encoder()
    if manifest.get("target") == "cuda":
        write_sampling_graphs(directory, VOCAB)
    return _write(
        directory,
        graphs,
        architecture="encoder-decoder" if cross else "decoder",
        task="generate",
        generation={
            "vocab_size": VOCAB,
            "num_heads": 1,
            "cache": CACHE,
            "cross_cache": CACHE if cross else None,
            "decoder_start_token_id": START if cross else None,
            "eos_token_ids": [END],
        },
        **manifest,
    )


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder", "one-pass"])
async def test_a_worker_says_how_long_a_step_of_a_slow_model_may_take(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "one-pass":
        path = _text_package(tmp_path / "p")
    else:
        path = _generating_package(tmp_path / "p", cross=kind == "encoder-decoder")
    engine = load_engine(load_package(path), replace(CONFIG, max_step_seconds=1e-9))

    await engine.start()
    await engine.stop()

    assert "a full step of tiny takes " in caplog.text
    assert "4 times that, instead of 1e-09 s (max_step_seconds)" in caplog.text


@pytest.mark.parametrize(("max_num_seqs", "seconds"), [(2, 1.0), (32, 1.0), (64, 2.0)])
def test_a_full_batch_of_a_one_pass_model_is_timed_when_its_weights_are_in_memory(
    tmp_path: Path, max_num_seqs: int, seconds: float
) -> None:
    package = load_package(_text_package(tmp_path / "p"))
    session = create_session(package.file("model.onnx"), num_threads=1)
    tokenizer = Tokenizer(package.file("tokenizer.json"), VOCAB)
    config = replace(CONFIG, max_num_seqs=max_num_seqs)

    result = warm_up_one_pass(
        session, package.manifest, tokenizer, config, package.path, clock=count().__next__
    )

    assert result == WarmUpResult(is_batch_invariant=True, step_seconds=seconds)


def test_graph_that_is_not_the_one_that_was_hashed_is_refused(tmp_path: Path) -> None:
    package = load_package(_generating_package(tmp_path / "p", cross=False))
    other = load_package(_generating_package(tmp_path / "other", cross=False))

    os.replace(other.file("decoder.onnx"), package.file("decoder.onnx"))  # its bytes are equal

    with pytest.raises(PackageError, match="was changed while the package was loaded"):
        load_engine(package, CONFIG)


@pytest.mark.parametrize(("cross", "answer"), [(False, "cde"), (True, "abcde")])
async def test_generating_package_becomes_an_engine_that_generates(
    tmp_path: Path, cross: bool, answer: str
) -> None:
    engine = load_engine(load_package(_generating_package(tmp_path / "p", cross=cross)), CONFIG)
    assert isinstance(engine, AsyncEngine)
    await engine.start()
    try:
        events = [e async for e in engine.generate(GenerationRequest("r", "ab", SamplingParams()))]
    finally:
        await engine.stop()

    (finished,) = (event for event in events if isinstance(event, SequenceFinished))
    assert finished.text == answer
    assert isinstance(events[-1], RequestFinished) and events[-1].usage.input_tokens == 2


async def test_a_package_for_a_gpu_is_served_with_its_graphs_for_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu.put_in(monkeypatch)
    fake_gpu.allow_unshown(monkeypatch)
    package = load_package(_generating_package(tmp_path, cross=False, target="cuda"))

    engine = load_engine(package, CONFIG)
    assert isinstance(engine, AsyncEngine)
    await engine.start()
    sampled = SamplingParams("sampling", top_k=4, temperature=0.01)
    try:
        events = [e async for e in engine.generate(GenerationRequest("r", "ab", sampled))]
    finally:
        await engine.stop()

    assert load_parts(package, CONFIG, print).core.runner.model.has_sampling_graphs
    (finished,) = (event for event in events if isinstance(event, SequenceFinished))
    assert finished.text == "cde"


def test_a_one_pass_package_for_a_gpu_is_loaded_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu.put_in(monkeypatch)
    fake_gpu.allow_unshown(monkeypatch)

    engine = load_engine(load_package(_text_package(tmp_path, target="cuda")), CONFIG)

    assert isinstance(engine, EncoderEngine)
    assert isinstance(engine._graph, FakeDeviceSession)


def test_a_gpu_without_room_says_what_would_fit_when_a_package_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule says so, or others have filled it since its memory was looked at."""
    fake_gpu.put_in(monkeypatch)
    fake_gpu.allow_unshown(monkeypatch)
    package = load_package(_generating_package(tmp_path, cross=False, target="cuda"))
    wanted = replace(CONFIG, max_num_seqs=10**6, max_num_batched_tokens=10**6 + 1000)

    with pytest.raises(OutOfDeviceMemory, match=r"this would fit: --max-num-seqs \d+"):
        load_engine(package, wanted)

    def full(*_: object) -> None:
        raise OutOfDeviceMemory("others were sooner")

    monkeypatch.setattr("engine.cuda.device.DeviceCacheMemory", full)
    with pytest.raises(OutOfDeviceMemory, match=r"^others were sooner; the GPU has no room for"):
        load_engine(package, CONFIG)


def test_an_engine_on_a_gpu_takes_what_its_settings_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its share of the memory, of which weights are a part, and calls of their shapes."""
    rooms: list[DeviceRoom] = []

    def note(config: EngineConfig, contract: GenerationContract, room: DeviceRoom) -> Fit:
        rooms.append(room)
        return fit(config, contract, room)

    fake_gpu.put_in(monkeypatch)
    fake_gpu.allow_unshown(monkeypatch)
    monkeypatch.setattr("engine.cuda.room.fit", note)
    package = load_package(_generating_package(tmp_path, cross=True, target="cuda"))
    limits = RequestLimits(max_num_outputs=2, max_best_of=2, max_beam_width=3)
    shape = replace(CONFIG, max_num_seqs=4, decode_buckets=(2, 4), max_num_batched_tokens=300)

    config = replace(shape, gpu_memory_utilization=0.3, limits=limits)
    runner = load_parts(package, config, print).core.runner.model

    (room,) = rooms
    graphs = [path.stat().st_size for path in tmp_path.glob("*.onnx")]
    assert (room.utilization, room.weights) == (0.3, sum(graphs))
    assert (runner.buckets, runner.widest_group, runner.most_tokens) == ((2, 4), 3, 300)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
@pytest.mark.parametrize("makes_text", [True, False])
def test_threads_of_graphs_are_as_nice_as_the_one_that_runs_them(
    makes_text: bool, tmp_path: Path
) -> None:
    path = _generating_package(tmp_path, cross=True) if makes_text else _text_package(tmp_path)
    package, before = load_package(path), _niceness_of_threads()

    engine = load_engine(package, replace(CONFIG, num_threads=3))

    after = _niceness_of_threads()
    own = before[threading.get_native_id()]
    assert {after[thread] - own for thread in after.keys() - before.keys()} == {5}
    assert after[threading.get_native_id()] == own
    assert engine.num_threads == 3


def _niceness_of_threads() -> dict[int, int]:
    found = {}
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            found[thread] = os.getpriority(os.PRIO_PROCESS, thread)
    return found


async def test_text_package_becomes_an_engine_that_predicts(tmp_path: Path) -> None:
    engine = load_engine(load_package(_text_package(tmp_path / "p")), CONFIG)
    assert isinstance(engine, EncoderEngine)
    await engine.start()
    try:
        answer = await engine.predict([PredictionItem("ab")], request_id="r", deadline=None)
    finally:
        await engine.stop()

    assert answer.items[0].logits.tolist() == [ord("a") + ord("b")]


def _image_package(directory: Path) -> Path:
    image = {"size": 2, "channels": 1, "mean": [0], "std": [1], "embedding_dim": 1}
    return _write(
        directory,
        {"model.onnx": _one_pass("pixel_values", ["B", 1, 2, 2])},
        architecture="vision-encoder",
        task="classify",
        image=image,
    )


@pytest.mark.parametrize(("max_num_seqs", "together"), [(1, 1), (2, 2), (9, 9), (64, 32)])
def test_images_are_tried_out_as_many_together_as_they_are_run(
    tmp_path: Path, max_num_seqs: int, together: int
) -> None:
    """Memory of a device is taken then, and rows are seen to depend on none of as many others."""
    package = load_package(_image_package(tmp_path / "p"))
    session = create_session(package.file("model.onnx"), num_threads=1)
    seen: list[int] = []

    class Counting:
        def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            seen.append(len(inputs["pixel_values"]))
            return session.run(inputs)

    config = replace(CONFIG, max_num_seqs=max_num_seqs)
    warm_up_one_pass(Counting(), package.manifest, None, config, package.path)

    assert seen == [1, together]


async def test_image_package_becomes_an_engine_that_predicts(tmp_path: Path) -> None:
    directory = _image_package(tmp_path / "p")
    buffer = io.BytesIO()
    Image.fromarray(np.array([[0, 255], [255, 255]], dtype=np.uint8)).save(buffer, "PNG")
    item = PredictionItem(buffer.getvalue())

    engine = load_engine(load_package(directory), CONFIG)
    assert isinstance(engine, EncoderEngine)
    await engine.start()
    try:
        answer = await engine.predict([item], request_id="r", deadline=None)
    finally:
        await engine.stop()

    assert answer.items[0].logits.tolist() == [3]


async def test_a_package_offers_batch_invariance_once_it_is_shown(tmp_path: Path) -> None:
    packages = [
        _generating_package(tmp_path / "text", cross=True),
        _text_package(tmp_path / "classes"),
    ]
    for package in packages:
        engine = load_engine(load_package(package), CONFIG)
        before = engine.capabilities
        assert engine.is_warming
        await engine.start()
        try:
            assert not engine.is_warming
            assert (*before, "batch_invariant") == engine.capabilities
        finally:
            await engine.stop()


async def test_what_a_warm_up_computes_is_not_counted_as_wasted(tmp_path: Path) -> None:
    package = load_package(_generating_package(tmp_path / "text", cross=True))
    engine = load_engine(package, replace(CONFIG, decode_buckets=(CONFIG.max_num_seqs,)))
    await engine.start()
    try:
        request = GenerationRequest("r", (3, 4), SamplingParams(max_new_tokens=1))
        async for _ in engine.generate(request):
            pass
        assert engine.load().wasted.padding_tokens == CONFIG.max_num_seqs - 1
    finally:
        await engine.stop()


def _behind_sums(*nodes: NodeProto, **weights: Any) -> ModelProto:
    """Return a text model whose logits `nodes` make from "sums"."""
    model = _one_pass("input_ids", ["B", "S"], extra=[("lengths", INT64, ["B"])])
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["sums" if name == "logits" else name for name in names]
    model.graph.node.extend(nodes)
    added = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    model.graph.initializer.extend(added)
    return model


_SIX_POSITIONS = _behind_sums(
    helper.make_node("Shape", ["input_ids"], ["length"], start=1, end=2),
    helper.make_node("Sub", ["length", "one"], ["last"]),
    helper.make_node("Gather", ["positions", "last"], ["position"]),
    helper.make_node("Add", ["sums", "position"], ["logits"]),
    positions=np.zeros((6, 1), np.float32),
    one=np.array(1),
)
_NOT_FINITE = _behind_sums(
    helper.make_node("Div", ["sums", "zero"], ["logits"]), zero=np.array(0, np.float32)
)
_ROWS_MIX = _behind_sums(
    helper.make_node("ReduceMean", ["sums"], ["mean"]),
    helper.make_node("Add", ["sums", "mean"], ["logits"]),
)


@pytest.mark.parametrize("graph", [_SIX_POSITIONS, _NOT_FINITE], ids=["length", "not finite"])
async def test_one_pass_model_that_fails_is_refused_before_it_serves(
    tmp_path: Path, graph: ModelProto
) -> None:
    engine = load_engine(load_package(_text_package(tmp_path / "p", graph)), CONFIG)

    with pytest.raises(PackageError, match="a text of 8 tokens failed"):
        await engine.start()


def test_one_pass_model_that_finds_no_memory_is_not_called_wrong(tmp_path: Path) -> None:
    class Full:
        def run(self, _: object) -> None:
            raise OutOfDeviceMemory("kernels want more")

    package = load_package(_text_package(tmp_path / "p"))
    tokenizer = Tokenizer(package.file("tokenizer.json"), VOCAB)

    with pytest.raises(OutOfDeviceMemory, match="tokens failed: kernels want more; fewer items"):
        warm_up_one_pass(Full(), package.manifest, tokenizer, CONFIG, package.path)  # type: ignore[arg-type]


async def test_one_pass_model_whose_rows_mix_does_not_offer_batch_invariance(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load_engine(load_package(_text_package(tmp_path / "p", _ROWS_MIX)), CONFIG)
    await engine.start()

    assert engine.capabilities == ("classify", "embed")
    assert "batch_invariant is not offered" in caplog.text
    await engine.stop()


async def test_generating_model_whose_rows_mix_does_not_offer_batch_invariance(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = _alphabet_decoder(cross=False)
    (gather,) = (node for node in decoder.graph.node if "logits" in node.output)
    gather.output[0] = "alone"
    place = list(decoder.graph.node).index(gather) + 1
    decoder.graph.node.insert(place, helper.make_node("ReduceMean", ["alone", "axes"], ["mean"]))
    decoder.graph.node.insert(place + 1, helper.make_node("Add", ["alone", "mean"], ["logits"]))
    decoder.graph.initializer.append(numpy_helper.from_array(np.array([0]), "axes"))
    package = load_package(_generating_package(tmp_path / "p", cross=False, decoder=decoder))

    engine = load_engine(package, CONFIG)
    await engine.start()

    assert "generate" in engine.capabilities and "batch_invariant" not in engine.capabilities
    assert "batch_invariant is not offered" in caplog.text
    await engine.stop()


async def test_generating_model_is_tried_out_before_it_serves(tmp_path: Path) -> None:
    directory = tmp_path / "p"
    directory.mkdir()
    decoder = _alphabet_decoder(cross=False)
    (table,) = (w for w in decoder.graph.initializer if w.name == "table")
    broken = numpy_helper.to_array(table).copy()
    broken[VOCAB - 1] = np.inf
    table.CopyFrom(numpy_helper.from_array(broken, "table"))
    package = _generating_package(directory, cross=False, decoder=decoder)

    engine = load_engine(load_package(package), CONFIG)

    with pytest.raises(PackageError, match="wanted failed: logits are not finite"):
        await engine.start()


def test_graph_with_other_inputs_than_the_contract_is_refused(tmp_path: Path) -> None:
    package = load_package(_text_package(tmp_path / "p", _one_pass("input_ids", ["B", "S"])))

    with pytest.raises(PackageError, match="missing.*lengths"):
        load_engine(package, CONFIG)


@pytest.mark.parametrize(
    ("contract", "labels", "problems"),
    [
        ({"embedding_dim": 2}, ["only"], ["output embedding is float32 [B, 1]"]),
        (
            {},
            ["one", "two"],
            ["output logits is float32 [B, 1], the manifest's float32 [batch, 2]"],
        ),
        (
            {"embedding_dim": 3},
            ["a", "b", "c"],
            ["output logits is float32 [B, 1]", "output embedding is float32 [B, 1]"],
        ),
    ],
    ids=["width", "labels", "both"],
)
def test_one_pass_graph_of_other_sizes_is_refused_with_every_difference(
    tmp_path: Path, contract: dict[str, int], labels: list[str], problems: list[str]
) -> None:
    package = load_package(_text_package(tmp_path / "p"))
    encoding = package.manifest.encoding.model_copy(update=contract)
    manifest = package.manifest.model_copy(update={"encoding": encoding, "labels": tuple(labels)})

    with pytest.raises(PackageError) as caught:
        load_engine(package.model_copy(update={"manifest": manifest}), CONFIG)

    for problem in problems:
        assert problem in str(caught.value)


def test_image_graph_of_another_size_is_refused(tmp_path: Path) -> None:
    image = {"size": 4, "channels": 3, "mean": [0] * 3, "std": [1] * 3, "embedding_dim": 1}
    directory = _write(
        tmp_path / "p",
        {"model.onnx": _one_pass("pixel_values", ["B", 1, 2, 2])},
        architecture="vision-encoder",
        task="classify",
        image=image,
    )

    with pytest.raises(PackageError, match=r"pixel_values is float32 \[B, 1, 2, 2\].*3, 4, 4\]"):
        load_engine(load_package(directory), CONFIG)


def test_graph_that_onnxruntime_does_not_take_is_refused(tmp_path: Path) -> None:
    directory = _text_package(tmp_path / "p", ModelProto())

    with pytest.raises(PackageError, match=r"model\.onnx.*export the model again"):
        load_engine(load_package(directory), CONFIG)


def test_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    package = load_package(_text_package(tmp_path / "p", vocab=VOCAB - 1))

    with pytest.raises(PackageError, match="ids up to 257, the model has a vocabulary of 257"):
        load_engine(package, CONFIG)


def test_a_package_in_bf16_is_refused_on_a_cpu_and_the_way_out_named(tmp_path: Path) -> None:
    path = _text_package(tmp_path, target="cuda", precision="bf16", weights="bf16")

    with pytest.raises(PackageError, match=r"no kernels for bf16 on a CPU.*--device cuda") as found:
        load_engine(load_package(path), replace(CONFIG, device="cpu"))

    assert "\n" not in str(found.value)


def test_a_package_for_cuda_is_not_tried_on_a_cpu_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.distributions._installed", lambda name: None)
    path = _text_package(tmp_path, target="cuda")

    with pytest.raises(
        ConfigError, match=r"onnxruntime-gpu is not installed.*--device cpu, a .* bf16"
    ):
        load_engine(load_package(path), CONFIG)


def test_reading_a_package_does_not_load_onnxruntime() -> None:
    code = (
        "import sys, engine.factory, engine.package.package;"
        "sys.exit('onnxruntime' in sys.modules or 'tokenizers' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
