"""All parts of the check, in the order in which they are worth most: right answers first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadtest.gpu_check.formats import model_formats
from loadtest.gpu_check.models import MODELS
from loadtest.gpu_check.part import Part, Settings
from loadtest.gpu_check.shapes import SHAPES

_QUICK_SECONDS, _QUICK_LIMIT = 15.0, 240.0  # on a GPU: one that takes minutes hangs
# Expected on a GPU beside 16 cores, the packages of `packages` made before.
_SECONDS = {"machine": 20.0, "packages": 300.0, "certificate": 40.0, "rows": 45.0}
_SECONDS |= {"variant": 40.0, "steps": 90.0, "speed": 240.0, "pieces": 20.0}
_LIMITS = {"packages": 1800.0, "speed": 1200.0}
_LIMIT = 600.0
_LARGE = {"llama-1b": 1.3, "bart-large": 1.3, "llama-8b": 2.0}  # times the seconds of the others
_ROUNDED_SHAPES = ("gpt2-124m", "llama-1b")
_VARIANTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {  # arguments, environment
    # The engine takes Flash alone, 1: in float32, and with a mask, it has no kernel, and
    # attention is computed without fusion. 3 has the memory-efficient kernel besides.
    "efficient-attention": ({"precision": "fp32", "options": "sdpa_kernel=3"}, {}),
    "unfused": ({"body": "unfused"}, {}),
    "default-attention": ({"options": "sdpa_kernel=0"}, {}),
    "no-xqa": ({}, {"ORT_ENABLE_XQA": "0"}),
    "one-xqa-part": ({}, {"XQA_NB_SUB_SEQ": "1"}),
    "attention24": ({"body": "attention24"}, {}),
    "int8-blocks": ({"weights": "int8-blocks"}, {}),
    "int8-blocks-one-launch": (
        {"weights": "int8-blocks", "entries": "ep.cuda.fpa_intb_gemm=1"},
        {},
    ),
    "int4": ({"weights": "int4"}, {}),
    "int4-one-launch": ({"weights": "int4", "entries": "ep.cuda.fpa_intb_gemm=1"}, {}),
}


def make_parts(settings: Settings) -> list[Part]:
    """Return every part, with the seconds that it is expected to take."""
    parts = [*_correctness(settings.quick), *_speed()]
    if settings.quick:  # but for the packages, of which there are many, whatever their size
        return [
            part if part.name == "packages" else part.within(_QUICK_SECONDS, _QUICK_LIMIT)
            for part in parts
        ]
    return parts


def choose_parts(parts: Sequence[Part], only: Sequence[str]) -> list[Part]:
    """Return the parts whose name holds one of these, all if there are none; else ValueError."""
    for name in only:
        if not any(name in part.name for part in parts):
            kinds = ", ".join(dict.fromkeys(part.name.partition(".")[0] for part in parts))
            raise ValueError(f"no part is called like {name!r}; they begin with: {kinds}")
    return [part for part in parts if not only or any(name in part.name for name in only)]


def _correctness(quick: bool) -> Iterator[Part]:
    yield _part("machine", "pieces:describe", needs_device=False)
    yield _part("packages", "certificates:export_all", needs_device=False)
    for model in ("gpt2", "llama"):
        for precision in ("fp32", "fp16", "bf16"):
            yield _part(
                f"rows.{model}.{precision}",
                "probes:probe",
                {"model": model, "precision": precision, "judged": "yes"},
            )
    for model, form in model_formats(MODELS, quick=quick):
        yield _part(
            f"certificate.{model}.{form}",
            "certificates:certify",
            {"model": model, "form": form},
            needs_device=False,
        )
    yield _part("pieces.row-copies", "pieces:copy_rows")


def _speed() -> Iterator[Part]:
    for shape in SHAPES:
        yield _part(f"steps.{shape}", "steps:time_steps", {"shape": shape})
        yield _part(f"speed.{shape}", "speed:compare_shape", {"shape": shape}, needs_device=False)
    for shape in _ROUNDED_SHAPES:
        for weights in ("int8-blocks", "int4"):
            arguments = {"shape": shape, "weights": weights}
            yield _part(f"steps.{shape}.{weights}", "steps:time_steps", arguments)
    yield _part("pieces.likeliest", "pieces:time_top")
    yield _part("pieces.draws", "draws:time_draws")
    for model in ("gpt2", "llama"):
        for name, (arguments, environment) in _VARIANTS.items():
            given = {"model": model, "precision": "fp16", **arguments}
            yield _part(f"variant.{model}.{name}", "probes:probe", given, environment)


def _part(
    name: str,
    run: str,
    arguments: dict[str, str] | None = None,
    environment: dict[str, str] | None = None,
    *,
    needs_device: bool = True,
) -> Part:
    kind, *rest = name.split(".")
    return Part(
        name=name,
        run=f"{__package__}.{run}",
        arguments=arguments or {},
        environment=environment or {},
        needs_device=needs_device,
        seconds=_SECONDS[kind] * (_LARGE.get(rest[0], 1.0) if rest else 1.0),
        limit=_LIMITS.get(kind, _LIMIT),
    )
