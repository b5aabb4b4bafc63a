"""`dualform admin`: have a server on this machine read its configuration again, or ask how it is.

Exit status: 0 where all is well, 1 where something was refused or is not served, 2 where nobody
answers or there is no such index.
"""

from __future__ import annotations

import argparse
import ipaddress
from typing import Any

from dualform.cli.errors import CommandError

DEFAULT = "127.0.0.1:50052"
_TIMEOUT_S = 600.0
_HEALTH_S = 4.0


def add_to(commands: Any) -> None:
    """Adds the command's arguments."""
    parser = commands.add_parser(
        "admin",
        allow_abbrev=False,
        help="what a server on this machine may be told",
        description="Speaks to the `admin` address of a server's configuration.",
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    reload = verbs.add_parser(
        "reload",
        allow_abbrev=False,
        help="read the configuration again, as SIGHUP does, and say what came of it",
    )
    health = verbs.add_parser(
        "health", allow_abbrev=False, help="whether it serves: exit status 0 if so, 1 if not"
    )
    health.add_argument("--index", metavar="NAME", help="this index, not the server")
    health.add_argument(
        "--alive", action="store_true", help="enough if it answers, whatever it says"
    )
    for verb, run in ((reload, _reload), (health, _health)):
        verb.add_argument(
            "--admin",
            default=DEFAULT,
            metavar="HOST:PORT",
            help=f"where it listens for that (default {DEFAULT})",
        )
        verb.set_defaults(run=run, parser=verb)


def _reload(options: argparse.Namespace) -> int:
    from dualform.v1 import admin_pb2 as pb
    from dualform.v1 import admin_pb2_grpc

    stubs: Any = admin_pb2_grpc
    with _channel(options.admin) as channel:
        stub = stubs.AdminServiceStub(channel)
        changes = _asked(stub.Reload, pb.ReloadRequest(), _TIMEOUT_S).changes
    refused = 0
    for change in changes:
        outcome = pb.Outcome.Name(change.outcome).removeprefix("OUTCOME_").lower()
        refused += change.outcome == pb.OUTCOME_REFUSED
        print(f"{outcome:<8} {change.detail}")
    return 1 if refused else 0


def _health(options: argparse.Namespace) -> int:
    from grpc_health.v1 import health_pb2 as pb
    from grpc_health.v1.health_pb2_grpc import HealthStub

    service = "" if options.index is None else f"dualform.index.{options.index}"
    with _channel(options.admin) as channel:
        request = pb.HealthCheckRequest(service=service)
        status = _asked(HealthStub(channel).Check, request, _HEALTH_S).status
    print(pb.HealthCheckResponse.ServingStatus.Name(status))
    return 0 if options.alive or status == pb.HealthCheckResponse.SERVING else 1


def _channel(address: str) -> Any:
    import grpc

    host = address.rpartition(":")[0].strip("[]")
    if host != "localhost" and not _is_loopback(host):
        raise CommandError(f"--admin is {address!r}; it is on this machine, such as {DEFAULT}")
    # What is on this machine is asked through no proxy.
    return grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _asked(call: Any, request: Any, timeout: float) -> Any:
    import grpc

    try:
        return call(request, timeout=timeout)
    except grpc.RpcError as error:
        status: Any = error
        code, details = status.code().name, status.details()
        if code == "NOT_FOUND":
            raise CommandError(details.replace("dualform.index.", "--index ")) from None
        if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
            raise CommandError(
                f"no gRPC server answers: {details}; is `admin` in the server's configuration, and "
                "--admin the same address?"
            ) from None
        raise CommandError(f"{details} ({code})") from None
