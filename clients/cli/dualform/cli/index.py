"""`dualform index build|inspect|verify|pack|unpack`: from a recording to an index, what is in one,
and the same with other bytes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualform.cli import devices, follow, repack
from dualform.cli.errors import CommandError
from dualform.cli.interruption import Interruption, load_engine
from dualform.cli.output import Progress, bytes_text, print_json, print_table

if TYPE_CHECKING:
    from dualform.client import LayerInfo
    from dualform.engine import VerifyReport
    from dualform.store.index_parts import IndexLayer


def add_to(commands: Any) -> None:
    """Adds the commands' arguments."""
    parser = commands.add_parser(
        "index",
        allow_abbrev=False,
        help="build, inspect, verify, pack or unpack an index",
        description="Builds, inspects, verifies, packs or unpacks an index.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    build = actions.add_parser(
        "build",
        allow_abbrev=False,
        help="publish a recording as an index",
        description="Publishes a recording as an index. Nothing is there until it is complete.",
    )
    build.add_argument(
        "recording",
        type=Path,
        nargs="+",
        metavar="RECORDING",
        help="what a Recorder wrote; of a data-parallel run the folder of the run, or those of all "
        "its ranks",
    )
    build.add_argument("index", type=Path, metavar="INDEX", help="the directory to create")
    build.add_argument(
        "--values",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the values; without them there is no dual output",
    )
    build.add_argument(
        "--parts",
        type=lambda names: names.split(","),
        default=[],
        metavar="COLUMN,...",
        help="keep what the rows of each value of these columns became: outputs by these groups, "
        "and of whole groups, are one small product",
    )
    build.add_argument(
        "--round-keys",
        choices=("bfloat16", "float16"),
        help="round float32 keys to 16 bits, for half their disk: layers are marked as rounded, "
        "and the remainder of outputs has what that leaves; keys of 16 bits stay as they are",
    )
    build.add_argument(
        "--pack",
        action="store_true",
        help="pack keys and values without loss, each layer's the shortest way: same answers from "
        "fewer bytes, slower where rows are read, and FAISS opens no packed file; "
        "`dualform index unpack` is the way back",
    )
    build.add_argument(
        "--shard-rows",
        type=int,
        default=65_536,
        metavar="N",
        help="rows of a shard at most (default 65536); fewer make more files, and more that can be "
        "made at a time or before training ends",
    )
    build.add_argument(
        "--follow",
        action="store_true",
        help="while training runs: publish version after version into the folder INDEX, of what is "
        "committed by then, until the recording is closed; a server that serves the folder takes "
        "each over",
    )
    build.add_argument(
        "--every",
        type=float,
        metavar="SECONDS",
        help="with --follow: look for newly committed steps so often (default 5)",
    )
    build.add_argument(
        "--keep",
        type=int,
        metavar="N",
        help="with --follow: so many of the newest versions stay at least (default 2); older ones "
        "are removed once nobody serves them",
    )
    build.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="have the processes of the Ray cluster at ADDRESS build it (auto: the one that this "
        "machine belongs to), or local for processes on this machine; goes on from where it was "
        "interrupted",
    )
    build.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="with --ray: so many pieces of work at a time (default: the cluster's CPUs)",
    )
    build.set_defaults(run=_build, parser=build)
    for name, run, what in (
        ("inspect", _inspect, "show an index's layers, rows and columns"),
        ("verify", _verify, "check every file, and that the memory rebuilds the weights"),
    ):
        action = actions.add_parser(
            name,
            allow_abbrev=False,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog="Exit status 1: the memory does not rebuild the weights."
            if name == "verify"
            else None,
        )
        action.add_argument(
            "index", type=Path, metavar="INDEX", help="or a folder of versions: the newest is taken"
        )
        action.add_argument("--json", action="store_true", help="print JSON")
        if name == "inspect":
            devices.add_to(action)
        action.set_defaults(run=run, parser=action)
    repack.add_to(actions)


def _build(options: argparse.Namespace) -> int:
    for name, of in (("every", "follow"), ("keep", "follow"), ("workers", "ray")):
        if getattr(options, name) is not None and not getattr(options, of):
            options.parser.error(f"--{name} goes with --{of}")
    if options.follow:
        if options.ray is not None:
            options.parser.error("--ray builds what is there, and --follow what comes: take one")
        return follow.run(options)
    started = time.monotonic()
    with Interruption() as interruption, Progress("building", "B") as progress:
        load_engine()
        import pyarrow

        from dualform.index import build_index

        pyarrow.enable_signal_handlers(False)  # its own make an error of Ctrl-C, or nothing

        def show(done: int, total: int) -> None:
            interruption.check()
            progress(done, total)

        try:
            if options.ray is not None:
                _build_on_machines(options, show)
            else:
                build_index(
                    options.recording,
                    options.index,
                    values=options.values,
                    shard_rows=options.shard_rows,
                    parts=options.parts,
                    round_keys=options.round_keys,
                    pack=options.pack,
                    announce=_announce,
                    progress=show,
                )
        except ValueError as error:
            raise CommandError(str(error)) from error
    repack.made(options.index, started)
    return 0


def _build_on_machines(options: argparse.Namespace, show: Callable[[int, int], None]) -> None:
    from dualform.machines.building import build_on_machines

    asked = follow.asked_for(options)
    build_on_machines(
        options.recording,
        options.index,
        address=options.ray,
        workers=options.workers,
        options=asked,
        announce=_announce,
        progress=show,
    )


def _announce(text: str) -> None:
    print(text, flush=True)


