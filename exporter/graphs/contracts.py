"""The contracts of the manifest: all that the engine must know of a model to run its graphs."""

from __future__ import annotations

from engine.package.manifest import (
    CacheDtype,
    CacheShape,
    Contract,
    EncodingContract,
    GenerationContract,
    ImageContract,
    PackageFormat,
    Task,
)
from exporter.models.config import TransformerConfig

_PLAIN = PackageFormat()


def contract_of(config: TransformerConfig, form: PackageFormat = _PLAIN) -> Contract:
    """Return the contract of a model with the numbers of a format."""
    return Contract(
        architecture=config.architecture,
        task=_task(config),
        generation=generation_contract(config, form),
        encoding=encoding_contract(config),
        image=image_contract(config),
        labels=config.labels,
        label_scores=config.head.label_scores,
    )


def _task(config: TransformerConfig) -> Task:
    if config.num_decoder_layers:
        return "generate"
    if config.head.each_token:
        return "label"
    return "classify" if config.labels else "embed"


def generation_contract(
    config: TransformerConfig, form: PackageFormat = _PLAIN
) -> GenerationContract | None:
    """Return the contract of a model that generates, None for others."""
    if not config.num_decoder_layers:
        return None
    has_source = config.num_encoder_layers > 0
    cross_cache = None
    if has_source:
        cross_cache = _cache_shape(config, config.max_source_len, form.precision)
    return GenerationContract(
        vocab_size=config.vocab_size,
        source_vocab_size=config.source_vocab_size if has_source else None,
        num_heads=config.num_heads,
        cache=_cache_shape(config, config.max_target_len, form.kv_cache),
        cross_cache=cross_cache,
        decoder_start_token_id=config.bos_token_id if has_source else None,
        eos_token_ids=config.eos_token_ids,
        alignment=config.gives_alignment,
    )


def encoding_contract(config: TransformerConfig) -> EncodingContract | None:
    """Return the contract of a one-pass text model, None for others."""
    if config.num_decoder_layers or config.architecture == "vision-encoder":
        return None
    num_token_types = config.num_token_types if config.num_token_types > 1 else 0
    if config.head.each_token:
        num_token_types = 1  # it takes one text
    return EncodingContract(
        vocab_size=config.vocab_size,
        max_len=config.cut_at or config.max_source_len,
        pad_token_id=config.pad_token_id,
        embedding_dim=config.vector_dim,
        num_token_types=num_token_types,
        cuts_texts=config.cut_at is not None,
        cuts_left=config.cuts_left,
        prompts=config.prompts,
        default_prompt=config.default_prompt,
    )


def image_contract(config: TransformerConfig) -> ImageContract | None:
    """Return the contract of a vision model, None for others."""
    if config.image is None:
        return None
    return ImageContract(
        size=config.image.size,
        channels=config.image.channels,
        mean=config.image.mean,
        std=config.image.std,
        embedding_dim=config.vector_dim,
        resize=config.image.resize,
        keep_ratio=config.image.keep_ratio,
        resample=config.image.resample,
    )


def _cache_shape(config: TransformerConfig, max_len: int, dtype: CacheDtype) -> CacheShape:
    return CacheShape(
        num_layers=config.num_decoder_layers,
        num_kv_heads=config.kv_heads,
        max_len=max_len,
        head_dim=config.cache_head_dim,
        dtype=dtype,
    )
