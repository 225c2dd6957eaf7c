"""`twinbus dev-certificate`: a certificate for servers on this machine."""

from datetime import UTC, datetime
from pathlib import Path

import click

from twinbus.errors import InvalidOperationError
from twinbus.extras import require_for_command

_TRUST = """\
No program trusts the certificate yet. How to make a program trust {ca}:
  Twinbus clients          CaFile={ca} in the connection string
  azure-servicebus         ServiceBusAdministrationClient.from_connection_string(
                               text, connection_verify="{ca}")
                           or, for the synchronous client: export REQUESTS_CA_BUNDLE={ca}
  @azure/service-bus       export NODE_EXTRA_CA_CERTS={ca}
  .NET and Go on Linux     export SSL_CERT_FILE={ca}
  Java                     keytool -importcert -noprompt -alias twinbus -file {ca}
                               -keystore twinbus.p12 -storepass changeit
                           java -Djavax.net.ssl.trustStore=twinbus.p12
                               -Djavax.net.ssl.trustStorePassword=changeit ...
  curl                     curl --cacert {ca} https://localhost:4617/health
Start a server with it:    twinbus serve DIRECTORY --tls {tls}"""


@click.command(
    "dev-certificate",
    epilog="""\b
Examples:
  twinbus dev-certificate
  twinbus dev-certificate --name laptop.local --folder ./certificate""",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the files [default: a folder of this user, which `serve --tls dev` reads].",
)
@click.option(
    "--name",
    "names",
    multiple=True,
    help="A further host name or address of this machine; repeat it for more.",
)
@click.option("--force", is_flag=True, help="Replace an existing certificate.")
def dev_certificate(folder: Path | None, names: tuple[str, ...], force: bool) -> None:
    """Create a certificate for development, and print how to make each client trust it.

    The certificate is for localhost and valid for a year. Its authority cannot sign anything else,
    because the key of the authority is not stored.
    """
    require_for_command("dev-certificate")
    from twinbus.server import certificates  # noqa: PLC0415 - an extra

    where = (folder or certificates.default_folder()).absolute()
    found = certificates.DevCertificate(where)
    if found.exists and not force:
        raise InvalidOperationError(
            f"{where} already has a certificate, valid until {found.expires_at():%Y-%m-%d}. "
            "Replace it with --force"
        )
    wanted = tuple(dict.fromkeys((*certificates.LOCAL_NAMES, *names)))
    made = certificates.make_certificate(where, wanted, datetime.now(UTC))
    click.echo(f"{made.certificate} is valid for {', '.join(wanted)}")
    click.echo(_TRUST.format(ca=made.ca, tls=where if folder else certificates.DEV))
