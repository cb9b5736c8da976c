"""From the checkpoint to answers on a device that computes, and back to a refusal on another.

All of it is what a worker does on a GPU; only the kernels are those of the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.errors import PackageError
from engine.factory import load_engine
from engine.generation.async_engine import AsyncEngine
from engine.package.package import Package, load_package
from engine.requests.events import SequenceFinished
from engine.requests.request import GenerationRequest, SamplingParams
from engine.slots.runner import SlotModelRunner
from exporter import verify_device
from exporter.prover.ahead import certify_ahead
from exporter.prover.digest import find
from exporter.verify_device import verify_on_device
from tests.engine.cuda.fake_cuda import NAME
from tests.exporter.prover.test_device import (  # noqa: F401 - a fixture
    SHORT,
    SHORT_LLAMA,
    MakePackage,
    make_package,
)
from tests.fakes import fake_gpu

pytestmark = pytest.mark.usefixtures("few_cases")

ROWS = 5
PROMPTS = [(3,), (4, 5, 6), (7, 3)]
AS_SHOWN = EngineConfig(max_num_seqs=0)


@pytest.mark.parametrize(
    ("family", "precision", "options"),
    [
        ("gpt", "fp16", SHORT_LLAMA),
        pytest.param("encoder-decoder", "fp32", SHORT, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "buckets",
    [
        pytest.param((), id="one"),
        pytest.param((2, ROWS), id="several", marks=pytest.mark.long),
    ],
)
async def test_a_package_is_verified_and_served_on_a_device_and_refused_on_another(
    family: str,
    precision: str,
    options: dict[str, object],
    buckets: tuple[int, ...],
    make_package: MakePackage,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package, checkpoint = make_package(family, precision, **options)  # type: ignore[arg-type]
    device = fake_gpu.put_in(monkeypatch)
    monkeypatch.setattr(verify_device, "find_elsewhere", find)
    went_ahead: list[SlotModelRunner] = []
    monkeypatch.setattr(
        verify_device,
        "certify_ahead",
        lambda runner, contract: went_ahead.append(runner) or certify_ahead(runner, contract),
    )

    found = verify_on_device(
        package.path, checkpoint.path, EngineConfig(max_num_seqs=ROWS, decode_buckets=buckets)
    ).certificate

    assert (found.gpu, found.buckets) == (NAME, buckets or (ROWS,))
    assert found.batch_invariant == (not buckets)
    assert len(went_ahead) == 1, "steps that are not waited for are compared, too"
    on_device, offered = await answers(load_package(package.path), AS_SHOWN)
    on_cpu, _ = await answers(load_package(package.path), replace(AS_SHOWN, device="cpu"))
    assert on_device == on_cpu and all(on_device)
    assert ("batch_invariant" in offered) == found.batch_invariant

    other = replace(device, gpu_name="another")
    monkeypatch.setattr("engine.cuda.device.open_device", lambda: other)
    with pytest.raises(PackageError, match=f"has GPU {NAME}, this one is another; run `tokenweir"):
        load_engine(load_package(package.path), AS_SHOWN)


async def answers(
    package: Package, config: EngineConfig
) -> tuple[list[Sequence[int]], tuple[str, ...]]:
    """Return the tokens behind some prompts, and what the engine offers."""
    engine = load_engine(package, config)
    assert isinstance(engine, AsyncEngine)
    await engine.start()
    try:
        tokens = []
        for number, prompt in enumerate(PROMPTS):
            request = GenerationRequest(str(number), prompt, SamplingParams(ignore_eos=True))
            events = [event async for event in engine.generate(request)]
            (end,) = (event for event in events if isinstance(event, SequenceFinished))
            tokens.append(end.token_ids)
        return tokens, engine.capabilities
    finally:
        await engine.stop()
