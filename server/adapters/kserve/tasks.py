"""The tasks of models: which tensors each takes and gives, and which call of our client it is."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from tokenweir import Answers, AsyncClient, Generation, ModelInfo, Usage

from server.adapters.kserve.errors import Refused, short
from server.adapters.kserve.images import encoded_images
from server.adapters.kserve.parameters import (
    MAX_TOKENS,
    STREAM,
    TEXT_INPUT,
    TEXT_OUTPUT,
    check_names,
    generation_options,
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
TEXTS = ("text", TEXT_OUTPUT)  # names of the output that has the texts
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


class Output(NamedTuple):
    """An output of a task: of shape (items, the most that one has), or of one row for all."""

    name: str
    datatype: str
    shape: Shape
    value: Callable[[Any], Any]  # takes what is found; in one row with its place


@dataclass(frozen=True)
class Task:
    """One capability of a model in this protocol."""

    call: Callable[[AsyncClient], Callable[..., Awaitable[Answers[Any]]]]
    checked: Callable[[Asked], Asked]  # returns the request with what the call takes, or Refused
    outputs: tuple[Output, ...]


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
    found = [await run_task(task, client, task.checked(asked)) for task in tasks]
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


async def run_task(task: Task, client: AsyncClient, asked: Asked) -> Answered:
    """Run one task; what is asked is checked."""
    items, given = await items_of(asked), {**asked.parameters, **asked.options}
    if (pair := _pair(asked)) is not None:
        given["text_pair"] = pair
    found = await task.call(client)(asked.model.model, items, **given)
    return answered(tensors(task, found.results, asked.outputs), found)


def answered(outputs: tuple[Tensor, ...], found: Answers[Any] | Generation) -> Answered:
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


def generation_of(asked: Asked) -> tuple[Asked, bool | None]:
    """Return a generation in our client's names, and whether it is to be streamed, if that is said.

    Raises Refused for options that are none.
    """
    names = asked.outputs or (TEXT_OUTPUT if TEXT_INPUT in asked.inputs else "text",)
    inputs, parameters = in_own_names(asked.inputs, asked.parameters)
    stream = parameters.pop(STREAM, None)
    if stream is not None and not isinstance(stream, bool):
        raise Refused(f"{STREAM} is {short(repr(stream))}; give true or false")
    options = generation_options(parameters)
    return replace(asked, inputs=inputs, parameters=options, outputs=names), stream


def _whole_generation(asked: Asked) -> Asked:
    found, stream = generation_of(asked)
    if stream:
        raise Refused(f"{STREAM} is true; streams are ModelStreamInfer's, over gRPC")
    return found


def _with(what: str, *known: str) -> Callable[[Asked], Asked]:
    """Return the check of a prediction that has these parameters."""

    def checked(asked: Asked) -> Asked:
        check_names(asked.parameters, frozenset(known), what)
        return asked

    return checked


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "generate": Task(
            lambda client: client.generate_many,
            _whole_generation,
            (
                Output("text", "BYTES", (-1, -1), lambda one: one.text),
                Output("finish_reason", "BYTES", (-1, -1), lambda one: one.finish_reason),
                Output("num_tokens", "INT32", (-1, -1), lambda one: len(one.token_ids)),
                Output("sum_logprob", "FP32", (-1, -1), lambda one: one.sum_logprob),
                Output(TEXT_OUTPUT, "BYTES", (-1, -1), lambda one: one.text),
            ),
        ),
        "classify": Task(
            lambda client: client.classify_many,
            _with("a classification", "top", "truncate"),
            (
                Output("label", "BYTES", (-1, -1), lambda one: one.label),
                Output("probability", "FP32", (-1, -1), lambda one: one.probability),
                Output("index", "INT32", (-1, -1), lambda one: one.index),
            ),
        ),
        "label": Task(
            lambda client: client.label_many,
            _with("a labelling", "aggregation", "stride", "truncate"),
            (
                Output("item", "INT32", (-1,), lambda one: one[0]),
                Output("start_byte", "INT32", (-1,), lambda one: one[1].start_byte),
                Output("end_byte", "INT32", (-1,), lambda one: one[1].end_byte),
                Output("label", "BYTES", (-1,), lambda one: one[1].label.label),
                Output("probability", "FP32", (-1,), lambda one: one[1].label.probability),
            ),
        ),
        "embed": Task(
            lambda client: client.embed_many,
            _with("an embedding", "normalize", "prompt_name", "truncate"),
            (Output("embedding", "FP32", (-1, -1), lambda value: value),),
        ),
    }
)


def tensors(task: Task, results: Sequence[Any], names: Sequence[str]) -> tuple[Tensor, ...]:
    """Return the outputs of a task, first the texts; of these those that have one of the names."""
    return tuple(
        _tensor(output, results)
        for output in sorted(task.outputs, key=lambda one: one.name not in TEXTS)
        if output.name not in TEXTS or output.name in names
    )


def _tensor(output: Output, results: Sequence[Any]) -> Tensor:
    """Return the values of all items; of rows, shorter ones end in "" or 0."""
    if len(output.shape) == 1:
        rows = [[(place, one) for place, found in enumerate(results) for one in found]]
    else:
        rows = [getattr(found, "sequences", found) for found in results]
    width, is_text = max(map(len, rows)), output.datatype == "BYTES"
    values: list[Any] = []
    for row in rows:
        found = [output.value(one) for one in row]
        values += [text.encode() for text in found] if is_text else found
        values += [b"" if is_text else 0] * (width - len(row))
    shape = (width,) if len(output.shape) == 1 else (len(rows), width)
    return Tensor(output.name, output.datatype, shape, values)


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
