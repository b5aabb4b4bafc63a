"""The study's report: facts as JSON, and a Markdown page with the command that makes it again."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from runner import table1
from runner.config import Study, Variant
from runner.measure import Usage


@dataclass
class Run:
    """What one variant with one seed came to.

    Attributes:
        stages: Cost of each stage's process, by the stage's name.
        bytes: Size on disk of "recording" and "index".
        record: Facts of the training process (runner/record.py).
        verify: What `dualform index verify --json` printed; empty where it was not asked.
        open_seconds: From starting the server until it listened.
        answers: Facts of the questions, by the stage's name.
        failures: Bounds of the study that did not hold; empty where all did.
    """

    variant: str
    seed: int
    stages: dict[str, Usage] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    verify: dict[str, Any] = field(default_factory=dict)
    open_seconds: float = 0.0
    answers: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def accuracy(self) -> dict[str, float]:
        """Of the trained model on each task's test set, 0 to 1."""
        return dict(self.record["test_accuracy"])


def save_run(study: Study, run: Run, folder: Path) -> None:
    """Leave run.json: the run is done."""
    facts = {"study": _settings(study, run.variant), "run": asdict(run)}
    (folder / "run.json").write_text(json.dumps(facts, indent=1) + "\n")


def load_run(study: Study, variant: str, folder: Path) -> Run | None:
    """A run that is done with the study's settings as they are, or None."""
    try:
        facts = json.loads((folder / "run.json").read_text())
    except FileNotFoundError:
        return None
    if facts["study"] != _settings(study, variant):
        return None
    run = Run(**facts["run"])
    run.stages = {name: Usage(**usage) for name, usage in facts["run"]["stages"].items()}
    return run


def failures(study: Study, run: Run) -> list[str]:
    """The bounds that do not hold, in words."""
    variant = study.variants[run.variant]
    found = []
    for checked in run.verify.get("layers", ()):
        error = checked["weight_error"]
        if error is None or error > variant.max_weight_error:
            found.append(f"layer {checked['layer']}: weight error {error}; {checked['note']}")
    if study.ask is not None:
        server = run.stages["serve"].peak_anonymous / 1e6
        if server > study.ask.max_server_mb:
            found.append(f"the server's memory reached {server:.0f} MB")
        for layer, facts in run.answers["ask"]["layers"].items():
            if facts["rows"] != study.rows:
                found.append(f"layer {layer} has {facts['rows']:,} rows, not {study.rows:,}")
            if not facts["output_error"] <= variant.max_output_error:
                found.append(f"layer {layer}: output error {facts['output_error']:.1e}")
    if study.votes is not None:
        for facts in run.answers["votes"]["layers"]:
            if facts["rows"] != study.rows:
                found.append(f"layer {facts['name']} has {facts['rows']:,} rows in its sums")
            found += [f"layer {facts['name']} is not exact: {why}" for why in facts["inexact"]]
    if study.masks is not None:
        facts = run.answers["masks"]
        if facts["differ_from_model"]:
            wrong = facts["differ_from_model"]
            found.append(f"{wrong:,} predictions in dual form are not the model's")
    return found


def write(study: Study, runs: list[Run], command: str, out: Path) -> None:
    """Write report.json and report.md to `out`, and table1.* where the study asks for votes."""
    facts = {
        "study": asdict(study),
        "command": command,
        "machine": _machine(),
        "variants": [asdict(run) for run in runs],
    }
    (out / "report.json").write_text(json.dumps(facts, indent=1) + "\n")
    training = ", then ".join(
        f"{phase.steps:,} steps on {' and '.join(phase.tasks)}" for phase in study.phases
    )
    lines = [
        f"# {study.name}",
        "",
        f"784-{'-'.join(map(str, study.hidden))}-10, {training}, batch {study.batch_size}: "
        f"{study.rows:,} rows per layer. Made by:",
        "",
        f"    {command}",
        "",
        ", ".join(f"{key} {value}" for key, value in _machine().items()) + ".",
    ]
    for name in dict.fromkeys(run.variant for run in runs):
        of_variant = [run for run in runs if run.variant == name]
        variant = study.variants[name]
        lines += [
            "",
            f"## {name}: {variant.title}",
        ]
        if study.votes is not None:
            lines += ["", *table1.write(of_variant, out, "" if name == "code" else f"_{name}")]
        for run in of_variant:
            lines += ["", *_run(study, variant, run)]
    (out / "report.md").write_text("\n".join(lines) + "\n")


