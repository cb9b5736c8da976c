"""Compares what an imported model does before and behind its numbers with what its original does.

Before them pictures are resized and normalised. Behind them labels have names, and scores are made
of logits: by the original's pipeline, or the activation that sentence-transformers is told.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import nn

from engine.errors import CertificateError
from engine.json_file import parse_object
from engine.one_pass.image import load_image
from engine.one_pass.scores import SCORES
from exporter.checkpoint import CONFIG_NAME
from exporter.compare.original_texts import around
from exporter.graphs.contracts import image_contract
from exporter.huggingface.pictures import PREPROCESSOR_NAME
from exporter.huggingface.sentences import read_sentence_texts
from exporter.models import TransformerConfig
from exporter.prover.eager import Floats
from exporter.samples import SEED

_SIZES = ((1.0, 1.0), (1.4, 0.9), (0.6, 2.0))  # width and height, in those of the model
_MOST_LOGIT = 3.0
_ROUNDED = 1e-5  # what float32 loses of a score
_FEW = 1e-3  # mean difference of pictures, in levels of 8 bits


class Items(NamedTuple):
    """The labels of an original, scores that it makes of `_logits`, and pictures as it reads them.

    No scores: each token has labels.
    """

    labels: Sequence[str]
    scores: Floats | None
    pictures: Sequence[Floats]

    @classmethod
    def of(cls, directory: Path, config: TransformerConfig, original: Any) -> Items:
        """Ask an original for them."""
        pictures, processor = [], None
        if config.image is not None:
            import transformers

            processor = transformers.AutoImageProcessor.from_pretrained(
                directory,
                backend="pil",  # which resizes as ours does
                trust_remote_code=False,
                local_files_only=True,
            )
            for picture in _pictures(config.image.size, config.image.channels):
                read = processor(picture, return_tensors="np")["pixel_values"][0]
                pictures.append(np.asarray(read, np.float32))
        if not config.labels:
            return cls((), None, pictures)
        names = original.config.id2label
        labels = [str(names[i]) for i in sorted(names)]
        texts = read_sentence_texts(directory, parse_object((directory / CONFIG_NAME).read_bytes()))
        if config.head.each_token:
            return cls(labels, None, pictures)
        if texts is not None and texts.activation_fn:
            return cls(labels, _activated(texts.activation_fn, len(labels)), pictures)
        return cls(labels, _scores(original, processor, len(labels)), pictures)

    def compare(self, config: TransformerConfig) -> list[str]:
        """Return in words what was compared; CertificateError says what differs."""
        here = config.labels
        if [*here] != [*self.labels]:
            raise CertificateError(f"it has other labels: {around(here, self.labels)}")
        if self.scores is not None:
            kind = config.head.label_scores
            found = SCORES[kind](_logits(len(here)))
            if np.abs(found - self.scores).max() > _ROUNDED * _MOST_LOGIT:
                raise CertificateError(
                    f"its scores of labels are made of logits by {kind}: {found[0]:.4f} of "
                    f"{_MOST_LOGIT}, there {self.scores[0]:.4f}"
                )
        self._compare_pictures(config)
        words = [f"{len(here)} label{'s' * (len(here) > 1)}"] if here else []
        return [*words, *([f"{len(self.pictures)} resized pictures"] if self.pictures else [])]

    def _compare_pictures(self, config: TransformerConfig) -> None:
        contract = image_contract(config)
        if contract is None:
            return
        level = 1 / 255 / np.array(contract.std)[:, None, None]
        given = _pictures(contract.size, contract.channels)
        for picture, theirs in zip(given, self.pictures, strict=True):
            file = io.BytesIO()
            picture.save(file, "PNG")
            ours = load_image(file.getvalue(), contract, path="picture")
            size = "{} x {}".format(*picture.size)
            if ours.shape != theirs.shape:
                raise CertificateError(
                    f"a picture of {size} becomes {[*ours.shape]}, there {[*theirs.shape]}"
                )
            apart = np.abs(ours - theirs) / level
            if not (apart.max() <= 1 and apart.mean() <= _FEW):
                raise CertificateError(
                    f"a picture of {size} is read in another way than {PREPROCESSOR_NAME} says: "
                    f"{apart.max():.3g} levels of 255 apart, {apart.mean():.3g} in the mean"
                )


def _logits(count: int) -> Any:
    """Return logits that fall, so that sorted scores stand in the order of labels."""
    return np.linspace(_MOST_LOGIT, -_MOST_LOGIT, count, dtype=np.float32)


def _scores(original: Any, processor: Any, count: int) -> Floats:
    import transformers

    logits = {"logits": torch.from_numpy(_logits(count))[None]}
    pipeline: Any
    if processor is None:
        pipeline, top_k = transformers.TextClassificationPipeline, None
        given = {"tokenizer": None}
    else:
        pipeline, top_k = transformers.ImageClassificationPipeline, count
        given = {"image_processor": processor}
    found = pipeline(model=original, device="cpu", **given).postprocess(logits, top_k=top_k)
    return np.array([one["score"] for one in found])


def _activated(named: str, count: int) -> Any:
    """Return the scores that an activation of torch makes."""
    name = named.rpartition(".")[2]
    activation = getattr(nn, name)(**({"dim": -1} if name == "Softmax" else {}))
    return activation(torch.from_numpy(_logits(count))).numpy()


def _pictures(size: int, channels: int) -> Iterator[Image.Image]:
    """Yield pictures of noise, of the model's size and of others."""
    rng = np.random.default_rng(SEED)
    for width, height in _SIZES:
        shape = (max(1, round(size * height)), max(1, round(size * width)), channels)
        pixels = rng.integers(0, 256, shape, dtype=np.uint8)
        yield Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
