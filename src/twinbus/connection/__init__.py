"""Where a namespace is and who may use it: connection strings and shared access tokens.

    Endpoint=embedded:///var/lib/orders                      in this process, on a directory
    Endpoint=twinbus://host:4617;SharedAccessKeyName=...;SharedAccessKey=...     a server
    Endpoint=twinbus+tls://host:4617;CaFile=/etc/ca.pem;...  a server with TLS
    Endpoint=twinbus+unix:///run/orders/door;...             a server on this machine
    Endpoint=sb://contoso.servicebus.windows.net;...         Azure Service Bus, by its SDK
    Endpoint=amqp://host:5672,host:5672/vhost;UserName=...;Password=...   a RabbitMQ; amqps: TLS

Without `Name`, the name is the first label of the host or the name of the directory; an IP address
has no label. `NamespaceId` is the unique id that a namespace gets when it is created.

A client presents a token in place of the key (tokens.py). No error text and no repr shows a key: an
error names a part of a connection string only if the name is a known one, because a key in the
wrong place looks like a name.
"""

from twinbus.connection.strings import ConnectionString, Place
from twinbus.connection.tokens import Token, sign_token, token_for

__all__ = ["ConnectionString", "Place", "Token", "sign_token", "token_for"]