def _run(study: Study, variant: Variant, run: Run) -> list[str]:
    record = run.record
    accuracies = ", ".join(f"{share:.2%} on {task}" for task, share in run.accuracy.items())
    lines = [f"### seed {run.seed}", ""] if len(study.seeds) > 1 else []
    lines += [
        "| stage | seconds | peak anonymous + shared MB | peak resident MB, mapped files too |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {usage.seconds:.1f} | {usage.peak_anonymous / 1e6:.0f} "
        f"| {usage.peak_rss / 1e6:.0f} |"
        for name, usage in run.stages.items()
    ]
    lines += [
        "",
        f"Of the first stage the training loop took {record['loop_seconds']:.1f} s and closing "
        f"the recording {record['close_seconds']:.1f} s. On disk: recording "
        f"{run.bytes['recording'] / 1e9:.2f} GB, index {run.bytes['index'] / 1e9:.2f} GB. "
        f"The server listened after {run.open_seconds:.1f} s. Test accuracy {accuracies}.",
    ]
    if len(study.phases) > 1:
        for number, shares in enumerate(record["test_accuracy_by_phase"], 1):
            after = ", ".join(f"{share:.2%} on {task}" for task, share in shares.items())
            lines.append(f"After phase {number}: {after}.")
    if study.ask is not None:
        lines += ["", *_asked(study, variant, run)]
    elif study.verify:
        errors = ", ".join(f"{checked['weight_error']:.1e}" for checked in run.verify["layers"])
        lines += ["", f"`dualform index verify`: the rows rebuild the layers' weights to {errors}."]
    if study.masks is not None:
        lines += ["", *_masked(study, run)]
    if run.failures:
        return [*lines, "", "**Bounds that do not hold:** " + "; ".join(run.failures) + "."]
    return [*lines, "", "Every bound of the study holds."]


def _asked(study: Study, variant: Variant, run: Run) -> list[str]:
    assert study.ask is not None
    ask = run.answers["ask"]
    lines = [
        f"Over the {ask['images']:,} images asked the accuracy is {ask['accuracy_layer']:.2%}, "
        f"with the last layer in dual form {ask['accuracy_dual']:.2%}.",
        "",
        "Weight error: what `dualform index verify` found, |rebuilt - trained| / |trained - "
        f"initial| in the Frobenius norm, bound {variant.max_weight_error:g}. Output error: "
        f"|dual - layer| / |layer|, the largest and the median over {ask['images']:,} test images, "
        f"bound {variant.max_output_error:g}. Seconds for the outputs of these images, for top-k "
        f"(largest absolute weight) and absolute sums per label of {study.ask.top_k_queries} "
        f"queries, k = {study.ask.k}. Server MB: anonymous and shared at their peak during top-k, "
        f"bound {study.ask.max_server_mb} throughout.",
        "",
        "| layer | rows | weight error | output error | median | outputs s | top-k s | sums s "
        "| server MB | vote is label |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    return lines + [
        f"| {name} | {facts['rows']:,} | {_weight_error(run, name)} "
        f"| {facts['output_error']:.1e} | {facts['output_error_median']:.1e} "
        f"| {facts['output_seconds']:.2f} | {facts['top_k_seconds']:.2f} "
        f"| {facts['sums_seconds']:.2f} | {facts['top_k_server_anonymous'] / 1e6:.0f} "
        f"| {facts['vote_is_label']:.0%} |"
        for name, facts in ask["layers"].items()
    ]


