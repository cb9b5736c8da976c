"""The commands that make checkpoints, and draw what they look at: train, import, explain."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporter.openmp import configure_openmp
from exporter.tasks import OWN_TASKS, TASKS, build_own_task, build_task
from server.cli.exit_codes import TARGET_MISSED, CommandError
from server.cli.extras import needs
from server.cli.interruption import cleaned_up
from server.cli.options import (
    ModelPath,
    any_path,
    checkpoint_path,
    examples,
    existing_directory,
    existing_file,
    existing_path,
)
from server.cli.progress import show_progress

if TYPE_CHECKING:
    from exporter.training.task import Task
    from exporter.training.trainer import TrainingReport


@click.command(
    epilog=examples(
        "tokenweir train dates --out checkpoints/dates",
        "tokenweir train dates --out checkpoints/dates --resume",
        "tokenweir train text --file a.txt --file b.txt --out checkpoints/text",
        "tokenweir train text --file a.txt --init checkpoints/gpt2 --out mine",
        "tokenweir train translation --pairs lines.tsv --out checkpoints/lines",
        "tokenweir train classification --file rows.tsv --check",
        "tokenweir train images --dir photos --init checkpoints/vit --out photos-vit",
    ),
)
@click.argument("task", type=click.Choice([*TASKS, *OWN_TASKS]), metavar="TASK")
@click.option("--out", type=any_path, help="Directory of the checkpoint.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run in --out.")
@click.option("--seed", type=int, help="The same seed, the same run.  [default: 0]")
@click.option("--steps", type=click.IntRange(1), help="Optimizer steps.  [default: the task's]")
@click.option("--file", "files", type=existing_file, multiple=True, help="Training data.")
@click.option("--pairs", type=existing_file, help="Training data of `translation`.")
@click.option("--dir", "folder", type=existing_directory, help="Training data of `images`.")
@click.option("--valid", type=existing_path, help="Examples to judge by.  [default: a part]")
@click.option("--size", type=click.Choice(["tiny", "base"]), help="Size of a fresh model.  [tiny]")
@click.option("--init", type=checkpoint_path, help="Checkpoint to start from.")
@click.option("--check", is_flag=True, help="Read the data, say what is in them, and stop.")
@needs("export")
def train(
    task: str,
    out: Path | None,
    resume: bool,
    seed: int | None,
    steps: int | None,
    check: bool,
    **given: Any,
) -> None:
    """Train a model for TASK and write its checkpoint to --out.

    \b
    dates           dates as people write them -> ISO 8601   encoder-decoder
    tagging         words -> parts of speech                 sequence labeller
    digits          images of digits -> the digit            ViT
    sentiment       sentences -> positive or negative        BERT
    text            continues a text; --file TEXT            GPT
    translation     source<TAB>target; --pairs TSV           encoder-decoder
    classification  text<TAB>label; --file TSV               BERT
    labelling       word ... tag; --file CONLL               sequence labeller
    images          a folder a class; --dir DIR              ViT

    The first four make their own data. A tenth of yours is held out and a twentieth chooses the
    best checkpoint, at most 2,000 examples each. The last line but one says how it does on held-out
    data, against the task's target. A model that misses it is written all the same, and the command
    exits with 5.
    """
    _check_data(task, given)

    configure_openmp()  # before torch is loaded
    with cleaned_up():
        if check:
            made = _builder(task, given)(seed or 0)
            click.echo(made.data_summary or f"{len(made.held_out):,} examples are held out")
            return
        if out is None:
            raise click.UsageError("Missing option '--out'.")
        from exporter.training.trainer import train as train_task

        build = _builder(task, given)
        with show_progress(f"Training {task}") as progress:
            report = train_task(
                build, out, resume=resume, seed=seed, steps=steps, progress=progress, say=click.echo
            )
    print_report(report)
    if not report.target_reached:
        raise CommandError(
            "the model misses the target of its task; more --steps with --resume, or more examples "
            "may help",
            TARGET_MISSED,
        )


# The option by which a task gets its data; the others make their own.
_DATA_OPTION = {
    "text": "files",
    "translation": "pairs",
    "classification": "files",
    "labelling": "files",
    "images": "folder",
}
_OPTION_NAMES = {"files": "--file FILE", "pairs": "--pairs FILE", "folder": "--dir DIR"}


def _check_data(task: str, given: dict[str, Any]) -> None:
    """Refuse options of data that are missing, or for another task."""
    wanted = _DATA_OPTION.get(task)
    if wanted and not given[wanted]:
        raise click.UsageError(f"`{task}` learns from your data: give {_OPTION_NAMES[wanted]}")
    for name, option in _OPTION_NAMES.items():
        if given[name] and name != wanted:
            what = f"takes {_OPTION_NAMES[wanted]}" if wanted else "makes its own data"
            raise click.UsageError(f"{option.split()[0]} is not for `{task}`, which {what}")
    if task in OWN_TASKS:
        if len(given["files"]) > 1:
            raise click.UsageError(f"`{task}` learns from one file, got {len(given['files'])}")
        if given["init"] and given["size"]:
            raise click.UsageError("--size is for a fresh model; the one of --init has its size")
        return
    for name in ("valid", "size", "init"):
        known = [*OWN_TASKS, *(["text"] if name == "init" else [])]
        if given[name] and task not in known:
            raise click.UsageError(f"--{name} is for {', '.join(known)}; got `{task}`")


def _builder(task: str, given: dict[str, Any]) -> Callable[[int], Task]:
    """Return what makes the task, for a seed."""
    from exporter.checkpoint import load_checkpoint

    start = None if given["init"] is None else load_checkpoint(given["init"])
    if task in TASKS:
        return lambda seed: build_task(task, seed=seed, files=given["files"], start=start)
    from exporter.tasks.own.data import OwnData

    (path,) = given["files"] or (given["pairs"] or given["folder"],)
    data = OwnData(path, given["valid"], given["size"] or "tiny", start)
    return lambda seed: build_own_task(task, data, seed=seed)


def print_report(report: TrainingReport) -> None:
    """Print how the training went."""
    click.echo(
        f"{report.steps} steps in {report.seconds:.0f} s, {report.num_parameters:,} parameters; "
        f"the best checkpoint is that of step {report.best_step}"
    )
    click.echo(report.summary)
    click.echo(f"checkpoint: {report.out}")


@click.command(
    epilog=examples("tokenweir average run/step-8 run/step-9 run/step-10 --out checkpoints/mean"),
)
@click.argument("checkpoints", nargs=-1, required=True, type=checkpoint_path)
@click.option("--out", required=True, type=any_path, help="Directory of the new checkpoint.")
@needs("export")
def average(checkpoints: tuple[Path, ...], out: Path) -> None:
    """Write the mean of the weights of two or more CHECKPOINTS of the same model to --out.

    The last checkpoints of a run, together, often do better than each of them.
    """
    from exporter.averaging import average_checkpoints

    with cleaned_up():
        average_checkpoints(checkpoints, out)
    click.echo(f"mean of {len(checkpoints)} checkpoints: {out}")


@click.command(
    "import",
    epilog=examples(
        "tokenweir import downloads/gpt2 --out checkpoints/gpt2",
        "tokenweir import downloads/llama --out checkpoints/llama --max-len 4096",
        "tokenweir import model_step_9000.pt --out checkpoints/nmt --bpe-codes codes",
    ),
)
@click.argument("path", type=ModelPath("original"))
@click.option("--out", required=True, type=any_path, help="Directory of the checkpoint.")
@click.option(
    "--max-len", type=click.IntRange(1), help="Tokens of the longest text.  [default: the model's]"
)
@click.option(
    "--source-lang", metavar="NAME", help="Language of all sources (NLLB, mBART, M2M-100)."
)
@click.option(
    "--target-lang", metavar="NAME", help="Language that is written, unless one is asked for."
)
@click.option(
    "--bpe-codes",
    type=existing_file,
    metavar="FILE",
    help="Codes of subword-nmt or fastBPE (OpenNMT-py, fairseq).",
)
@click.option(
    "--no-comparison", is_flag=True, help="Do not run the original to compare outputs with it."
)
@needs("export")
def import_(
    path: Path,
    out: Path,
    max_len: int | None,
    source_lang: str | None,
    target_lang: str | None,
    bpe_codes: Path | None,
    no_comparison: bool,
) -> None:
    """Turn the model at PATH into a checkpoint: of Hugging Face, OpenNMT-py or fairseq.

    PATH is a directory that holds config.json, the files of the tokenizer and the weights, as
    `save_pretrained` of transformers writes them, or a file that OpenNMT-py or fairseq saved, or
    its directory. Weights are safetensors or PyTorch's own files, of which nothing is run. Models
    of Hugging Face need the extra `import`: transformers reads their options, and the outputs are
    compared with those of its class.
    exporter/docs/reference/families.md lists the families.
    """
    from exporter.huggingface import Languages
    from exporter.imports import Options, import_model
    from exporter.toolkits import is_toolkit_checkpoint

    of_toolkit = is_toolkit_checkpoint(path)
    if of_toolkit and (source_lang or target_lang):
        raise click.UsageError("--source-lang and --target-lang are for models of Hugging Face")
    if bpe_codes and not of_toolkit:
        raise click.UsageError("--bpe-codes is for checkpoints of OpenNMT-py and fairseq")
    languages = Languages(source_lang, target_lang)
    options = Options(max_len, languages, bpe_codes, compares=not no_comparison)
    with cleaned_up(), show_progress("Importing") as progress:
        imported, original = import_model(path, out, options, progress)
    click.echo(f"{imported.model_type}, {imported.num_parameters:,} parameters")
    for name, said in {**imported.understood, "original": original}.items():
        click.echo(textwrap.fill(f"{name:<15}{said}", 80, subsequent_indent=" " * 15))
    for note in imported.notes:
        click.echo(f"note: {note}")
    click.echo(f"checkpoint: {out}")


@click.command(
    epilog=examples('tokenweir explain checkpoints/dates "3rd of Feb, 1998" --out heads.png'),
)
@click.argument("checkpoint", type=checkpoint_path)
@click.argument("text")
@click.option("--target", help="Output to explain.  [default: what the model writes]")
@click.option(
    "--out", type=any_path, default=Path("attention.png"), show_default=True, help="PNG to write."
)
@needs("export")
def explain(checkpoint: Path, text: str, target: str | None, out: Path) -> None:
    """Draw what every attention head of CHECKPOINT looks at in TEXT: layers x heads.

    For a model of images TEXT is the path of one.
    """
    from exporter.checkpoint import load_checkpoint
    from exporter.explain.explain import explain as draw_attention

    draw_attention(load_checkpoint(checkpoint), text, out, target=target)
    click.echo(out)
