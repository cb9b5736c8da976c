"""Imported checkpoints of OpenNMT-py and fairseq compute what those toolkits compute."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.generation.async_engine import AsyncEngine
from engine.package.package import load_package
from engine.requests.defaults import sampling_params
from engine.requests.events import SequenceFinished
from engine.requests.request import GenerationRequest
from exporter.averaging import average_checkpoints
from exporter.checkpoint import load_checkpoint
from exporter.export import export_package
from exporter.toolkits import import_toolkit_checkpoint, is_toolkit_checkpoint
from tests.exporter.toolkits.reference import fairseq_logits, opennmt_logits
from tests.exporter.toolkits.sources import save_fairseq, save_opennmt

B, S, T = 3, 9, 8
LENGTHS = torch.tensor([S, 5, 1])
MASK = torch.arange(S) < LENGTHS[:, None]
FIRST = {"encoder_normalize_before": True, "decoder_normalize_before": True}
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}
UNTIED = {"share_decoder_input_output_embed": False}


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("args", {}),
        ("args", {"share_all_embeddings": True}),
        ("args", {**LEARNED, "layernorm_embedding": True, "no_scale_embedding": True}),
        ("cfg", {**FIRST, **UNTIED, "activation_fn": "gelu_accurate"}),
        ("nested", {**FIRST, "activation_fn": "gelu"}),
        ("2018", {**UNTIED, "arch": "transformer"}),
        ("2018", {**FIRST, "activation_fn": "gelu"}),
    ],
)
@torch.no_grad()
def test_logits_are_those_of_fairseq(form: str, options: dict[str, Any], tmp_path: Path) -> None:
    source = save_fairseq(tmp_path / "source", form=form, **options)
    source_ids, target_ids = torch.randint(4, 37, (B, S)), torch.randint(4, 33, (B, T))
    source_ids[~MASK] = 1

    imported = import_toolkit_checkpoint(tmp_path / "source", tmp_path / "checkpoint")
    logits = load_checkpoint(tmp_path / "checkpoint").model(source_ids, target_ids, MASK)

    assert imported.model_type == source.options.arch
    expected = fairseq_logits(source.weights, source.options, source_ids, target_ids)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("version", "options"),
    [
        (2, {}),
        (2, {"share_embeddings": True, "share_decoder_embeddings": True}),
        (3, {"share_decoder_embeddings": True}),
        (3, {"add_ffnbias": True, "pos_ffn_activation_fn": "silu", "norm_eps": 1e-6}),
        (
            3,
            {
                "add_qkvbias": True,
                "layer_norm": "rms",
                "position_encoding_type": "SinusoidalConcat",
                "pos_ffn_activation_fn": "gated-gelu",
            },
        ),
    ],
)
@torch.no_grad()
def test_logits_are_those_of_opennmt(version: int, options: dict[str, Any], tmp_path: Path) -> None:
    source = save_opennmt(tmp_path / "model_step_3.pt", version=version, **options)
    source_ids, target_ids = torch.randint(4, 37, (B, S)), torch.randint(4, 33, (B, T))

    import_toolkit_checkpoint(source.path, tmp_path / "checkpoint")
    logits = load_checkpoint(tmp_path / "checkpoint").model(source_ids, target_ids, MASK)

    expected = opennmt_logits(source.weights, source.options, source_ids, target_ids, LENGTHS)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_requests_that_say_nothing_get_what_fairseq_generate_does(tmp_path: Path) -> None:
    save_fairseq(tmp_path / "source")

    import_toolkit_checkpoint(tmp_path / "source", tmp_path / "checkpoint")

    assert load_checkpoint(tmp_path / "checkpoint").config.generation.given == {
        "length_penalty": 1.0,
        "beam_end": "enough",
        "banned_tokens": (1,),
        "min_new_tokens": 1,  # besides the end, by which an answer is never empty
    }


def test_weights_of_opennmt_may_lie_in_a_file_of_their_own_and_transformers_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    source = save_opennmt(tmp_path / "model_step_3.pt", form="safetensors")

    import_toolkit_checkpoint(source.path, tmp_path / "checkpoint")

    state = load_checkpoint(tmp_path / "checkpoint").model.state_dict()
    assert state["decoder.output.bias"].equal(source.weights["generator.bias"])


@torch.no_grad()
def test_the_last_checkpoints_of_a_run_are_averaged(tmp_path: Path) -> None:
    source = save_opennmt(tmp_path / "model_step_8.pt", version=3)
    content = torch.load(source.path, weights_only=False)
    content["model"] = {name: 3 * weight for name, weight in content["model"].items()}
    torch.save(content, tmp_path / "model_step_9.pt")
    checkpoints = [tmp_path / "step-8", tmp_path / "step-9"]

    for step, checkpoint in zip((8, 9), checkpoints, strict=True):
        import_toolkit_checkpoint(tmp_path / f"model_step_{step}.pt", checkpoint)
    average_checkpoints(checkpoints, tmp_path / "mean")

    encoders = [
        load_checkpoint(path).model.get_submodule("encoder").state_dict()
        for path in (checkpoints[0], tmp_path / "mean")
    ]
    torch.testing.assert_close(encoders[1], {name: 2 * w for name, w in encoders[0].items()})


def test_vocabularies_of_opennmt_1_are_read(tmp_path: Path) -> None:
    source = save_opennmt(tmp_path / "model_step_3.pt", version=1)

    import_toolkit_checkpoint(source.path, tmp_path / "checkpoint")

    tokenizer = load_checkpoint(tmp_path / "checkpoint").tokenizer
    assert tokenizer is not None and tokenizer.encode("quelle2 quelle0 x").ids == [6, 4, 0]


@pytest.mark.usefixtures("few_cases")
async def test_the_package_of_a_fairseq_model_writes_what_its_formulas_say(tmp_path: Path) -> None:
    source = save_fairseq(tmp_path / "source", **UNTIED)
    texts = ["quelle3 quelle1 quelle4", "quelle1", "quelle5 quelle9 quelle2 quelle6"]

    ids, answers = await write(tmp_path / "source", texts, tmp_path)

    def logits(one: Tensor, target: Tensor) -> Tensor:
        found = fairseq_logits(source.weights, source.options, one, target)
        found[..., 1] = -torch.inf  # padding, which its search never writes
        found[:, 0, 2] = -torch.inf  # nor an empty answer
        return found

    assert [one[-1] for one in ids] == [2, 2, 2]
    assert answers == [greedy(one, logits, start=2, end=2) for one in ids]
    assert len(set(map(tuple, answers))) == len(answers)


@pytest.mark.long
async def test_the_package_of_an_opennmt_model_writes_what_its_formulas_say(tmp_path: Path) -> None:
    source = save_opennmt(tmp_path / "model_step_3.pt", version=2)
    texts = ["quelle3 quelle1 quelle4", "quelle1", "quelle5 quelle9 quelle2 quelle6"]

    ids, answers = await write(source.path, texts, tmp_path)

    def logits(one: Tensor, target: Tensor) -> Tensor:
        lengths = torch.tensor([one.shape[1]])
        return opennmt_logits(source.weights, source.options, one, target, lengths)

    assert ids[0] == [7, 5, 8]
    assert answers == [greedy(one, logits, start=2, end=3) for one in ids]
    assert len(set(map(tuple, answers))) == len(answers)


async def write(
    source: Path, texts: list[str], directory: Path, num_tokens: int = 8
) -> tuple[list[list[int]], list[list[int]]]:
    """Import, export with the certificate, and return the ids of texts and of their answers."""
    import_toolkit_checkpoint(source, directory / "checkpoint", max_len=10)
    tokenizer = load_checkpoint(directory / "checkpoint").tokenizer
    assert tokenizer is not None
    ids = [list(tokenizer.encode(text).ids) for text in texts]
    export_package(directory / "checkpoint", directory / "package")
    package = load_package(directory / "package")
    asked = {"strategy": "greedy", "max_new_tokens": num_tokens}
    params = sampling_params(asked, package.manifest.defaults)
    engine = load_engine(package, EngineConfig(max_num_seqs=4, num_threads=1))
    assert isinstance(engine, AsyncEngine)
    await engine.start()
    answers = []
    try:
        for one in ids:
            events = engine.generate(GenerationRequest("one", tuple(one), params))
            (end,) = [event async for event in events if isinstance(event, SequenceFinished)]
            answers.append(list(end.token_ids))
    finally:
        await engine.stop()
    return ids, answers


@torch.no_grad()
def greedy(
    source: list[int],
    logits: Callable[[Tensor, Tensor], Tensor],
    *,
    start: int,
    end: int,
    num_tokens: int = 8,
) -> list[int]:
    target = [start]
    while len(target) <= num_tokens and (len(target) == 1 or target[-1] != end):
        found = logits(torch.tensor([source]), torch.tensor([target]))
        target.append(int(found[0, -1].argmax()))
    return target[1:]


def test_what_a_toolkit_saves_is_told_from_a_directory_of_hugging_face(tmp_path: Path) -> None:
    source = save_opennmt(tmp_path / "model_step_3.pt")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").touch()
    (tmp_path / "other" / "training_args.pt").touch()

    assert is_toolkit_checkpoint(source.path)
    assert is_toolkit_checkpoint(tmp_path)
    assert not is_toolkit_checkpoint(tmp_path / "other")
