"""A device certificate tries steps that the device feeds itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.cuda.memory import DeviceArray, DeviceMemory
from engine.cuda.sampling_calls import SamplingCalls
from engine.errors import CertificateError
from engine.sampling.plain import SamplingInputs
from engine.slots.calls.graph_call import GraphCall
from engine.slots.runner import SlotModelRunner
from exporter.prover.ahead import certify_ahead
from exporter.prover.draws import NUM_DRAWS, certify_draws
from tests.engine.cuda.fake_cuda import FakeCuda
from tests.engine.cuda.fake_device_session import load_on, write_sampling_graphs
from tests.engine.slots.test_model_runner import TinyModel

ENCODERS = pytest.mark.parametrize("has_encoder", [False, True], ids=["decoder", "encoder-decoder"])


def on_device(directory: Path, *, has_encoder: bool = False) -> tuple[SlotModelRunner, TinyModel]:
    write_sampling_graphs(directory)
    model = TinyModel(4, has_encoder=has_encoder)
    return load_on(FakeCuda(), model, directory, num_slots=9)[0], model


@ENCODERS
def test_steps_that_are_fed_on_a_device_have_the_bits_of_those_that_are_told(
    tmp_path: Path, has_encoder: bool
) -> None:
    runner, model = on_device(tmp_path, has_encoder=has_encoder)

    certify_ahead(runner, model.contract)

    assert certify_draws(runner, model.contract) >= NUM_DRAWS


def test_tokens_of_other_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, model = on_device(tmp_path)
    copy_column = DeviceMemory.copy_column

    def copy_first(memory: DeviceMemory, target: DeviceArray, origin: DeviceArray) -> None:
        for row in range(origin.shape[0]):
            copy_column(memory, target[row : row + 1], origin[:1])

    monkeypatch.setattr(DeviceMemory, "copy_column", copy_first)

    with pytest.raises(CertificateError, match="step . of 6 gives other bits .* likeliest of 1,"):
        certify_ahead(runner, model.contract)


def test_numbers_that_a_step_under_way_still_reads_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the host wrote the next step's inputs over those that have not gone yet."""
    runner, model = on_device(tmp_path)
    monkeypatch.setattr("engine.cuda.memory.DeviceMark.wait", lambda mark: None)
    runner.run = lambda *step: wait_for(runner, *step)  # type: ignore[method-assign]

    def wait_for(runner: SlotModelRunner, *step: object) -> object:
        pending = runner.start(*step)  # type: ignore[arg-type]
        runner._device.runtime.synchronize()  # type: ignore[union-attr]
        return pending()

    with pytest.raises(CertificateError, match="gives other bits"):
        certify_ahead(runner, model.contract)


def test_numbers_of_other_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, model = on_device(tmp_path)
    plan = SamplingCalls.plan

    def turned(calls: SamplingCalls, draws: SamplingInputs, *size: int) -> GraphCall:
        return plan(calls, draws._replace(uniform=draws.uniform[::-1]), *size)

    monkeypatch.setattr(SamplingCalls, "plan", turned)

    with pytest.raises(CertificateError, match="the graph draws .* the sampler"):
        certify_draws(runner, model.contract)
