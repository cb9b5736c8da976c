"""The settings that a command was given: by a file, and by options, which win."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from server.cli.door_options import DOOR_OPTIONS
from server.cli.options import existing_file
from server.identity.config import CERTIFICATES

if TYPE_CHECKING:
    from server.settings import Settings

config_option = click.option(
    "--config",
    "file",
    type=existing_file,
    metavar="FILE",
    help="Settings in TOML, all that there are; options win over them.",
)
print_config_option = click.option(
    "--print-config",
    is_flag=True,
    help="Print every setting and where it comes from, as a FILE for --config; serve nothing.",
)

# The settings that have an option, by its name as a parameter.
SETTING_OF_OPTION: Mapping[str, str] = MappingProxyType(
    {
        **{
            name: f"serve.{name}"
            for name in (
                "host",
                "port",
                "http_port",
                "min_replicas",
                "max_replicas",
                "target_live_requests",
                "num_gpus_per_replica",
                "grace",
                "name",
                "package_cache",
                "require_signature",
            )
        },
        **{
            name: f"engine.{name}"
            for name in (
                "max_num_seqs",
                "max_step_seconds",
                "device",
                "gpu_memory_utilization",
                "decode_buckets",
            )
        },
        **{name: f"gateway.doors.{name}" for name in DOOR_OPTIONS},
        "prefix_affinity": "gateway.prefix_affinity",
        "threads": "engine.num_threads",
        "gateway": "serve.with_gateway",
        "crowded_calls": "gateway.crowded_calls_per_worker",
        "metrics_port": "metrics.port",
        "metrics_host": "metrics.host",
        "otlp_endpoint": "tracing.endpoint",
        "log_level": "log.level",
        "log_format": "log.format",
    }
)

_OPTION_OF_FRONT: Mapping[str, str] = MappingProxyType(
    {
        "host": "serve.host",
        "grace": "serve.grace",
        **{f"listen_{name}": f"gateway.doors.{name}" for name in CERTIFICATES},
        "insecure": "gateway.doors.insecure",
        "log_level": "log.level",
        "log_format": "log.format",
    }
)
# The same of the commands that serve beside it or in front.
SETTINGS_OF_COMMAND: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "serve": SETTING_OF_OPTION,
        "gateway": SETTING_OF_OPTION,
        "http": {
            **_OPTION_OF_FRONT,
            "port": "serve.http_port",
            "timeout": "http.timeout",
            "max_body_bytes": "http.max_body_bytes",
        },
        "kserve": {
            **_OPTION_OF_FRONT,
            "port": "kserve.port",
            "timeout": "kserve.timeout",
            "max_request_bytes": "kserve.max_request_bytes",
        },
    }
)


def settings_of(command: str, file: Path | None, options: Mapping[str, Any]) -> Settings:
    """Return the settings of a file, and of those options of a command that were in fact given."""
    from server.settings import Settings

    settings = Settings(command)
    if file is not None:
        settings.read(file)
    for name, value in options.items():
        if is_given(name):
            setting = SETTINGS_OF_COMMAND[command][name]
            settings.give(setting, value, f"--{name.replace('_', '-')}")
    return settings


def print_settings(settings: Settings) -> None:
    """Print them as a file, which is UTF-8 in every locale."""
    click.echo("\n".join(settings.lines()).encode())


def is_given(option: str) -> bool:
    """Say whether an option of the running command was typed, or is in the environment."""
    source = click.get_current_context().get_parameter_source(option)
    return source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
