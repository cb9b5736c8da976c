"""Other people's clients run the first example of their own documentation against this server.

The programs in `clients` are these examples. The address and the key come from the environment,
as every client has it, and the model is called `assistant` or `embedder`; below each example
stands what it has to find.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from tokenweir import AsyncClient
from transformers import PreTrainedTokenizerFast

from engine.config import EngineConfig
from engine.text.chat_format import ChatFormat
from server.config import WorkerConfig
from server.settings import Metrics, Settings
from server.telemetry.metrics_page import MetricsPage
from server.worker.worker import Worker
from tests.conftest import EOS, VOCAB_SIZE
from tests.fakes.engines import LABELS, FakePredictor, prediction_package
from tests.fakes.gateways import running_gateway
from tests.fakes.http_calls import http_of
from tests.fakes.kserve_calls import kserve_server

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "clients"
PAGE = ROOT / "server/docs/reference/clients.md"
# Each has an environment of its own, since they want different versions of openai.
IN_PYTHON = ["infinity", "instructor", "langchain", "litellm", "llama_index", "openai_agents"]
IN_PYTHON += ["pydantic_ai"]

TURN, END = "<|im_start|>", "<|im_end|>"
ASKED = f"{TURN}assistant:"
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}"
    f"{TURN}{{{{ m.role }}}}:"
    "{{ m.content if m.content is not none }}{{ m.tool_calls | tojson if m.tool_calls }}"
    f"{END}"
    f"{{% endfor %}}{ASKED}"
)
SAID = "A weir is a low dam across a river."


def answer_of(prompt: str) -> str:
    """Call the first function, repeat what a function gave, or say what a weir is."""
    role, _, content = prompt.split(TURN)[-2].partition(":")
    if role == "tool":
        return f"It is {content.partition(END)[0]}"
    tools = re.search("<tools>(.*?)</tools>", prompt)
    if tools is None:
        return SAID
    function = json.loads(tools[1])[0]["function"]
    call = {"name": function["name"], "arguments": example_of(function["parameters"])}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def example_of(schema: dict[str, Any]) -> Any:
    if "properties" in schema:
        return {name: example_of(one) for name, one in schema["properties"].items()}
    return {"integer": 7, "number": 0.5, "array": []}.get(schema.get("type", ""), "Tokyo")


def script(source: list[int], tokens: list[int]) -> np.ndarray:
    """Write the answer where nothing forbids it, else anything, with strings that end soon."""
    prompt, _, written = bytes(tokens).decode(errors="replace").rpartition(ASKED)
    row = np.random.default_rng(len(tokens)).normal(size=VOCAB_SIZE).astype(np.float32)
    row[[EOS, *b'"]}']] += 4
    answer = answer_of(prompt + ASKED)
    if answer.startswith(written):
        row[answer.encode()[len(written)] if len(written) < len(answer) else EOS] += 40
    return row


@dataclass(frozen=True)
class Served:
    """Addresses of one server."""

    url: str
    grpc: str
    kserve: str
    metrics: str

    async def run(self, *command: str | Path) -> str:
        """Run a client until it ends well; return what it writes."""
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=PROGRAMS,
            env={**os.environ, "OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": "any"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        told, _ = await asyncio.wait_for(process.communicate(), 240)
        assert process.returncode == 0, told.decode()
        return told.decode()


@pytest.fixture
async def served(scripted_engine: Callable[..., Any]) -> AsyncIterator[Served]:
    """Serve a chat model that calls functions, and models for embeddings, classes and ranks."""
    chat = ChatFormat(template=TEMPLATE, tool_format="hermes")
    engine, _ = scripted_engine(
        script, config=EngineConfig(max_num_seqs=8), chat=chat, max_len=8192
    )
    embedder = FakePredictor(prediction_package("embedder", task="embed"))
    classifier, ranker = (
        FakePredictor(prediction_package(name, task="classify", takes="text", labels=labels))
        for name, labels in (("classifier", LABELS), ("ranker", ["relevant"]))
    )
    ranker.logits = (1.0,)
    models = {"assistant": engine, "embedder": embedder, "classifier": classifier, "ranker": ranker}
    worker = Worker(models, WorkerConfig())
    address = await worker.start()
    try:
        async with (
            running_gateway(address) as (gateway, stubs),
            AsyncClient(stubs.address, timeout=60) as client,
            http_of(client) as caller,
            kserve_server(stubs.address) as kserve,
        ):
            settings = Settings(metrics=Metrics(port=0))
            page = MetricsPage(settings, [gateway.snapshot], gateway.worker_snapshots)
            try:
                yield Served(caller.url, stubs.address, kserve, f"http://127.0.0.1:{page.port}")
            finally:
                await asyncio.to_thread(page.close)
    finally:
        await worker.drain(0)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make the environment of a client; give its Python."""

    def make(name: str) -> Path:
        python = tmp_path_factory.mktemp(name) / "bin" / "python"
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", python.parents[1]], check=True
        )
        # The list is whole, so nothing has to be resolved, and no other constraint counts.
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        pip += ["--no-deps", "--no-compile", "-r", PROGRAMS / f"{name}.txt"]
        alone = {**os.environ, "PIP_CONSTRAINT": ""}
        if subprocess.run(pip, env=alone, check=False).returncode:
            pytest.skip(f"the packages of {name}.txt cannot be had here")
        return python

    return make


