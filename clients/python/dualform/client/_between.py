"""What stands between, or answers in a server's place: proxies, web servers, TLS of another kind.

gRPC makes a status of their answers and has few words for them. Which of them asking again can
mend, and what the user has to change, is known here.
"""

from __future__ import annotations

import re

from dualform.client._connection import Connection
from dualform.client._retry import NOT_GRPC, PROXY_TIMEOUT, TLS_REFUSED, WHEN_LATE, seconds
from dualform.client.errors import (
    DeadlineExceededError,
    DualformError,
    InternalError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    bad_answer,
)

# The reason of a request that is too large for what stands between; fewer queries make it fit.
REQUEST_TOO_LARGE = "REQUEST_TOO_LARGE"

_STATUS = re.compile(r"http2 header with status: (\d+)")
_OUT_OF_DATE = re.compile("certificate (has expired|is not yet valid)")
_CERTIFICATE = re.compile("CERTIFICATE_VERIFY_FAILED|[Hh]ostname|[Pp]eer name")
# gRPC's own words, on this side; a server's refusals have theirs.
_LATE = re.compile("[Dd]eadline [Ee]xceeded")
_OTHER = re.compile("http1.x server|Failed parsing HTTP.2")
_NO_TLS = re.compile("WRONG_VERSION_NUMBER|tls_get_more_records")


def error_between(
    code: str, message: str, connection: Connection, timeout: float | None
) -> DualformError | None:
    """The error of a call that no dualform server has refused; None where one may have.

    Args:
        code: The canonical gRPC code, by its name.
        message: gRPC's own.
        connection: What was asked.
        timeout: What the call had, seconds.
    """
    status = _STATUS.search(message)
    if status:
        return _of_status(int(status[1]), connection.server)
    if code == "UNAVAILABLE":
        return _unreachable(message, connection)
    if code == "DEADLINE_EXCEEDED" and timeout is not None and _LATE.search(message):
        return DeadlineExceededError(
            f"no answer within {seconds(timeout)} s; {WHEN_LATE}, or see whether the server at "
            f"{connection.server} answers anyone ({message})"
        )
    if "Compression algorithm" in message:
        return bad_answer(f"it is compressed, which this client does not take ({message})")
    if "deserializing response" in message:
        return bad_answer("it can't be read as the message that it should be")
    if code in ("INTERNAL", "UNKNOWN"):  # of a server's own defects, details tell
        return InternalError(
            f"{message} ({code}); something between, such as a proxy whose time-out passed, broke "
            f"the answer off, or what answers at {connection.server} is no dualform server"
        )
    return None


def _of_status(status: int, server: str) -> DualformError:
    """Of an answer in HTTP alone, without a status of gRPC's."""
    answered = f"what answers at {server} is no dualform server, and says HTTP {status}"
    if status == 413:
        return ResourceExhaustedError(
            f"{answered}: a proxy takes no requests of this size; raise its limit to the server's "
            "max_message_mib (nginx: client_max_body_size), or ask with fewer queries",
            reason=REQUEST_TOO_LARGE,
        )
    if status == 401:
        return UnauthenticatedError(
            f"{answered}: a proxy wants to know who asks, before the server is asked; token= goes "
            "with every call as `authorization: Bearer TOKEN`"
        )
    if status == 403:
        return PermissionDeniedError(f"{answered}: a proxy does not let this call through")
    if status in (408, 504):
        return DeadlineExceededError(
            f"{answered}: a proxy waited no longer for the server; raise its time-outs (nginx: "
            "grpc_read_timeout, haproxy: timeout server), or ask for less",
            reason=PROXY_TIMEOUT,
        )
    if status == 429:
        return UnavailableError(f"{answered}: a proxy was asked too often; ask less often")
    if status in (502, 503):
        return UnavailableError(
            f"{answered}: a proxy has no server behind it; is `dualform serve` running there, and "
            "is the proxy told its address, and to speak HTTP/2 to it (nginx: grpc_pass, haproxy: "
            "proto h2)?"
        )
    return UnavailableError(
        f"{answered}: a web server, or a proxy that passes no gRPC on under this address; is it "
        "the right one?",
        reason=NOT_GRPC,
    )


def _unreachable(message: str, connection: Connection) -> UnavailableError:
    """Why no server answers, in words, and a reason where trying again can't help."""
    server, encrypted = connection.server, connection.credentials is not None
    if encrypted and _OUT_OF_DATE.search(message):
        return UnavailableError(
            f"the certificate of {server} is out of date ({message}); renew it there and reload "
            "the server, or set the clock that is wrong, here or there",
            reason=TLS_REFUSED,
        )
    if encrypted and _CERTIFICATE.search(message):
        return UnavailableError(
            f"the certificate of {server} is not trusted ({message}); name the authority that "
            "signed it, as in tls='ca.pem', and the server as its certificate does; or is it out "
            "of date, which an older gRPC does not say?",
            reason=TLS_REFUSED,
        )
    if encrypted and _NO_TLS.search(message):
        return UnavailableError(
            f"what answers at {server} does not speak TLS ({message}); leave out tls=, or give the "
            "server a certificate",
            reason=TLS_REFUSED,
        )
    if encrypted and "ALPN" in message:
        return UnavailableError(
            f"what answers at {server} speaks TLS but not HTTP/2, which gRPC needs ({message}); "
            "is it the right address, and does a proxy there offer HTTP/2 (nginx: http2, haproxy: "
            "alpn h2)?",
            reason=NOT_GRPC,
        )
    if _OTHER.search(message):
        tls = "" if encrypted else " and, if it has TLS, say tls=True or tls='ca.pem' (--tls)"
        return UnavailableError(
            f"what answers at {server} does not speak HTTP/2, which gRPC needs ({message}); is it "
            f"the right address? Let a proxy there offer HTTP/2{tls}",
            reason=NOT_GRPC,
        )
    hints = ["is `dualform serve` running there, and is the address right?"]
    if encrypted:
        hints.append(
            "Does the server want a client's certificate (certificate=, key=; --certificate, "
            "--key)?"
        )
    else:  # localhost may be two addresses, and the message is of the last
        hints.append("If it has TLS, say tls=True or tls='ca.pem' (--tls).")
    if connection.proxy is not None:
        hints.append(
            f"The call goes through a proxy, {connection.proxy} in the environment; "
            "no_grpc_proxy=HOST there passes it by."
        )
    return UnavailableError(f"no server answers at {server} ({message}); {' '.join(hints)}")
