"""The work that a benchmark gives a model, and whether it fits."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from engine.errors import ConfigError, PackageError
from engine.package.manifest import CacheShape, GenerationContract
from engine.package.package import Package
from engine.requests.request import SamplingParams

Choice = Literal["greedy", "topk", "beam"]
Prompt = tuple[int, ...]

_BYTES_PER_NUMBER = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}  # in the cache


@dataclass(frozen=True)
class BenchmarkWork:
    """The options of every request of a benchmark."""

    num_prompt_tokens: int = 128
    num_new_tokens: int = 64  # exactly: the end of a sequence is ignored
    strategy: Choice = "greedy"
    top_k: int = 50  # for "topk" only; a smaller vocabulary is sampled whole
    beam_width: int = 1  # above 1 with "beam" only
    seed: int = 0  # for prompts and draws
    prompt_logprobs: int | None = None  # alternatives of every given token; None: it is not scored

    def __post_init__(self) -> None:
        for name in ("num_prompt_tokens", "num_new_tokens", "beam_width"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} ({value}) must be at least 1")
        if (self.strategy == "beam") != (self.beam_width > 1):
            raise ConfigError(
                f"beam_width is {self.beam_width} and strategy {self.strategy}; "
                "beam search has a width of 2 or more, everything else of 1"
            )

    def params(self, index: int, num_new_tokens: int) -> SamplingParams:
        """Return how the tokens of request `index` are chosen."""
        common = SamplingParams(
            max_new_tokens=num_new_tokens, ignore_eos=True, prompt_logprobs=self.prompt_logprobs
        )
        if self.strategy == "topk":
            return replace(common, strategy="sampling", top_k=self.top_k, seed=self.seed + index)
        if self.strategy == "beam":
            return replace(common, strategy="beam", beam_width=self.beam_width)
        return common


def generation_contract(package: Package) -> GenerationContract:
    """Return what is known of a generating model; PackageError for any other."""
    contract = package.manifest.generation
    if contract is None:
        raise PackageError(
            f"{package.path}: {package.manifest.name} does not generate, and only generating "
            "models are measured here; give one that does"
        )
    return contract


def random_prompts(
    work: BenchmarkWork, num_prompts: int, vocab_size: int, number: int = 0
) -> list[Prompt]:
    """Return prompts of exactly the asked length, other ones for every `number`."""
    draw = random.Random(f"{work.seed} {number}")
    return [
        tuple(draw.randrange(vocab_size) for _ in range(work.num_prompt_tokens))
        for _ in range(num_prompts)
    ]


def check_fits(work: BenchmarkWork, contract: GenerationContract) -> None:
    """Raise ConfigError, naming the limit, if a request of the work is too long for the model."""
    prompt, new, limit = work.num_prompt_tokens, work.num_new_tokens, contract.cache.max_len
    if contract.cross_cache is None:
        if prompt + new > limit:
            raise ConfigError(
                f"{prompt} prompt tokens and {new} new ones are {prompt + new}, more than the "
                f"{limit} that this model's context holds; give less with --prompt-tokens or "
                "--new-tokens"
            )
        return
    limits = (
        ("prompt", prompt, contract.cross_cache.max_len, "source"),
        ("new", new, limit - 1, "output"),
    )
    if found := [
        f"{given} {kind} tokens are more than {most}, the longest {what} of this model; give "
        f"--{kind}-tokens {most} or less"
        for kind, given, most, what in limits
        if given > most
    ]:
        raise ConfigError("; ".join(found))


def cache_bytes(work: BenchmarkWork, contract: GenerationContract) -> int:
    """Return the cache that one request reaches; the last token's keys are never needed."""
    cache, cross = contract.cache, contract.cross_cache
    position = _position_bytes(cache)
    if cross is None:
        return position * work.beam_width * (work.num_prompt_tokens + work.num_new_tokens - 1)
    source = _position_bytes(cross)
    return position * work.beam_width * work.num_new_tokens + source * work.num_prompt_tokens


def _position_bytes(shape: CacheShape) -> int:
    numbers = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    return numbers * _BYTES_PER_NUMBER[shape.dtype]