def test_the_table_of_clients_has_the_versions_that_are_tested():
    lists = [*PROGRAMS.glob("*.txt"), ROOT / "constraints.txt"]
    pins = {line for path in lists for line in path.read_text().splitlines()}
    modules = json.loads((PROGRAMS / "package.json").read_text())["dependencies"]
    pins |= {f"{name}=={version}" for name, version in modules.items()}
    rows = re.findall(r"^\| .*?`([\w-]+)`.*? \| ([\d.]+) \|", PAGE.read_text(), re.M)

    others = {f"{name}=={version}" for name, version in rows} - pins

    assert len(rows) == 17
    assert others == {"lm-eval==0.4.13", "promtool==2.42.0"}  # tested elsewhere, and of Debian


async def test_openai(served: Served):
    await served.run(sys.executable, "-P", "use_openai.py")


async def test_the_call_of_grpc_health_probe(served: Served):
    await served.run(sys.executable, "-P", "use_grpc_health_probe.py", served.grpc)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Unpack a package of Debian, which is not installed; give the folder."""

    def unpack(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        load = f"apt-get download {name} && dpkg --extract {name}_*.deb ."
        if subprocess.run(load, shell=True, cwd=folder, check=False).returncode:
            pytest.skip(f"Debian's package {name} cannot be had here")
        return folder

    return unpack


@pytest.mark.long
async def test_promtool_finds_nothing_to_say_of_the_metrics(
    served: Served, unpacked: Callable[[str], Path]
):
    promtool = shutil.which("promtool") or unpacked("prometheus") / "usr/bin/promtool"
    await served.run(sys.executable, "-P", "use_openai.py")  # which is counted
    async with aiohttp.ClientSession() as session:
        for url in (served.url, served.metrics):
            async with session.get(f"{url}/metrics") as answer:
                assert answer.status == 200
                page = await answer.read()
            command = [promtool, "check", "metrics"]
            found = subprocess.run(command, input=page, capture_output=True, check=False)
            assert (found.returncode, found.stdout, found.stderr) == (0, b"", b"")
            assert b"_total{" in page


@pytest.mark.long
@pytest.mark.parametrize("name", IN_PYTHON)
async def test_a_client_in_python(name: str, served: Served, environment: Callable[[str], Path]):
    await served.run(environment(name), "-P", f"use_{name}.py")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the clients in JavaScript; give the folder, which has their programs too."""
    folder = tmp_path_factory.mktemp("node")
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    for path in (*PROGRAMS.glob("*.mjs"), PROGRAMS / "package.json"):
        shutil.copy(path, folder)
    npm = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
    if subprocess.run(npm, cwd=folder, check=False).returncode:
        pytest.skip("the packages of package.json cannot be had here")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", ["openai", "ai_sdk"])
