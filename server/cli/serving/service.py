"""The command that serves packages."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine.config import EngineConfig
from engine.distributions import check_cuda_distribution
from engine.errors import PackageError
from server.cli.exit_codes import FAILED, CommandError
from server.cli.extras import check_extras, needs
from server.cli.interruption import cleaned_up
from server.cli.options import ModelPath, checkpoint_path, examples
from server.cli.serving.setting_options import (
    is_given,
    prints_settings,
    setting_options,
    settings_of,
)
from server.given_settings import GivenSettings
from server.packages.address import is_remote
from server.process import prepare_to_relay
from server.ray.address import check_gateways_find
from server.ray.thread import RayLost
from server.settings import MAX_REPLICAS, Log, Settings
from server.telemetry.logs import log_to_stderr

if TYPE_CHECKING:
    from engine.package.manifest import Target
    from server.ray.serving import Service

_BOUNDS = ("min_replicas", "max_replicas")


@click.command(
    epilog=examples(
        "tokenweir serve packages/dates",
        "tokenweir serve packages/dates packages/digits --replicas 2 --port 50051",
        "tokenweir serve --model iso=packages/dates --min-replicas 1 --max-replicas 4",
        "tokenweir serve s3://models/dates --require-signature key.pub",
        "tokenweir serve packages/gpt2 --verify checkpoints/gpt2",
        "tokenweir serve downloads/opus-mt openai-community/gpt2 --weights int8",
        "tokenweir serve --config serve.toml --print-config",
    ),
)
@click.argument(
    "packages",
    nargs=-1,
    type=ModelPath("package", "checkpoint", "original", "name", may_be_url=True),
    metavar="[MODEL]...",
)
@click.option(
    "--model",
    "named",
    multiple=True,
    metavar="NAME=MODEL",
    help="Serve a model under another name than its own; may be repeated.",
)
@click.option(
    "--replicas", type=click.IntRange(1, MAX_REPLICAS), help="Worker processes.  [default: 1]"
)
@click.option(
    "--verify",
    "checkpoint",
    type=checkpoint_path,
    metavar="CHECKPOINT",
    help="Verify the PACKAGE first, where it is to run, and serve it only if that succeeds.",
)
@click.option(
    "--rehash",
    is_flag=True,
    help="Hash all files of a MODEL to see whether its package was built from them.",
)
@setting_options("serve")
@needs("serve", "cpu")
def serve(
    packages: tuple[Path | str, ...],
    named: tuple[str, ...],
    replicas: int | None,
    checkpoint: Path | None,
    rehash: bool,
    given: GivenSettings,
) -> None:
    """Serve one or more MODELs over gRPC until SIGTERM or Ctrl-C.

    A MODEL is the directory of a package, or its address, such as s3://, gs://, https:// or
    file://, which every node fetches once. A checkpoint, a directory of Hugging Face or
    ORG/NAME[@REVISION] of its Hub becomes one first, which is kept for the next start.

    Starts a local Ray with the workers, or joins the cluster at RAY_ADDRESS, and opens one public
    port in front of them. A worker that dies is replaced. A second Ctrl-C does not wait for
    running requests. If other machines can call, it requires a certificate and authentication.
    """
    if replicas is not None:
        if any(is_given(f"engine__{name}") for name in _BOUNDS):
            raise click.UsageError("give --replicas, or --min-replicas and --max-replicas")
        for name in _BOUNDS:
            given.give(f"engine.{name}", replicas, "--replicas")
    if packages or named or not (given["packages.models"].value or prints_settings()):
        given.give("packages.models", collect_models(packages, named), "the command line")
    config = settings_of(given, is_served=True)
    check_gateways_find(has_gateway=config.listen.gateway)
    prepare_to_relay()  # before anything imports gRPC
    if config.http.port is not None:
        check_extras("http")
    config = _with_packages(config, rehash)
    if checkpoint is not None:
        from server.gateway.authenticator import check_access

        check_access(config)  # fails before minutes of comparing
        _verify(config.packages.models, checkpoint, config)
    low = config.engine.min_replicas
    say(f"starting {low} worker{'s' if low > 1 else ''} ...", config.log)
    serve_until_ended(config)
    say("stopped", config.log)


def _with_packages(config: Settings, rehash: bool) -> Settings:
    """Build the packages of those models that have none."""
    from engine.package.recognised import recognise
    from server.gateway.authenticator import check_access
    from server.packages.build import BuildOptions, build_package, is_package

    models, weights = config.packages.models, config.packages.weights
    sources = [given for given in models.values() if not is_package(given)]
    if sources and config.packages.require_signature is not None:
        raise PackageError(
            f"{sources[0]} is no package, and with --require-signature signed packages alone are "
            "served; make one with `tokenweir export`, and sign it with `tokenweir sign`"
        )
    if sources:
        are_ours = all(recognise(given).stage == "checkpoint" for given in sources)
        check_extras("serve", "cpu", "export", *(() if are_ours else ("import",)))
        check_access(config)  # fails before minutes of building
    options = BuildOptions(weights, config.engine.device, rehash)
    with cleaned_up():
        built = {
            name: build_package(given, options, lambda text: say(text, config.log))
            for name, given in models.items()
        }
    return replace(config, packages=replace(config.packages, models=built))


def say(text: str, config: Log) -> None:
    """Print a line for the user of a command, in the form of its log."""
    if config.format == "text":
        return click.echo(text, err=True)
    log_to_stderr(config)
    logging.getLogger(__name__).info(text)


def _verify(models: Mapping[str, Path | str], checkpoint: Path, config: Settings) -> None:
    """Verify the only package as its workers will run it."""
    from server.packages.pinned import pin

    if len(models) > 1:
        raise click.UsageError(
            f"--verify is for one package, here are {len(models)}; run `tokenweir verify` for each"
        )
    (package,) = models.values()
    pinned = pin(package, config.packages.require_signature)
    target = pinned.manifest.target
    engine = config.for_targets([target]).engine_config
    if engine.device_for(target) == "cuda":
        _check_may_be_written(package, config, engine)
        check_cuda_distribution()
    with cleaned_up():
        path = pinned.load(config.packages.cache).path
        verify_apart(path, checkpoint, target, engine)


def verify_apart(package: Path, checkpoint: Path, target: Target, config: EngineConfig) -> None:
    """Compare a package with its checkpoint where an engine with these settings runs it.

    A process of its own gives back what it takes of a GPU; it prints what `tokenweir verify`
    prints. Raises CommandError if it fails.
    """
    from engine.cuda.certificate import verify_options
    from server.packages.build import COMMAND

    options = verify_options(config) if config.device_for(target) == "cuda" else []
    command = [*COMMAND, "verify", str(package), str(checkpoint), *options]
    code = subprocess.run(command).returncode
    if code:
        raise CommandError(
            f"{package} was not shown to match {checkpoint}, so it is not served",
            code if code > 0 else FAILED,
        )


def _check_may_be_written(package: Path | str, config: Settings, engine: EngineConfig) -> None:
    """Raise UsageError for a package that is not served with what is written into it on a GPU."""
    from engine.cuda.certificate import verify_options

    if is_remote(package):
        why, last = f"{package} is fetched as it was before", "put the package there again"
    elif config.packages.require_signature is not None:
        why, last = f"what was signed of {package} is what it was before", "sign the package again"
    else:
        return
    command = " ".join(["tokenweir verify PACKAGE CHECKPOINT", *verify_options(engine)])
    raise click.UsageError(
        f"--verify on a GPU writes into the package, and {why}; run `{command}` first, and {last}"
    )


def serve_until_ended(config: Settings) -> None:
    """Serve until a signal ends it; where Ray is lost, say so and end this process at once.

    The caller has prepared this process to relay, before anything imported gRPC.
    """
    from server.ray.serving import serve_models

    log_to_stderr(config.log)
    with cleaned_up():
        try:
            serve_models(
                config, lambda service: announce(service, config.packages.models, config.log)
            )
        except RayLost as error:
            click.echo(f"error: {error}; start the command again", err=True)
            os._exit(FAILED)  # the rest of Ray in this process would keep it forever


def announce(service: Service, models: Iterable[str], log: Log) -> None:
    """Print where the models are served, and where the server is operated."""
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
    from engine.package.recognised import recognise
    from server.packages.build import is_package
    from server.packages.pinned import manifest_at

    pairs: list[tuple[str, Path | str]] = []
    for pair in named:
        name, _, given = pair.partition("=")
        if not name or not given:
            raise click.UsageError(f"--model {pair!r} is not NAME=PATH")
        is_path = "://" not in given and os.path.lexists(given)
        pairs.append((name, Path(given) if is_path else given))
    if not packages and not pairs:
        raise click.UsageError("give at least one MODEL, or --model NAME=PATH")
    pairs = [
        (manifest_at(one).name if is_package(one) else recognise(one).name, one) for one in packages
    ] + pairs
    models: dict[str, Path | str] = {}
    for name, path in pairs:
        if name in models:
            raise click.UsageError(
                f"both {models[name]} and {path} would be model {name!r}; "
                f"name one of them: --model OTHER={path}"
            )
        if isinstance(path, Path):
            models[name] = path.resolve()
        else:  # a name has its prefix, which it needs in a file of settings
            found = recognise(path)
            models[name] = f"hf://{found.given}" if found.stage == "name" else path
    return models
