"""The runner on a device that computes: its answers are those of the CPU, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.cuda.memory import ALIGNMENT, DeviceArray
from engine.cuda.room import RoomNeeds
from engine.cuda.session import CudaBinding
from engine.errors import OutOfDeviceMemory
from engine.sampling.plain import SamplingGraph
from engine.session import NOT_CAPTURED
from engine.slots.batch import Encode, PrefillChunk, ScheduledBatch
from engine.slots.invariance import rows_are_bit_equal
from engine.slots.warm_up import warm_up
from tests.engine.cuda.fake_cuda import FakeCuda
from tests.engine.cuda.fake_device_session import FakeDeviceBinding, load_on, write_sampling_graphs
from tests.engine.generation.test_steps_under_way import whole_answers
from tests.engine.slots.test_decode_buckets import NOTHING, SLOTS, answers, bits, ids, load
from tests.engine.slots.test_model_runner import TinyModel

ENCODERS = pytest.mark.parametrize("has_encoder", [False, True], ids=["decoder", "encoder-decoder"])


@ENCODERS
@pytest.mark.parametrize("buckets", [(), (1, 3, SLOTS)], ids=["one", "several"])
def test_an_engine_answers_every_kind_of_request_as_on_the_cpu(
    tmp_path: Path, has_encoder: bool, buckets: tuple[int, ...]
) -> None:
    model, seeds = TinyModel(4, has_encoder=has_encoder), range(45)
    write_sampling_graphs(tmp_path)
    runner, decoder = load_on(FakeCuda(), model, tmp_path, num_slots=SLOTS, buckets=buckets)

    found = answers(runner, model, seeds)

    wanted = answers(load(model, tmp_path), model, seeds)
    assert whole_answers(found) == whole_answers(wanted)
    assert decoder.replays > 20


@ENCODERS
def test_a_step_larger_than_any_before_finds_room_and_leaves_rows_as_they_are(
    tmp_path: Path, has_encoder: bool
) -> None:
    model = TinyModel(4, has_encoder=has_encoder)
    runner, decoder = load_on(FakeCuda(), model, tmp_path, num_slots=SLOTS, num_tokens=1)
    on_host = load(model, tmp_path)
    chunks = tuple(PrefillChunk(row, ids(row, 30), 30, 1) for row in range(1, 4))
    sources = (0,) if has_encoder else ()

    for each in (runner, on_host):
        if has_encoder:
            each.run(NOTHING._replace(encodes=(Encode(0, ids(1, 5)), Encode(1, ids(2, 9)))))
    for step in (
        NOTHING._replace(decode_ids=(4,), decode_sources=sources),
        NOTHING._replace(decode_ids=(5,), decode_sources=sources, chunks=chunks, num_top=2),
        NOTHING._replace(decode_ids=(6,), decode_sources=sources),
    ):
        found, wanted = runner.run(step), on_host.run(step)
        np.testing.assert_array_equal(np.asarray(found.logits), wanted.logits)
        k = wanted.top_ids.shape[1]
        np.testing.assert_array_equal(found.top_ids[:, :k], wanted.top_ids)

    assert len(decoder.captured) == 3  # before it, at another place behind it, and k = 2


@ENCODERS
def test_what_a_decode_call_captures_stays_true_for_any_other_rows(
    tmp_path: Path, has_encoder: bool
) -> None:
    model = TinyModel(4, has_encoder=has_encoder)
    runner, decoder = load_on(FakeCuda(), model, tmp_path, num_slots=SLOTS)
    on_host = load(model, tmp_path)
    encodes = tuple(Encode(row, ids(row, 3 + row)) for row in range(SLOTS)) if has_encoder else ()

    for each in (runner, on_host):
        each.run(NOTHING._replace(encodes=encodes))
    for rows in (range(1), range(4), range(2), range(SLOTS)):
        sources = tuple(reversed(rows)) if has_encoder else ()
        step = NOTHING._replace(decode_ids=tuple(5 + row for row in rows), decode_sources=sources)
        found, wanted = runner.run(step), on_host.run(step)
        assert [bits(found, row) for row in rows] == [bits(wanted, row) for row in rows]

    assert (len(decoder.captured), decoder.replays) == (1, 3)


def test_two_runners_on_the_same_graphs_do_not_repeat_what_the_other_has_captured(
    tmp_path: Path,
) -> None:
    model = TinyModel(4, has_encoder=False)
    runner, decoder = load_on(FakeCuda(), model, tmp_path, num_slots=SLOTS)
    on_host = load(model, tmp_path)
    steps = [NOTHING._replace(decode_ids=(token,)) for token in (4, 5, 6)]
    wanted = [bits(on_host.run(step), 0) for step in steps]

    beside = runner.beside(num_slots=1)
    for step, expected in zip(steps, wanted, strict=True):
        assert [bits(each.run(step), 0) for each in (runner, beside)] == [expected] * 2

    assert (len(decoder.captured), decoder.replays) == (2, 4)


def test_sequences_of_one_source_decode_in_the_call_that_is_captured(tmp_path: Path) -> None:
    model = TinyModel(4, has_encoder=True)
    runner, decoder = load_on(FakeCuda(), model, tmp_path, num_slots=SLOTS)
    on_host = load(model, tmp_path)
    encodes = tuple(Encode(row, ids(row, 3 + row)) for row in range(3))

    for each in (runner, on_host):
        each.run(NOTHING._replace(encodes=encodes))
    for sources in ((0,), (1, 1, 1), (0, 1, 0, 2, 1), (2,) * SLOTS, (0, 1, 2)):
        token_ids = tuple(range(5, 5 + len(sources)))
        step = NOTHING._replace(decode_ids=token_ids, decode_sources=sources)
        found, wanted = runner.run(step), on_host.run(step)
        assert [bits(found, i) for i in range(len(sources))] == [
            bits(wanted, i) for i in range(len(sources))
        ]

    assert (len(decoder.captured), decoder.replays) == (1, 4)
    assert runner.num_padding == sum(SLOTS - count for count in (1, 3, 5, 5, 3))


@ENCODERS
def test_it_warms_up_and_captures_every_kind_of_decode_call(
    tmp_path: Path, has_encoder: bool
) -> None:
    model = TinyModel(4, has_encoder=has_encoder)
    runner, decoder = load_on(FakeCuda(), model, tmp_path, num_slots=SLOTS, buckets=(2, SLOTS))
    lines: list[str] = []

    warm_up(runner, model.contract, "package", progress=lines.append)

    tops = (1, 23)  # the vocabulary has fewer than 128
    assert runner.captured == tuple((rows, k) for rows in (2, SLOTS) for k in tops)
    assert len(decoder.captured) == len(lines) == 4
    assert lines[0].startswith("captured a decode call of 2 rows with their likeliest token in ")
    assert lines[3].startswith("captured a decode call of 5 rows with their 23 likeliest tokens in")
    assert not runner.cache.lengths.any()


def test_it_captures_all_that_draws_behind_a_decode_call(tmp_path: Path) -> None:
    write_sampling_graphs(tmp_path)
    model = TinyModel(4, has_encoder=False)
    runner, decoder = load_on(FakeCuda(), model, tmp_path, num_slots=SLOTS)
    (graphs,) = runner._make_draws.args  # type: ignore[union-attr]

    warm_up(runner, model.contract, "package")

    num_captured = [len(graph.captured) for graph in graphs]
    assert num_captured == [len(decoder.captured)] * len(SamplingGraph) == [2] * 3


@ENCODERS
def test_rows_that_do_not_depend_on_others_are_seen_to(tmp_path: Path, has_encoder: bool) -> None:
    model = TinyModel(1, has_encoder=has_encoder)
    runner, _ = load_on(FakeCuda(), model, tmp_path, num_slots=SLOTS)

    assert rows_are_bit_equal(runner, model.contract, 16)


def test_a_device_without_room_says_how_much_is_wanted_and_free(tmp_path: Path) -> None:
    model = TinyModel(1, has_encoder=False)

    with pytest.raises(OutOfDeviceMemory, match=r"were wanted, .* of .* are free"):
        load_on(FakeCuda(num_bytes=50_000), model, tmp_path, num_slots=SLOTS)


@pytest.mark.parametrize(
    ("rows", "way"),
    [(1.5, f"this would fit: --max-num-seqs {SLOTS - 2}"), (SLOTS, "a GPU with more memory is")],
)
def test_kernels_without_room_beside_the_rows_say_how_many_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: float, way: str
) -> None:
    model = TinyModel(1, has_encoder=False)
    runner, _ = load_on(FakeCuda(), model, tmp_path, num_slots=SLOTS, num_tokens=8)
    lacking = int(rows * RoomNeeds.of(model.contract, 0).row)

    def no_room(*_: object) -> None:
        raise OutOfDeviceMemory("kernels want more", lacking=lacking)

    monkeypatch.setattr(FakeDeviceBinding, "run", no_room)

    with pytest.raises(OutOfDeviceMemory, match=f"prompt of .* failed: kernels want more; .*{way}"):
        warm_up(runner, model.contract, tmp_path)


@pytest.mark.parametrize(
    ("message", "wanted", "lacking"),
    [
        ("Failed to allocate memory for requested buffer of size 5000000", "5.0 MB", 1_000_000),
        ("CUDA failure 2: out of memory ; GPU=0", "more", 1),
        ("CUBLAS failure 3: the resource allocation failed ; GPU=0", "more", 1),
    ],
)
def test_an_error_of_onnxruntime_that_memory_is_missing_says_how_much(
    message: str, wanted: str, lacking: int
) -> None:
    class Full:
        def io_binding(self) -> None: ...

        def run_with_iobinding(self, *_: object) -> None:
            raise RuntimeError(message)

    runtime = FakeCuda(num_bytes=4_000_000).runtime()
    binding = CudaBinding(Full(), runtime, frozenset())  # type: ignore[arg-type]

    with pytest.raises(OutOfDeviceMemory, match=rf"want {wanted} of .* 4\.0 MB are") as found:
        binding.run()
    assert found.value.lacking == lacking


def test_calls_of_many_shapes_do_not_drop_what_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.slots.calls.decode_calls._MAX_BINDINGS", 2)
    model = TinyModel(4, has_encoder=True)
    runner, decoder = load_on(FakeCuda(), model, tmp_path, num_slots=SLOTS, widest_group=1)
    runner.run(NOTHING._replace(encodes=(Encode(0, ids(1, 5)),)))

    for sources in ((0,), (0, 0), (0, 0, 0), (0,), (0, 0), (0, 0, 0), (0,)):
        runner.run(NOTHING._replace(decode_ids=(4,) * len(sources), decode_sources=sources))

    assert (len(decoder.captured), decoder.replays) == (1, 2)


def test_emptying_the_rows_waits_for_what_a_failed_step_has_queued(tmp_path: Path) -> None:
    cuda = FakeCuda()
    runner, _ = load_on(cuda, TinyModel(4, has_encoder=False), tmp_path, num_slots=SLOTS)
    cuda.calls.clear()

    runner.reset()

    assert cuda.calls[-1] == "cudaStreamSynchronize"


def test_logits_are_fetched_in_one_copy_for_rows_beside_each_other(tmp_path: Path) -> None:
    cuda, model = FakeCuda(), TinyModel(4, has_encoder=False)
    runner, _ = load_on(cuda, model, tmp_path, num_slots=SLOTS)
    chunks = (PrefillChunk(3, ids(1, 9), num_logits=4),)
    step = NOTHING._replace(decode_ids=(4, 5, 6), chunks=chunks)
    wanted = load(model, tmp_path).run(step).all_logits
    runner.run(step).fetch((0,))  # takes the memory to fetch into
    runner.reset()
    found = runner.run(step)

    for rows, num_copies in (((1, 2), 1), ((0, 1, 2, 3), 2), ((4, 6), 2), (range(7), 1)):
        cuda.calls.clear()
        found.fetch(rows)
        assert cuda.calls == ["cudaMemcpyAsync"] * num_copies + ["cudaStreamSynchronize"]
    assert found.all_logits.tobytes() == wanted.tobytes()


def test_logits_of_every_call_begin_where_those_of_a_decode_call_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are chosen by that too: else a chunk's bits would depend on the chunks beside it."""
    places: list[int] = []
    bind = FakeDeviceBinding.output

    def output(binding: FakeDeviceBinding, name: str, array: DeviceArray) -> None:
        places.extend([array.address % ALIGNMENT] if name == "logits" else [])
        bind(binding, name, array)

    monkeypatch.setattr(FakeDeviceBinding, "output", output)
    model = TinyModel(4, has_encoder=False)  # 23 tokens
    runner, _ = load_on(FakeCuda(), model, tmp_path, num_slots=SLOTS)
    wanted = (1, 0, 2, 9)  # logits of the chunks
    chunks = [PrefillChunk(row, ids(row, 9), many) for row, many in enumerate(wanted, 1)]
    step = NOTHING._replace(decode_ids=(4,), chunks=tuple(chunks))

    found = runner.run(step).all_logits

    assert len(places) == 5 and set(places) == {places[0]}
    assert found.tobytes() == load(model, tmp_path).run(step).all_logits.tobytes()


