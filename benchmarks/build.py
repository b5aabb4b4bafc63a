"""Throughput of `build_index` beside `cp -r` and `sync` of the same recording, alternated.

    python -m benchmarks build RECORDING [--scratch DIR] [--repeat 3] [--json]

Both write every byte once and end with it on disk; the build also verifies, reorders and hashes.
Each runs in a process of its own with the recording out of the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recording", type=Path)
    parser.add_argument("--scratch", type=Path, help="folder to write to (default: beside it)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    size = sum(file.stat().st_size for file in arguments.recording.rglob("*") if file.is_file())
    seconds: dict[str, list[float]] = {"copy": [], "build": []}
    scratch = arguments.scratch or arguments.recording.parent
    for _ in range(arguments.repeat):
        for name in seconds:
            with tempfile.TemporaryDirectory(dir=scratch) as directory:
                seconds[name].append(run(name, arguments.recording, Path(directory) / "out"))
    rates = {name: size / 1e6 / statistics.median(times) for name, times in seconds.items()}
    result = {
        "bytes": size,
        "seconds": seconds,
        "mb_per_s": rates,
        "ratio": rates["build"] / rates["copy"],
    }
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"recording of {size / 1e9:.2f} GB, medians of {arguments.repeat}")
        for name, rate in rates.items():
            print(f"{name:>6}: {rate:6.0f} MB/s")
        print(f" ratio: {result['ratio']:6.2f} (build to copy)")


def run(name: str, recording: Path, target: Path) -> float:
    """Seconds that one copy or build takes, its bytes on disk at the end."""
    os.sync()
    drop_from_cache(recording)
    start = time.perf_counter()
    if name == "copy":
        subprocess.run(["cp", "-r", str(recording), str(target)], check=True)
        subprocess.run(["sync", "-f", str(target)], check=True)
    else:
        build = [
            sys.executable,
            "-m",
            "dualform.cli",
            "index",
            "build",
            str(recording),
            str(target),
        ]
        subprocess.run(build, check=True, capture_output=True)
    elapsed = time.perf_counter() - start
    shutil.rmtree(target)
    return elapsed


def drop_from_cache(directory: Path) -> None:
    """Let go of the page cache of every file below a directory."""
    for file in directory.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
