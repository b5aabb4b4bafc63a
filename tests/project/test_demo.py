"""The demo: what it prints is what the memory says, and its closing commands work as pasted."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import matplotlib.image
import numpy as np

from dualform.client import Client

from .demo_run import Demo, serving


def test_it_reports_an_exact_dual_output(demo: Demo) -> None:
    errors = re.findall(r"dual output against the layer's own: relative error (\S+)", demo.output)
    assert len(errors) == 3
    assert all(0 <= float(error) <= 1e-5 for error in errors)
    assert re.search(r"Test image \d+: digit \d, the network says \d\.", demo.output)
    right = re.search(r"Right on ([\d.]+)% of 297 test images", demo.output)
    assert right is not None
    assert float(right[1]) > 95


def test_its_class_contributions_add_up_to_the_output(demo: Demo) -> None:
    lines = demo.output.splitlines()
    added = next(line.split()[1:] for line in lines if line.split()[:1] == ["added"])
    said = next(line for line in lines if "added to the output for" in line)
    output = next(line.split()[2:] for line in lines if line.split()[:2] == ["own", "output"])
    predicted = int(re.search(r"for (\d):", said)[1])  # type: ignore[index]
    parts = [float(cell) for cell in added]
    assert abs(sum(parts[:-1]) - float(output[predicted])) < 0.01  # Eleven parts of three decimals.
    assert int(np.argmax([float(cell) for cell in output])) == predicted


def test_its_picture_is_a_picture(demo: Demo) -> None:
    picture = matplotlib.image.imread(demo.folder / "answers.png")
    assert picture.shape[0] > 800
    assert picture.shape[1] > 1600
    assert picture[..., :3].std() > 0.05


def test_a_run_starts_over(demo: Demo) -> None:
    assert (demo.folder / "index" / "manifest.json").exists()
    assert not (demo.folder / "left-behind.txt").exists()


def test_its_closing_commands_work_as_pasted(demo: Demo) -> None:
    lines = demo.output.splitlines()
    commands = [line.strip() for line in lines[lines.index("To go on:") + 1 :] if line.strip()]
    assert len(commands) >= 4
    for command in commands[:-1]:
        done = run(command, demo.folder.parent)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert done.stdout.strip(), command
        assert "Traceback" not in done.stderr


def test_its_last_command_serves(demo: Demo) -> None:
    command = demo.output.strip().splitlines()[-1].strip()
    words = ["bash", "-c", f"exec {command} --port 0"]
    with serving(words, demo.folder.parent / "last.log") as address, Client(address) as client:
        hits = client.top_k("0", np.load(demo.folder / "query-0.npy"), k=1)
    best = re.search(r"example +(\d+), digit", demo.output)
    assert best is not None
    assert hits["example"][0, 0] == int(best[1])


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True)
