"""The server's configuration: small frozen dataclasses, from YAML or from the command line.

Imports neither torch nor FAISS, so that a mistake in the file is told at once and before the
thread policy matters.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from dualform._errors import DualformError
from dualform.questions.placement import GPU_MEMORY, bytes_of, device_names, gpu_memory
from dualform.questions.quoted import quoted

_LOGS = ("text", "json")
MOST_BYTES = 16 << 20
"""What the files hold at most that the configuration names."""
_MOST_YAML = 1 << 20
"""What it holds itself: YAML is read at some 100 kB a second."""


class ConfigError(DualformError, ValueError):
    """The configuration is wrong; the message names the key, what is allowed and what was given."""


@dataclass(frozen=True)
class ServerLimits:
    """What one request may ask for, and how many are worked on at a time.

    Attributes:
        max_k: Largest k of a top-k.
        max_queries: Most queries, and most example ids, in one request.
        max_message_mib: Largest request and response, in MiB.
        concurrent_scans: Requests that are worked on at a time, each in its own thread.
        queued_scans: Requests that may wait for that; more are refused.
        waiting_mib: Requests above 1 MiB that may be in memory together, in MiB; at least one may.

    Raises:
        ConfigError: A value out of range.
    """

    max_k: int = 16384
    max_queries: int = 4096
    max_message_mib: int = 64
    concurrent_scans: int = 2
    queued_scans: int = 64
    waiting_mib: int = 256

    def __post_init__(self) -> None:
        _check_integer("limits.max_k", self.max_k, 1, 2**31)
        _check_integer("limits.max_queries", self.max_queries, 1, 2**31)
        _check_integer("limits.max_message_mib", self.max_message_mib, 1, 2047)
        _check_integer("limits.concurrent_scans", self.concurrent_scans, 1, 1024)
        _check_integer("limits.queued_scans", self.queued_scans, 0, 2**20)
        _check_integer("limits.waiting_mib", self.waiting_mib, 1, 2**20)


@dataclass(frozen=True)
class TlsFiles:
    """PEM files.

    Attributes:
        certificate: The server's certificate and those that it rests on.
        key: Its private key, not encrypted.
        client_ca: Clients must show a certificate signed by one of these; None asks for none.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True)
class RayActors:
    """Where shards are opened, if not in the server's process.

    Attributes:
        address: Of a Ray cluster, "auto" for the one that this machine belongs to, or "local" for
            processes on this machine.
        actors: How many open shards; None for one on each node, or of "local" one for each core.

    Raises:
        ConfigError: A value of the wrong type or out of range.
    """

    address: str = "local"
    actors: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.address, str) or not self.address:
            raise ConfigError(
                f"ray.address is {quoted(self.address)}; say HOST:PORT of a Ray cluster, auto "
                "for the "
                "one that this machine belongs to, or local for processes on this machine"
            )
        if self.actors is not None:
            _check_integer("ray.actors", self.actors, 1, 2**16)


