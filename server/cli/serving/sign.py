"""The command that signs a package."""

from __future__ import annotations

from pathlib import Path

import click

from server.cli.extras import needs
from server.cli.options import examples, existing_file, package_path


@click.command(
    epilog=examples(
        "openssl ecparam -genkey -noout -name prime256v1 -out key.pem",
        "openssl pkey -in key.pem -pubout -out key.pub",
        "tokenweir sign packages/dates --key key.pem",
        "tokenweir serve packages/dates --require-signature key.pub",
    ),
)
@click.argument("package", type=package_path)
@click.option(
    "--key",
    type=existing_file,
    required=True,
    metavar="PEM",
    help="Private key (P-256, P-384 or P-521), without a password.",
)
@needs("serve")
def sign(package: Path, key: Path) -> None:
    """Sign PACKAGE: its manifest, and every file by its hash.

    The signature is manifest.sig in the package: ECDSA with SHA-256, detached, as `openssl dgst`
    makes and checks it. Commands that change the manifest, such as `tokenweir verify --device
    cuda`, come before.
    """
    from server.packages.signature import sign as sign_package

    click.echo(f"signature: {sign_package(package, key)}")
