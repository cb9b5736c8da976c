"""Text like the files given: a GPT on a byte-level BPE that is trained on them, or on its own."""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from engine.errors import ConfigError
from engine.lines import read_text
from engine.requests.generation_defaults import GenerationDefaults
from exporter.checkpoint import Checkpoint, TextFiles
from exporter.models.config import FeedForwardConfig, TransformerConfig
from exporter.tasks.start import FINE_TUNING, digest_of, kept_weights, of_architecture
from exporter.training.data import Example
from exporter.training.evaluation import Evaluation
from exporter.training.task import Outcome, Recipe, Task

END_OF_TEXT = "<|endoftext|>"  # between passages; the model ends its output with it
MIN_BYTES = 20_000
MAX_BYTES = 2**28  # each file; more than a model of this size can learn from
PASSAGE_BYTES = 4096  # the unit of the split into training and held-out text
VOCAB_SIZE = 1024
CONTEXT = 256  # tokens the served model can hold
WINDOW = 128  # tokens of a training example
RECIPE = Recipe(
    steps=1000,
    batch_tokens=2048,
    peak_learning_rate=2e-3,
    warmup_steps=100,
    weight_decay=0.01,
    validate_every=100,
)


def text_task(seed: int, files: Sequence[Path], start: Checkpoint | None = None) -> Task:
    """Return the task for some UTF-8 files; `seed` decides the order of the training windows.

    `start` is what learns from them, with its tokenizer; None: a fresh model. Raises ConfigError
    for files that are missing, not UTF-8, or too small together, and for a start that is no GPT.
    """
    text = read_files(files)
    parts = split(passages(text))
    tokenizer, config = _learner(of_architecture(start, "decoder"), parts["training"])
    kept = {} if start is None else kept_weights(start, config)
    rate = RECIPE.peak_learning_rate * (1 if start is None else FINE_TUNING)
    ids = {part: encode_passages(tokenizer, config, found) for part, found in parts.items()}
    trigram = AddOneTrigram(ids["training"], config.vocab_size)
    size = min(WINDOW, config.max_target_len)

    def chunk(number: int) -> list[Example]:
        rng = random.Random(f"text/{seed}/{number}")
        return windows(ids["training"], rng.randrange(size), size)

    return Task(
        name="text",
        config=config,
        tokenizer=tokenizer,
        recipe=replace(RECIPE, peak_learning_rate=rate),
        chunks=chunk,
        validation=windows(ids["validation"], size=size),
        held_out=windows(ids["held out"], size=size),
        selection="loss",
        judge=_judge(trigram, ids["held out"], parts["held out"]),
        data_fingerprint=hashlib.sha256((text + digest_of(kept)).encode()).hexdigest(),
        initial_weights=kept,
        generation=GenerationDefaults() if start is None else start.config.generation,
        text=TextFiles() if start is None else start.text,
    )


def _learner(start: Checkpoint | None, texts: Sequence[str]) -> tuple[Tokenizer, TransformerConfig]:
    """Return tokenizer and configuration of the model that learns."""
    if start is not None:
        assert start.tokenizer is not None, "a GPT has a tokenizer"
        return start.tokenizer, start.config.model
    tokenizer = make_tokenizer(texts)
    end = tokenizer.get_vocab()[END_OF_TEXT]
    return tokenizer, TransformerConfig(
        architecture="decoder",
        d_model=128,
        num_heads=4,
        d_ff=512,
        num_decoder_layers=4,
        feed_forward=FeedForwardConfig(activation="gelu"),
        norm_position="first",
        dropout=0.1,
        vocab_size=tokenizer.get_vocab_size(),
        max_target_len=CONTEXT,
        pad_token_id=end,
        eos_token_id=end,
    )


def read_files(files: Sequence[Path]) -> str:
    """Return the text of all files, one after the other."""
    if not files:
        raise ConfigError("text needs one or more UTF-8 files to learn from; give their names")
    text = "\n".join(read_text(path, MAX_BYTES) for path in files)
    size = len(text.encode())
    if size < MIN_BYTES:
        raise ConfigError(
            f"the files hold {size:,} bytes of text, at least {MIN_BYTES:,} are needed; give more"
        )
    return text