@ENCODERS
def test_kernels_are_told_of_whole_rows_and_decode_calls_have_all_of_them(
    tmp_path: Path, has_encoder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They divide their work by both, so that a row's bits would depend on the rows beside it."""
    totals: list[int] = []
    shapes: list[tuple[int, ...]] = []  # tokens of decode calls
    run = FakeDeviceBinding.run

    def running(binding: FakeDeviceBinding, graph_id: int = NOT_CAPTURED) -> None:
        arrays = binding.arrays
        if ("input", "total_seq") in arrays:
            totals.append(int(arrays["input", "total_seq"][0]))
            tokens = arrays["input", "input_ids"]
            is_decoding = tokens.address == runner._decodes.input_ids.address
            shapes.extend([tokens.shape] if is_decoding else [])
        run(binding, graph_id)

    monkeypatch.setattr(FakeDeviceBinding, "run", running)
    model = TinyModel(4, has_encoder=has_encoder)
    write_sampling_graphs(tmp_path)
    runner, _ = load_on(FakeCuda(), model, tmp_path, num_slots=SLOTS)

    answers(runner, model, range(12))

    assert len(totals) > len(shapes) > 10
    assert set(totals) == {model.contract.cache.max_len}
    assert set(shapes) == {(SLOTS, 1)}


def test_numbers_of_likeliest_tokens_share_memory_and_two_of_them_are_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("runner", "calls.decode_calls"):
        monkeypatch.setattr(f"engine.slots.{module}.CAPTURED_TOPS", (1, 4))
    runner, decoder = load_on(
        FakeCuda(), TinyModel(4, has_encoder=False), tmp_path, num_slots=SLOTS
    )

    found = [runner.run(NOTHING._replace(decode_ids=(4,), num_top=k)) for k in range(1, 20)]

    assert sorted({step.top_ids.shape[1] for step in found}) == [1, 4, 8, 16, 23]
    assert len(decoder.captured) == 2


@ENCODERS
def test_the_largest_steps_are_the_first_that_are_tried_out(
    tmp_path: Path, has_encoder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cuda = TinyModel(4, has_encoder=has_encoder), FakeCuda()
    runner, _ = load_on(cuda, model, tmp_path, num_slots=SLOTS, num_tokens=20)
    ran: list[ScheduledBatch] = []
    run = runner.run
    monkeypatch.setattr(runner, "run", lambda batch, draws: ran.append(batch) or run(batch))

    warm_up(runner, model.contract, "package")

    first = next(batch for batch in ran if batch.chunks).chunks[0]
    assert len(first.token_ids) == first.num_logits == min(20, model.contract.cache.max_len)
    if model.contract.cross_cache:
        longest = model.contract.cross_cache.max_len
        assert len(ran[0].encodes[0].source_ids) == longest
    assert not runner.cache.lengths.any()