def _inspect(options: argparse.Namespace) -> int:
    load_engine()
    from dualform.client import Client
    from dualform.engine import Index, unexplained_share
    from dualform.store import IndexManifest
    from dualform.store.versions import newest

    options.index = newest(options.index)
    with Client.local(options.index, device="cpu") as client:
        info = client.index()
    if info.health != "serving":
        raise CommandError(f"{options.index}: {info.health_reason}")
    with Index.open(options.index) as index:
        errors = {name: unexplained_share(index, layer) for name, layer in index.layers.items()}
    manifest = IndexManifest.load(options.index)
    published = manifest.layers
    distinct = {
        name: None if layer.equal_keys is None else layer.equal_keys.distinct
        for name, layer in published.items()
    }
    size = repack.size_of(options.index)
    layers = info.layers.values()
    held = devices.held(options)
    if options.json:
        print_json(
            {
                "steps": info.steps,
                "optimizer": info.optimizer,
                "bytes": size,
                "sampling": None if info.sampling is None else asdict(info.sampling),
                "devices": devices.as_json(held),
                "layers": [
                    {
                        "name": layer.name,
                        "kind": layer.kind,
                        "d_in": layer.d_in,
                        "d_out": layer.d_out,
                        "bias": layer.bias,
                        "rows": layer.rows,
                        "dropped": dict(layer.dropped),
                        "distinct_keys": distinct[layer.name],
                        "row_space": layer.row_space,
                        "values": layer.values,
                        "encodings": dict(
                            zip(("keys", "values"), published[layer.name].encodings, strict=True)
                        ),
                        "row_bytes": dict(
                            zip(("stored", "unpacked"), manifest.row_bytes(layer.name), strict=True)
                        ),
                        "columns": dict(layer.columns),
                        "inexact": [
                            {"from_step": mark.from_step, "reason": mark.reason}
                            for mark in layer.inexact
                        ],
                        "output_error": errors[layer.name],
                    }
                    for layer in layers
                ],
            }
        )
        return 0
    print(f"{options.index}: {info.steps:,} steps of {info.optimizer}, {bytes_text(size)}")
    if manifest.sampling.options:
        print(f"of a sample: recorded with {manifest.sampling.options}")
    print()
    print_table(
        [
            "layer",
            "kind",
            "d_in",
            "d_out",
            "bias",
            "values",
            "kept as",
            "rows",
            "not recorded",
            "distinct keys",
            "packed to",
            "row space",
            "exactness",
        ],
        [
            [
                layer.name,
                layer.kind,
                layer.d_in,
                layer.d_out,
                layer.bias,
                layer.values,
                _kept_as(published[layer.name]),
                layer.rows,
                sum(layer.dropped.values()),
                distinct[layer.name],
                _packed_to(*manifest.row_bytes(layer.name)),
                layer.row_space,
                _exactness(layer, errors[layer.name]),
            ]
            for layer in layers
        ],
    )
    for space in sorted({layer.row_space for layer in layers}):
        columns = next(layer.columns for layer in layers if layer.row_space == space)
        print()
        print(f"columns of row space {space}")
        print_table(["column", "type"], columns.items())
    devices.show(held)
    return 0


def _exactness(layer: LayerInfo, error: float | None) -> str:
    """What the marks say, and where its outputs are refused all the same, why."""
    from dualform.questions import MAX_RESIDUAL

    if layer.inexact or error is None or error <= MAX_RESIDUAL:
        return layer.exactness
    return f"weights exact; no row explains {error:.2g} of its outputs (`dualform index verify`)"


def _kept_as(layer: IndexLayer) -> str:
    """How keys and values lie on disk: "bfloat16", or both where they differ."""
    keys, values = layer.encodings
    return keys if keys == values or not layer.values else f"{keys}, {values}"


def _packed_to(stored: int, unpacked: int) -> float | None:
    """What share of their bytes keys and values take; None where they are not packed."""
    return round(stored / unpacked, 3) if stored < unpacked else None


def _verify(options: argparse.Namespace) -> int:
    load_engine()
    from dualform.engine import verify_index
    from dualform.store.versions import newest

    options.index = newest(options.index)
    with Progress("verifying", "rows") as progress:
        report = verify_index(options.index, progress=progress)
    if options.json:
        print_json(report.to_json())
    else:
        _print_report(report)
    if not report.ok:
        print(
            f"dualform: {options.index} does not hold what it claims; rebuild it with "
            "`dualform index build`, and if that does not help, record the run again",
            file=sys.stderr,
        )
    return 0 if report.ok else 1


def _print_report(report: VerifyReport) -> None:
    open_ = sum(one.weight_error is None or bool(one.inexact) for one in report.layers)
    but = f", but {open_} of {len(report.layers)} layers prove nothing to the end: see their notes"
    verdict = "ok" if report.ok else "NOT OK"
    print(f"{report.path}: {report.steps:,} steps; {verdict}{but if report.ok and open_ else ''}")
    for damage in report.damage:
        about = [] if damage.layer is None else [f"layer {damage.layer}"]
        if damage.first_row is not None:
            about.append(f"rows {damage.first_row:,} to {damage.last_row:,}")
        print(f"damaged: {damage.file} ({', '.join(about) or 'all layers'}): {damage.what}")
    if report.layers:
        print()
        print_table(
            ["layer", "ok", "weight error", "bias error", "output error", "exact steps", "note"],
            [
                [
                    layer.layer,
                    layer.ok,
                    layer.weight_error,
                    layer.bias_error,
                    layer.output_error,
                    layer.exact_steps,
                    layer.note,
                ]
                for layer in report.layers
            ],
        )
        print("errors are relative: |rebuilt - trained| / |trained - initial|, Frobenius norm;")
        print("of outputs, the largest part that no row explains")
