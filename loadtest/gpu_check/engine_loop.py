"""Our engine without a server or an event loop: scheduler, runner and sampler, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path

from engine.config import EngineConfig
from engine.cuda.device import open_device
from engine.factory import core_on_slots
from engine.requests.request import SamplingParams
from engine.scheduling.output import TokensOutput
from engine.scheduling.sequence import TokenRequest
from engine.slots.runner import SlotModelRunner
from engine.slots.warm_up import warm_up
from loadtest.gpu_check.contract_file import read_contract
from loadtest.lab.peers.worker import LoadOptions, Prompts

_CHUNK = 128  # tokens of a prompt computed in one call
_BUCKETS = (1, 32)  # rows of decode calls for fewer requests than there may be


class EngineLoop:
    """An engine on graphs that need no certificate: only their speed is looked at."""

    def __init__(
        self, directory: Path, num_rows: int, *, on_cuda: bool, buckets: Sequence[int] = ()
    ) -> None:
        contract = read_contract(directory)
        runner = SlotModelRunner.load(
            contract,
            directory / "decoder.onnx",
            directory / "encoder.onnx" if contract.cross_cache else None,
            num_slots=num_rows,
            buckets=buckets,
            device=open_device() if on_cuda else None,
        )
        warm_up(runner, contract, directory)
        config = EngineConfig(
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(1024, num_rows + _CHUNK),
            max_queue_size=num_rows,
            prefill_chunk_size=_CHUNK,
            reuse_prefixes=False,
        )
        self.core = core_on_slots(config, contract, runner)
        self._keys = count()

    def generate(self, prompts: Iterable[Sequence[int]], num_new_tokens: int) -> list[list[int]]:
        """Return exactly so many tokens for every prompt, which all begin at once."""
        params = SamplingParams(max_new_tokens=num_new_tokens, ignore_eos=True)
        tokens: dict[int, list[int]] = {}
        for prompt, key in zip(prompts, self._keys, strict=False):
            tokens[key] = []
            self.core.scheduler.add(TokenRequest(key, "", tuple(prompt), params, 0, 0.0))
        while self.core.has_work:
            for output in self.core.step():
                if isinstance(output, TokensOutput):
                    tokens[output.key] += output.token_ids
        return list(tokens.values())


class EngineAdapter:
    """The engine as a comparison asks for it."""

    def __init__(self, options: LoadOptions) -> None:
        self.versions = dict(_versions())
        directory = Path(options.directory) / options.weights
        on_cuda, most = bool(options.setting["cuda"]), options.max_concurrency
        buckets = [] if options.setting["one_bucket"] else [n for n in _BUCKETS if n < most]
        self._loop = EngineLoop(
            directory, most, on_cuda=on_cuda, buckets=[*buckets, most] if on_cuda else ()
        )

    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        """Run the prompts together."""
        return self._loop.generate(prompts, num_new_tokens)


def load(options: LoadOptions) -> EngineAdapter:
    """Load the graphs in the directory that `weights` names."""
    return EngineAdapter(options)


def _versions() -> Iterable[tuple[str, str]]:
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
