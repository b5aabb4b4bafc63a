"""Stage "figures": the paper's figures for chosen test images, and accuracy along a mask's sweep.

Run as a process of its own: python -m runner.figures STUDY DATA SCRATCH FOLDER HOST:PORT
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file

from dualform import plot
from dualform.client import Client, capture_queries
from dualform.plot import style
from runner import config, images


def main(study_file: str, data: str, scratch: str, folder: str, address: str) -> None:
    """Leave figures/*.png and figures.json, what they show, in `folder`."""
    study = config.load(Path(study_file))
    assert study.figures is not None
    tests = {task: images.held_out(Path(data), Path(scratch), task) for task in study.tasks}
    model = images.network(study.hidden).eval()
    model.load_state_dict(load_file(str(Path(folder) / "model.safetensors")))
    out = Path(folder) / "figures"
    out.mkdir(exist_ok=True)
    masks: dict[str, Any] = {}
    if study.masks is not None:
        masks = json.loads((Path(folder) / "masks.json").read_text())
        plot.save(swept(study.masks, masks), out / "sweep.png")
    shown: list[dict[str, Any]] = []
    with Client(address, timeout=3600) as client:
        for figure in study.figures:
            start = time.perf_counter()
            test = tests[figure.task]
            with torch.no_grad():
                predictions = model(test.inputs).argmax(1)
            place = _place(figure, test, predictions, masks)
            if place is None:
                print(f"{figure.name}: no such test image", flush=True)
                continue
            queries = capture_queries(model, test.inputs[place : place + 1])
            for kind, drawn in _drawn(client, study, queries, images.png(test.pixels[place])):
                plot.save(drawn, out / f"{figure.name}_{kind}.png")
            shown.append(
                {
                    "name": figure.name,
                    "task": figure.task,
                    "place": place,
                    "label": int(test.labels[place]),
                    "prediction": int(predictions[place]),
                    "seconds": time.perf_counter() - start,
                }
            )
            print(shown[-1], flush=True)
    (Path(folder) / "figures.json").write_text(json.dumps(shown, indent=1))


def _place(
    figure: config.Figure, test: images.Images, predictions: torch.Tensor, masks: dict[str, Any]
) -> int | None:
    """Which test image is shown; None where there is none of the kind."""
    if figure.astray:
        example = masks["astray"].get("example")
        return None if example is None else int(example["place"])
    right = torch.nonzero((test.labels == figure.label) & (predictions == figure.label)).flatten()
    return int(right[0]) if len(right) else None


def _drawn(
    client: Client, study: config.Study, queries: Mapping[str, Any], image: bytes
) -> list[tuple[str, Figure]]:
    """The figures of one query, by the end of their file's name."""
    tasks = study.tasks if len(study.tasks) > 1 else None
    last = list(queries)[-1]
    return [
        ("attention", plot.attention(client, queries, tasks=tasks)),
        ("sums", plot.sums(client, queries, tasks=tasks)),
        ("matches", plot.matches(client, queries, image=image)),
        ("profile", plot.profile(client, queries, tasks=tasks)),
        ("contributions", plot.contributions(client, last, queries[last], tasks=tasks)),
    ]


def swept(masks: config.Masks, facts: dict[str, Any]) -> Figure:
    """Accuracy on both tasks as the mask is lifted step by step.

    Args:
        masks: Whose rows.
        facts: What runner/masks.py left.
    """
    with style.look():
        figure = style.new_figure(style.WIDTH, 1.3 * style.HEIGHT)
        axes = figure.add_subplot()
        style.dress(axes)
        steps = [each["step"] for each in facts["sweep"]]
        for task, colour in zip((masks.kept, masks.task), style.TASK_COLOURS, strict=False):
            shares = [100 * each["accuracy"][task] for each in facts["sweep"]]
            axes.plot(steps, shares, color=colour, marker="o", markersize=3, linewidth=1.2)
        axes.set_ylim(0, 100)
        axes.set_xlabel(f"rows of {masks.task} take part before step")
        axes.set_ylabel("test accuracy (%)")
        style.legend(figure, [masks.kept, masks.task], style.TASK_COLOURS[:2])
    return figure


if __name__ == "__main__":
    main(*sys.argv[1:])
