"""Subjects of comparisons: models, requests, and the engines that take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from loadtest.errors import LoadTestError

Setting = Mapping[str, int]  # options of an engine that are tried; the fastest counts

OURS = "tokenweir"
# Shapes with random weights, as charts call them.
MODELS = {"gpt2": "GPT-2 124M", "smollm2": "SmolLM2 135M", "marian": "Marian base"}


@dataclass(frozen=True)
class Engine:
    """One engine with one form of the weights."""

    name: str  # as results call it
    adapter: str  # a module of loadtest.lab.peers.adapters, or of loadtest.lab.peers.servers
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
    model: str  # a name in models.py
    num_prompt_tokens: int
    num_new_tokens: int
    engines: tuple[Engine, ...]
    num_beams: int = 1
    are_servers: bool = False  # the engines are asked by a load test; else they are workers

    def of(self, names: Sequence[str]) -> Work:
        """Return it with the engines only whose name holds one of these, with all for none.

        Raises LoadTestError for one that no engine's name holds.
        """
        for name in names:
            if not any(name in engine.name for engine in self.engines):
                known = ", ".join(engine.name for engine in self.engines)
                raise LoadTestError(f"no engine of {self.name} is called {name!r}; known: {known}")
        chosen = [one for one in self.engines if any(name in one.name for name in names)]
        return replace(self, engines=tuple(chosen)) if names else self


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
_FIXED = f"{OURS} int8-fixed"
_MARIAN_FIXED = (*_ours("int8-fixed"), replace(_ctranslate2()[1], against=_FIXED))


def _servers(ours: str, theirs: str) -> tuple[Engine, ...]:
    """Return `tokenweir serve` with one form of the weights, and others that are asked by gRPC."""
    serve = f"{OURS} serve {ours}"
    is_float = ours == "fp32"
    settings: tuple[Setting, ...] = ({"intra_threads": 0}, {"intra_threads": 1, "inter_threads": 2})
    return (
        Engine(serve, "tokenweir_serve", ours),
        Engine(f"Ray Serve gRPC {ours}", "ray_ingress", ours, serve, True),
        Engine(f"CTranslate2 gRPC {theirs}", "ctranslate_grpc", theirs, serve, is_float, settings),
    )


_SERVERS = (*_servers("fp32", "float32"), *_servers("int8", "int8"))
_LLAMA_SERVER = (
    Engine("llama-server f32", "llama_server", "f32", f"{OURS} serve fp32"),
    Engine("llama-server q8_0", "llama_server", "q8_0", f"{OURS} serve int8", settings=_REPACKED),
)

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
        Work("marian-fixed", "marian", 25, 32, _MARIAN_FIXED),
        Work("marian-beam-fixed", "marian", 25, 32, _MARIAN_FIXED, num_beams=4),
        Work("gpt2-servers", "gpt2", 128, 64, (*_SERVERS, *_LLAMA_SERVER), are_servers=True),
        Work("marian-servers", "marian", 25, 32, _SERVERS, are_servers=True),
    )
}
