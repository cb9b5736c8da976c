"""The formats whose answers are checked: every precision, with weights or cache rounded or not."""

from __future__ import annotations

from collections.abc import Iterable

from engine.package.manifest import CacheDtype, PackageFormat, Precision, Weights

_PRECISIONS: tuple[Precision, ...] = ("fp16", "bf16", "fp32")
_ROUNDED: tuple[Weights, ...] = ("int8-blocks", "int4")
_WITH_INT8_CACHE = ("llama",)  # four query heads share a key head


def formats_of(model: str, *, quick: bool) -> dict[str, PackageFormat]:
    """Return the formats of a model by name, those that round nothing first; a few with `quick`."""
    found = {str(precision): PackageFormat.of("cuda", precision) for precision in _PRECISIONS}
    for precision in _PRECISIONS[:1] if quick else _PRECISIONS:
        for weights in _ROUNDED[-1:] if quick else _ROUNDED:
            found[f"{precision}.{weights}"] = PackageFormat.of("cuda", precision, weights)
        if model in _WITH_INT8_CACHE and precision != "fp32":
            cache: CacheDtype = "int8"
            found[f"{precision}.kv-{cache}"] = PackageFormat.of("cuda", precision, None, cache)
    return found


def weights_of(name: str) -> Weights | None:
    """Return the weights that the task of a part names; "" names none, those of the precision."""
    names: dict[str, Weights | None] = {"": None, "int8-blocks": "int8-blocks", "int4": "int4"}
    return names[name]


def model_formats(models: Iterable[str], *, quick: bool) -> list[tuple[str, str]]:
    """Return the names of every model and format, of all models what rounds nothing first."""
    of_model = {model: [*formats_of(model, quick=quick)] for model in models}
    pairs = [(model, form) for model, forms in of_model.items() for form in forms]
    return sorted(pairs, key=lambda pair: of_model[pair[0]].index(pair[1]))
