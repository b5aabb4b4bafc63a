"""`dualform record inspect`: what of a recording is committed, while training runs or after it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualform.cli.interruption import load_engine
from dualform.cli.output import Progress, bytes_text, print_json, print_table

if TYPE_CHECKING:
    from dualform.store.recording import Recording


def add_to(commands: Any) -> None:
    """Adds the command's arguments."""
    parser = commands.add_parser(
        "record",
        allow_abbrev=False,
        help="show what a recording holds so far, or pack it",
        description="Shows what a recording holds so far, or packs it.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    inspect = actions.add_parser(
        "inspect",
        allow_abbrev=False,
        help="layers, rows, bytes, exactness of what is committed",
        description="Shows what is committed of a recording, while training runs or after it. Of a "
        "data-parallel run, of each rank.",
    )
    inspect.add_argument("recording", type=Path, metavar="RUN", help="what a Recorder writes")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect, parser=inspect)
    pack = actions.add_parser(
        "pack",
        allow_abbrev=False,
        help="fewer bytes for the same recording, in its place",
        description="Packs keys and values of a recording in its place, without loss: readers get "
        "the same numbers, bit for bit. A segment at a time, so that little more disk is needed; "
        "what is killed goes on when called again. Not while it is recorded or read.",
    )
    pack.add_argument("recording", type=Path, metavar="RUN", help="what a Recorder wrote")
    pack.add_argument("--json", action="store_true", help="print JSON")
    pack.set_defaults(run=_pack, parser=pack)


def _inspect(options: argparse.Namespace) -> int:
    load_engine()
    from dualform.store.recording import Recording

    ranks = _ranks(options.recording)
    found = []
    for folder in ranks or [options.recording]:
        with Recording.open(folder) as recording:
            found.append(view_of(recording))
    if options.json:
        print_json({"ranks": found} if ranks else found[0])
        return 0
    for number, view in enumerate(found):
        if number:
            print()
        _print(view)
    return 0


def _pack(options: argparse.Namespace) -> int:
    load_engine()
    from dualform.store.recording_pack import pack_recording

    ranks = _ranks(options.recording)
    found: list[dict[str, Any]] = []
    for folder in ranks or [options.recording]:
        with Progress("packing", "B") as progress:
            before, after = pack_recording(folder, progress)
        found.append({"path": str(folder), "bytes_before": before, "bytes": after})
    if options.json:
        print_json({"ranks": found} if ranks else found[0])
        return 0
    for each in found:
        before, after = each["bytes_before"], each["bytes"]
        left = f", {after / before:.2f} of before" if before else ""
        # `inspect` counts the numbers alone; small records are most of all padding.
        print(f"{each['path']}: {bytes_text(after)} on disk{left}, with the padding to whole pages")
    return 0


def _ranks(path: Path) -> list[Path]:
    """The folders of a data-parallel run's ranks; none where it is a recording itself."""
    from dualform.store.ranks import rank_folders
    from dualform.store.recording_format import MANIFEST

    return [] if (path / MANIFEST).exists() else list(rank_folders(path))


def view_of(recording: Recording) -> dict[str, Any]:
    """What is committed, as JSON has it."""
    from dualform.store.lock import holder_of

    writer = holder_of(recording.path)
    if writer is None and not recording.complete:  # it may have been closed since it was read
        recording = type(recording).open(recording.path)
    manifest = recording.manifest
    times = [
        (recording.path / "segments" / f"{segment.number:06d}.json").stat().st_mtime
        for segment in recording.segments
    ]
    return {
        "path": str(recording.path),
        "rank": None if manifest.ranks is None else manifest.ranks.to_json(),
        "optimizer": manifest.optimizer,
        "steps": recording.steps,
        "complete": recording.complete,
        "writer": writer,
        "seconds_since_commit": max(0.0, time.time() - times[-1]) if times else None,
        "bytes": sum(f.stat().st_size for f in recording.path.rglob("*") if f.is_file()),
        "values": manifest.values,
        "options": manifest.sampling.options,
        "columns": {field.name: str(field.type) for field in recording.schema},
        "layers": [_layer(recording, name) for name in manifest.layers],
        "left_out": {reason: list(names) for reason, names in manifest.left_out.items()},
    }


def _layer(recording: Recording, name: str) -> dict[str, Any]:
    spec, passes = recording.manifest.layers[name], recording.passes(name)
    spans = {
        (record.segment, span)
        for record in passes
        for span in (record.keys, record.values)
        if span and span.nbytes
    }
    return {
        "name": name,
        "kind": spec.kind,
        "d_in": spec.d_in,
        "d_out": spec.d_out,
        "rows": recording.rows(name),
        "dropped": recording.dropped(name),
        "bytes": sum(span.stored for _, span in spans),
        "unpacked_bytes": sum(span.whole for _, span in spans),
        "encodings": sorted({span.encoding for _, span in spans}),
        "packings": sorted({span.packing for _, span in spans}),
        "inputs": any(span.patches is not None for _, span in spans),
        "inexact": [
            {"from_step": mark.from_step, "reason": mark.reason} for mark in recording.marks[name]
        ],
    }


def _print(view: dict[str, Any]) -> None:
    rank = view["rank"]
    of = "" if rank is None else f" (rank {rank['rank']} of {rank['world']})"
    print(
        f"{view['path']}{of}: {view['steps']:,} steps of {view['optimizer']} committed, "
        f"{bytes_text(view['bytes'])}; {_state(view)}"
    )
    if view["options"]:
        print(f"of a sample: recorded with {view['options']}")
    print()
    headers = [
        "layer",
        "kind",
        "d_in",
        "d_out",
        "kept as",
        "rows",
        "not recorded",
        "bytes",
        "packed to",
    ]
    print_table(
        [*headers, "exactness"],
        [
            [
                *(layer[key] for key in ("name", "kind", "d_in", "d_out")),
                ", ".join(layer["encodings"]),
                layer["rows"],
                sum(layer["dropped"].values()),
                bytes_text(layer["bytes"]),
                _packed(layer),
                _exactness(layer["inexact"]),
            ]
            for layer in view["layers"]
        ],
    )
    for reason, names in view["left_out"].items():
        print(f"\nleft out: {', '.join(name or 'the model itself' for name in names)}: {reason}")
    print(f"\ncolumns: {', '.join(view['columns'])}")


def _state(view: dict[str, Any]) -> str:
    """Whether it is complete, is being written, or was cut off."""
    if view["complete"]:
        return "complete"
    if view["writer"] is None:
        return "cut off: no process writes it, and it was not closed"
    since = view["seconds_since_commit"]
    when = "nothing is committed yet" if since is None else f"last commit {since:,.0f} s ago"
    return f"being recorded by {view['writer']}, {when}"


def _packed(layer: dict[str, Any]) -> str:
    """What of a layer's bytes is left."""
    if layer["packings"] in ([], ["plain"]) and not layer["inputs"]:
        return "-"
    return f"{layer['bytes'] / layer['unpacked_bytes']:.2f}"


def _exactness(marks: list[dict[str, Any]]) -> str:
    if not marks:
        return "exact so far"
    first = min(marks, key=lambda mark: int(mark["from_step"]))
    return f"not from step {first['from_step']:,} on: {first['reason']}"
