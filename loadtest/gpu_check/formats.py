"""The formats whose answers are checked: every precision, with weights or cache rounded or not."""

from __future__ import annotations

from engine.package import CacheDtype, PackageFormat, Precision, Weights

_PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16")
_ROUNDED: tuple[Weights, ...] = ("int8-blocks", "int4")
_WITH_INT8_CACHE = ("llama",)  # four query heads share a key head


def formats_of(model: str) -> dict[str, PackageFormat]:
    """Return the formats of a model by name, those that round nothing first."""
    found = {str(precision): PackageFormat.of("cuda", precision) for precision in _PRECISIONS}
    for precision in ("fp16", "bf16", "fp32"):
        for weights in _ROUNDED:
            found[f"{precision}.{weights}"] = PackageFormat.of("cuda", precision, weights)
        if model in _WITH_INT8_CACHE and precision != "fp32":
            cache: CacheDtype = "int8"
            found[f"{precision}.kv-{cache}"] = PackageFormat.of("cuda", precision, None, cache)
    return found