async def test_a_client_in_javascript(name: str, served: Served, modules: Path):
    await served.run("node", modules / f"use_{name}.mjs")


@pytest.mark.long
async def test_guidellm(
    served: Served,
    environment: Callable[[str], Path],
    byte_tokenizer_file: Path,
    tmp_path: Path,
):
    python = environment("guidellm")
    # It imports torch, of which the one here will do.
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(byte_tokenizer_file), eos_token="</s>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")

    await served.run(
        *(python.parent / "guidellm", "run"),
        *("--backend", f"kind=openai_http,target={served.url}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", "kind=max_requests,count=4"),
        *("--tokenizer", f"kind=hf_auto,model={tmp_path / 'tokenizer'}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-console"),
    )

    (found,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    assert len(found["requests"]["successful"]) == 4
    assert found["requests"]["errored"] == []


@pytest.fixture(scope="module")
def perf_analyzer(
    environment: Callable[[str], Path], unpacked: Callable[[str], Path]
) -> tuple[str, Path]:
    """Install it; give the variable that names its libraries, and the program."""
    python = environment("perf_analyzer")
    files = [
        *unpacked("libb64-0d").rglob("libb64.so.0d"),
        *python.parents[1].rglob("libcudart.so.12"),
    ]
    folders = ":".join(str(path.parent) for path in files)
    return f"LD_LIBRARY_PATH={folders}", python.with_name("perf_analyzer")


TO_ANALYZE = {"text": {"content": [f"{TURN}user:Hi.{END}{ASKED}"], "shape": [1]}}
OF_LLM = {"text_input": [f"{TURN}user:Hi.{END}{ASKED}"], "max_tokens": [8], "stream": [True]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "kind", "inputs", "options"),
    [
        ("embedder", "grpc", TO_ANALYZE, ()),
        ("embedder", "http", TO_ANALYZE, ()),
        ("classifier", "grpc", TO_ANALYZE, ("--async",)),
        ("classifier", "http", TO_ANALYZE, ()),
        ("assistant", "grpc", TO_ANALYZE, ("--async", "--streaming")),
        ("assistant", "grpc", OF_LLM, ("--async", "--streaming")),
    ],
)
async def test_perf_analyzer(
    model: str,
    kind: str,
    inputs: dict[str, Any],
    options: tuple[str, ...],
    served: Served,
    perf_analyzer: tuple[str, Path],
    tmp_path: Path,
):
    libraries, program = perf_analyzer
    (tmp_path / "inputs.json").write_text(json.dumps({"data": [inputs]}))
    address = served.kserve if kind == "grpc" else served.url.removeprefix("http://")

    told = await served.run(
        *("env", libraries, program, "-m", model, "-u", address, "-i", kind, *options),
        *("--input-data", tmp_path / "inputs.json", "--request-count", "20"),
    )

    assert "Request count: 20" in told
    assert re.search(r"queue \d+ usec .* compute infer \d+ usec", told)


@pytest.mark.long
async def test_perf_analyzer_of_chats(
    served: Served, perf_analyzer: tuple[str, Path], tmp_path: Path
):
    libraries, program = perf_analyzer
    chat = {"model": "assistant", "messages": [{"role": "user", "content": "Hi."}]}
    (tmp_path / "inputs.json").write_text(json.dumps({"data": [{"payload": [chat]}]}))

    told = await served.run(
        *("env", libraries, program, "-m", "assistant", "-u", served.url.removeprefix("http://")),
        *("--service-kind", "openai", "--endpoint", "v1/chat/completions", "--async"),
        *("--input-data", tmp_path / "inputs.json", "--request-count", "20"),
    )

    assert "Request count: 20" in told
