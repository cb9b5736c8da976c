"""Prompts are answered with their own tokens and log-probabilities, over HTTP as OpenAI had it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai.types.completion_choice import Logprobs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tokenweir import AsyncClient

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.package.package import load_package
from exporter.checkpoint import load_checkpoint, save_checkpoint
from exporter.models import TransformerConfig, build_model
from server.config import WorkerConfig
from server.worker.worker import Worker
from tests.fakes.http_calls import Caller, http_of
from tests.fakes.stand_in_certificate import PLAIN, export_with_stand_in
from tests.fakes.traces import traced  # noqa: F401 - a fixture

MODEL, MAX_LEN, VOCAB_SIZE = "tiny", 48, 300
BOS, EOS = 0, 1
TEXTS = ["the weir", "a river falls over the weir", "Überfall 🌊", "x"]
CORPUS = ["the weir holds the river", "the river falls over the weir", "a river and a weir"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level tokenizer whose texts begin with a special token."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return made


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a small GPT, and its package."""
    folder = tmp_path_factory.mktemp("tiny")
    config = TransformerConfig(
        architecture="decoder",
        num_decoder_layers=2,
        max_target_len=MAX_LEN,
        d_model=32,
        num_heads=4,
        d_ff=64,
        vocab_size=VOCAB_SIZE,
        eos_token_id=EOS,
    )
    torch.manual_seed(0)
    save_checkpoint(folder / "checkpoint", MODEL, build_model(config), tokenizer)
    export_with_stand_in(folder / "checkpoint", folder / "package", PLAIN)
    return folder


@pytest.fixture
async def caller(folder: Path) -> AsyncIterator[Caller]:
    """Serve the package over HTTP."""
    config = EngineConfig(max_num_seqs=4, num_threads=1, prefill_chunk_size=16)
    worker = Worker({MODEL: load_engine(load_package(folder / "package"), config)}, WorkerConfig())
    address = await worker.start()
    try:
        async with AsyncClient(address, timeout=60) as client, http_of(client) as caller:
            yield caller
    finally:
        await worker.drain(0)


