"""Turns the client's arguments into requests of the protocol."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, MutableSequence, Sequence
from pathlib import Path
from typing import TypedDict, TypeVar

from google.protobuf.message import Message
from tokenweir.v1 import common_pb2, generation_service_pb2, prediction_service_pb2

T = TypeVar("T")
Item = str | bytes | Path | Sequence[int]  # text, encoded image, file of one, token ids
PredictionRequest = (
    prediction_service_pb2.ClassifyRequest
    | prediction_service_pb2.LabelRequest
    | prediction_service_pb2.EmbedRequest
)


class CallOptions(TypedDict, total=False):
    """Options of every call that runs a model."""

    model_version: str | None
    request_id: str | None  # one is made if it is left out
    timeout: float | None  # seconds; None: no deadline


class GenerateOptions(CallOptions, total=False):
    """Options of a generation: the fields of SamplingParams, and `stop` for `stop_strings`.

    None is the same as leaving an option out, but for `timeout`.
    """

    strategy: str | None  # "greedy" or "sampling"; left out: sampling if one of its fields is given
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None  # left out: the server draws one and reports it
    num_outputs: int | None
    max_new_tokens: int | None  # left out: the model's limit
    min_new_tokens: int | None
    stop: str | Sequence[str] | None
    stop_strings: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop: bool | None
    ignore_eos: bool | None


class StreamOptions(GenerateOptions, total=False):
    """Options of a streamed generation."""

    tokens_per_message: int | None


class PredictOptions(CallOptions, total=False):
    """Options of a one-pass prediction."""

    text_pair: str | None  # the second text of a pair


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
_STRATEGIES = ("greedy", "sampling")


def check_names(options: Mapping[str, object], known: type, *more: str) -> None:
    """Raise TypeError, with the known names, if `options` has a name that `known` has not."""
    names = [*known.__annotations__, *more]
    unknown = [name for name in options if name not in names]
    if unknown:
        raise TypeError(
            f"unknown option{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}; "
            f"known are {', '.join(sorted(names))}"
        )


def generate_request(
    model: str, prompt: str | Sequence[int], options: GenerateOptions
) -> generation_service_pb2.GenerateRequest:
    """Return the request for one prompt, given as text or as token ids."""
    check_names(options, GenerateOptions)
    return _generate_request(model, prompt, options)


def stream_request(
    model: str, prompt: str | Sequence[int], options: StreamOptions
) -> generation_service_pb2.GenerateStreamRequest:
    """Return the request for one streamed prompt."""
    check_names(options, StreamOptions)
    request = generation_service_pb2.GenerateStreamRequest(
        request=_generate_request(model, prompt, options)
    )
    _set(request, "tokens_per_message", options.get("tokens_per_message"))
    return request


def check_single_output(options: StreamOptions) -> None:
    """Raise ValueError if more than one output is asked of a stream of text pieces."""
    num_outputs = options.get("num_outputs") or 1
    if num_outputs > 1:
        raise ValueError(
            f"num_outputs={num_outputs}: a stream gives the pieces of one output; "
            "for several use generate(), or stream_events() of AsyncClient"
        )


def classify_request(
    model: str, item: Item, top: int | None, options: PredictOptions
) -> prediction_service_pb2.ClassifyRequest:
    """Return the request to classify one item."""
    check_names(options, PredictOptions, "top")
    request = prediction_service_pb2.ClassifyRequest()
    _fill_prediction(request, model, item, options)
    _set(request, "top", top)
    return request


def label_request(
    model: str, item: Item, options: PredictOptions
) -> prediction_service_pb2.LabelRequest:
    """Return the request to label one text."""
    check_names(options, PredictOptions)
    request = prediction_service_pb2.LabelRequest()
    _fill_prediction(request, model, item, options)
    return request


def embed_request(
    model: str, item: Item, normalize: bool, options: PredictOptions
) -> prediction_service_pb2.EmbedRequest:
    """Return the request for the vector of one item."""
    check_names(options, PredictOptions, "normalize")
    request = prediction_service_pb2.EmbedRequest(normalize=normalize)
    _fill_prediction(request, model, item, options)
    return request


def _generate_request(
    model: str, prompt: str | Sequence[int], options: Mapping[str, object]
) -> generation_service_pb2.GenerateRequest:
    request = generation_service_pb2.GenerateRequest(
        inputs=[_input(prompt)],
        decoding=_decoding(options),
        stopping=_stopping(options),
        output=generation_service_pb2.Output(token_ids=True),
    )
    _fill_identity(request, model, options)
    return request


def _fill_identity(
    request: generation_service_pb2.GenerateRequest | PredictionRequest,
    model: str,
    options: Mapping[str, object],
) -> None:
    _set(request, "model", model)
    _set(request, "model_version", options.get("model_version"))
    # Names the call in logs, and makes a retry of a unary call harmless.
    _set(request, "request_id", options.get("request_id") or str(uuid.uuid4()))


def _input(prompt: str | Sequence[int]) -> generation_service_pb2.Input:
    if isinstance(prompt, str):
        message = generation_service_pb2.Input()
        _set(message, "text", prompt)
        return message
    return generation_service_pb2.Input(tokens=_token_ids(prompt, "prompt"))


def _token_ids(ids: Sequence[int], name: str) -> common_pb2.TokenIds:
    try:
        return common_pb2.TokenIds(ids=ids)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{name} is a {type(ids).__name__} that is neither text nor a sequence of "
            f"token ids: {error}"
        ) from None


def _decoding(options: Mapping[str, object]) -> generation_service_pb2.Decoding:
    decoding = generation_service_pb2.Decoding()
    sampling = {name: options[name] for name in _SAMPLING if options.get(name) is not None}
    strategy = options.get("strategy") or ("sampling" if sampling else "greedy")
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy={strategy!r} must be one of {', '.join(_STRATEGIES)}")
    if strategy == "sampling":
        decoding.sampling.SetInParent()
        for name, value in sampling.items():
            _set(decoding.sampling, name, value)
    elif sampling:
        raise ValueError(f"{', '.join(sampling)} mean nothing with strategy='greedy'")
    else:
        decoding.greedy.SetInParent()
    _set(decoding, "num_outputs", options.get("num_outputs"))
    return decoding


def _stopping(options: Mapping[str, object]) -> generation_service_pb2.Stopping:
    stopping = generation_service_pb2.Stopping()
    for name in ("max_new_tokens", "min_new_tokens", "include_stop", "ignore_eos"):
        _set(stopping, name, options.get(name))
    for name in ("stop", "stop_strings"):
        value = options.get(name)
        if value is not None:
            _extend(stopping.strings, [value] if isinstance(value, str) else value, name)
    if options.get("stop_token_ids") is not None:
        _extend(stopping.token_ids, options["stop_token_ids"], "stop_token_ids")
    return stopping


def _fill_prediction(
    request: PredictionRequest, model: str, item: Item, options: PredictOptions
) -> None:
    _fill_identity(request, model, options)
    request.items.append(_item(item))
    _set(request.items[0], "text_pair", options.get("text_pair"))


def _item(item: Item) -> prediction_service_pb2.Item:
    match item:
        case str():
            message = prediction_service_pb2.Item()
            _set(message, "text", item)
            return message
        case bytes():
            return prediction_service_pb2.Item(image=item)
        case Path():
            return prediction_service_pb2.Item(image=item.read_bytes())
        case _:
            return prediction_service_pb2.Item(tokens=_token_ids(item, "item"))


def _set(message: Message, name: str, value: object) -> None:
    """Set a field, unless the value is None; an impossible value is refused by its name."""
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise _refusal(name, value, error) from None


def _extend(field: MutableSequence[T], values: object, name: str) -> None:
    try:
        field.extend(values)  # type: ignore[arg-type]  # checked by protobuf, at run time
    except (TypeError, ValueError) as error:
        raise _refusal(name, values, error) from None


def _refusal(name: str, value: object, error: TypeError | ValueError) -> TypeError | ValueError:
    if isinstance(error, UnicodeEncodeError):  # bytes that are no UTF-8, in an argument or a file
        place = f"half a surrogate pair at character {error.start + 1}"
        return ValueError(f"{name} is no Unicode text: {place}")
    return type(error)(f"{name}={value!r}: {error}")
