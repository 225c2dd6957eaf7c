"""Shared access tokens: what a client presents in place of its key, in the format of Service Bus.

    SharedAccessSignature sr=<resource>&sig=<signature>&se=<expiry>&skn=<key name>

The signature is the HMAC-SHA256, under the key, of the URL-encoded resource, a newline and the
expiry in seconds since 1970. Clients sign tokens; servers parse them and check the signature.
"""

import base64
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import quote_plus, unquote_plus, urlsplit

from twinbus.connection.strings import ConnectionString
from twinbus.errors import UnauthorizedError
from twinbus.limits import MAX_TOKEN_CHARACTERS, SECOND_US

_MANAGEMENT = "/$management"
_SCHEME = "SharedAccessSignature "


@dataclass(frozen=True, slots=True)
class Token:
    """The values of a token; its signature and its expiry are not checked yet."""

    resource: str  # as it was signed: URL-encoded
    path: str  # within the namespace; empty: the whole namespace
    key_name: str
    expires_s: int
    signature: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the values of a token, or raise an error that says what is wrong."""
        known = isinstance(text, str) and text.isascii() and text.startswith(_SCHEME)
        if not known or len(text) > MAX_TOKEN_CHARACTERS:
            raise UnauthorizedError(
                "The token is not a SharedAccessSignature of at most "
                f"{MAX_TOKEN_CHARACTERS} characters. Sign a new one with the key."
            )
        found = dict(
            piece.partition("=")[::2] for piece in text.removeprefix(_SCHEME).strip().split("&")
        )
        try:
            return cls(
                found["sr"],
                _path_in(found["sr"]),
                unquote_plus(found["skn"]),
                int(found["se"]),
                base64.b64decode(unquote_plus(found["sig"]), validate=True),
            )
        except (KeyError, ValueError) as error:
            raise UnauthorizedError(
                "The token has a missing or malformed part. It must have sr, sig, se and skn."
            ) from error

    def is_signed_with(self, key: str) -> bool:
        """Whether this key made the signature; takes the same time for every key."""
        import hmac  # noqa: PLC0415 - see _signature

        return hmac.compare_digest(self.signature, _signature(self.resource, self.expires_s, key))

    def is_expired(self, now_us: int) -> bool:
        """Whether the token has expired."""
        return self.expires_s * SECOND_US <= now_us


def _path_in(resource: str) -> str:
    """Return the path that a token is for.

    Some SDKs of Service Bus sign a token for the management node of an entity. Such a token counts
    as a token for the entity itself.
    """
    path = urlsplit(unquote_plus(resource)).path.strip("/")
    return path[: -len(_MANAGEMENT)] if path.lower().endswith(_MANAGEMENT) else path


def _signature(resource: str, expires_s: int, key: str) -> bytes:
    import hmac  # noqa: PLC0415 - loads OpenSSL, which only signing and checking tokens need

    return hmac.digest(key.encode(), f"{resource}\n{expires_s}".encode(), "sha256")


def sign_token(resource: str, key_name: str, key: str, expires_s: int) -> str:
    """Return a token for a resource such as `twinbus://host/orders`."""
    quoted = quote_plus(resource)
    signature = base64.b64encode(_signature(quoted, expires_s, key)).decode()
    signed = f"sr={quoted}&sig={quote_plus(signature)}&se={expires_s}"
    return f"{_SCHEME}{signed}&skn={quote_plus(key_name)}"


def token_for(connection: ConnectionString, expires_s: int) -> str:
    """Return a token for the entity or the namespace of a connection string."""
    resource = f"twinbus://{connection.host}/{connection.entity_path or ''}"
    return sign_token(resource, connection.key_name, connection.key, expires_s)