def _masked(study: Study, run: Run) -> list[str]:
    assert study.masks is not None
    facts, kept, task = run.answers["masks"], study.masks.kept, study.masks.task
    edges = study.masks.edges(study.steps)
    lines = [
        f"Accuracy over the first {facts['images']:,} test images of each task, every layer in "
        f"dual form. The model itself: {facts['accuracy'][kept]:.2%} on {kept}, "
        f"{facts['accuracy'][task]:.2%} on {task}. What the rows of each task add to each layer, "
        f"in {len(edges) - 1} ranges of steps, took {facts['parts_seconds']:.0f} s to ask; masks "
        "add these parts up. Passes by `dual_form` ask for every layer's output "
        "with the filter, as anyone would.",
        "",
        f"| rows that take part | {kept} | {task} | predictions that differ | seconds |",
        "|---|---:|---:|---:|---:|",
    ]
    for each in facts["passes"]:
        differ = each.get("differ", facts["differ_from_model"])
        if each["title"] != "nothing masked" and "differ" not in each:
            differ = None
        lines.append(
            f"| {each['title']} | {each['accuracy'][kept]:.2%} | {each['accuracy'][task]:.2%} "
            f"| {'' if differ is None else differ} "
            f"| {format(each['seconds'], '.0f') if 'seconds' in each else ''} |"
        )
    lines += [
        "",
        "Predictions that differ: from the model's where nothing is masked, from the added parts' "
        f"for a pass by `dual_form`; of {2 * facts['images']:,}.",
        "",
        f"The mask swept over steps: rows of {task} take part before step s only.",
        "",
        f"| s | {kept} | {task} |",
        "|---:|---:|---:|",
    ]
    lines += [
        f"| {each['step']:,} | {each['accuracy'][kept]:.2%} | {each['accuracy'][task]:.2%} |"
        for each in facts["sweep"]
    ]
    found = facts["astray"]
    lines += [
        "",
        f"Of {found['images']:,} test images of {kept} with label {found['label']}, "
        f"{found['wrong']:,} are classified wrongly, and with the {task} rows masked in every "
        f"layer {found['right_masked']:,} of these are right. For {found['led_by_largest_sum']:,} "
        f"of these the {task} rows of the predicted label have the largest sum of weights in the "
        "last layer of all tasks and labels, as in the paper's example.",
    ]
    if "example" in found:
        example = found["example"]
        label, prediction = found["label"], example["prediction"]
        lines += [
            "",
            f"An example, preferably taken for a {study.masks.taken_for}, that is pushed furthest: "
            f"test image {example['place']}, taken for a {prediction}. Its logits for "
            f"{label} and {prediction} are {example['logits'][label]:.2f} and "
            f"{example['logits'][prediction]:.2f}, with the {task} rows masked "
            f"{example['logits_masked'][label]:.2f} and "
            f"{example['logits_masked'][prediction]:.2f}.",
        ]
    return lines


def _weight_error(run: Run, layer: str) -> str:
    if not run.verify:
        return "not asked"
    for checked in run.verify.get("layers", ()):
        if checked["layer"] == layer and checked["weight_error"] is not None:
            return f"{checked['weight_error']:.1e}"
    return "not rebuilt"


def _settings(study: Study, variant: str) -> Any:
    """What a run's answers depend on, as JSON gives it back: not on other seeds and variants."""
    facts = asdict(study) | {"variants": asdict(study.variants[variant])}
    del facts["seeds"]
    return json.loads(json.dumps(facts))


def _machine() -> dict[str, str]:
    names = ("torch", "faiss-cpu", "numpy", "grpcio")
    return {
        "Python": platform.python_version(),
        **{name: version(name) for name in names},
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.0f} GB",
    }
