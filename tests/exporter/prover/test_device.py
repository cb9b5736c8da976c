"""A device certificate is what its cases gave: faults of padding, place and process are refused.

No device is here: calls are padded to a bucket, and run on the CPU.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.cuda.certificate import DeviceUse
from engine.errors import CertificateError, OutOfDeviceMemory
from engine.package.manifest import DeviceCertificate, PackageFormat, Precision, Weights
from engine.package.package import Package, load_package
from engine.sampling.logits import StepLogits
from engine.sampling.plain import SamplingInputs
from engine.sampling.top_k import step_logits
from engine.session import Session
from engine.slots.batch import ScheduledBatch
from engine.slots.runner import SlotModelRunner
from exporter.checkpoint import Checkpoint, load_checkpoint
from exporter.export import export_package
from exporter.progress import no_progress
from exporter.prover import execution
from exporter.prover.digest import find, find_elsewhere
from exporter.prover.driver import exported_graphs
from exporter.prover.execution import OnCpu, OnDevice
from exporter.prover.loss import LossLimits
from exporter.verify_device import prove_on_device
from tests.exporter.conftest import MakeCheckpoint
from tests.exporter.test_export_for_cuda import SHORT_LLAMA
from tests.fakes.stand_in_certificate import export_with_stand_in

pytestmark = pytest.mark.usefixtures("few_cases")

MakePackage = Callable[..., tuple[Package, Checkpoint]]

BUCKET = 6
SHORT = {"max_source_len": 5, "max_target_len": 4}


@pytest.fixture(scope="module")
def make_package(
    make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> MakePackage:
    """Export a tiny model for CUDA; what its graphs give is taken as shown."""

    def make(
        family: str, precision: Precision, weights: Weights | None = None, **options: Any
    ) -> tuple[Package, Checkpoint]:
        checkpoint = make_checkpoint(family, **options)
        out = tmp_path_factory.mktemp("device") / "package"
        export_with_stand_in(checkpoint, out, PackageFormat.of("cuda", precision, weights))
        return load_package(out), load_checkpoint(checkpoint)

    return make


@pytest.fixture(scope="module")
def vit(make_package: MakePackage) -> tuple[Package, Checkpoint]:
    return make_package("vit", "fp16")


@pytest.fixture(scope="module")
def llama(make_package: MakePackage) -> tuple[Package, Checkpoint]:
    return make_package("gpt", "fp32", **SHORT_LLAMA)


def shown(
    made: tuple[Package, Checkpoint],
    *,
    buckets: tuple[int, ...] = (BUCKET,),
    elsewhere: str | None = None,
) -> DeviceCertificate:
    """Return the certificate; what another process finds is taken from this one, if not given."""
    package, checkpoint = made
    buckets = buckets if package.manifest.generation else ()
    on_cpu = OnCpu(buckets)
    use = DeviceUse(gpu="none", driver="0", onnxruntime="1", buckets=buckets)
    digest = elsewhere or find(package, on_cpu).digest
    return prove_on_device(package, checkpoint, on_cpu, use, digest, no_progress)


@pytest.mark.parametrize(
    ("family", "precision", "weights", "options"),
    [
        ("gpt", "fp32", None, SHORT_LLAMA),
        pytest.param("encoder-decoder", "fp16", None, SHORT, marks=pytest.mark.long),
        pytest.param("bert", "fp16", None, {}, marks=pytest.mark.long),
        pytest.param("gpt", "fp16", "int8-blocks", {}, marks=pytest.mark.long),
        pytest.param("encoder-decoder", "fp32", "int4", {}, marks=pytest.mark.long),
        pytest.param("labeller", "fp16", None, {}, marks=pytest.mark.long),
    ],
)
def test_it_says_what_was_compared(
    family: str,
    precision: Precision,
    weights: Weights | None,
    options: dict[str, Any],
    make_package: MakePackage,
) -> None:
    made = make_package(family, precision, weights, **options)

    found = shown(made)

    assert found.buckets == ((BUCKET,) if made[0].manifest.generation else ())
    assert found.cases > 10 and found.tokens_compared > 0
    assert (found.loss is None) == bool(found.judged) == (weights is None)
    if family == "gpt":  # a CPU rounds attention to a source otherwise for one row than for two
        assert found.batch_invariant
    if not weights:
        assert found.tokens_equal == found.tokens_compared


def test_much_more_loss_than_the_graphs_had_is_refused_whatever_is_allowed(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, out = make_checkpoint("vit"), tmp_path / "package"
    limits = LossLimits(1.0, 100.0, 100.0, 1.0)
    export_package(checkpoint, out, target="cuda", precision="fp16", weights="int4", limits=limits)
    made = load_package(out), load_checkpoint(checkpoint)
    assert shown(made).cases > 10
    with pytest.raises(CertificateError, match="the largest logit difference"):
        shown((with_less_loss(made[0]), made[1]))
    run = Session.run

    def give_nothing(session: Session, inputs: Any) -> Any:
        return {name: np.zeros_like(array) for name, array in run(session, inputs).items()}

    monkeypatch.setattr(Session, "run", give_nothing)

    with pytest.raises(CertificateError, match="a kernel computes something else here"):
        shown(made)


def with_less_loss(package: Package) -> Package:
    """Return a package that says it may lose nearly nothing, and has lost what it has."""
    certificate = package.manifest.certificate
    assert certificate.loss is not None
    loss = certificate.loss.model_copy(update={"max_logit_loss": 1e-6})
    certificate = certificate.model_copy(update={"loss": loss})
    manifest = package.manifest.model_copy(update={"certificate": certificate})
    return package.model_copy(update={"manifest": manifest})


def test_another_process_finds_the_same_outputs(llama: tuple[Package, Checkpoint]) -> None:
    elsewhere = find_elsewhere(llama[0], OnCpu((BUCKET,)))

    assert elsewhere.buckets == (BUCKET,)
    assert shown(llama, elsewhere=elsewhere.digest).digest == elsewhere.digest


def test_outputs_that_another_process_does_not_find_are_refused(
    vit: tuple[Package, Checkpoint],
) -> None:
    with pytest.raises(CertificateError, match="two processes on none compute different outputs"):
        shown(vit, elsewhere="0" * 64)


def test_a_process_that_fails_says_why(vit: tuple[Package, Checkpoint], tmp_path: Path) -> None:
    package = load_package(shutil.copytree(vit[0].path, tmp_path / "p"))
    package.file("model.onnx").unlink()

    with pytest.raises(CertificateError, match="another process cannot run it: .*model.onnx"):
        find_elsewhere(package, OnCpu())


Spoil = Callable[[SlotModelRunner, ScheduledBatch, np.ndarray], None]


def by_what_padding_holds(runner: SlotModelRunner, batch: ScheduledBatch, logits: Any) -> None:
    """Rows that nobody asked for disturb the others, by as much as they hold."""
    beside = runner.cache.lengths[len(batch.decode_ids) :].sum()
    logits[: len(batch.decode_ids)] *= 1 + SIZE * beside


def by_place(runner: SlotModelRunner, batch: ScheduledBatch, logits: Any) -> None:
    for row in range(len(batch.decode_ids)):
        logits[row] *= 1 + SIZE * row


def by_number_of_rows(runner: SlotModelRunner, batch: ScheduledBatch, logits: Any) -> None:
    logits[: len(batch.decode_ids)] *= 1 + SIZE * len(batch.decode_ids)


def by_decoding_beside_prompts(runner: SlotModelRunner, batch: ScheduledBatch, logits: Any) -> None:
    """A decode call disturbs the prompts that are computed in its step."""
    logits[len(batch.decode_ids) :] *= 1 + SIZE * len(batch.decode_ids)


SIZE = 0.0


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Spoil, float], None]:
    """Spoil what a runner gives; the likeliest tokens are those of the spoiled logits."""

    def spoil(how: Spoil, size: float) -> None:
        run = SlotModelRunner.run

        def wrong(
            runner: SlotModelRunner, batch: ScheduledBatch, draws: SamplingInputs | None = None
        ) -> StepLogits:
            step = run(runner, batch, draws)
            if draws is not None:  # draws are compared with this very step
                return step
            logits = np.array(step.logits)
            how(runner, batch, logits)
            return step_logits(logits, step.top_ids.shape[1])._replace(alignment=step.alignment)

        monkeypatch.setattr(f"{__name__}.SIZE", size)
        monkeypatch.setattr(SlotModelRunner, "run", wrong)

    return spoil


@pytest.mark.parametrize(
    ("how", "plays"),
    [
        (by_what_padding_holds, {"batches", "numbers of rows"}),
        (by_place, {"batches", "beams", "numbers of rows"}),
        (by_number_of_rows, {"batches", "beams", "numbers of rows"}),
        (by_decoding_beside_prompts, {"prompts beside each other"}),
    ],
)
def test_a_row_that_others_disturb_is_refused_in_all_plays_at_once(
    how: Spoil,
    plays: set[str],
    spoiled: Callable[[Spoil, float], None],
    llama: tuple[Package, Checkpoint],
) -> None:
    spoiled(how, 1e-2)

    with pytest.raises(CertificateError) as caught:
        shown(llama)

    lines = str(caught.value).splitlines()
    assert {told[1] for line in lines if (told := re.search(r" \((.*)\) is ", line))} >= plays
    assert " from float64, PyTorch's own " in lines[0] and " times are allowed: " in lines[0]


@pytest.mark.parametrize(
    ("how", "size"),
    [
        (by_what_padding_holds, 2**-26),
        (by_place, 2**-23),
        (by_number_of_rows, 2**-23),
        (by_decoding_beside_prompts, 2**-23),
    ],
)
def test_a_row_whose_last_bits_others_change_is_not_claimed_to_be_invariant(
    how: Spoil,
    size: float,
    spoiled: Callable[[Spoil, float], None],
    llama: tuple[Package, Checkpoint],
) -> None:
    spoiled(how, size)

    assert not shown(llama).batch_invariant


def test_a_digest_is_of_every_bit_that_comes_out(
    spoiled: Callable[[Spoil, float], None],
    llama: tuple[Package, Checkpoint],
    vit: tuple[Package, Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = [find(llama[0], OnCpu((BUCKET,))).digest, find(vit[0], OnCpu()).digest]
    run = Session.run

    spoiled(by_place, 2**-23)
    monkeypatch.setattr(
        Session,
        "run",
        lambda session, inputs: {
            name: np.nextafter(array, np.inf, dtype=array.dtype)
            for name, array in run(session, inputs).items()
        },
    )

    after = [find(llama[0], OnCpu((BUCKET,))).digest, find(vit[0], OnCpu()).digest]
    assert not set(before) & set(after)


def test_with_several_buckets_nothing_is_claimed(llama: tuple[Package, Checkpoint]) -> None:
    assert not shown(llama, buckets=(2, BUCKET)).batch_invariant


def test_a_device_holds_a_package_once(
    llama: tuple[Package, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, _ = llama
    contract = package.manifest.generation
    assert contract is not None
    done: list[str] = []
    runner = SimpleNamespace(reset=lambda: done.append("emptied"))
    monkeypatch.setattr(execution, "load_runner", lambda *_: done.append("loaded") or runner)
    monkeypatch.setattr(execution, "warm_up", lambda *_: done.append("warmed up"))
    device = OnDevice(package, EngineConfig(), SimpleNamespace())  # type: ignore[arg-type]

    loaded = [device.load_runners(contract, package.path) for _ in range(2)]

    assert loaded == [(runner, runner)] * 2
    assert done == ["loaded", "warmed up", "emptied", "emptied"]


def test_a_device_without_room_is_no_fault_of_the_graph() -> None:
    with pytest.raises(OutOfDeviceMemory, match="this would fit"), exported_graphs():
        raise OutOfDeviceMemory("this would fit: --max-num-seqs 3")
