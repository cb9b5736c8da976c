"""Prompts are answered with their own tokens and log-probabilities, over HTTP as OpenAI had it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tokenweir import AsyncClient
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.package.package import load_package
from exporter.huggingface.importer import import_checkpoint
from server.config import WorkerConfig
from server.worker.worker import Worker
from tests.exporter.huggingface.sources import save_gpt2
from tests.fakes.http_calls import Caller, http_of
from tests.fakes.stand_in_certificate import PLAIN, export_with_stand_in
from tests.fakes.traces import traced  # noqa: F401 - a fixture

if TYPE_CHECKING:  # as in conftest.py
    import openai
    from openai.types.completion_choice import Logprobs

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
    """A small GPT-2 as people publish it, `original`, and its package."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    save_gpt2(
        folder / "original",
        vocab_size=VOCAB_SIZE,
        n_positions=MAX_LEN,
        n_embd=32,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    published = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
    published.save_pretrained(folder / "original")
    import_checkpoint(folder / "original", folder / "checkpoint")
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
    import openai

    url = f"{caller.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """Return the log-probabilities of ids from the second on, and of the likeliest there."""
    model = GPT2LMHeadModel.from_pretrained(folder / "original").eval()

    def of(ids: Sequence[int]) -> tuple[list[float], list[float]]:
        with torch.no_grad():
            logprobs = model(torch.tensor([list(ids)])).logits[0, :-1].log_softmax(-1)
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
async def test_the_log_probabilities_of_prompts_are_those_of_transformers(
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
        heads = type(choice.logprobs).model_construct(
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
        if logprobs and most:  # a client finds by that whether a token is the likeliest
            assert choice.logprobs.token_logprobs[-1] == max(
                choice.logprobs.top_logprobs[-1].values()
            )
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


@pytest.mark.parametrize(("most", "kept"), [(3, 3), (-1, MAX_LEN - 1), (99, MAX_LEN - 1)])
async def test_of_a_longer_prompt_the_last_tokens_are_read(
    most: int, kept: int, client: openai.AsyncOpenAI, tokenizer: Tokenizer, expected: Any
):
    text = "the weir, a river, " * 20
    body = {"truncate_prompt_tokens": most, "return_token_ids": True}
    found = await client.completions.create(
        model=MODEL, prompt=text, max_tokens=0, echo=True, logprobs=0, extra_body=body
    )

    ids = tokenizer.encode(text).ids
    choice = found.choices[0]
    assert choice.model_extra["prompt_token_ids"] == [BOS, *ids[1 - kept :]]
    assert choice.text == "<s>" + tokenizer.decode(ids[1 - kept :])
    assert choice.logprobs.text_offset[1] == len("<s>")
    assert found.usage.prompt_tokens == kept


async def test_a_text_is_read_without_special_tokens_if_wanted(
    client: openai.AsyncOpenAI, tokenizer: Tokenizer
):
    body = {"add_special_tokens": False, "return_token_ids": True}
    found = await client.completions.create(
        model=MODEL, prompt=TEXTS, max_tokens=0, extra_body=body
    )

    given = [one.model_extra["prompt_token_ids"] for one in found.choices]
    assert given == [tokenizer.encode(text).ids[1:] for text in TEXTS]


WRONG = [
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens: 0 is below 1; leave it out for none",
     "truncate_prompt_tokens"),
    ({"max_tokens": -1}, "max_tokens: -1 is below 0; leave it out for the model's limit",
     "max_tokens"),
    ({"max_tokens": 0, "n": 2, "top_p": 0.5}, "n: 2 outputs of no tokens would all be equal; ask "
     "for 1", "n"),
    ({"logprobs": 21}, "logprobs: 21 is outside 0 to 20 alternatives; 0 gives the chosen token's",
     "logprobs"),
    ({"prompt": [[5, VOCAB_SIZE]]}, "prompt[1]: 300 is outside the vocabulary, 0 to 299",
     "prompt"),
    ({"prompt": [[5], [-1]]}, "prompt[1][0]: -1 is outside the vocabulary, 0 to 299", "prompt"),
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


LM_EVAL = "lm-eval[api]==0.4.13"
CONSTRAINTS = Path(__file__).parents[5] / "constraints.txt"
QUESTIONS = [
    {"question": "the river falls over", "choices": [" the weir", " it", " a river", " holds"]},
    {"question": "the weir holds", "choices": [" the river", " water", " the weir", " nothing"]},
    {"question": "a river and", "choices": [" a weir", " the Überfall", " no", " 🌊"]},
    {"question": "x =", "choices": [" 1", " 2.5", " -3", " the"]},
    {"question": "weir", "choices": [" over the river", " falls", "!", " and a weir"]},
]
TASK = """
task: weirs
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own: it brings half a gigabyte that nothing else here uses."""
    folder = tmp_path_factory.mktemp("lm-eval")
    pip = [folder / "bin" / "pip", "install", "--quiet", "-c", CONSTRAINTS]
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    if subprocess.run([*pip, LM_EVAL, "transformers"], check=False).returncode:
        pytest.skip(f"{LM_EVAL} cannot be had here")
    return folder / "bin" / "lm_eval"


@pytest.mark.long
async def test_lm_eval_finds_the_log_likelihoods_of_transformers(
    lm_eval: Path, folder: Path, caller: Caller, tokenizer: Tokenizer, expected: Any, tmp_path: Path
):
    (tmp_path / "weirs.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "weirs.yaml").write_text(TASK.format(file=tmp_path / "weirs.jsonl"))
    model = {
        "model": MODEL,
        "base_url": f"{caller.url}/v1/completions",
        "tokenizer": folder / "original",
        "tokenizer_backend": "huggingface",
        "max_length": MAX_LEN,
        "num_concurrent": 2,
    }
    arguments = ",".join(f"{name}={value}" for name, value in model.items())

    process = await asyncio.create_subprocess_exec(
        *(lm_eval, "run", "--model", "local-completions", "--model_args", arguments),
        *("--tasks", "weirs", "--include_path", tmp_path, "--batch_size", "3"),
        *("--log_samples", "--output_path", tmp_path / "out"),
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
    )

    assert await process.wait() == 0
    (samples,) = (tmp_path / "out").rglob("samples_weirs_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    found.sort(key=lambda one: one["doc_id"])
    answers = [(float(x), is_greedy) for one in found for ((x, is_greedy),) in one["resps"]]
    wanted = []
    for question in QUESTIONS:
        context = tokenizer.encode(question["question"], add_special_tokens=False).ids
        for choice in question["choices"]:
            text = question["question"] + choice
            ids = tokenizer.encode(text, add_special_tokens=False).ids  # as lm-eval does
            given, best = (numbers[len(context) - 1 :] for numbers in expected(ids))
            wanted.append((pytest.approx(sum(given), abs=1e-4), str(given == best)))
    assert len(wanted) == 20
    assert answers == wanted
