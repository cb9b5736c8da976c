"""The command that signs a package."""

from __future__ import annotations

from pathlib import Path

import click

from server.cli.extras import needs
from server.cli.options import examples, existing_directory, existing_file


@click.command(
    short_help="Sign a package.",
    epilog=examples(
        "openssl genpkey -algorithm ed25519 -out key.pem",
        "openssl pkey -in key.pem -pubout -out key.pub",
        "tokenweir sign packages/dates --key key.pem",
        "tokenweir serve packages/dates --require-signature key.pub",
    ),
)
@click.argument("package", type=existing_directory)
@click.option(
    "--key",
    type=existing_file,
    required=True,
    metavar="PEM",
    help="Private key (Ed25519), without a password.",
)
@needs("serve")
def sign(package: Path, key: Path) -> None:
    """Sign the manifest of PACKAGE, which has the hash of every file.

    The signature is beside it, manifest.json.sig. What changes the manifest, such as `tokenweir
    verify --device cuda`, comes before.
    """
    from server.packages.signature import sign as sign_package

    click.echo(f"signature: {sign_package(package, key)}")
