"""What is compared: models, requests, and the engines that take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Setting = Mapping[str, int]  # options of an engine that are tried; the fastest counts

OURS = "tokenweir"


@dataclass(frozen=True)
class Engine:
    """One engine with one form of the weights."""

    name: str  # as results call it
    adapter: str  # a module of loadtest.peers.adapters
    weights: str  # the adapter's name of their form
    against: str | None = None  # the engine of ours it is compared with; None: it is ours
    must_agree: bool = False  # its greedy tokens are those of `against`: both compute in float32
    # By concurrency, the fastest is taken.
    settings: tuple[Setting, ...] = field(default=({},), hash=False)
    max_concurrency: int | None = None


@dataclass(frozen=True)
class Work:
    """One model, and what every request asks of it."""

    name: str
    model: str  # of models.py
    num_prompt_tokens: int
    num_new_tokens: int
    engines: tuple[Engine, ...]
    num_beams: int = 1


def _ours(*weights: str) -> tuple[Engine, ...]:
    return tuple(Engine(f"{OURS} {form}", "tokenweir", form) for form in weights)


def _ctranslate2() -> tuple[Engine, ...]:
    # One thread is at times faster than two, and two batches beside each other than one.
    settings: tuple[Setting, ...] = (
        {"intra_threads": 0},
        {"intra_threads": 1},
        {"intra_threads": 1, "inter_threads": 2},
    )
    return (
        Engine("CTranslate2 float32", "ctranslate", "float32", f"{OURS} fp32", True, settings),
        Engine("CTranslate2 int8", "ctranslate", "int8", f"{OURS} int8", settings=settings),
    )


def _torch() -> tuple[Engine, ...]:
    return (
        Engine("Hugging Face generate", "huggingface", "fp32", f"{OURS} fp32", True),
        Engine(
            "torch eager, static cache", "eager", "fp32", f"{OURS} fp32", True, max_concurrency=8
        ),
    )


# Weights packed for the processor's matrix unit are faster, where that does not crash.
_REPACKED: tuple[Setting, ...] = ({"repacked": 1}, {"repacked": 0})
_LLAMA_CPP = (
    # Its keys and values are float16, so that its tokens may differ.
    Engine("llama.cpp f32", "llamacpp", "f32", f"{OURS} fp32", max_concurrency=8),
    Engine(
        "llama.cpp q8_0",
        "llamacpp",
        "q8_0",
        f"{OURS} int8",
        settings=_REPACKED,
        max_concurrency=8,
    ),
)
_GENAI = (
    Engine("onnxruntime-genai fp32", "genai", "fp32", f"{OURS} fp32", True),
    Engine("onnxruntime-genai int4", "genai", "int4", f"{OURS} int4"),
)
_MARIAN = (*_ours("fp32", "int8"), *_ctranslate2(), _torch()[0])

WORKS: Mapping[str, Work] = {
    work.name: work
    for work in (
        Work(
            "gpt2",
            "gpt2",
            128,
            64,
            (*_ours("fp32", "int8", "int8-cache8"), *_ctranslate2(), *_torch(), *_LLAMA_CPP),
        ),
        Work("smollm2", "smollm2", 128, 64, (*_ours("fp32", "int4"), *_GENAI, *_torch())),
        Work("marian", "marian", 25, 32, _MARIAN),
        Work("marian-beam", "marian", 25, 32, _MARIAN, num_beams=4),
    )
}
