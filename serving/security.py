"""TLS and bearer tokens, for both ends of a channel."""

import dataclasses
import hmac
import os
import pathlib
import re
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from absl import logging

_OPEN = "/grpc.health.v1.Health/"  # probes have no token
_TOKEN = re.compile(rb"[A-Za-z0-9\-._~+/]+=*")  # RFC 6750
# By whether responses are a stream. Of requests, so that a refusal waits for none.
_HANDLERS = {False: grpc.stream_unary_rpc_method_handler,
             True: grpc.stream_stream_rpc_method_handler}


def _read(name: str, path: str) -> bytes:
    """Raises ValueError naming what the file is for."""
    try:
        data = pathlib.Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ValueError(f"{name} {path} cannot be read: {error.strerror}") from None
    if not data.strip():
        raise ValueError(f"{name} {path} is empty")
    return data


def _check_together(certificate: str | None, key: str | None) -> None:
    if (certificate is None) != (key is None):
        raise ValueError("tls_certificate and tls_key must be given together")


class _Watched[Value]:
    """What a file holds; read again when it has changed, so that it can be replaced while
    the server runs. A file that has become bad leaves what was read before."""

    def __init__(self, paths: tuple[str, ...], parse: Callable[[], Value]):
        self._paths = paths
        self._parse = parse
        self._seen = self._stamp()
        self.value = parse()

    def changed(self) -> bool:
        """Whether ``value`` is another one since the last call."""
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            self.value = self._parse()
        except ValueError as error:
            logging.error("not taken over: %s", error)
            return False
        logging.info("read again: %s", ", ".join(self._paths))
        return True

    def _stamp(self) -> tuple[object, ...]:
        stamps: list[object] = []
        for path in self._paths:
            try:
                stat = os.stat(os.path.expanduser(path))
            except OSError:
                stamps.append(None)
            else:
                stamps.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return tuple(stamps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSecurity:
    """How a server proves who it is, and whom it answers. All files are PEM and are read
    again when they change.

    Attributes:
      certificate, key: of the server; both or none, and then no TLS.
      client_ca: clients must have a certificate that this one signed.
      tokens: a file of tokens, one a line; a call must bring one of them as
        ``authorization: Bearer TOKEN``. The health service asks for none.

    Raises:
      ValueError: a combination makes no sense.
    """

    certificate: str | None = None
    key: str | None = None
    client_ca: str | None = None
    tokens: str | None = None

    def __post_init__(self) -> None:
        _check_together(self.certificate, self.key)
        if self.client_ca is not None and self.certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")

    def credentials(self) -> grpc.ServerCredentials | None:
        """None without TLS. Raises ValueError on files that cannot be used."""
        if self.certificate is None or self.key is None:
            return None
        paths = (self.certificate, self.key, *filter(None, [self.client_ca]))
        watched = _Watched(paths, self._configuration)

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            return watched.value if watched.changed() else None

        return grpc.dynamic_ssl_server_credentials(
            watched.value, fetch, require_client_authentication=self.client_ca is not None)

    def check(self) -> None:
        """Raises ValueError on files that cannot be used."""
        self.credentials()
        self.interceptors()

    def interceptors(self) -> tuple[grpc.aio.ServerInterceptor, ...]:
        return () if self.tokens is None else (_TokenCheck(self.tokens),)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        assert self.certificate is not None and self.key is not None
        certificate, key = _read("tls_certificate", self.certificate), _read("tls_key", self.key)
        for name, data in (("tls_certificate", certificate), ("tls_key", key)):
            if b"-----BEGIN " not in data:
                raise ValueError(f"{name} must be a PEM file")
        # gRPC would only say that it cannot listen. OpenSSL reads the files themselves.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key)
        except ssl.SSLError as error:
            raise ValueError(f"tls_certificate {self.certificate} and tls_key {self.key} are no "
                             f"pair: {error.reason or error}") from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError as error:
                raise ValueError(f"tls_client_ca {self.client_ca} has no certificate: "
                                 f"{error.reason or error}") from None
        return grpc.ssl_server_certificate_configuration(
            [(key, certificate)],
            None if self.client_ca is None else _read("tls_client_ca", self.client_ca))


class _TokenCheck(grpc.aio.ServerInterceptor):
    """Answers calls without a known token with UNAUTHENTICATED."""

    def __init__(self, path: str):
        def parse() -> tuple[bytes, ...]:
            tokens = tuple(_read("token_file", path).split())
            for number, token in enumerate(tokens):
                if not _TOKEN.fullmatch(token):
                    raise ValueError(f"token_file {path} has a token, number {number + 1}, that no "
                                     "header can carry: letters, digits and -._~+/= may be in it")
            return tokens

        self._tokens = _Watched((path,), parse)

    async def intercept_service(
            self, continuation: Callable[[grpc.HandlerCallDetails],
                                         Awaitable[grpc.RpcMethodHandler]],
            handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method.startswith(_OPEN) or self._knows(handler_call_details):
            return handler

        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> NoReturn:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED,
                                "authorization must be 'Bearer' and a token of this server")
            raise AssertionError  # abort raises

        return _HANDLERS[handler.response_streaming](refuse)

    def _knows(self, details: grpc.HandlerCallDetails) -> bool:
        self._tokens.changed()
        metadata = {str(key): value for key, value in details.invocation_metadata or ()}
        value = metadata.get("authorization", "")
        scheme, _, token = (value if isinstance(value, str) else "").partition(" ")
        given = token.strip().encode()
        # Every one, so that the time tells nothing.
        found = [hmac.compare_digest(given, known) for known in self._tokens.value]
        return scheme.lower() == "bearer" and any(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientSecurity:
    """How a client reaches a server.

    Attributes:
      tls: whether the channel is encrypted and the server must have a certificate.
      ca: file of the certificates to trust; None is gRPC's own list.
      certificate, key: of the client, for a server that asks for one.
      token: sent as ``authorization: Bearer TOKEN``.

    Raises:
      ValueError: a combination makes no sense.
    """

    tls: bool = False
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    token: str | None = None

    def __post_init__(self) -> None:
        _check_together(self.certificate, self.key)
        for name, value in (("tls_ca", self.ca), ("tls_certificate", self.certificate)):
            if value is not None and not self.tls:
                raise ValueError(f"{name} needs tls")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise ValueError("token must be printable ASCII")

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None without TLS. Raises ValueError on files that cannot be read."""
        if not self.tls:
            return None
        return grpc.ssl_channel_credentials(
            None if self.ca is None else _read("tls_ca", self.ca),
            None if self.key is None else _read("tls_key", self.key),
            None if self.certificate is None else _read("tls_certificate", self.certificate))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)


def read_token(path: str) -> str:
    """The first token of a file. Raises ValueError if there is none."""
    return _read("token_file", path).split()[0].decode(errors="replace")


PLAIN_SERVER = ServerSecurity()
PLAIN_CLIENT = ClientSecurity()