@dataclass(frozen=True)
class ServerConfig:
    """What is served, and where.

    Attributes:
        indexes: Index directories, or folders of them, by the name they are served under.
        listen: "HOST:PORT"; port 0 takes a free one. IPv6 addresses in brackets.
        device: "auto" (all GPUs that there are, or the CPU alone), "cpu", "cuda", "cuda:1", or
            several GPUs.
        gpu_memory: A share of each GPU's memory, or bytes, that may be taken.
        limits: See `ServerLimits`.
        insecure: Says outright that listening beyond loopback without TLS is meant.
        tls: Encrypts; see `TlsFiles`.
        tokens: File of bearer tokens, see `dualform.serve.access`; None lets everyone ask.
        open_health: Health checks need no token.
        metrics: "HOST:PORT" where Prometheus finds metrics, over TLS and with a token where
            questions are asked so; None for nowhere.
        admin: "HOST:PORT", on loopback, where `dualform admin` is answered; None for nowhere.
        memory: Bytes of memory, not counting mapped files, that the process stays below; None for
            no limit.
        telemetry: Trace calls with OpenTelemetry, as its own environment variables say.
        ray: Shards are opened by Ray's actors; see `RayActors`. None opens them in this process.
        explore: The page in the browser: True for 127.0.0.1:8080, or "HOST:PORT" on loopback.
        log: "text" or "json" lines.

    Raises:
        ConfigError: A value of the wrong type or out of range, or an address beyond loopback
            without TLS and without `insecure`.

    Example:
        >>> ServerConfig({"mnist": Path("indexes/mnist")}, listen="127.0.0.1:0").port
        0
    """

    indexes: Mapping[str, Path] = field(default_factory=dict)
    listen: str = "127.0.0.1:50051"
    device: str | Sequence[str] = "auto"
    gpu_memory: float | str = GPU_MEMORY
    limits: ServerLimits = field(default_factory=ServerLimits)
    insecure: bool = False
    tls: TlsFiles | None = None
    tokens: Path | None = None
    open_health: bool = False
    metrics: str | None = None
    admin: str | None = None
    memory: int | None = None
    telemetry: bool = False
    ray: RayActors | None = None
    explore: bool | str = False
    log: str = "text"

    def __post_init__(self) -> None:
        for name in ("insecure", "open_health", "telemetry"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name} is {quoted(value)}; allowed are true and false")
        if self.log not in _LOGS:
            raise ConfigError(f"log is {quoted(self.log)}; allowed are {', '.join(_LOGS)}")
        try:
            device_names(self.device)
            gpu_memory(self.gpu_memory)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        host, _ = split_address("listen", self.listen)
        if self.tls is None and not self.insecure and not _is_loopback(host):
            raise ConfigError(
                f"listen is {quoted(self.listen)}: anyone who reaches {host} could ask, "
                "unencrypted; "
                "listen on 127.0.0.1, give `tls:`, or say `insecure: true` in the configuration "
                "file"
            )
        if self.metrics is not None:
            host, _ = split_address("metrics", self.metrics)
            if self.tls is None and not self.insecure and not _is_loopback(host):
                raise ConfigError(
                    f"metrics is {quoted(self.metrics)}: anyone who reaches {host} could read "
                    "them, "
                    "unencrypted; use 127.0.0.1, give `tls:`, or say `insecure: true`"
                )
        if self.admin is not None and not _is_loopback(split_address("admin", self.admin)[0]):
            raise ConfigError(
                f"admin is {quoted(self.admin)}: it asks nobody who they are, so it is on this "
                "machine "
                "alone, such as 127.0.0.1:50052"
            )
        if self.memory is not None:
            _check_integer("memory", self.memory, 1, 1 << 60)
        self._check_explore()

    def _check_explore(self) -> None:
        if isinstance(self.explore, str):
            if not _is_loopback(split_address("explore", self.explore)[0]):
                raise ConfigError(
                    f"explore is {quoted(self.explore)}: the page asks nobody who they are, so "
                    "it is on "
                    "this machine alone, such as 127.0.0.1:8080"
                )
        elif not isinstance(self.explore, bool):
            raise ConfigError(
                f"explore is {quoted(self.explore)}; allowed are true, false and HOST:PORT"
            )
        if self.explore and (self.tls is not None or self.tokens is not None):
            raise ConfigError(
                "explore goes without tls and tokens: everyone on this machine would see what only "
                "they may ask; run `dualform explore --server HOST:PORT` with a token of its own"
            )

    @property
    def host(self) -> str:
        """Name or address, without brackets."""
        return split_address("listen", self.listen)[0]

    @property
    def port(self) -> int:
        return split_address("listen", self.listen)[1]

    @classmethod
    def load(cls, path: Path | str) -> ServerConfig:
        """Read a YAML file; paths of indexes in it are relative to the file's folder.

        `indexes` may be missing: the command names them too.

        Raises:
            ConfigError: Not readable, not YAML, an unknown key or a wrong type.
        """
        path = Path(path)
        text = read_small("--config", path, _MOST_YAML)
        try:
            data = _parsed(text)
            return cls._from_mapping({} if data is None else data, path.parent)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {error}") from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def _from_mapping(cls, data: Any, folder: Path) -> ServerConfig:
        _check_keys("the file", data, [f.name for f in fields(cls)])
        values = dict(data)
        if "indexes" in values:
            values["indexes"] = _indexes(values["indexes"], folder)
        if "limits" in values:
            _check_keys("limits", values["limits"], [f.name for f in fields(ServerLimits)])
            values["limits"] = ServerLimits(**values["limits"])
        if values.get("tls") is not None:
            values["tls"] = _tls(values["tls"], folder)
        if values.get("tokens") is not None:
            values["tokens"] = _path("tokens", values["tokens"], folder)
        if values.get("memory") is not None:
            values["memory"] = _bytes("memory", values["memory"])
        if values.get("ray") is not None:
            _check_keys("ray", values["ray"], [f.name for f in fields(RayActors)])
            values["ray"] = RayActors(**values["ray"])
        return cls(**values)


