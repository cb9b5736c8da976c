"""Tries a one-pass model out before anybody is served, on items alone and among others."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from PIL import Image

from engine.config import EngineConfig
from engine.errors import DeviceError, InvalidRequest, OutOfDeviceMemory, PackageError
from engine.lifecycle.lifecycle import WarmUpResult
from engine.one_pass.batch import Graph, split, stack
from engine.one_pass.item_encoder import EncodedItem, ItemEncoder
from engine.one_pass.prediction import ItemPrediction, PredictionItem
from engine.package.manifest import ImageContract, Manifest
from engine.text.tokenizer import Tokenizer

_SHORT = 8  # tokens of a short text
_MAX_ITEMS = 32  # run together at most

Group = tuple[str, Sequence[EncodedItem]]  # a name for errors; items of one length


def warm_up_one_pass(
    graph: Graph,
    manifest: Manifest,
    tokenizer: Tokenizer | None,
    config: EngineConfig,
    path: str | os.PathLike[str],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> WarmUpResult:
    """Run texts, short and longest, or images, each alone and then with others.

    Raises PackageError, saying at what, if a call fails or gives what no request could use;
    DeviceError if the device fails, OutOfDeviceMemory if kernels have no room there.
    """
    is_invariant, slowest = True, 0.0
    for what, items in _groups(manifest, config, tokenizer):
        size = config.most_items(items[0].cost)
        try:
            alone = _run(graph, items[:1], manifest)
            started = clock()  # the weights are in memory by now
            together = _run(graph, items[:size], manifest)
        except OutOfDeviceMemory as error:
            ways = "fewer items at once need less: --max-num-seqs and --max-num-batched-tokens"
            raise OutOfDeviceMemory(f"{path}: {what} failed: {error}; {ways}") from error
        except DeviceError:
            raise
        except Exception as error:  # onnxruntime's own have no other class in common
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise PackageError(
                f"{path}: {what} failed: {reason}; export the model again"
            ) from error
        slowest = max(slowest, size / len(together) * (clock() - started))
        is_invariant &= _bits(alone[0]) == _bits(together[0])
    return WarmUpResult(is_invariant, slowest)


def _groups(
    manifest: Manifest, config: EngineConfig, tokenizer: Tokenizer | None
) -> Iterator[Group]:
    encoder = ItemEncoder(manifest.contract, tokenizer, config)
    if manifest.image is not None:
        yield "an image", _images(manifest.image, encoder, config)
        return
    assert manifest.encoding is not None and tokenizer is not None, "the factory sees to it"
    contract = manifest.encoding
    for length in (min(_SHORT, contract.max_len), contract.max_len):
        ids = np.arange(_MAX_ITEMS)[:, None] + np.arange(length)  # [items, length]
        # The first begins with the last of the vocabulary.
        texts = (contract.vocab_size - 1 + ids) % contract.vocab_size
        types = np.zeros(length, int) if contract.num_token_types > 1 else None
        items = [EncodedItem(text, length, length, types) for text in texts]
        yield f"a text of {length} tokens", items
    first = range(min(_SHORT, contract.vocab_size))
    try:
        yield "a text", encoder.encode([PredictionItem(tokenizer.decode(first))], "items")
    except InvalidRequest:  # not every tokenizer reads what it writes
        return


def _images(
    contract: ImageContract, encoder: ItemEncoder, config: EngineConfig
) -> list[EncodedItem]:
    """Return images of noise, from the file to the pixels, as many as are run together."""
    size = (contract.size, contract.size) + ((3,) if contract.channels == 3 else ())
    rng = np.random.default_rng(0)

    def noise() -> EncodedItem:
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).save(file, "PNG")
        return encoder.encode([PredictionItem(file.getvalue())], "items")[0]

    first = noise()
    others = min(_MAX_ITEMS, config.most_items(first.cost)) - 1
    return [first, *(noise() for _ in range(others))]


def _run(graph: Graph, items: Sequence[EncodedItem], manifest: Manifest) -> list[ItemPrediction]:
    """Return what the model says of each item; ValueError for what nobody could use."""
    per_token = (items[0].length,) if manifest.task == "label" else ()
    contract = manifest.encoding or manifest.image
    assert contract is not None, "a one-pass model reads texts or sees images"
    labels = (*per_token, len(manifest.labels)) if manifest.labels else (0,)
    wanted = (labels, (contract.embedding_dim or 0,))
    found = []
    for prediction in split(graph.run(stack(items)), items):
        if prediction is None:
            raise ValueError("what the model gives is not finite")
        shapes = (prediction.logits.shape, prediction.embedding.shape)
        if items[0].kept is None and shapes != wanted:
            raise ValueError(f"logits and embedding of an item are {shapes}, not {wanted}")
        found.append(prediction)
    return found


def _bits(prediction: ItemPrediction) -> tuple[bytes, bytes]:
    return prediction.logits.tobytes(), prediction.embedding.tobytes()
