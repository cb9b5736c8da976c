"""Imported models go to CUDA, by the commands, and answer on a device as Hugging Face does.

The device is the fake one, whose kernels are those of the CPU.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTImageProcessorPil

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.one_pass.engine import EncoderEngine
from engine.one_pass.prediction import PredictionItem
from engine.package.manifest import Precision
from engine.package.package import Package, load_package
from engine.requests.request import SamplingParams
from exporter import verify_device
from exporter.checkpoint import load_checkpoint
from exporter.prover.digest import find
from server.cli.app import run
from tests.engine.cuda.fake_cuda import NAME
from tests.exporter.conftest import try_few_cases
from tests.exporter.huggingface.decoders import LLAMA3, OPT_350M, save_decoder
from tests.exporter.huggingface.encoders import save_encoder, save_vision, tokenizer
from tests.exporter.huggingface.greedy import ask_all, draw_prompts, of_hugging_face
from tests.exporter.huggingface.translation_sources import save as save_translation
from tests.fakes import fake_gpu
from tests.parity.eager import Eager, greedy_search

ROWS = "4"
LENGTHS = (1, 3, 8, 8)  # tokens of prompts
NUM_TOKENS = 10
MOST_FROM_HALF = 0.02  # answers in float16, in standard deviations

pytestmark = pytest.mark.long

Make = Callable[[Path], Any]

GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "own_output": True}
WRITERS: dict[str, Make] = {
    "t5": lambda path: save_translation("t5", path, n_positions=16, **GATED),
    "m2m_100": lambda path: save_translation("m2m_100", path, own_output=True),
    "pegasus": lambda path: save_translation("pegasus", path, own_output=True),
    "llama": lambda path: save_decoder(path, "llama", rope_parameters=LLAMA3),
    "gemma2": lambda path: save_decoder(path, "gemma2"),
    "gemma3_text": lambda path: save_decoder(path, "gemma3_text"),
    "gpt_neox": lambda path: save_decoder(path, "gpt_neox"),
    "opt-350m": lambda path: save_decoder(path, "opt", **OPT_350M),
    "phi3": lambda path: save_decoder(path, "phi3"),
}
TEXTS = ["sun", "new york is far", "Berlin is far from microsoft."]
PIXELS = np.random.default_rng(1).integers(0, 256, (8, 8, 3), dtype=np.uint8)
IMAGES = ViTImageProcessorPil(size={"height": 8, "width": 8})


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Make, Precision], Any]:
    """Make a model; type what leads to a package that a worker on a GPU takes."""
    monkeypatch.chdir(tmp_path)
    try_few_cases(monkeypatch)  # in long tests, too: there are many models
    fake_gpu.put_in(monkeypatch)
    monkeypatch.setattr(verify_device, "find_elsewhere", find)  # it would see no GPU

    def lead_there(make: Make, precision: Precision) -> tuple[Any, Package]:
        twin = make(tmp_path / "source")
        for line in (
            "import source --out checkpoint",
            f"export checkpoint --out package --target cuda --precision {precision}",
            f"verify package checkpoint --device cuda --max-num-seqs {ROWS}",
        ):
            assert run(line.split()) == 0, line
        package = load_package(tmp_path / "package")
        shown = package.manifest.certificate.device
        assert shown is not None and shown.gpu == NAME
        return twin, package

    return lead_there


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("name", WRITERS)
async def test_an_imported_model_writes_on_a_device_what_hugging_face_writes(
    name: str, precision: Precision, serve: Callable[[Make, Precision], Any], tmp_path: Path
) -> None:
    """In float16 a token may be another one where the eager model in that type cannot tell."""
    twin, package = serve(WRITERS[name], precision)
    prompts, params = draw_prompts(LENGTHS), SamplingParams(max_new_tokens=NUM_TOKENS)
    eager = Eager(load_checkpoint(tmp_path / "checkpoint").model, precision)

    answers = await ask_all(load_engine(package, EngineConfig(max_num_seqs=0)), [params], prompts)

    assert [tuple(answer) for answer in answers] == [
        greedy_search(eager, tuple(prompt), params, followed=tuple(answer))[0]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    theirs = {"do_sample": False, "max_new_tokens": NUM_TOKENS}
    wanted = [of_hugging_face(twin, prompt, theirs) for prompt in prompts]
    num_equal = sum(answer == one for answer, one in zip(answers, wanted, strict=True))
    assert num_equal == len(wanted) if precision == "fp32" else num_equal > len(wanted) / 2
    assert len({tuple(answer) for answer in answers}) > 2, "it hardly reads its input"


READERS: dict[str, Make] = {
    "bert": lambda path: save_encoder(path, "bert", "classify"),
    "modernbert": lambda path: save_encoder(path, "modernbert", "classify"),
    "roberta": lambda path: save_encoder(path, "roberta", "label"),
    "distilbert": lambda path: save_encoder(path, "distilbert", "embed"),
    "vit": lambda path: save_vision(path, "ViTForImageClassification", IMAGES),
}


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("name", READERS)
async def test_an_imported_reader_answers_on_a_device_as_transformers_does(
    name: str, precision: Precision, serve: Callable[[Make, Precision], Any]
) -> None:
    twin, package = serve(READERS[name], precision)
    items = [png(PIXELS), png(PIXELS[::-1])] if name == "vit" else TEXTS
    engine = load_engine(package, EngineConfig(max_num_seqs=0))
    assert isinstance(engine, EncoderEngine)

    await engine.start()
    try:
        asked = [PredictionItem(item) for item in items]
        answer = await engine.predict(asked, request_id="one", deadline=None)
    finally:
        await engine.stop()

    for item, found in zip(items, answer.items, strict=True):
        wanted = of_transformers(twin, name, item)
        ours = found.embedding if name == "distilbert" else found.logits
        allowed = 1e-4 if precision == "fp32" else MOST_FROM_HALF * wanted.std()
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=allowed)


def png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@torch.no_grad()
def of_transformers(twin: Any, name: str, item: Any) -> Any:
    """Return the logits of what a model reads, or its vector; of a labeller no special tokens'."""
    if name == "vit":
        picture = Image.open(io.BytesIO(item))
        return twin(IMAGES(picture, return_tensors="pt")["pixel_values"]).logits[0].numpy()
    output = twin(torch.tensor([tokenizer().encode(item).ids]))
    if name == "distilbert":
        return output.last_hidden_state[0].mean(dim=0).numpy()
    return output.logits[0, 1:-1].numpy() if name == "roberta" else output.logits[0].numpy()
