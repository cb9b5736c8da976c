"""A package in this process answers as the served one does."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import tokenweir

from engine.config import EngineConfig
from engine.errors import ConfigError, PackageError
from engine.factory import load_engine
from engine.package.package import load_package
from server.config import WorkerConfig
from server.worker.worker import Worker

THREADS = {"num_threads": 1, "max_num_seqs": 4}


@asynccontextmanager
async def served(package: Path) -> AsyncIterator[tokenweir.AsyncClient]:
    engine = load_engine(load_package(package), EngineConfig(**THREADS))
    worker = Worker({"m": engine}, WorkerConfig())
    address = await worker.start()
    try:
        async with tokenweir.AsyncClient(address, timeout=60) as client:
            yield client
    finally:
        await worker.drain(0)


@pytest.fixture
def translator(exported: Callable[..., tuple[object, Path]]) -> Iterator[tokenweir.Client]:
    with tokenweir.load(exported("encoder-decoder")[1], name="m", **THREADS) as client:
        yield client


async def test_what_is_generated_is_equal(
    translator: tokenweir.Client, exported: Callable[..., tuple[object, Path]]
) -> None:
    texts = ["abc", "the", "x=1"]
    options = {"logprobs": 2, "alignment": True, "batch_invariant": True}

    def local() -> tuple[object, ...]:
        stream = translator.stream("m", "abc", **options)
        pieces = "".join(stream)
        return (
            translator.generate("m", "abc", beam=3, num_outputs=2).sequences,
            (pieces, stream.result.sequences),
            translator.generate_many("m", texts, temperature=1.0, seed=3).results,
            translator.score("m", "abc", "de", top_logprobs=1).positions,
        )

    async with served(exported("encoder-decoder")[1]) as client:
        stream = client.stream("m", "abc", **options)
        pieces = "".join([piece async for piece in stream])
        expected = (
            (await client.generate("m", "abc", beam=3, num_outputs=2)).sequences,
            (pieces, stream.result.sequences),
            (await client.generate_many("m", texts, temperature=1.0, seed=3)).results,
            (await client.score("m", "abc", "de", top_logprobs=1)).positions,
        )
        assert await asyncio.to_thread(local) == expected


async def test_what_is_predicted_is_equal(
    exported: Callable[..., tuple[object, Path]],
) -> None:
    package = exported("labeller")[1]

    with tokenweir.load(package, name="m", **THREADS) as local:
        async with served(package) as client:
            labels = await client.label("m", "w5 w7 w9")
            assert (await asyncio.to_thread(local.label, "m", "w5 w7 w9")).spans == labels.spans
            vector = await client.embed("m", "w5 w7", normalize=True)
            found = await asyncio.to_thread(local.embed, "m", "w5 w7", normalize=True)
            assert found.values == vector.values


def test_it_has_the_calls_and_errors_of_a_server(translator: tokenweir.Client) -> None:
    assert [model.model for model in translator.models()] == ["m"]
    assert translator.health("m") == "SERVING"
    with pytest.raises(tokenweir.NotFound):
        translator.generate("nothing", "a")
    with pytest.raises(tokenweir.InvalidArgument, match="top_p"):
        translator.generate("m", "a", top_p=2.0)


def test_closing_it_ends_all_of_it(exported: Callable[..., tuple[object, Path]]) -> None:
    client = tokenweir.load(exported("encoder-decoder")[1], **THREADS)
    (model,) = client.models()
    stream = client.stream(model.model, "abc")
    client.close()
    client.close()

    with pytest.raises(tokenweir.Cancelled):
        list(stream)
    with pytest.raises(ValueError, match="the client is closed"):
        client.models()


def test_a_process_that_does_not_close_it_ends(
    exported: Callable[..., tuple[object, Path]],
) -> None:
    code = """
import sys, tokenweir
client = tokenweir.load(sys.argv[1], name="m", num_threads=1)
next(client.stream("m", "abc"))
print(client.health())
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(exported("encoder-decoder")[1])],
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "SERVING\n", "")


def test_what_cannot_be_loaded_is_told_by_the_engine(tmp_path: Path) -> None:
    with pytest.raises(PackageError):
        tokenweir.load(tmp_path)


def test_an_impossible_setting_is_refused(exported: Callable[..., tuple[object, Path]]) -> None:
    with pytest.raises(ConfigError, match="num_threads"):
        tokenweir.load(exported("labeller")[1], num_threads=-1)