def _parsed(text: bytes) -> Any:
    """What a YAML file says.

    Raises:
        ConfigError: A value is not what its tag or its form promises, or it is nested too deeply.
        yaml.YAMLError: It is not YAML.
    """
    try:
        return yaml.load(text, _Loader)
    except (ConfigError, yaml.YAMLError):
        raise
    except RecursionError:
        raise ConfigError("not valid YAML: lists or mappings are nested too deeply") from None
    except Exception as error:  # PyYAML lets out whatever int(), date() and its like raise
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"not valid YAML: a value is none of its type ({what})") from None


class _Loader(yaml.SafeLoader):
    """YAML's safe types; a key that occurs twice is an error, not the last one's victory."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(
                    f"a key in line {key.start_mark.line + 1} is a list or a mapping; keys are "
                    "words"
                )
            if key.value in seen:
                raise ConfigError(
                    f"{quoted(key.value)} occurs twice, again in line {key.start_mark.line + 1}"
                )
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep))

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value: int = super().construct_yaml_int(node)
        if abs(value) >= 2**64:
            line = node.start_mark.line + 1
            raise ConfigError(f"the integer in line {line} does not fit 64 bits")
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _check_keys(where: str, data: Any, allowed: list[str]) -> None:
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must hold `key: value` lines with: {', '.join(allowed)}")
    for key in data:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            meant = f" (is {near[0]!r} meant?)" if near else ""
            known = ", ".join(allowed)
            raise ConfigError(f"unknown key {quoted(key)} in {where}{meant}; allowed are: {known}")


def _indexes(data: Any, folder: Path) -> dict[str, Path]:
    if not isinstance(data, dict) or not data:
        raise ConfigError("indexes must hold `name: path` lines, at least one")
    for name, path in data.items():
        if not isinstance(name, str) or not isinstance(path, str) or not path:
            raise ConfigError(
                f"indexes holds {quoted(name)}: {quoted(path)}; both must be strings (put them "
                "in quotes)"
            )
    return {name: _path(f"indexes.{name}", path, folder) for name, path in data.items()}


def _tls(data: Any, folder: Path) -> TlsFiles:
    names = [f.name for f in fields(TlsFiles)]
    _check_keys("tls", data, names)
    for name in ("certificate", "key"):
        if data.get(name) is None:
            raise ConfigError(f"tls needs certificate and key; {name} is missing")
    # An empty client_ca, as of a template's empty variable, must not mean that none is asked for.
    given = {name: value for name, value in data.items() if value is not None}
    paths = {name: _path(f"tls.{name}", value, folder) for name, value in given.items()}
    return TlsFiles(paths["certificate"], paths["key"], paths.get("client_ca"))


def _path(name: str, value: Any, folder: Path) -> Path:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} is {quoted(value)}; a path is needed")
    if "\0" in value:
        raise ConfigError(f"{name} is {quoted(value)}; no path has a null byte")
    try:
        return folder / Path(value).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{name} is {quoted(value)}; the home folder of that user is not known: write the "
            "whole path"
        ) from None


def _bytes(name: str, value: Any) -> int:
    """A number with its unit, as bytes."""
    size = bytes_of(value) if isinstance(value, str) else None
    if size is None:
        raise ConfigError(f"{name} is {quoted(value)}; say how many MiB, GiB or TiB, such as 4GiB")
    return size


def read_small(key: str, path: Path, most: int = MOST_BYTES) -> bytes:
    """What a file holds that the configuration names.

    Raises:
        ConfigError: It cannot be read, or is no regular file, which alone can be read again at a
            reload and makes nobody wait, or is larger than any such file; the message says `key`.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{key}: {path} is no regular file")
            content = file.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from None
    if len(content) > most:
        raise ConfigError(f"{key}: {path} is larger than {most >> 20} MiB: another file?")
    return content


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # for whoever writes into a FIFO


def _check_integer(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(
            f"{name} is {quoted(value)}; allowed are integers from {least} to {most:,}"
        )


def split_address(name: str, address: Any) -> tuple[str, int]:
    """HOST:PORT, taken apart; brackets are left out.

    Raises:
        ConfigError: It is none; the message says `name`.
    """
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    known = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    if not (colon and host and known) or (":" in host and not bracketed):
        raise ConfigError(
            f"{name} is {quoted(address)}; say HOST:PORT with a port up to 65535, such as "
            "127.0.0.1:50051 or [::1]:50051 (sockets in the file system are not listened on)"
        )
    return host, int(port)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
