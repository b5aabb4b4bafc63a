"""TLS: the server's certificate, and who must show one; read again without dropping a call."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dualform.serve.config import ConfigError, TlsFiles

_LOG = logging.getLogger("dualform.serve")


@dataclass(frozen=True)
class _Pems:
    """The files' contents."""

    key: bytes
    chain: bytes
    client_ca: bytes | None


class Certificates:
    """What new connections are shown; those there are stay as they are.

    Args:
        files: Where the PEM files are.

    Raises:
        ConfigError: A file cannot be read, or key and certificate do not belong together.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._pems = _read(files)

    def reload(self, files: TlsFiles) -> None:
        """Read the files again, or others. Whether clients must show one stays as it was.

        Raises:
            ConfigError: As above; what was read before stays in force.
        """
        if (files.client_ca is None) != (self._files.client_ca is None):
            raise ConfigError("turning tls.client_ca on or off takes a restart")
        self._files, self._pems = files, _read(files)

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC, which asks for the certificate anew at each connection."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            self._configuration,
            require_client_authentication=self._files.client_ca is not None,
        )

    def _configuration(self) -> Any:
        pems = self._pems
        return grpc.ssl_server_certificate_configuration(
            [(pems.key, pems.chain)], root_certificates=pems.client_ca
        )


def _read(files: TlsFiles) -> _Pems:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _usable("tls.certificate and tls.key", files.certificate, files.key)
    try:
        # The empty password: an encrypted key is an error, not a question on the terminal.
        context.load_cert_chain(files.certificate, files.key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"tls.certificate {files.certificate} and tls.key {files.key} are no PEM files of one "
            f"pair: {error}; the key must not be encrypted"
        ) from None
    if files.client_ca is not None:
        _usable("tls.client_ca", files.client_ca)
        try:
            context.load_verify_locations(files.client_ca)
        except ssl.SSLError as error:
            raise ConfigError(
                f"tls.client_ca {files.client_ca} holds no certificate in PEM: {error}"
            ) from None
    return _Pems(
        files.key.read_bytes(),
        files.certificate.read_bytes(),
        None if files.client_ca is None else files.client_ca.read_bytes(),
    )


def _usable(key: str, *paths: Path) -> None:
    for path in paths:
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from None