@pytest.fixture
async def client(caller: Caller) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{caller.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """Return the log-probabilities of ids from the second on, and of the likeliest there."""
    model = load_checkpoint(folder / "checkpoint").model

    def of(ids: Sequence[int]) -> tuple[list[float], list[float]]:
        with torch.no_grad():
            logprobs = model(torch.tensor([list(ids)]))[0, :-1].log_softmax(-1)
        given = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        return given.tolist(), logprobs.max(-1).values.tolist()

    return of


def check(found: Logprobs, ids: Sequence[int], expected: Any) -> None:
    """Compare the log-probabilities of ids, the first of which nothing predicts."""
    given, best = expected(ids)
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    assert found.token_logprobs[1:] == pytest.approx(given, abs=1e-4)
    top = [max(one.values()) for one in found.top_logprobs[1:]]
    assert top == pytest.approx(best, abs=1e-4)
    assert len(found.tokens) == len(found.text_offset) == len(ids)


@pytest.mark.parametrize("as_ids", [False, True])
async def test_the_log_probabilities_of_prompts_are_those_of_the_eager_model(
    as_ids: bool, client: openai.AsyncOpenAI, tokenizer: Tokenizer, expected: Any
):
    ids = [tokenizer.encode(text).ids for text in TEXTS]

    found = await client.completions.create(
        model=MODEL, prompt=ids if as_ids else TEXTS, max_tokens=0, echo=True, logprobs=1
    )

    assert [one.index for one in found.choices] == [*range(len(TEXTS))]
    assert {one.finish_reason for one in found.choices} == {"length"}
    for choice, text, given in zip(found.choices, TEXTS, ids, strict=True):
        assert choice.text == ("<s>" if as_ids else "") + text
        check(choice.logprobs, given, expected)
    assert found.usage.prompt_tokens == sum(map(len, ids))
    assert (found.usage.completion_tokens, found.usage.total_tokens) == (0, sum(map(len, ids)))


async def test_offsets_are_the_places_of_tokens_in_the_text(client: openai.AsyncOpenAI):
    found = await client.completions.create(
        model=MODEL,
        prompt="the weir, die Überfälle 🌊 river",
        max_tokens=2,
        echo=True,
        logprobs=0,
        extra_body={"ignore_eos": True, "allowed_token_ids": [*range(40, 60)]},
    )

    logprobs, whole = found.choices[0].logprobs, found.choices[0].text
    ends = [*logprobs.text_offset[1:], len(whole)]
    parts = [whole[i:j] for i, j in zip(logprobs.text_offset, ends, strict=True)]
    assert "".join(parts) == whole
    assert (logprobs.tokens[0], parts[0]) == ("<s>", "")  # no text shows a special token
    for token, part in zip(logprobs.tokens[1:], parts[1:], strict=True):
        assert token == part or token.startswith("bytes:")


async def test_what_continues_a_prompt_stands_behind_it(
    client: openai.AsyncOpenAI, tokenizer: Tokenizer, expected: Any
):
    options = {"model": MODEL, "prompt": TEXTS[:2], "max_tokens": 3, "logprobs": 2, "seed": 5}
    options |= {"n": 2, "extra_body": {"top_k": 5, "ignore_eos": True}}

    plain = await client.completions.create(**options)
    found = await client.completions.create(echo=True, **options)

    assert [one.index for one in found.choices] == [0, 1, 2, 3]
    for place, (choice, alone) in enumerate(zip(found.choices, plain.choices, strict=True)):
        text = TEXTS[place // 2]
        given = tokenizer.encode(text).ids
        assert choice.text == text + alone.text
        assert choice.logprobs.tokens[len(given) :] == alone.logprobs.tokens
        assert choice.logprobs.token_logprobs[len(given) :] == alone.logprobs.token_logprobs
        assert choice.logprobs.text_offset[len(given)] == len(text)
        heads = Logprobs.model_construct(
            **{name: part[: len(given)] for name, part in choice.logprobs}
        )
        check(heads, given, expected)
    assert found.usage == plain.usage


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("most", [0, 3])
async def test_a_stream_has_what_the_whole_answer_has(
    most: int, as_ids: bool, logprobs: int | None, client: openai.AsyncOpenAI, tokenizer: Tokenizer
):
    prompts = [tokenizer.encode(text).ids for text in TEXTS] if as_ids else TEXTS
    options = {"model": MODEL, "prompt": prompts, "max_tokens": most, "logprobs": logprobs}
    options |= {"echo": True, "temperature": 0, "extra_body": {"ignore_eos": True}}

    found = await client.completions.create(**options)
    stream = await client.completions.create(
        stream=True, stream_options={"include_usage": True}, **options
    )
    *chunks, last = [one async for one in stream]

    for choice in found.choices:
        pieces = [one.choices[0] for one in chunks if one.choices[0].index == choice.index]
        assert "".join(one.text for one in pieces) == choice.text
        assert [one.finish_reason for one in pieces if one.finish_reason] == ["length"]
        tokens = [token for one in pieces if one.logprobs for token in one.logprobs.tokens]
        assert tokens == (choice.logprobs.tokens if logprobs else [])
    assert (last.choices, last.usage) == ([], found.usage)


async def test_nothing_is_generated_where_nothing_is_asked_for(client: openai.AsyncOpenAI):
    found = await client.completions.create(
        model=MODEL, prompt=["the weir", "x"], max_tokens=0, logprobs=2
    )

    assert [(one.text, one.finish_reason, one.logprobs) for one in found.choices] == [
        ("", "length", None)
    ] * 2
    assert found.usage.completion_tokens == 0


async def test_a_prompt_of_one_token_is_echoed_without_a_number(client: openai.AsyncOpenAI):
    found = await client.completions.create(
        model=MODEL, prompt=[[40], [41, 42]], max_tokens=0, echo=True, logprobs=1
    )

    one, two = (choice.logprobs for choice in found.choices)
    assert (one.token_logprobs, one.top_logprobs, one.text_offset) == ([None], [None], [0])
    assert two.token_logprobs[0] is None and two.token_logprobs[1] < 0


async def test_prompts_and_answers_are_told_as_vllm_tells_them(
    client: openai.AsyncOpenAI, tokenizer: Tokenizer, expected: Any
):
    body = {"prompt_logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    found = await client.completions.create(
        model=MODEL, prompt=TEXTS, max_tokens=2, temperature=0, extra_body=body
    )

    for choice, text in zip(found.choices, TEXTS, strict=True):
        said, ids = choice.model_extra, tokenizer.encode(text).ids
        first, *others = said["prompt_logprobs"]
        given, best = expected(ids)
        assert (first, said["prompt_token_ids"], len(said["token_ids"])) == (None, ids, 2)
        pairs = [(one[str(i)], one) for i, one in zip(ids[1:], others, strict=True)]
        assert [one["logprob"] for one, _ in pairs] == pytest.approx(given, abs=1e-4)
        assert [max(x["logprob"] for x in all_.values()) for _, all_ in pairs] == pytest.approx(
            best, abs=1e-4
        )
        assert all(one["rank"] > 1 or len(all_) == 1 for one, all_ in pairs)
        assert choice.text == tokenizer.decode(said["token_ids"])


WRONG = [
    ({"max_tokens": -1}, "max_tokens: -1 is below 0; leave it out for the model's limit",
     "max_tokens"),
    ({"max_tokens": 0, "n": 2, "top_p": 0.5}, "n: 2 outputs of no tokens would all be equal; ask "
     "for 1", "n"),
    ({"logprobs": 21}, "logprobs: 21 is outside 0 to 20 alternatives; 0 gives the chosen token's",
     "logprobs"),
    ({"prompt": [[5, VOCAB_SIZE]]}, "prompt[1]: 300 is outside 0 to 299, the vocabulary",
     "prompt"),
    ({"prompt": [[5], [-1]]}, "prompt[1][0]: -1 is outside 0 to 299, the vocabulary", "prompt"),
    ({"prompt": [[5], []]}, "prompt: give a text or token ids, or a list of the one or the other, "
     "not an empty one", "prompt"),
    ({"prompt": [[]]}, "prompt: give a text or token ids, or a list of the one or the other, not "
     "an empty one", "prompt"),
    ({"prompt": [[5], "x"]}, "prompt: give a text or token ids, or a list of the one or the "
     "other, not an empty one", "prompt"),
    ({"echo": "yes"}, "echo: Input should be a valid boolean", "echo"),
    ({"prompt_logprobs": -1}, "prompt_logprobs: -1 is outside 0 to 20 alternatives; 0 gives the "
     "chosen token's", "prompt_logprobs"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_wrong_is_named(stream: bool, caller: Caller):
    for body, said, param in WRONG:
        if stream and "prompt_logprobs" in body:
            continue  # for no stream
        asked = {"model": MODEL, "prompt": "x", "echo": True, "logprobs": 1, "stream": stream}
        status, found = await caller.post(**(asked | body))
        assert (status, found["error"]["message"]) == (400, said)
        assert found["error"]["param"] == param
