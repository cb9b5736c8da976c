"""Compares an imported model with its original: the class of transformers that people trained.

Both read the same tokens or pictures. The original runs in float32 and in float64; then it is
freed, and ours is loaded. No position of ours may lose more than the judge of graphs allows.
"""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from itertools import cycle
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from engine.errors import CertificateError, CheckpointError
from engine.machine import free_memory
from engine.one_pass.item_encoder import EncodedItem
from engine.package.manifest import (
    Architecture,
    EncodingContract,
    GenerationContract,
    ImageContract,
)
from engine.wording import shortened, size_of
from exporter.checkpoint import CONFIG_NAME, WEIGHTS_NAME, load_checkpoint, read_config
from exporter.compare.original_answers import Answers, Search
from exporter.compare.original_items import Items
from exporter.compare.original_options import compare_options
from exporter.compare.original_texts import compare_texts
from exporter.compare.original_vectors import PROMPTS_NAME, Modules
from exporter.graphs.contracts import contract_of
from exporter.huggingface.reading import silent_transformers
from exporter.huggingface.tokenizers import Languages
from exporter.models.config import TransformerConfig
from exporter.progress import Progress, no_progress
from exporter.prover.cases import first_lengths
from exporter.prover.eager import (
    Eager,
    EagerModel,
    Floats,
    Forward,
    as_array,
    logits_of,
    padded,
)
from exporter.prover.generation_cases import Case, case_of
from exporter.prover.item_cases import draw_images, given_texts, random_groups
from exporter.prover.judge import At, ExactJudge, kinds_of_tokens
from exporter.samples import SEED, Tokens, TokenSampler

NOT_COMPARED = "not compared with its original"
_PLAY = "compared"
_WHAT = "comparing with the original"
_PER_LENGTH = 2
_MOST_NUMBERS = 2**24  # that are kept of the original
_NUM_IMAGES = 8
_TOGETHER = 32  # tokens of a prompt and its source, up to which it also stands padded among others
_SCORE_BYTES = 32  # a score in float64, while a softmax is made
_PARTED = 1e-4  # share of a layer's largest number: hidden states that differ by more are others
_CLASSES: Mapping[Architecture, str] = {
    "decoder": "AutoModelForCausalLM",
    "encoder-decoder": "AutoModelForSeq2SeqLM",
    "encoder": "AutoModelForSequenceClassification",
    "vision-encoder": "AutoModelForImageClassification",
}


class Pass(NamedTuple):
    """A forward pass of both models, which gives the numbers [N, V] of each of its inputs."""

    ours: Forward
    theirs: Forward
    what: Sequence[str]  # the numbers of each are
    names: Sequence[str]  # one per input
    lengths: Sequence[int]  # tokens of each
    first: Sequence[int]  # position of each whose numbers are compared


class Compared(NamedTuple):
    """The outcome of a comparison, for a person who imports."""

    said: str
    notes: tuple[str, ...] = ()


class _Seen(NamedTuple):
    """The numbers of an original for every input of every pass, and its answers."""

    numbers: Sequence[Sequence[Eager]]
    of_what: str  # the judged numbers are held against
    generation: Any  # its options of generation, and those that a person's languages ask for
    answers: Answers | None
    items: Items | None
    notes: Sequence[str]


