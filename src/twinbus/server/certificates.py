"""A certificate for development: `twinbus dev-certificate`, and `twinbus serve --tls dev`.

    ca.pem            the certificate of an authority; programs that must trust the server read it
    certificate.pem   the server's certificate, signed by the authority
    key.pem           the server's key

The authority signs one certificate, for names of this machine. Its private key is never written, so
nobody can sign another certificate with it. A program trusts the authority only if it is
configured with ca.pem. All files are readable by their owner only.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_address, ip_network
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from twinbus.errors import InvalidArgumentError
from twinbus.files import alone_in, make_private, write_all_whole
from twinbus.limits import CLOCK_SKEW, DEV_CERTIFICATE_LIFE

DEV = "dev"  # the value of --tls that means the default folder
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class DevCertificate:
    """The files of a certificate for development."""

    folder: Path

    @property
    def ca(self) -> Path:
        """The file that programs read to trust the server."""
        return self.folder / "ca.pem"

    @property
    def certificate(self) -> Path:
        """The certificate that the server presents."""
        return self.folder / "certificate.pem"

    @property
    def key(self) -> Path:
        """The private key of the server."""
        return self.folder / "key.pem"

    @property
    def exists(self) -> bool:
        """Whether all files exist."""
        return all(path.is_file() for path in (self.ca, self.certificate, self.key))

    def expires_at(self) -> datetime:
        """Return when the certificate expires."""
        try:
            certificate = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(
                f"{self.certificate} cannot be read as a certificate: {error}. Make a new one with "
                "`twinbus dev-certificate --force`"
            ) from error
        return certificate.not_valid_after_utc


def default_folder() -> Path:
    """Return the folder of this user's certificate."""
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "twinbus" / "dev-certificate"


def folder_of(wanted: str) -> Path:
    """Return the folder that the value of --tls means."""
    return default_folder() if wanted == DEV else Path(wanted)


def ready_certificate(folder: Path, now: datetime) -> DevCertificate:
    """Return the certificate in a folder, creating it if missing; refuse an expired one."""
    found = DevCertificate(folder)
    if not found.exists:
        make_private(folder)
        with alone_in(folder):  # another server may start with the same folder now
            if not found.exists:
                make_certificate(folder, LOCAL_NAMES, now)
    if found.expires_at() <= now:
        raise InvalidArgumentError(
            f"{found.certificate} has expired. Make a new one with `twinbus dev-certificate "
            "--force`, and have the programs that trusted the old ca.pem trust the new one"
        )
    return found


def make_certificate(folder: Path, names: Sequence[str], now: datetime) -> DevCertificate:
    """Create an authority and a certificate for names and addresses; overwrite existing files."""
    made = DevCertificate(folder)
    alternatives = [_alternative(name) for name in names]
    subject = _name(f"Twinbus development server on {names[0]}")
    authority = _name(f"Twinbus development authority of {now:%Y-%m-%d %H:%M:%S}")
    authority_key = ec.generate_private_key(ec.SECP256R1())
    server_key = ec.generate_private_key(ec.SECP256R1())
    ca = _sign(
        _builder(authority, authority_key, now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.NameConstraints(_permitted(alternatives), None), critical=True),
        authority,
        authority_key,
    )
    certificate = _sign(
        _builder(subject, server_key, now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        ),
        authority,
        authority_key,
    )
    private = server_key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    make_private(folder)
    write_all_whole(
        {
            made.ca: lambda file: file.write(_pem(ca)),
            made.certificate: lambda file: file.write(_pem(certificate) + _pem(ca)),
            made.key: lambda file: file.write(private),
        }
    )
    return made


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{name!r:.80} is not a host name: {error} Give a host name in ASCII, or an IP address"
        ) from None


def _permitted(alternatives: Sequence[x509.GeneralName]) -> list[x509.GeneralName]:
    """Return the names that the authority may sign for."""
    return [
        x509.IPAddress(ip_network(name.value)) if isinstance(name, x509.IPAddress) else name
        for name in alternatives
    ]


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime
) -> x509.CertificateBuilder:
    start = now.astimezone(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - CLOCK_SKEW)
        .not_valid_after(start + DEV_CERTIFICATE_LIFE)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _sign(
    builder: x509.CertificateBuilder, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    return builder.issuer_name(issuer).sign(key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
