"""The command that serves packages."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from server.cli.door_options import door_options
from server.cli.exit_codes import FAILED
from server.cli.extras import needs
from server.cli.given_settings import (
    config_option,
    is_given,
    print_config_option,
    print_settings,
    settings_of,
)
from server.cli.interruption import cleaned_up
from server.cli.options import (
    ModelPath,
    Number,
    checkpoint_path,
    decode_buckets_option,
    device_option,
    examples,
    existing_file,
    gpu_memory_option,
)
from server.cli.sight_options import sight_options

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from server.config import LogConfig, ServeConfig
    from server.ray.serving import Service
    from server.settings import Settings

_REPLICAS = ("replicas", "min_replicas", "max_replicas")


@click.command(
    short_help="Serve packages over gRPC.",
    epilog=examples(
        "tokenweir serve packages/dates",
        "tokenweir serve packages/dates packages/digits --replicas 2 --port 50051",
        "tokenweir serve --model iso=packages/dates --min-replicas 1 --max-replicas 4",
        "tokenweir serve s3://models/dates --require-signature key.pub",
        "tokenweir serve packages/gpt2 --verify checkpoints/gpt2",
        "tokenweir serve --config serve.toml --print-config",
    ),
)
@click.argument(
    "packages", nargs=-1, type=ModelPath("package", may_be_url=True), metavar="[PACKAGE]..."
)
@click.option(
    "--model",
    "named",
    multiple=True,
    metavar="NAME=PACKAGE",
    help="Serve a package under another name than its own; may be repeated.",
)
@click.option("--replicas", type=click.IntRange(1), help="Worker processes.  [default: 1]")
@click.option("--min-replicas", type=click.IntRange(1), help="Scale between this many ...")
@click.option("--max-replicas", type=click.IntRange(1), help="... and this many, by load.")
@click.option(
    "--target-live-requests",
    type=Number(min=0, min_open=True),
    default=16.0,
    show_default=True,
    help="Live requests per worker that the scaling aims at.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Interface to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=50051,
    show_default=True,
    help="Port of the gateway; 0: any free one.",
)
@click.option(
    "--threads",
    type=click.IntRange(0),
    default=0,
    help="Threads of each worker.  [default: its share of the cores]",
)
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1),
    help="Sequences that a worker decodes at once, per model.  "
    "[default: 32; on a GPU as many as were verified]",
)
@device_option
@gpu_memory_option
@decode_buckets_option
@click.option(
    "--num-gpus-per-replica",
    type=Number(min=0, max=1),
    metavar="SHARE",
    help="GPUs of a worker; with 0.5 two share one.  [default: 1 if a model runs on one]",
)
@click.option(
    "--package-cache",
    type=click.Path(file_okay=False, resolve_path=True, path_type=Path),
    metavar="DIRECTORY",
    help="Of a node, for packages that are fetched.  [default: ~/.cache/tokenweir/packages]",
)
@click.option(
    "--require-signature",
    type=existing_file,
    metavar="PEM",
    help="Serve packages only that this public key has signed; see `tokenweir sign`.",
)
@click.option(
    "--verify",
    "checkpoint",
    type=checkpoint_path,
    metavar="CHECKPOINT",
    help="Verify the PACKAGE first, where it is to run, and serve it only if that goes well.",
)
@click.option(
    "--max-step-seconds",
    type=Number(min=0, min_open=True, allow_inf=True),
    default=8.0,
    show_default=True,
    metavar="SECONDS",
    help="A worker whose model is longer in one step counts as hung and is replaced; a slow model "
    "has four times what a full step takes at the start, where that is more.",
)
@click.option(
    "--crowded-calls",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Calls at a worker of tenants that have more waiting, while another has none: with fewer "
    "it waits less, with more they get more done in a second.",
)
@click.option(
    "--grace",
    type=Number(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Requests in flight at SIGTERM or Ctrl-C get this long to finish.",
)
@click.option(
    "--name",
    default="tokenweir",
    show_default=True,
    help="Name of the service; two on one Ray cluster need two.",
)
@click.option(
    "--gateway/--no-gateway",
    default=True,
    help="With a gateway, or workers only: `tokenweir gateway` then runs those, on a Ray cluster.",
)
@door_options
@click.option(
    "--http-port",
    type=click.IntRange(0, 65535),
    help="Answer OpenAI's protocol over HTTP too, and a page for people; 0: any free port.  "
    "[default: none]",
)
@sight_options
@config_option
@print_config_option
@needs("serve", "cpu")
def serve(
    packages: tuple[Path | str, ...],
    named: tuple[str, ...],
    checkpoint: Path | None,
    file: Path | None,
    print_config: bool,
    **typed: Any,
) -> None:
    """Serve one or more PACKAGEs over gRPC until SIGTERM or Ctrl-C.

    A PACKAGE is a directory, or an address such as s3://, gs://, https:// or file://, which every
    node fetches once.

    Starts a local Ray with the workers, or joins the cluster at RAY_ADDRESS, and opens one public
    port in front of them. A worker that dies is replaced. A second Ctrl-C does not wait for what
    still runs. If other machines can call, it requires a certificate and authentication.
    """
    settings = _settings(file, typed)
    if packages or named or not ("serve.packages" in settings or print_config):
        settings.give("serve.packages", collect_models(packages, named), "the command line")
    if print_config:
        settings.check()
        return print_settings(settings)
    config = settings.config()
    if checkpoint is not None:
        from server.ray.serving import check_doors

        check_doors(config)  # fails before minutes of comparing
        _verify(config.packages, checkpoint, config)
    low = config.min_replicas
    say(f"starting {low} worker{'s' if low > 1 else ''} ...", config.log)
    serve_until_ended(config)
    say("stopped", config.log)


def say(text: str, config: LogConfig) -> None:
    """Tell the user of a command, in the form that its log has."""
    from server.telemetry.logs import log_to_stderr

    if config.format == "text":
        return click.echo(text, err=True)
    log_to_stderr(config)
    logging.getLogger(__name__).info(text)


def _settings(file: Path | None, options: Mapping[str, Any]) -> Settings:
    """Return the settings of a file, and of those options that were in fact given."""
    replicas = {name: options[name] for name in _REPLICAS if is_given(name)}
    _check_replicas(replicas)
    others = {name: options[name] for name in options if name != "replicas"}
    settings = settings_of("serve", file, others)
    if (number := replicas.get("replicas")) is not None:
        settings.give("serve.min_replicas", number, "--replicas")
        settings.give("serve.max_replicas", number, "--replicas")
    _complete(settings)
    return settings


def _complete(settings: Settings) -> None:
    """Give what follows from something else that was given."""
    low, high = (settings[f"serve.{name}_replicas"].value for name in ("min", "max"))
    if low > high and "serve.max_replicas" not in settings:
        settings.give("serve.max_replicas", low, "serve.min_replicas")
    buckets = settings["engine.decode_buckets"].value
    if buckets and "engine.max_num_seqs" not in settings:
        settings.give("engine.max_num_seqs", max(buckets), "engine.decode_buckets")


def _verify(models: Mapping[str, Path | str], checkpoint: Path, config: ServeConfig) -> None:
    """Verify the only package as its workers will run it."""
    from engine.distributions import check_cuda_distribution
    from server.cli.verification import verify_apart
    from server.packages.pinned import pin

    if len(models) > 1:
        raise click.UsageError(
            f"--verify is for one package, here are {len(models)}; run `tokenweir verify` for each"
        )
    (package,) = models.values()
    pinned, manifest = pin(package, config.require_signature)
    engine = config.settled([manifest.target]).engine
    if engine.device_for(manifest.target) == "cuda":
        _check_may_be_written(package, config, engine)
        check_cuda_distribution()
    with cleaned_up():
        path = pinned.load(config.package_cache).path
        verify_apart(path, checkpoint, manifest.target, engine)


def _check_may_be_written(package: Path | str, config: ServeConfig, engine: EngineConfig) -> None:
    """Raise UsageError for a package that is not served with what is written into it on a GPU."""
    from engine.cuda.certificate import verify_options
    from server.packages.address import is_remote

    if is_remote(package):
        why, last = f"{package} is fetched as it was before", "put the package there again"
    elif config.require_signature is not None:
        why, last = f"what was signed of {package} is what it was before", "sign the package again"
    else:
        return
    command = " ".join(["tokenweir verify PACKAGE CHECKPOINT", *verify_options(engine)])
    raise click.UsageError(
        f"--verify on a GPU writes into the package, and {why}; run `{command}` first, and {last}"
    )


def serve_until_ended(config: ServeConfig) -> None:
    """Serve until a signal ends it; where Ray is lost, say so and end this process at once."""
    from server.ray.serving import serve_models
    from server.ray.thread import RayLost
    from server.telemetry.logs import log_to_stderr

    log_to_stderr(config.log)
    with cleaned_up():
        try:
            serve_models(config, lambda service: announce(service, config.packages, config.log))
        except RayLost as error:
            click.echo(f"error: {error}; start the command again", err=True)
            os._exit(FAILED)  # the rest of Ray in this process would keep it forever


def announce(service: Service, models: Iterable[str], log: LogConfig) -> None:
    """Say where the models are served, and where the server is operated."""
    if service.admin_address is not None:
        say(f"operated on {service.admin_address}", log)
    if service.http_url is not None:
        say(f"answering OpenAI's protocol at {service.http_url}/v1", log)
    where = f"on {service.address}" if service.address else "to gateways of this Ray cluster"
    click.echo(f"serving {', '.join(models)} {where}; Ctrl-C stops")


def collect_models(
    packages: tuple[Path | str, ...], named: tuple[str, ...]
) -> dict[str, Path | str]:
    """Return the packages to serve by model name; UsageError if a name is missing or double."""
    pairs = [_split_pair(pair) for pair in named]
    if not packages and not pairs:
        raise click.UsageError("give at least one PACKAGE, or --model NAME=PATH")
    from server.packages.pinned import manifest_at

    pairs = [(manifest_at(address).name, address) for address in packages] + pairs
    models: dict[str, Path | str] = {}
    for name, path in pairs:
        if name in models:
            raise click.UsageError(
                f"both {models[name]} and {path} would be model {name!r}; "
                f"name one of them: --model OTHER={path}"
            )
        models[name] = path.resolve() if isinstance(path, Path) else path
    return models


def _split_pair(pair: str) -> tuple[str, Path | str]:
    name, equals, path = pair.partition("=")
    if not name or not equals or not path:
        raise click.UsageError(f"--model {pair!r} is not NAME=PATH")
    return name, path if "://" in path else Path(path)


def _check_replicas(given: Mapping[str, Any]) -> None:
    low, high = given.get("min_replicas"), given.get("max_replicas")
    if "replicas" in given and (low is not None or high is not None):
        raise click.UsageError("give --replicas, or --min-replicas and --max-replicas")
    if low is not None and high is not None and low > high:
        raise click.UsageError(f"--min-replicas ({low}) is above --max-replicas ({high})")