def passages(text: str) -> list[str]:
    """Cut a text at ends of lines into passages of about PASSAGE_BYTES."""
    found: list[str] = []
    lines: list[str] = []
    size = 0
    for line in io.StringIO(text):  # "\n" alone ends one
        # A line may alone be longer than a passage.
        for piece in (line[i : i + PASSAGE_BYTES] for i in range(0, len(line), PASSAGE_BYTES)):
            lines.append(piece)
            size += len(piece.encode())
            if size >= PASSAGE_BYTES:
                found.append("".join(lines))
                lines, size = [], 0
    return [*found, "".join(lines)] if lines else found


def split(found: Sequence[str]) -> dict[str, list[str]]:
    """Return a tenth of the passages as held out, a twentieth for validation, and the rest.

    A passage that occurs twice stays in one part.
    """
    unique = list(dict.fromkeys(found))
    order = list(range(len(unique)))
    random.Random("text/split").shuffle(order)
    num_held_out, num_validation = max(1, len(order) // 10), max(1, len(order) // 20)
    held_out = sorted(order[:num_held_out])
    validation = sorted(order[num_held_out : num_held_out + num_validation])
    training = sorted(order[num_held_out + num_validation :])
    return {
        "held out": [unique[i] for i in held_out],
        "validation": [unique[i] for i in validation],
        "training": [unique[i] for i in training],
    }


def make_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Return a byte-level BPE; it can encode any text and gives it back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_passages(
    tokenizer: Tokenizer, config: TransformerConfig, texts: Sequence[str]
) -> list[int]:
    """Return the ids of all passages; where the model knows an end, one stands around each."""
    end = [] if config.eos_token_id is None else [config.eos_token_id]
    ids = list(end)
    for encoding in tokenizer.encode_batch_fast(list(texts)):
        ids += [*encoding.ids, *end]
    return ids


def windows(ids: Sequence[int], start: int = 0, size: int = WINDOW) -> list[Example]:
    """Return windows side by side; every token after the first `start` + 1 is a target once."""
    array = np.array(ids)
    starts = range(start, len(array) - 1, size)
    return [
        Example(array[i : i + size][: len(array) - 1 - i], array[i + 1 : i + 1 + size])
        for i in starts
    ]


class AddOneTrigram:
    """A GPT must beat it: P(c | a, b) = (count(a, b, c) + 1) / (count(a, b) + vocab_size)."""

    def __init__(self, ids: Sequence[int], vocab_size: int) -> None:
        self._trigrams = Counter(zip(ids, ids[1:], ids[2:], strict=False))
        self._bigrams = Counter(itertools.pairwise(ids[:-1]))
        self._vocab_size = vocab_size

    def probability(self, first: int, second: int, third: int) -> float:
        """Return the probability of `third` after `first` and `second`."""
        seen = self._trigrams[first, second, third]
        return (seen + 1) / (self._bigrams[first, second] + self._vocab_size)

    def negative_log_likelihood(self, ids: Sequence[int]) -> float:
        """Return the nats of all ids but the first; before the first there is its like.

        The first id is taken as seen twice, so that the second has a context of two.
        """
        padded = [ids[0], *ids]
        return -sum(
            math.log(self.probability(*three))
            for three in zip(padded, padded[1:], padded[2:], strict=False)
        )


def _judge(
    trigram: AddOneTrigram, ids: Sequence[int], texts: Sequence[str]
) -> Callable[[Evaluation], Outcome]:
    """Return a judge that compares model and trigram on the same tokens of the held-out text."""
    num_bytes = sum(len(text.encode()) for text in texts)

    def judge(evaluation: Evaluation) -> Outcome:
        ours = math.exp(evaluation.negative_log_likelihood / num_bytes)
        theirs = math.exp(trigram.negative_log_likelihood(ids) / num_bytes)
        metrics = {
            "perplexity_per_byte": ours,
            "trigram_perplexity_per_byte": theirs,
            "loss": evaluation.loss,
        }
        summary = (
            f"perplexity per byte {ours:.3f} on {num_bytes:,} held-out bytes; add-one trigram "
            f"model over the same tokens {theirs:.3f} (target: below it)"
        )
        return Outcome(metrics, summary, ours < theirs)

    return judge
