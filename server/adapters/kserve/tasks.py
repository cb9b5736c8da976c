"""The tasks of models: which tensors each takes and gives, and which call of our client it is."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from tokenweir import Answers, AsyncClient, GeneratedSequence, ModelInfo, Usage
from tokenweir import Generation as WholeGeneration

from server.adapters.kserve.errors import Refused, short
from server.adapters.kserve.images import encoded_images
from server.adapters.kserve.parameters import check_names, generation_options
from server.adapters.kserve.second_names import (
    MAX_TOKENS,
    STREAM,
    TEXT_INPUT,
    TEXT_OUTPUT,
    in_own_names,
)
from server.adapters.kserve.tensors import Tensor

Shape = tuple[int, ...]
Named = tuple[str, str, Shape]  # name, datatype, shape; -1 is any size
TEXT: Named = ("text", "BYTES", (-1,))
TEXT_PAIR: Named = ("text_pair", "BYTES", (1,))
INPUT_IDS: Named = ("input_ids", "INT64", (-1, -1))
IMAGE: Named = ("image", "BYTES", (-1,))
_SECOND: tuple[Named, ...] = (
    (TEXT_INPUT, "BYTES", (1,)),
    (MAX_TOKENS, "INT32", (1,)),
    (STREAM, "BOOL", (1,)),
)
_OF_ITEMS = ("text", "input_ids", "image")
_INTEGERS = ("INT32", "INT64")
_MAX_ITEMS = 2048  # per request; our client divides them
_RANKS = {"input_ids": 2, "image": 4}  # for several items


@dataclass(frozen=True)
class Asked:
    """A request, read."""

    model: ModelInfo
    inputs: Mapping[str, Tensor]
    parameters: Mapping[str, Any]
    outputs: Sequence[str] = ()  # none: all, each by one name
    options: dict[str, Any] = field(default_factory=dict)  # for every call of our client


@dataclass(frozen=True)
class Answered:
    """The answer to a request; only the last piece of one has all fields."""

    outputs: tuple[Tensor, ...]
    usage: Usage | None = None
    version: str = ""
    request_id: str = ""
    queue: float = 0.0  # seconds, and those below
    compute: float = 0.0


@dataclass(frozen=True)
class Task:
    """One capability of a model in this protocol."""

    outputs: tuple[Named, ...]
    run: Callable[[AsyncClient, Asked], Awaitable[Answered]]


def inputs_of(model: ModelInfo) -> tuple[Named, ...]:
    """Return what a model takes; where there are several, none of them has to be given."""
    if model.architecture == "vision-encoder":
        return (IMAGE,)
    is_paired = "generate" not in model.capabilities
    return (TEXT, TEXT_PAIR, INPUT_IDS) if is_paired else (TEXT, INPUT_IDS, *_SECOND)


def tasks_for(model: ModelInfo, outputs: Sequence[str]) -> list[Task]:
    """Return the tasks that give the outputs which are asked for, none: the model's first.

    One is enough where it gives them all. Raises Refused for an output that the model does not
    have.
    """
    tasks, left = tasks_of(model), set(outputs)
    found: list[Task] = []
    for task in tasks:
        names = {name for name, *_ in task.outputs}
        if set(outputs) <= names:
            return [task]
        if left & names:
            found.append(task)
            left -= names
    if found and not left:
        return found
    known = "; or ".join(", ".join(name for name, *_ in task.outputs) for task in tasks)
    raise Refused(
        f"outputs {', '.join(map(short, outputs)) or 'of any kind'} are not what {model.model} "
        f"gives; it gives {known or 'nothing here'}"
    )


async def run(tasks: Sequence[Task], client: AsyncClient, asked: Asked) -> Answered:
    """Run tasks one after the other; the answer has the first output of a name."""
    found = [await task.run(client, asked) for task in tasks]
    outputs: dict[str, Tensor] = {}
    for one in itertools.chain.from_iterable(answer.outputs for answer in found):
        outputs.setdefault(one.name, one)
    usages = [astuple(answer.usage) for answer in found if answer.usage is not None]
    return replace(
        found[0],
        outputs=tuple(outputs.values()),
        usage=Usage(*map(sum, zip(*usages, strict=True))),
        queue=sum(answer.queue for answer in found),
        compute=sum(answer.compute for answer in found),
    )


def answered(outputs: tuple[Tensor, ...], found: Answers[Any] | WholeGeneration) -> Answered:
    """Return the answer of a call of our client, whole or the last piece of it."""
    timing = found.timing
    return Answered(
        outputs,
        found.usage,
        found.provenance.model_version,
        found.request_id,
        timing.queue,
        timing.prefill + timing.decode,
    )


def tasks_of(model: ModelInfo) -> list[Task]:
    """Return the tasks of a model."""
    return [task for name, task in TASKS.items() if name in model.capabilities]


@dataclass(frozen=True)
class Generation:
    """A request for a generation, in our names."""

    asked: Asked
    options: dict[str, Any]  # in our client's call
    texts: tuple[str, ...]  # names of the output that has the texts
    stream: bool | None  # None: nothing is said of it


def generation_of(asked: Asked) -> Generation:
    """Return the generation that is asked for; Refused for options that are none."""
    names = asked.outputs or (TEXT_OUTPUT if TEXT_INPUT in asked.inputs else "text",)
    inputs, parameters = in_own_names(asked.inputs, asked.parameters)
    stream = parameters.pop(STREAM, None)
    if stream is not None and not isinstance(stream, bool):
        raise Refused(f"{STREAM} is {short(repr(stream))}; give true or false")
    return Generation(
        replace(asked, inputs=inputs),
        generation_options(parameters) | asked.options,
        tuple(name for name in ("text", TEXT_OUTPUT) if name in names),
        stream,
    )


def generated(
    names: Sequence[str], rows: Sequence[Sequence[GeneratedSequence]]
) -> tuple[Tensor, ...]:
    """Return the outputs of a generation; `names` are those of the texts."""
    return (
        *(_table(name, rows, lambda one: one.text) for name in names),
        _table("finish_reason", rows, lambda one: one.finish_reason),
        _table("num_tokens", rows, lambda one: len(one.token_ids), "INT32"),
        _table("sum_logprob", rows, lambda one: one.sum_logprob, "FP32"),
    )


async def _generate(client: AsyncClient, asked: Asked) -> Answered:
    generation = generation_of(asked)
    if generation.stream:
        raise Refused(f"{STREAM} is true; streams are ModelStreamInfer's, over gRPC")
    return await whole_generation(client, generation)


async def whole_generation(client: AsyncClient, generation: Generation) -> Answered:
    """Return all that is generated, once it is there."""
    asked = generation.asked
    items = await items_of(asked)
    found = await client.generate_many(asked.model.model, items, **generation.options)
    return answered(
        generated(generation.texts, [result.sequences for result in found.results]),
        found,
    )


async def _classify(client: AsyncClient, asked: Asked) -> Answered:
    check_names(asked.parameters, frozenset(("top", "truncate")), "a classification")
    items, pair = await items_of(asked), _pair(asked)
    found = await client.classify_many(
        asked.model.model, items, top=asked.parameters.get("top"), text_pair=pair, **_options(asked)
    )
    rows = found.results
    return answered(
        (
            _table("label", rows, lambda one: one.label),
            _table("probability", rows, lambda one: one.probability, "FP32"),
            _table("index", rows, lambda one: one.index, "INT32"),
        ),
        found,
    )


async def _label(client: AsyncClient, asked: Asked) -> Answered:
    check_names(asked.parameters, frozenset(("aggregation", "stride", "truncate")), "a labelling")
    items, pair = await items_of(asked), _pair(asked)
    aggregation = asked.parameters.get("aggregation")
    found = await client.label_many(
        asked.model.model,
        items,
        aggregation=aggregation,
        stride=asked.parameters.get("stride"),
        text_pair=pair,
        **_options(asked),
    )
    spans = [span for spans in found.results for span in spans]
    places = [place for place, spans in enumerate(found.results) for _ in spans]
    return answered(
        (
            _column("item", "INT32", places),
            _column("start_byte", "INT32", [span.start_byte for span in spans]),
            _column("end_byte", "INT32", [span.end_byte for span in spans]),
            _column("label", "BYTES", [span.label.label.encode() for span in spans]),
            _column("probability", "FP32", [span.label.probability for span in spans]),
        ),
        found,
    )


async def _embed(client: AsyncClient, asked: Asked) -> Answered:
    known = frozenset(("normalize", "prompt_name", "truncate"))
    check_names(asked.parameters, known, "an embedding")
    items, pair = await items_of(asked), _pair(asked)
    normalize = asked.parameters.get("normalize", False)
    found = await client.embed_many(
        asked.model.model,
        items,
        normalize=normalize,
        prompt_name=asked.parameters.get("prompt_name"),
        text_pair=pair,
        **_options(asked),
    )
    return answered(
        (_table("embedding", found.results, lambda value: value, "FP32"),),
        found,
    )


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "generate": Task(
            (
                ("text", "BYTES", (-1, -1)),
                ("finish_reason", "BYTES", (-1, -1)),
                ("num_tokens", "INT32", (-1, -1)),
                ("sum_logprob", "FP32", (-1, -1)),
                (TEXT_OUTPUT, "BYTES", (-1, -1)),
            ),
            _generate,
        ),
        "classify": Task(
            (
                ("label", "BYTES", (-1, -1)),
                ("probability", "FP32", (-1, -1)),
                ("index", "INT32", (-1, -1)),
            ),
            _classify,
        ),
        "label": Task(
            (
                ("item", "INT32", (-1,)),
                ("start_byte", "INT32", (-1,)),
                ("end_byte", "INT32", (-1,)),
                ("label", "BYTES", (-1,)),
                ("probability", "FP32", (-1,)),
            ),
            _label,
        ),
        "embed": Task((("embedding", "FP32", (-1, -1)),), _embed),
    }
)


async def items_of(asked: Asked) -> list[Any]:
    """Return what is to be worked at: texts, runs of token ids, or images.

    Raises Refused for inputs that the model does not have, and if there is not one of them.
    """
    known = [name for name, *_ in inputs_of(asked.model)]
    unknown = sorted(short(name) for name in set(asked.inputs) - set(known))
    theirs = f"inputs of {asked.model.model}"
    if unknown:
        what = "is not an input" if len(unknown) == 1 else "are no inputs"
        raise Refused(
            f"{', '.join(unknown)} {what} of {asked.model.model}; its inputs are {', '.join(known)}"
        )
    given = [asked.inputs[name] for name in _OF_ITEMS if name in asked.inputs]
    if len(given) != 1:
        of_items = [name for name in known if name in _OF_ITEMS]
        raise Refused(f"{len(given)} {theirs} were given; give one of {', '.join(of_items)}")
    (tensor,) = given
    number = 1
    if tensor.datatype == "BYTES":
        number = len(tensor.values)
    elif len(tensor.shape) == _RANKS.get(tensor.name):
        number = tensor.shape[0]
    if number > _MAX_ITEMS:
        raise Refused(f"{tensor.name} has {number:,} items, more than {_MAX_ITEMS:,}; send fewer")
    match tensor.name:
        case "text":
            return _texts(tensor)
        case "input_ids":
            return _rows(tensor)
    return await asyncio.to_thread(encoded_images, tensor)


def _options(asked: Asked) -> dict[str, Any]:
    """Return what all predictions have in common."""
    return {"truncate": asked.parameters.get("truncate"), **asked.options}


def _pair(asked: Asked) -> str | None:
    tensor = asked.inputs.get("text_pair")
    if tensor is None:
        return None
    texts = _texts(tensor)
    if len(texts) != 1:
        raise Refused(
            f"text_pair has {len(texts)} texts, and all items of a request have the same one; send "
            "a request for each"
        )
    return texts[0]


def _texts(tensor: Tensor) -> list[str]:
    if tensor.datatype != "BYTES":
        raise Refused(f"{tensor.name} is {tensor.datatype}; give BYTES in UTF-8")
    try:
        return [value.decode() for value in tensor.values]
    except UnicodeDecodeError as error:
        raise Refused(f"{tensor.name}: a text is not UTF-8") from error


def _rows(tensor: Tensor) -> list[list[int]]:
    if tensor.datatype not in _INTEGERS or not 1 <= len(tensor.shape) <= 2:
        raise Refused(
            f"{tensor.name} is {tensor.datatype} of shape {list(tensor.shape)}; give INT32 or INT64"
            " of shape (tokens) or (items, tokens)"
        )
    size = max(1, tensor.shape[-1])
    return [list(tensor.values[at : at + size]) for at in range(0, len(tensor.values), size)]


def _table(
    name: str,
    rows: Sequence[Sequence[Any]],
    value: Callable[[Any], Any],
    datatype: str = "BYTES",
) -> Tensor:
    """Return a tensor of shape (items, the most that one has); shorter rows end in "" or 0."""
    width = max(map(len, rows))
    values: list[Any] = []
    for row in rows:
        found = [value(one) for one in row]
        is_text = datatype == "BYTES"
        values += [text.encode() for text in found] if is_text else found
        values += [b"" if is_text else 0] * (width - len(row))
    return Tensor(name, datatype, (len(rows), width), values)


def _column(name: str, datatype: str, values: Sequence[Any]) -> Tensor:
    return Tensor(name, datatype, (len(values),), values)
