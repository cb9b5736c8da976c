"""The commands that make packages, and compare them with their checkpoints: export, verify."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from engine.config import Device, EngineConfig
from exporter.files import remove_own_directories
from exporter.openmp import configure_openmp
from server.cli.extras import needs
from server.cli.interruption import cleaned_up, ended_soon
from server.cli.options import (
    Number,
    any_path,
    checkpoint_path,
    checkpoint_source,
    examples,
    existing_file,
    package_path,
)
from server.cli.progress import Tell, show_progress
from server.cli.serving.setting_options import engine_option
from server.cli.tables import certificate_table, device_table, print_table

if TYPE_CHECKING:
    from engine.package.manifest import CacheDtype, Precision, Target, Weights
    from exporter.prover.loss import LossLimits

_SHARE = Number(min=0)
proof_option = click.option(
    "--proof",
    type=click.Choice(["quick", "standard", "full"]),
    default="standard",
    show_default=True,
    help="How much is compared: few lengths, lengths at all edges, or every length.",
)
text_option = click.option(
    "--text",
    type=existing_file,
    help="UTF-8 text to measure perplexity on; of an encoder-decoder lines of source, tab, "
    "target, or of sources, to measure chrF on as well.",
)


@click.command(
    epilog=examples(
        "tokenweir export checkpoints/dates --out packages/dates",
        "tokenweir export checkpoints/dates --out new --name dates --version 2",
        "tokenweir export checkpoints/gpt2 --out small --weights int8 --text a.txt",
    ),
)
@click.argument("checkpoint", type=checkpoint_source)
@click.option("--out", required=True, type=any_path, help="Directory of the package.")
@click.option(
    "--name", help="The model is served under it.  [default: that of the directory of --out]"
)
@click.option("--version", default="1", show_default=True, help="Every answer carries it.")
@click.option(
    "--target",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Device for the graphs.",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "bf16"]),
    default="fp32",
    show_default=True,
    help="Number format of all that is not rounded further; fp16 and bf16 with --target cuda.",
)
@click.option(
    "--weights",
    type=click.Choice(["fp32", "fp16", "bf16", "int8", "int8-fixed", "int8-blocks", "int4"]),
    help="Number format of the weights.  [default: --precision]",
)
@click.option(
    "--kv-cache",
    type=click.Choice(["fp32", "fp16", "bf16", "int8"]),
    help="Number format of a decoder's cached keys and values.  [default: --precision; beside "
    "int8 weights for a CPU int8, if that does not lose too much]",
)
@text_option
@click.option("--max-token-loss", type=_SHARE, help="Greedy tokens that may differ, as a share.")
@click.option(
    "--max-logit-loss", type=_SHARE, help="Largest logit difference, in their standard deviations."
)
@click.option("--max-perplexity-loss", type=_SHARE, help="Rise on --text, as a share.")
@click.option("--max-vector-loss", type=_SHARE, help="Largest 1 - cosine of an embedding.")
@proof_option
@needs("export", "cpu")
def export(checkpoint: Path | str, out: Path, text: Path | None, **typed: Any) -> None:
    """Export CHECKPOINT to a package that `tokenweir serve` can run.

    A directory of Hugging Face, or ORG/NAME[@REVISION] of its Hub, is imported first.

    Compares the exported model with the eager one over prompts, lengths, batches, paddings and
    chunkings: it may lose no more against float64 than PyTorch itself does in the same type. Else
    nothing is written, and the place of the first difference is printed.

    \b
    int8         an 8-bit scale for each output, and for each row at its input
    int8-fixed   all rows of an input have one, by its range on --text: faster
    int8-blocks  one for every 32 inputs: more exact, slower for many rows
    int4         4 bits, one for every 32 inputs: smallest, fastest for one row

    --kv-cache int8 uses a quarter of the memory, with a scale for each layer. These formats are
    not equal to the eager model: the certificate says how much they lose, and nothing is
    written if that is more than the --max-...-loss options allow. They default to 0.1, 1, 0.05 and
    0.03; with int4 to 0.3, 4, 0.25 and 0.6. A model with random weights needs --max-token-loss 1.
    """
    from server.packages.build import build_checkpoint

    given = {name: typed.pop(name) for name in list(typed) if name.endswith("_loss")}
    limits = _loss_limits(text, given, **typed)
    with cleaned_up():
        checkpoint = build_checkpoint(checkpoint)
    export_with_progress(checkpoint, out, text=text, limits=limits, **typed)
    click.echo(f"package: {out}")


def _loss_limits(
    text: Path | None,
    limits: Mapping[str, float | None],
    *,
    target: Target,
    precision: Precision,
    weights: Weights | None,
    kv_cache: CacheDtype | None,
    **_: str | None,
) -> LossLimits:
    """Return what a package of this format may lose; UsageError if it loses nothing."""
    from engine.package.manifest import PackageFormat
    from exporter.prover.loss import DEFAULT_LIMITS

    given = {name: value for name, value in limits.items() if value is not None}
    form = PackageFormat.of(target, precision, weights, kv_cache)
    if not form.is_lossy and (given or text):
        raise click.UsageError(
            f"{form} loses nothing: give --weights or --kv-cache, or no --text and --max-...-loss"
        )
    return replace(DEFAULT_LIMITS[form.weights], **given)


def export_with_progress(checkpoint: Path, out: Path, **options: Any) -> None:
    """Export as `export_package` does, show the progress, print the certificate."""
    configure_openmp()  # before torch is loaded
    from exporter.export import export_package

    with _comparing(f"interrupted: nothing was written to {out}") as progress:
        manifest = export_package(checkpoint, out, progress=progress, **options)
    print_table(certificate_table(manifest, manifest.certificate))


@click.command(
    epilog=examples(
        "tokenweir verify packages/dates checkpoints/dates",
        "tokenweir verify packages/gpt2 checkpoints/gpt2 --device cuda",
    ),
)
@click.argument("package", type=package_path)
@click.argument("checkpoint", type=checkpoint_path)
@text_option
@click.option(
    "--device",
    type=click.Choice(["cuda"]),
    help="Compare on the GPU, and write what is found there into PACKAGE.",
)
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1),
    help="Sequences that a worker on the GPU decodes at once.  "
    "[default: as many as it has memory for, up to 256]",
)
@engine_option("decode_buckets")
@engine_option("gpu_memory_utilization")
@needs("export", "cpu")
def verify(
    package: Path,
    checkpoint: Path,
    text: Path | None,
    device: Device | None,
    max_num_seqs: int | None,
    decode_buckets: tuple[int, ...],
    gpu_memory_utilization: float,
) -> None:
    """Check the files of PACKAGE, and compare it with CHECKPOINT once more as `export` does.

    Its certificate has to be reproduced. The last line says so, and names the versions that PACKAGE
    was made with where others are installed here.

    With --device cuda it is compared on the GPU of this machine, in decode calls as a worker makes
    them there, and the result becomes part of its certificate: a worker serves it on a GPU of that
    name, with that onnxruntime and that number of rows. If it fails, PACKAGE stays as it was.
    """
    from engine.package.package import read_manifest

    manifest = read_manifest(package)
    if device is None and (given := list(_given_for_device())):
        verb = "goes" if len(given) == 1 else "go"
        raise click.UsageError(f"{' and '.join(given)} {verb} with --device cuda")
    if text and (device or manifest.certificate.loss is None):
        what = "is compared on a GPU without it" if device else "loses nothing"
        raise click.UsageError(f"{package} {what}; leave out --text")
    if device is None:
        _verify_graphs(package, checkpoint, text)
        return
    config = EngineConfig(
        max_num_seqs=max_num_seqs or max(decode_buckets, default=0),
        device=device,
        gpu_memory_utilization=gpu_memory_utilization,
        decode_buckets=decode_buckets,
    )
    config.device_for(manifest.target)  # refuses one for another target, and without a GPU
    verify_device_with_progress(package, checkpoint, config)


def _given_for_device() -> Iterator[str]:
    context = click.get_current_context()
    for name in ("max_num_seqs", "decode_buckets", "gpu_memory_utilization"):
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            yield f"--{name.replace('_', '-')}"


def _verify_graphs(package: Path, checkpoint: Path, text: Path | None) -> None:
    configure_openmp()  # before torch is loaded
    from exporter.verification import verify_package

    with _comparing(f"interrupted: {package} is as it was") as progress:
        found = verify_package(package, checkpoint, text=text, progress=progress)
    print_table(certificate_table(found.package.manifest, found.certificate))
    click.echo(found.summary())


def verify_device_with_progress(package: Path, checkpoint: Path, config: EngineConfig) -> None:
    """Verify on the GPU, show the progress, print the certificate."""
    from engine.cuda.device import open_device

    open_device()  # fails before anything is loaded or read
    configure_openmp()  # before torch is loaded
    from exporter.verify_device import verify_on_device

    with _comparing(f"interrupted: {package} is as it was") as progress:
        found = verify_on_device(package, checkpoint, config, progress=progress)
    print_table(device_table(found.package.manifest, found.certificate))
    click.echo(found.summary())


@contextmanager
def _comparing(last_word: str) -> Iterator[Tell]:
    """Show the progress of a block that ends soon after a signal, even amid a computation."""
    with cleaned_up(), ended_soon(last_word, remove_own_directories):
        with show_progress("Comparing with PyTorch") as progress:
            yield progress