class _Lengths(NamedTuple):
    """The lengths of texts that are compared."""

    limit: int  # the model's
    least: int  # whose places turn in the original as in ours
    most: int  # whose scores have room in memory
    edges: Sequence[int]

    @classmethod
    def of(cls, config: TransformerConfig, spare: int) -> _Lengths:
        """Return them; the scores of one layer have `spare` bytes."""
        scaling, contract = config.positions.rotary_scaling, contract_of(config)
        before, least = (scaling.original_max_len, scaling.least_len) if scaling else (None, 1)
        edges = [edge for edge in (config.attention.window, before) if edge]
        limit = 1  # pictures have no length
        if contract.generation:
            limit = max(contract.generation.max_prompt_len, contract.generation.cache.max_len)
        elif contract.encoding:
            limit = contract.encoding.max_len
        rows = 1 if contract.generation else _PER_LENGTH
        most = isqrt(spare // (_SCORE_BYTES * rows * config.num_heads))
        return cls(
            limit,
            min(least, limit),
            max(most, _TOGETHER),
            [*edges, *(one + 1 for one in edges), least],
        )

    def up_to(self, limit: int) -> list[int]:
        """Return those at the edges of a model: its limit, windows, rope's first length."""
        limit = min(limit, self.most)
        found = {*first_lengths(limit), *self.edges}
        return sorted(length for length in found if self.least <= length <= limit)

    def kept(self, texts: Iterable[Tokens], limit: int) -> list[Tokens]:
        """Return the texts that are not too short or too long."""
        return [one for one in texts if self.least <= len(one) <= min(limit, self.most)]

    @property
    def said(self) -> str:
        """The limit of what was compared, in words."""
        if self.most >= self.limit:
            return ""
        return f" (up to {self.most:,} of {self.limit:,} tokens, for lack of memory)"


def compare_with_original(
    directory: Path,
    checkpoint: Path,
    languages: Languages = Languages(),
    progress: Progress = no_progress,
    *,
    asked_len: int | None = None,
) -> Compared:
    """Hold a checkpoint against the model in `directory` that it was imported from.

    `asked_len` tokens are the most of a text that a person has asked for.

    Returns what was compared, or why transformers does not run the original. Raises
    CheckpointError where texts are read in another way, where an option of generation has another
    default, where a position of ours loses more than the judge allows, with the first layer that
    differs, where other tokens are written, or where labels or pictures are others.
    """
    described = read_config(checkpoint)
    original = cache(lambda: _load_original(directory, described.model))
    with silent_transformers():
        texts = compare_texts(directory, checkpoint, languages)
        needed = (checkpoint / WEIGHTS_NAME).stat().st_size * 5 // 4 + 2**31  # float32, and room
        spare = (free := free_memory()) - needed
        lengths = _Lengths.of(described.model, max(0, spare))
        if spare < 0 or lengths.least > lengths.most:
            missing = f"it takes about {size_of(needed)} of memory, and {size_of(free)} are free"
            if spare >= 0:
                missing = f"texts of {lengths.least:,} tokens take more memory than is free"
            return Compared(f"{NOT_COMPARED}: {missing}", texts.notes)
        gives_vectors = described.model.is_of_texts and not described.model.labels
        modules = Modules.of(directory) if gives_vectors else None
        passes, search = (
            [*_passes(described.model, lengths, texts.given, modules)],
            Search.of(described, texts.asked),
        )
        try:
            seen = _see(directory, described.model, original, passes, search, progress)
            if seen.generation is not None:
                seen.generation.update(**texts.asked)
            name = type(original()).__name__
        except Exception as error:  # noqa: BLE001 - whatever a library says of files of strangers
            return Compared(f"{NOT_COMPARED}: {_first_line(error)}", texts.notes)
        original.cache_clear()  # before ours is loaded
        gc.collect()
        model = load_checkpoint(checkpoint).model
        with _refusing(directory, name, "generation_config.json"):
            num_options = compare_options(described, seen.generation)
        with _refusing(directory, name, CONFIG_NAME):
            of_items = seen.items.compare(described.model) if seen.items else []
            said = _judge(model, passes, seen, described.generation.banned_tokens, original)
            said += lengths.said
        seen = seen._replace(numbers=())  # a large vocabulary's, before others come
        with _refusing(directory, name, PROMPTS_NAME):
            of_items += modules.compare(described.model, asked_len) if modules else []
        words = [said, *of_items, *texts.words]
        words += [f"{num_options} options"] if num_options else []
        with _refusing(directory, name, "generation_config.json"):
            if search and seen.answers:
                words += search.compare(model, seen.answers, original)
        said = f"compared with {name} of transformers {version('transformers')}: "
        return Compared(said + ", ".join(words), (*texts.notes, *seen.notes))


def _see(
    directory: Path,
    config: TransformerConfig,
    original: Callable[[], Any],
    passes: Sequence[Pass],
    search: Search | None,
    progress: Progress,
) -> _Seen:
    """Return what the original computes and writes; where `generate` fails, a note says why."""

    def again(forward: Forward) -> list[Eager]:
        return EagerModel(original(), original()).with_all_orders(forward)

    progress(0, len(passes), _WHAT)
    eager = EagerModel.of(original(), original(), passes[0].theirs)
    numbers = []
    for i, one in enumerate(passes):
        again_one = partial(again, one.theirs)  # which holds no model, so that it can be freed
        numbers.append(
            [
                replace(found, origin=found.origin and found.origin._replace(again=again_one))
                for found in eager.run(one.theirs)
            ]
        )
        progress(i + 1, len(passes), _WHAT)
    answers, notes = None, []
    try:
        answers = search and search.theirs(original())
    except Exception as error:  # noqa: BLE001 - whatever a library says of files of strangers
        why = _first_line(error)
        notes.append(f"its answers are not compared with `generate` of its original, for {why}")
    of_what = "float64" if eager.has_float64 else "the mean of its runs in float32"
    generation = copy.deepcopy(getattr(original(), "generation_config", None))
    items = None
    try:
        items = Items.of(directory, config, original())
    except Exception as error:  # noqa: BLE001 - whatever a library says of files of strangers
        why = _first_line(error)
        notes.append(f"labels and pictures are not compared with those of its original, for {why}")
    return _Seen(numbers, of_what, generation, answers, items, notes)


def _judge(
    model: nn.Module,
    passes: Sequence[Pass],
    seen: _Seen,
    banned: Tokens,
    original: Callable[[], nn.Module],
) -> str:
    """Return in words how near ours comes to what was seen of the original.

    Raises CertificateError where the judge refuses a position, with the first layer that differs.
    """
    judge, num_inputs = ExactJudge(banned=banned, needs_equal_bits=False), 0
    try:
        for one, of_pass in zip(passes, seen.numbers, strict=True):
            with torch.no_grad():
                ours = one.ours(model)
            for i, (numbers, found) in enumerate(zip(ours, of_pass, strict=True)):
                if numbers.shape != found.exact.shape:
                    raise CertificateError(
                        f"{one.names[i]}: {one.what[i]} are {list(numbers.shape)}, those of the "
                        f"original {list(found.exact.shape)}"
                    )
                at = _at(one, i, len(numbers), num_inputs)
                judge.numbers(_PLAY, one.what[i], numbers, found, at)
                num_inputs += one.what[i] == one.what[0]
        judge.check()
    except CertificateError as error:
        said = str(error).partition(": the graph computes")[0]
        layer = _first_difference(model, original(), passes)
        raise CertificateError(f"{said}; {layer}") from error
    largest = max(one.exported.largest for one in judge.judged)
    return f"{num_inputs} inputs within {largest:.1e} of {seen.of_what}"


@contextmanager
def _refusing(directory: Path, name: str, told_by: str) -> Iterator[None]:
    """Turn a difference from the original's class into a CheckpointError; a file may explain it.

    A CheckpointError is told of the directory.
    """
    try:
        yield
    except CertificateError as error:
        raise CheckpointError(
            f"{directory}: the imported model is not {name} of transformers: {error}; please "
            f"report it with {told_by}, or import with --no-comparison"
        ) from error
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from error


def _first_line(error: Exception) -> str:
    return shortened(str(error).strip().partition("\n")[0])


def _load_original(directory: Path, config: TransformerConfig) -> nn.Module:
    """Load the original in float32; no code of the directory is run, and nothing is fetched."""
    import transformers

    has_head = config.num_decoder_layers or config.labels
    named = _CLASSES[config.architecture] if has_head else "AutoModel"
    if config.head.each_token:
        named = "AutoModelForTokenClassification"
    local: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    read = transformers.AutoConfig.from_pretrained(directory, **local)
    read._attn_implementation = "eager"  # files name others, which transformers may fetch
    model, about = getattr(transformers, named).from_pretrained(
        directory, config=read, dtype=torch.float32, output_loading_info=True, **local
    )
    unused = () if has_head else ("pooler.",)  # for vectors are made of hidden states
    if lacking := sorted(one for one in about["missing_keys"] if not one.startswith(unused)):
        raise CheckpointError(
            f"transformers finds no {lacking[0]} ({len(lacking):,} weights in all)"
        )
    found: nn.Module = model.eval()
    return found


def _passes(
    config: TransformerConfig,
    lengths: _Lengths,
    given: Sequence[Tokens],
    modules: Modules | None,
) -> Iterator[Pass]:
    """Yield passes of random ids and of the texts that are given."""
    contract = contract_of(config)
    if contract.generation:
        yield from _of_prompts(config, contract.generation, lengths, given)
    elif contract.encoding:
        yield from _of_texts(config, contract.encoding, lengths, given, modules)
    else:
        assert contract.image is not None, "a model generates, encodes text, or sees images"
        yield _of_images(config, contract.image)


def _of_prompts(
    config: TransformerConfig,
    contract: GenerationContract,
    of_texts: _Lengths,
    given: Sequence[Tokens],
) -> Iterator[Pass]:
    rng = np.random.default_rng(SEED)
    lengths = [n for n in of_texts.up_to(contract.max_prompt_len) for _ in range(_PER_LENGTH)]
    read = of_texts.kept(given, contract.max_prompt_len)
    most = max(1, _MOST_NUMBERS // (contract.vocab_size * (len(lengths) + len(read))))
    texts, targets = (
        TokenSampler(rng, contract.prompt_vocab_size),
        TokenSampler(rng, contract.vocab_size),
    )
    of_target = cycle(reversed(of_texts.up_to(contract.cache.max_len)))
    cases = []
    for text in [*map(texts.sample, lengths), *read]:
        target: Tokens = ()
        if contract.cross_cache:
            target = targets.sample(next(of_target) - 1)
        other = int(config.pad_token_id == 0)  # M2M-100 counts no place of padding
        written = tuple(other if token == config.pad_token_id else token for token in target)
        case = case_of(contract, text, 1, written)
        cases.append(replace(case, num_prompt_logits=min(most, len(case.prompt))))
    short = [case for case in cases if sum(case.lengths) <= _TOGETHER]
    for group in [*([case] for case in cases), short]:
        names = [f"{case}, padded among others" if len(group) > 1 else str(case) for case in group]
        yield Pass(
            logits_of(group, [(0,)] * len(group), config.pad_token_id),
            _their_logits(group, config.pad_token_id),
            ["logits"] * len(group),
            names,
            [case.length for case in group],
            [case.first_logit for case in group],
        )


def _their_logits(cases: Sequence[Case], pad_token_id: int) -> Forward:
    source_ids, source_mask = padded([case.source for case in cases], pad_token_id)
    ids, mask = padded([case.prompt for case in cases], pad_token_id)

    def forward(model: nn.Module) -> list[Floats]:
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask.long()}
        if cases[0].source:
            given = {"input_ids": source_ids, "attention_mask": source_mask.long()}
            given["decoder_input_ids"] = ids
        most = max(ids.shape[1] - case.first_logit for case in cases)
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            given["logits_to_keep"] = most  # the head is the largest product of most models
        logits = model(**given, use_cache=False).logits
        before = ids.shape[1] - logits.shape[1]
        starts = [case.first_logit - before for case in cases]
        return [
            as_array(row[start : start + case.num_logits])
            for row, start, case in zip(logits, starts, cases, strict=True)
        ]

    return forward


def _of_texts(
    config: TransformerConfig,
    contract: EncodingContract,
    lengths: _Lengths,
    given: Sequence[Tokens],
    modules: Modules | None,
) -> Iterator[Pass]:
    most = min(lengths.most, contract.max_len)
    groups = random_groups(contract.model_copy(update={"max_len": most}), "quick")
    kept = {group[0].length for group in groups}
    rng = np.random.default_rng(SEED)
    sampler = TokenSampler(rng, contract.vocab_size)
    edges = [n for n in lengths.up_to(most) if n not in kept]
    read = lengths.kept(given, most)
    groups += [given_texts([one], contract) for one in [*map(sampler.sample, edges), *read]]
    short = [group[0] for group in groups if group[0].length <= _TOGETHER]
    for texts in [*groups, short]:
        yield _of_group(config, texts, modules)


def _of_group(
    config: TransformerConfig, texts: Sequence[EncodedItem], modules: Modules | None
) -> Pass:
    ids, mask = padded([tuple(text.values) for text in texts], config.pad_token_id)
    of_tokens = [tuple(one.token_types) for one in texts if one.token_types is not None]
    types = padded(of_tokens, 0)[0] if of_tokens else None
    lengths, steps = [text.length for text in texts], modules.steps if modules else ()

    def parts(numbers: Tensor) -> list[Tensor]:
        if numbers.ndim == 2:
            return [row[None] for row in numbers]
        return [row[:length] for row, length in zip(numbers, lengths, strict=True)]

    def ours(model: Any) -> list[Floats]:
        given = () if types is None else (types,)
        if modules is None:
            return [*map(as_array, parts(model(ids, mask, *given).logits))]
        with _recorded([model.encoder, model.pooler]) as seen:
            found = model(ids, mask, *given)
        (_, hidden), (pooled, dense) = seen
        of_kind = {"Pooling": pooled, "Dense": dense}
        vectors = [*(of_kind[step.kind] for step in steps[:-1]), found.embedding]
        return [as_array(one) for numbers in (hidden, *vectors) for one in parts(numbers)]

    def theirs(model: nn.Module) -> list[Floats]:
        given = {} if types is None else {"token_type_ids": types}
        found = model(input_ids=ids, attention_mask=mask.long(), **given)
        if modules is None:
            return [*map(as_array, parts(found.logits))]
        vectors: Sequence[Tensor] = parts(found.last_hidden_state)
        numbers = [*vectors]
        for step in steps:
            vectors = step.compute(vectors)
            numbers += [vector[None] for vector in vectors]
        return [*map(as_array, numbers)]

    what = ["logits" if modules is None else "hidden states"]
    what += [f"vectors behind {step.name}" for step in steps]
    return Pass(
        ours,
        theirs,
        [one for one in what for _ in texts],
        [f"text of {length} tokens" for length in lengths] * len(what),
        lengths * len(what),
        [0] * len(texts) * len(what),
    )


def _of_images(config: TransformerConfig, contract: ImageContract) -> Pass:
    images = draw_images(contract, _NUM_IMAGES)
    pixels = torch.from_numpy(np.stack([image.values for image in images]))

    def ours(model: Any) -> list[Floats]:
        found = model(pixels).logits if config.labels else model.encoder(model.embeddings(pixels))
        return [as_array(row.reshape(-1, row.shape[-1])) for row in found]

    def theirs(model: nn.Module) -> list[Floats]:
        found = model(pixel_values=pixels)
        numbers = found.logits if config.labels else found.last_hidden_state
        return [as_array(row.reshape(-1, row.shape[-1])) for row in numbers]

    names = [f"picture {i}" for i in range(len(pixels))]
    what = "logits" if config.labels else "hidden states"
    return Pass(ours, theirs, [what] * len(pixels), names, [1] * len(pixels), [0] * len(pixels))


def _at(one: Pass, i: int, width: int, number: int) -> At:
    """Return where the positions of an input are, which is so manieth of all."""

    def place(position: int) -> str:
        token = f", token {one.first[i] + position + 1}" if width > 1 else ""
        return one.names[i] + token

    ones = np.ones(width, np.int64)
    return At(number * ones, one.lengths[i] * ones, kinds_of_tokens(width), place)


def _first_difference(ours: nn.Module, original: nn.Module, passes: Sequence[Pass]) -> str:
    """Name the first layer behind which hidden states part; what is padded may hold anything."""
    unpadded = [one for one in passes if min(one.lengths) == max(one.lengths)]
    for one in sorted(unpadded, key=lambda one: max(one.lengths), reverse=True):
        with (
            torch.no_grad(),
            _recorded(_layers(ours)) as our_states,
            _recorded(_layers(original)) as their_states,
        ):
            one.ours(ours)
            one.theirs(original)
        pairs = zip(our_states, their_states, strict=False)
        for i, ((_, numbers), (_, expected)) in enumerate(pairs):
            allowed = _PARTED * float(expected.abs().max())
            is_alike = numbers.shape == expected.shape
            if not (is_alike and bool((numbers - expected).abs().max() <= allowed)):
                return f"hidden states part in layer {i + 1} of {len(their_states)}"
    return "hidden states of all layers are equal: look at the head, and at padding"


def _layers(model: nn.Module) -> list[nn.Module]:
    stacks = (one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one))
    outer: list[nn.Module] = []
    for stack in stacks:  # a list within a layer is no stack of layers
        if not any(stack in set(layer.modules()) for layer in outer):
            outer += stack
    return outer


@contextmanager
def _recorded(modules: Sequence[nn.Module]) -> Iterator[list[tuple[Any, Tensor]]]:
    """Give what modules are given first and give, in the order in which they run."""
    seen: list[tuple[Any, Tensor]] = []

    def record(module: nn.Module, given: Any, output: object) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            seen.append((next(iter(given), None), first))

    hooks = [module.register_forward_hook(record) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
