"""Who may ask: bearer tokens from a file, and which indexes each may ask about.

A line of the file is NAME:TOKEN or NAME:TOKEN:INDEX,INDEX; empty lines and those that begin with #
count for nothing. A name may have several tokens, old and new, while one replaces the other.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dualform.engine.errors import InvalidArgumentError, NotFoundError
from dualform.serve.config import ConfigError, read_small
from dualform.serve.status import REQUEST_ID, Refusal, refuse

OTHER = "other"
"""What gRFC A66 calls methods that there are none of."""
_ID = re.compile(r"[A-Za-z0-9._:/-]{1,64}")
_LINE = re.compile(r"([A-Za-z0-9_.@-]+):([!-9;-~]+)(?::([A-Za-z0-9_.,-]+))?")


@dataclass(frozen=True)
class Client:
    """Who asks.

    Attributes:
        name: Of the token; empty where none is needed.
        indexes: What it may ask about; None for all.
    """

    name: str = ""
    indexes: frozenset[str] | None = None

    def index_for(self, asked: str, served: Sequence[str]) -> str:
        """The index that a request means.

        Args:
            asked: As the request names it; empty for the only one.
            served: All there are.

        Raises:
            NotFoundError: None that this client may ask about; others are not mentioned.
            InvalidArgumentError: There are several.
        """
        if self.indexes is None:
            return asked
        allowed = [name for name in served if name in self.indexes]
        if not asked and len(allowed) > 1:
            raise InvalidArgumentError(
                f"several indexes are served; name one of them: {', '.join(allowed)}", field="index"
            )
        if (asked and asked not in allowed) or not allowed:
            raise NotFoundError(
                f"no index {asked!r} is served to {self.name!r}; there are: {', '.join(allowed)}"
                if allowed
                else f"none of the indexes that {self.name!r} may ask is served",
                field="index",
                reason="UNKNOWN_INDEX",
            )
        return asked or allowed[0]


class Access:
    """Tells clients by their tokens.

    Args:
        path: The file of tokens; None lets everyone ask.

    Raises:
        ConfigError: The file cannot be read, or holds no token, or a line that is none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._tokens = _read(path)

    def reload(self, path: Path | None) -> None:
        """Read the file again, or another one.

        Raises:
            ConfigError: As above, or there is none any more, which would let everyone ask; the
                tokens from before stay in force.
        """
        if path is None and self._path is not None:
            raise ConfigError("tokens was taken out of the configuration: restart for it")
        self._tokens, self._path = _read(path), path

    def client(self, metadata: Sequence[tuple[str, Any]] | None) -> Client | Refusal:
        """Who sent this metadata, or the refusal."""
        if self._path is None:
            return Client()
        given = [value for key, value in metadata or () if key == "authorization"]
        if not given:
            return _unknown(
                "this server needs a token: send the metadata `authorization: Bearer TOKEN` "
                "(Client(token=…), or DUALFORM_TOKEN)",
                "NO_TOKEN",
            )
        scheme, _, token = str(given[0]).partition(" ")
        digest = _digest(token.strip() if scheme.lower() == "bearer" else "")
        found: Client | None = None
        # All of them, so that time tells nothing.
        for known, client in self._tokens:
            if hmac.compare_digest(known, digest):
                found = client
        return found or _unknown("the token is not one of this server's", "BAD_TOKEN")


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Asks for a token before health checks, reflection and whatever else is served.

    Args:
        access: Tells who may.
        exempt: Method names, as "/package.Service/", that are left to themselves.
        refused: Told of each call that is refused: its method, as "package.Service/Method", its
            id, and why.
        known: The methods that there are; others are `OTHER` to `refused`, however many.
    """

    def __init__(
        self,
        access: Access,
        exempt: tuple[str, ...],
        refused: Callable[[str, str, Refusal], None],
        known: frozenset[str],
    ) -> None:
        self._access = access
        self._exempt = exempt
        self._refused = refused
        self._known = known

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Continue, or answer with the refusal."""
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        if not method.startswith(self._exempt):
            found = self._access.client(metadata)
            if isinstance(found, Refusal):
                name, request_id = method.removeprefix("/"), request_id_of(metadata)
                self._refused(name if name in self._known else OTHER, request_id, found)
                return _refusing(found, request_id)
        return await continuation(handler_call_details)


def request_id_of(metadata: Any) -> str:
    """The id that the caller gave its call, or one that is made."""
    given = dict(metadata or ()).get(REQUEST_ID)
    known = isinstance(given, str) and _ID.fullmatch(given)
    return str(given) if known else secrets.token_hex(8)


def _refusing(refusal: Refusal, request_id: str) -> Any:
    async def handle(_: Any, context: Any) -> None:
        refuse(context, refusal, request_id)

    # The same on the wire, whatever the method takes and gives.
    return grpc.stream_stream_rpc_method_handler(handle)


def _unknown(message: str, reason: str) -> Refusal:
    return Refusal("UNAUTHENTICATED", message, reason)


def _read(path: Path | None) -> tuple[tuple[bytes, Client], ...]:
    if path is None:
        return ()
    try:
        # Editors of Windows put a mark in front.
        lines = read_small("tokens", path).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"tokens: {path} is not text in UTF-8") from None
    tokens: dict[bytes, tuple[int, Client]] = {}
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            # Without the line: it may hold a token.
            raise ConfigError(
                f"tokens: line {number} of {path} is not NAME:TOKEN or NAME:TOKEN:INDEX,INDEX "
                "(no spaces, no colon in a token)"
            )
        name, token, indexes = match.groups()
        allowed = None if indexes is None else frozenset(indexes.split(","))
        if allowed is not None and "" in allowed:
            raise ConfigError(f"tokens: line {number} of {path} has an empty name of an index")
        # Whose it is, and what it may ask about, must not hang on which line is looked at first.
        first, known = tokens.setdefault(_digest(token), (number, Client(name, allowed)))
        if known != Client(name, allowed):
            raise ConfigError(
                f"tokens: lines {first} and {number} of {path} hold the same token for different "
                "names or indexes; say it once, with all of its indexes"
            )
    if not tokens:
        raise ConfigError(f"tokens: {path} holds none, so nobody could ask")
    return tuple((digest, client) for digest, (_, client) in tokens.items())


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
