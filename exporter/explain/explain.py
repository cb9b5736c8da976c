"""Shows what the attention heads of a checkpoint look at, for one input, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn

from engine.errors import FieldViolation, InvalidRequest
from engine.one_pass.image import load_image
from engine.requests.defaults import sampling_params
from engine.sampling.stop_rule import StopRule
from engine.sampling.token_rules import TokenRules
from exporter.checkpoint import Checkpoint
from exporter.explain.picture import ImageBlock, TextBlock, draw
from exporter.files import replace_file, writing_to
from exporter.graphs.contracts import image_contract
from exporter.models import EncoderDecoder, TransformerConfig
from exporter.models.attention import record_probabilities

_WHITESPACE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})


def explain(checkpoint: Checkpoint, text: str, out: Path, *, target: str | None = None) -> None:
    """Write a PNG of every attention head of the eager model, layers down, heads across.

    Encoders: self-attention over the tokens of `text`. GPT: causal self-attention over them.
    Encoder-decoder: cross-attention of the output, then self-attention of encoder and decoder;
    the output is the model's own greedy one, or `target`. ViT: `text` is the path of an image,
    and the picture shows how the class token attends to its patches.
    Raises InvalidRequest for an input that the model cannot take, CheckpointError if `out` cannot
    be written.
    """
    config = checkpoint.config.model
    if target is not None and config.architecture != "encoder-decoder":
        raise _invalid("target", f"the architecture {config.architecture} has none; leave it out")
    if config.code is not None:
        raise _invalid("checkpoint", "transformers computes it, and tells no attention")
    with torch.no_grad():
        if config.architecture == "vision-encoder":
            path = Path(text)
            caption, blocks = path.name, _explain_image(checkpoint.model, config, path)
        elif config.architecture == "encoder-decoder":
            caption, blocks = _explain_translation(checkpoint, text, target)
        else:
            caption, blocks = text, _explain_tokens(checkpoint, text)
    picture = draw(f"{checkpoint.config.task} ({config.architecture}): {caption}", blocks)
    with writing_to(out):
        replace_file(out, picture)


def _explain_tokens(checkpoint: Checkpoint, text: str) -> list[TextBlock | ImageBlock]:
    tokenizer, ids = _encoded(checkpoint, text)
    with record_probabilities(checkpoint.model) as recorded:
        checkpoint.model(torch.tensor([ids]))
    is_causal = checkpoint.config.model.architecture == "decoder"
    kind = "causal self-attention" if is_causal else "self-attention"
    title = f"{kind}: from each token (row) to each token (column)"
    tokens = _labels(tokenizer, ids)
    return [TextBlock(title, tokens, tokens, _heads(recorded, "self_attention"))]


def _explain_translation(
    checkpoint: Checkpoint, text: str, target: str | None
) -> tuple[str, list[TextBlock | ImageBlock]]:
    """Show the three attentions of an encoder-decoder while it writes its answer, or `target`."""
    model, target_tokenizer = cast(EncoderDecoder, checkpoint.model), checkpoint.target_tokenizer
    assert target_tokenizer is not None, "load_checkpoint demands one of texts"
    start, end = model.config.bos_token_id, model.config.eos_token_id
    assert start is not None, "TransformerConfig demands it of an encoder-decoder"
    tokenizer, source = _encoded(checkpoint, text)
    if target is None:
        output = _greedy(checkpoint, model, source, start)
    else:
        ids = target_tokenizer.encode(target, add_special_tokens=False).ids
        output = [*checkpoint.config.generation.forced_begin, *ids]
        output += [] if end is None else [end]
        _check_length("target", output, model.config.max_target_len)
    inputs = [start, *output[:-1]]
    with record_probabilities(model) as recorded:
        model(torch.tensor([source]), torch.tensor([inputs]))
    read = _labels(tokenizer, source)
    written, before = _labels(target_tokenizer, output), _labels(target_tokenizer, inputs)
    return f"{text} → {target_tokenizer.decode(output, skip_special_tokens=True)}", [
        TextBlock(
            "cross-attention: from each token being written (row) to the source (column)",
            written,
            read,
            _heads(recorded, "cross_attention"),
        ),
        TextBlock(
            "encoder self-attention: from each source token (row) to each source token (column)",
            read,
            read,
            _heads(recorded, "encoder."),
        ),
        TextBlock(
            "decoder self-attention: from each token being written (row) to those before (column)",
            written,
            before,
            _heads(recorded, "self_attention", within="decoder."),
        ),
    ]


def _encoded(checkpoint: Checkpoint, text: str) -> tuple[Tokenizer, list[int]]:
    """Return the tokenizer of what is read, and the tokens that it makes of a text."""
    tokenizer, config = checkpoint.tokenizer, checkpoint.config.model
    assert tokenizer is not None, "load_checkpoint demands one of texts"
    ids = tokenizer.encode(text).ids
    _check_length("text", ids, config.max_source_len or config.max_target_len)
    return tokenizer, ids


def _greedy(
    checkpoint: Checkpoint, model: EncoderDecoder, source: list[int], start: int
) -> list[int]:
    """Return the model's own answer, with the tokens that it must and must not write."""
    params = sampling_params({"strategy": "greedy"}, checkpoint.config.generation)
    room = model.config.max_target_len - 1  # behind the start token, as in the engine
    ends = StopRule(params, frozenset(model.config.eos_token_ids), room)
    rules = TokenRules(params, ends, source)
    memory = model.encode(torch.tensor([source]))
    ids = [start]
    for count in range(ends.max_new_tokens):
        logits = model.decode(torch.tensor([ids]), memory)[0, -1]
        logits[list(rules.banned(ids, count))] = -torch.inf
        forced = rules.forced(count)
        ids.append(int(logits.argmax()) if forced is None else forced)
        if ends.end_of(ids[-1], count + 1) is not None:
            break
    return ids[1:]


