"""Finds what makes a manifest impossible although every field of it is well-formed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from engine.package.manifest import (
    FORMATS,
    LEAST_POSITIONS,
    MOST_TIMES,
    Comparison,
    Judged,
    Manifest,
    PackageFormat,
)
from engine.wording import listed

_MAX_ROW_BYTES = 2**40  # one sequence's keys and values
_ROUNDING = 1 + 1e-5


def find_contradictions(manifest: Manifest) -> list[str]:
    """Return one sentence, beginning with the field, for everything that cannot be so."""
    return [
        *_wrong_contracts(manifest),
        *manifest.format.problems,
        *_missing_files(manifest),
        *_impossible_ids(manifest),
        *_impossible_rows(manifest),
        *_impossible_image(manifest),
        *_failed_certificate(manifest),
        *_failed_on_device(manifest),
    ]


def _wrong_contracts(manifest: Manifest) -> Iterator[str]:
    """Compare the contracts that are there with those that the architecture needs."""
    architecture = manifest.architecture
    generates = architecture in {"encoder-decoder", "decoder"}
    needed = {
        "generation": generates,
        "encoding": architecture == "encoder",
        "image": architecture == "vision-encoder",
    }
    for name, is_needed in needed.items():
        if (getattr(manifest, name) is not None) != is_needed:
            yield f"{name}: must {'' if is_needed else 'not '}be there for {architecture}"
    if (manifest.task == "generate") != generates:
        yield f"task: {manifest.task} does not go with {architecture}"
    if manifest.defaults.given and not generates:
        yield f"defaults: must not be there for {architecture}"
    if (manifest.layout is not None) != generates:
        yield f"layout: {manifest.layout} does not go with {architecture}"
    if not generates and manifest.task != "embed" and not manifest.labels:
        yield f"labels: none; {manifest.task} needs the names of the model's classes"
    if manifest.task == "embed":
        if manifest.labels:
            yield f"labels: {len(manifest.labels)} of them do not go with embed"
        for name in ("encoding", "image"):
            contract = getattr(manifest, name)
            if contract is not None and contract.embedding_dim is None:
                yield f"{name}.embedding_dim: none; embed needs the width of the model's vectors"
    yield from _wrong_attention(manifest)


def _wrong_attention(manifest: Manifest) -> Iterator[str]:
    crosses = manifest.architecture == "encoder-decoder"
    contract = manifest.generation
    if contract is None:
        return
    precision = manifest.precision
    if contract.cross_cache is not None and contract.cross_cache.dtype != precision:
        yield f"generation.cross_cache.dtype: {contract.cross_cache.dtype}; it must be {precision}"
    if contract.num_heads % contract.cache.num_kv_heads:
        yield (
            f"generation.num_heads: {contract.num_heads} is not a multiple of cache.num_kv_heads, "
            f"{contract.cache.num_kv_heads}"
        )
    if contract.alignment and not crosses:
        yield f"generation.alignment: must not be there for {manifest.architecture}"
    if contract.source_vocab_size is not None and not crosses:
        yield f"generation.source_vocab_size: must not be there for {manifest.architecture}"
    for name in ("cross_cache", "decoder_start_token_id"):
        if (getattr(contract, name) is not None) != crosses:
            yield (
                f"generation.{name}: must {'' if crosses else 'not '}be there for "
                f"{manifest.architecture}"
            )


def _missing_files(manifest: Manifest) -> Iterator[str]:
    tokenizer = () if manifest.architecture == "vision-encoder" else ("tokenizer.json",)
    for name in (*manifest.graphs, *tokenizer):
        if name not in manifest.files:
            yield f"files: {name} is not listed"


def _impossible_ids(manifest: Manifest) -> Iterator[str]:
    given: dict[str, int | None] = {}
    size = 0
    if manifest.generation is not None:
        size = manifest.generation.vocab_size
        given["generation.decoder_start_token_id"] = manifest.generation.decoder_start_token_id
        for i, token_id in enumerate(manifest.generation.eos_token_ids):
            given[f"generation.eos_token_ids.{i}"] = token_id
        given |= {f"defaults.{name}": most for name, most in manifest.defaults.largest_ids.items()}
    elif manifest.encoding is not None:
        size = manifest.encoding.vocab_size
        given["encoding.pad_token_id"] = manifest.encoding.pad_token_id
    for name, value in given.items():
        if value is not None and value >= size:
            yield f"{name}: {value} is outside the vocabulary, 0 to {size - 1}"


def _impossible_rows(manifest: Manifest) -> Iterator[str]:
    contract = manifest.generation
    if contract is None:
        return
    for name, cache in (("cache", contract.cache), ("cross_cache", contract.cross_cache)):
        if cache is None:
            continue
        numbers = 2 * cache.num_layers * cache.num_kv_heads * cache.max_len * cache.head_dim
        size = numbers * (1 if cache.dtype == "int8" else 4)
        if size > _MAX_ROW_BYTES:
            yield (
                f"generation.{name}: a row of {size:,} bytes is more than {_MAX_ROW_BYTES:,}; "
                "no memory holds a sequence"
            )


def _impossible_image(manifest: Manifest) -> Iterator[str]:
    image = manifest.image
    if image is None:
        return
    for name, values in (("mean", image.mean), ("std", image.std)):
        if len(values) != image.channels:
            yield f"image.{name}: {len(values)} values for {image.channels} channels"
    if any(value <= 0 for value in image.std):
        yield f"image.std: {image.std} must be above 0"


def _failed_certificate(manifest: Manifest) -> Iterator[str]:
    found, form = manifest.certificate, manifest.format
    if bool(found.half) != form.has_half_stage:
        yield (
            f"certificate.half: must {'not ' if found.half else ''}be there for precision "
            f"{manifest.precision} and weights {manifest.weights}"
        )
    yield from _unequal("certificate.half", found.half)
    if (found.answers is None) != (manifest.task == "generate"):
        verb = "must not" if found.answers else "must"
        yield f"certificate.answers: {verb} be there for {manifest.task}"
    choices = found.tokens_compared or found.covered.get("undecided_tokens")
    if manifest.task == "generate" and not choices:
        yield "certificate: no token was compared with the eager model"
    yield from _failed_comparison("certificate", found, form)
    vector_loss = found.answers.max_vector_loss if found.answers else None
    if found.loss and vector_loss is not None and vector_loss > found.loss.max_vector_loss:
        yield (
            f"certificate: 1 less the cosine of a vector to the eager model's is {vector_loss:g}, "
            f"more than {found.loss.max_vector_loss:g}"
        )


def _failed_on_device(manifest: Manifest) -> Iterator[str]:
    found = manifest.certificate.device
    if found is None:
        return
    if not FORMATS[manifest.target].is_shown_on_device:
        yield f"certificate.device: must not be there for the target {manifest.target}"
    buckets = found.buckets
    if bool(buckets) != (manifest.generation is not None):
        yield (
            f"certificate.device.buckets: must {'not ' if buckets else ''}be there for "
            f"{manifest.architecture}"
        )
    if any(one >= other for one, other in itertools.pairwise(buckets)):
        yield f"certificate.device.buckets: {listed([*map(str, buckets)])} do not rise"
    if found.batch_invariant and len(buckets) > 1:
        yield (
            f"certificate.device.batch_invariant: cannot be with {len(buckets)} buckets; which "
            "kernel computes a row depends on them"
        )
    yield from _failed_comparison("certificate.device", found, manifest.format)


def _failed_comparison(name: str, found: Comparison, form: PackageFormat) -> Iterator[str]:
    """Yield what a comparison with the eager model shows to be wrong."""
    loss = found.loss
    if (loss is not None) != form.is_lossy or bool(found.judged) == form.is_lossy:
        wanted = "a loss, and nothing judged" if form.is_lossy else "what was judged, and no loss"
        yield f"{name}: must have {wanted} in {form}"
    yield from _unequal(f"{name}.judged", found.judged)
    allowed = loss.max_token_loss * found.tokens_compared if loss else 0
    if not 0 <= found.tokens_compared - found.tokens_equal <= allowed:
        yield (
            f"{name}: only {found.tokens_equal} of {found.tokens_compared} tokens were equal to "
            "those of the eager model"
        )
    if found.max_abs_logit_diff > found.tolerance * _ROUNDING:
        yield (
            f"{name}: logits differ by {found.max_abs_logit_diff:g} from the eager model, more "
            f"than {found.tolerance:g}"
        )


def _unequal(name: str, judged: Sequence[Judged]) -> Iterator[str]:
    """Yield where graphs lose more than they may beside the eager model."""
    for one in judged:
        ours, theirs = one.exported.model_dump(), one.eager.model_dump()
        theirs["largest"] = max(x.eager.largest for x in judged if x.what == one.what)
        for quantile, factor in MOST_TIMES.items():
            allowed = max(factor * theirs[quantile], one.floor) * _ROUNDING
            if one.positions >= LEAST_POSITIONS[quantile] and ours[quantile] > allowed:
                yield (
                    f"{name}: {one.what}, {one.play}: {quantile} {ours[quantile]:.3g} is more than "
                    f"{factor:g} times that of the eager model, {theirs[quantile]:.3g}"
                )
