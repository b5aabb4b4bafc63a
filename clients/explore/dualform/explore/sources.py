"""Whom the page asks: indexes on disk, or those of a server; through the SDK alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dualform.client import AsyncClient, Client, DualformError


@dataclass(frozen=True)
class Source:
    """One index.

    Attributes:
        name: What the page calls it.
        index: What `index=` of a question says; None for an index on disk.
        client: Who answers; None where it can't be opened.
        trouble: Why it does not answer; "" where it does.
        python: The client as Python has it, for lines to copy.
        command: The same as arguments of `dualform query`.
        opens: Makes a client of another kind, for the middle of a forward pass.
    """

    name: str
    index: str | None
    client: AsyncClient | None
    trouble: str
    python: str
    command: tuple[str, ...]
    opens: Callable[[], Client] | None = None

    def asked(self) -> AsyncClient:
        """The client that answers.

        Raises:
            DualformError: It can't be opened; the message is `trouble`.
        """
        if self.client is None or self.trouble:
            raise DualformError(self.trouble or f"{self.name} is not open")
        return self.client


class LocalSources:
    """Indexes on disk by name; one that can't be opened is there with the reason."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._sources = [self._open(name, path) for name, path in paths.items()]

    async def listed(self) -> Sequence[Source]:
        """All of them, those that are damaged with the reason."""
        return [await self._looked_at(source) for source in self._sources]

    async def named(self, name: str) -> Source | None:
        """One of them, as it was opened."""
        return next((each for each in self._sources if each.name == name), None)

    async def close(self) -> None:
        """Gives back what was opened."""
        for source in self._sources:
            if source.client is not None:
                await source.client.close()

    async def _looked_at(self, source: Source) -> Source:
        if source.client is None:
            return source
        try:
            (found,) = await source.client.indexes()
        except DualformError as error:
            return replace(source, trouble=str(error))
        return source if found.health == "serving" else replace(source, trouble=found.health_reason)

    def _open(self, name: str, path: Path) -> Source:
        command, python = ("--local", str(path)), f"Client.local({str(path)!r})"
        try:
            client = AsyncClient.local(path)
        except DualformError as error:
            return Source(name, None, None, str(error), python, command)
        return Source(name, None, client, "", python, command, lambda: Client.local(path))


class ServerSources:
    """What a server serves, asked anew each time: it may reload.

    Args:
        client: On the server.
        python: As in Source.
        command: As in Source.
        opens: Likewise.
    """

    def __init__(
        self,
        client: AsyncClient,
        python: str,
        command: tuple[str, ...],
        opens: Callable[[], Client] | None = None,
    ) -> None:
        self._client, self._python, self._command = client, python, command
        self._opens = opens
        self._latest: Sequence[Source] = []

    async def listed(self) -> Sequence[Source]:
        """All of them, those that are damaged with the reason.

        Raises:
            DualformError: The server does not answer.
        """
        found = await self._client.indexes(timeout=10)
        self._latest = [
            Source(
                each.name,
                each.name,
                self._client,
                "" if each.health == "serving" else each.health_reason,
                self._python,
                (*self._command, "--index", each.name),
                self._opens,
            )
            for each in found
        ]
        return self._latest

    async def named(self, name: str) -> Source | None:
        """One of them, as it was listed last."""
        listed = self._latest or await self.listed()
        return next((each for each in listed if each.name == name), None)

    async def close(self) -> None:
        """Gives back the connection."""
        await self._client.close()


Sources = LocalSources | ServerSources