def _explain_image(
    model: nn.Module, config: TransformerConfig, path: Path
) -> list[TextBlock | ImageBlock]:
    image, contract = config.image, image_contract(config)
    assert image is not None and contract is not None, "TransformerConfig demands it of a vit"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _invalid(
            "text",
            f"this model looks at images, and {str(path)!r} cannot be read ({error.strerror}); "
            "give the path of a PNG or JPEG file instead of a text",
        ) from error
    pixels = load_image(content, contract, path="text")  # (channels, size, size)
    with record_probabilities(model) as recorded:
        logits = model(torch.from_numpy(pixels)[None]).logits
    # From the class token to patches.
    weights = _heads(recorded, "self_attention")[:, :, 0, image.num_special :]
    side = image.size // image.patch_size
    shown = pixels * np.reshape(image.std, (-1, 1, 1)) + np.reshape(image.mean, (-1, 1, 1))
    found = f"; classified as {config.labels[int(logits.argmax())]!r}" if config.labels else ""
    return [
        ImageBlock(
            f"self-attention: from the class token to each patch{found}",
            shown.mean(axis=0).clip(0, 1).astype(np.float32),  # gray, so that attention has colour
            weights.reshape(*weights.shape[:2], side, side),
        )
    ]


def _heads(recorded: dict[str, Tensor], part: str, within: str = "") -> NDArray[np.float32]:
    """Return (num_layers, num_heads, T, S) of the attentions with `part` in their name."""
    chosen = [p[0] for name, p in recorded.items() if part in name and name.startswith(within)]
    return torch.stack(chosen).numpy()


def _labels(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, ...]:
    """Return the texts of tokens; a name where a token is only a part of a character."""
    labels = []
    for token_id in ids:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if not text or "\ufffd" in text:
            text = tokenizer.id_to_token(token_id) or f"#{token_id}"
        labels.append(text.translate(_WHITESPACE))
    return tuple(labels)


def _check_length(field: str, ids: list[int], limit: int) -> None:
    if not ids:
        raise _invalid(field, "it has no tokens; give at least one word")
    if len(ids) > limit:
        raise _invalid(field, f"{len(ids)} tokens are more than the {limit} that the model takes")


def _invalid(field: str, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(field, description)])
