"""Generations in pieces: the text as it comes, then the rest of the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from tokenweir import AsyncClient

from server.adapters.kserve.errors import Refused
from server.adapters.kserve.tasks import (
    TASKS,
    TEXTS,
    Answered,
    Asked,
    answered,
    generation_of,
    items_of,
    run_task,
    tensors,
)
from server.adapters.kserve.tensors import Tensor


async def generate_in_pieces(client: AsyncClient, asked: Asked) -> AsyncGenerator[Answered]:
    """Yield the pieces of one text; all at once where it is not to be streamed.

    The last has an empty text. Raises Refused for several texts or outputs: pieces do not say which
    one they are of.
    """
    asked, is_streamed = generation_of(asked)
    task = TASKS["generate"]
    if is_streamed is False:
        yield await run_task(task, client, asked)
        return
    items = await items_of(asked)
    num_outputs = asked.parameters.get("num_outputs") or 1
    if len(items) != 1 or num_outputs != 1:
        raise Refused(
            f"{len(items)} texts with {num_outputs} outputs each are to be streamed; give one text "
            "with one output in a request, or the parameter stream as false"
        )
    options = {**asked.parameters, **asked.options, "num_outputs": 1}
    del options["answer_others"]  # there are none
    names = [name for name in TEXTS if name in asked.outputs]
    async with client.stream(asked.model.model, items[0], **options) as stream:
        async for text in stream:
            if names:
                values = [text.encode()]
                yield Answered(tuple(Tensor(name, "BYTES", (1, 1), values) for name in names))
    found = stream.result
    last = replace(found.sequences[0], text="")
    yield answered(tensors(task, [[last]], asked.outputs), found)
