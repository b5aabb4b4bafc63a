"""TLS: the server's certificate, and who must show one; read again without dropping a call."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dualform.serve.config import ConfigError, TlsFiles, read_small

_MARK = re.compile(rb"^---.*", re.MULTILINE)
_BEGIN, _END = rb"-----BEGIN ", rb"-----END "


@dataclass(frozen=True)
class _Pems:
    """The files' contents, which belong together."""

    chain: bytes
    key: bytes
    client_ca: bytes | None


class Certificates:
    """What new connections are shown; those there are stay as they are.

    Attributes:
        context: The same for servers that are not gRPC's; another one after each `reload`.

    Args:
        files: Where the PEM files are.

    Raises:
        ConfigError: A file cannot be read or is torn, key and certificate do not belong together,
            or the certificate is not valid now.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._pems, self.context = _read(files)

    def reload(self, files: TlsFiles) -> None:
        """Read the files again, or others. Whether clients must show one stays as it was.

        Raises:
            ConfigError: As above; what was read before stays in force.
        """
        if (files.client_ca is None) != (self._files.client_ca is None):
            raise ConfigError("turning tls.client_ca on or off takes a restart")
        self._pems, self.context = _read(files)
        self._files = files

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


def _read(files: TlsFiles) -> tuple[_Pems, ssl.SSLContext]:
    pems = _contents(files)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # The empty password: an encrypted key is an error, not a question on the terminal.
        context.load_cert_chain(files.certificate, files.key, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tls.certificate {files.certificate} and tls.key {files.key} are no PEM files of one "
            f"pair: {error}; the key must not be encrypted"
        ) from None
    _check_whole("tls.certificate", files.certificate, pems.chain)
    if files.client_ca is not None and pems.client_ca is not None:
        _check_whole("tls.client_ca", files.client_ca, pems.client_ca)
        try:
            context.load_verify_locations(cadata=pems.client_ca.decode("ascii", "ignore"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"tls.client_ca {files.client_ca} holds no certificate in PEM: {error}"
            ) from None
    if pems != _contents(files):
        raise ConfigError(
            "the files of tls changed while they were read: reload once they are whole"
        )
    _check_valid_now(files.certificate, pems.chain, context)
    if files.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        # A session that is taken up again shows no certificate, whoever is trusted by then.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
    return pems, context


def _contents(files: TlsFiles) -> _Pems:
    return _Pems(
        read_small("tls.certificate", files.certificate),
        read_small("tls.key", files.key),
        None if files.client_ca is None else read_small("tls.client_ca", files.client_ca),
    )


def _check_whole(key: str, path: Path, content: bytes) -> None:
    """Refuse what ends within a certificate: OpenSSL is content with those before it.

    Raises:
        ConfigError: It does.
    """
    begun: bytes | None = None
    whole = True
    for mark in (found[0].rstrip() for found in _MARK.finditer(content)):
        if begun is None:
            begun = mark.removeprefix(_BEGIN)
            whole = whole and mark.startswith(_BEGIN)
        else:
            whole = whole and mark == _END + begun
            begun = None
    if begun is not None or not whole:
        raise ConfigError(
            f"{key}: {path} is not whole: a certificate begins in it and does not end"
        )


def _check_valid_now(path: Path, chain: bytes, context: ssl.SSLContext) -> None:
    """Shake hands with ourselves, trusting the certificate itself: so its dates are looked at.

    Raises:
        ConfigError: No client would take it now.
    """
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname = False
    asking.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    asking.load_verify_locations(cadata=chain.decode("ascii", "ignore"))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = asking.wrap_bio(to_client, to_server)
    for _ in range(3):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError as error:
                raise ConfigError(
                    f"tls.certificate {path} is refused by clients now: {error.verify_message}"
                ) from None
            except ssl.SSLError as error:
                raise ConfigError(
                    f"tls.certificate {path} can't be shown to clients: {error}"
                ) from None
