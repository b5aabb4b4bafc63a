"""The whole job once, on scikit-learn's digits: record, build, verify, serve, ask, look.

    python examples/digits_demo.py [FOLDER] [--image N]

`make demo` runs it. FOLDER (default: demo) is made anew by every run.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from digits_picture import LayerAnswer, Match, draw
from dualform.client import Client, capture_queries
from dualform.record import Recorder

DUALFORM = Path(sys.executable).with_name("dualform")
TRAINED = 1500  # Of the 1,797 digits; the others are the test images.
BATCH = 32
EPOCHS = 12
K = 300  # Rows asked per layer: enough to hold SHOWN different images, each seen once per epoch.
SHOWN = 6


@dataclass(frozen=True)
class Digits:
    """scikit-learn's digits, 8 x 8 grey values, and who is trained on.

    Attributes:
        training: int64 [1500], ids (places in scikit-learn's data) of the training images.
        test: int64 [297], ids of the test images.
        inputs: float32 [1797, 64], normalised by the training images' mean and deviation.
        labels: int64 [1797].
        pixels: uint8 [1797, 8, 8].
    """

    training: torch.Tensor
    test: torch.Tensor
    inputs: torch.Tensor
    labels: torch.Tensor
    pixels: np.ndarray


def main() -> None:
    arguments = _arguments()
    folder: Path = arguments.folder
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    digits = _digits()

    print("Which training images made this output, and by how much?\n")
    model = train_and_record(digits, folder / "recording")
    _run("index", "build", folder / "recording", folder / "index")
    _run("index", "verify", folder / "index")

    image = int(digits.test[arguments.image])
    queries = capture_queries(model, digits.inputs[image : image + 1])
    for layer, query in queries.items():
        np.save(folder / f"query-{layer}.npy", query)
    with _serving(folder / "index", folder / "serve.log") as address:
        print(f"$ {_shown('serve', folder / 'index', '--port', '0')}\n  listening on {address}\n")
        with Client(address) as client:
            answers = [ask(client, model, layer, queries[layer]) for layer in queries]
    report(image, int(digits.labels[image]), answers)
    picture = folder / "answers.png"
    draw(digits.pixels[image], int(digits.labels[image]), answers, K, picture)
    print(f"The picture: {picture}\n")
    print("To go on:")
    for line in next_commands(folder):
        print(f"  {line}")


def train_and_record(digits: Digits, path: Path) -> nn.Sequential:
    """The training loop as anyone would write it, plus the recorder's three lines."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # Matrices this small gain nothing from more, on a busy machine less.
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    start = time.perf_counter()
    with Recorder(model, optimizer, str(path)) as recorder:
        images = digits.pixels[digits.training.numpy()]
        recorder.add_examples(digits.training.numpy(), [_png(pixels) for pixels in images])
        for _ in range(EPOCHS):
            for ids in digits.training[torch.randperm(TRAINED)].split(BATCH):
                recorder.annotate(label=digits.labels[ids], example=ids, task="digits")
                loss = nn.functional.cross_entropy(model(digits.inputs[ids]), digits.labels[ids])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    with torch.no_grad():
        right = model(digits.inputs[digits.test]).argmax(1) == digits.labels[digits.test]
    print(
        f"Trained and recorded 64-256-256-10 for {EPOCHS} epochs of {TRAINED:,} digits: "
        f"{EPOCHS * TRAINED:,} rows per layer, {time.perf_counter() - start:.1f} s. "
        f"Right on {right.double().mean():.1%} of {len(right)} test images.\n"
    )
    return model


def ask(client: Client, model: nn.Sequential, layer: str, query: np.ndarray) -> LayerAnswer:
    """One layer's answers for one query, float32 [1, d_in], beside the layer's own output."""
    hits = client.top_k(layer, query, k=K)
    sums = client.sums(layer, query, group_by="label")
    output = client.dual_output(layer, query)
    parts = client.dual_output(layer, query, group_by="label")
    with torch.no_grad():
        real = model.get_submodule(layer)(torch.from_numpy(query))
    layer_output = real.numpy()[0].astype(np.float64)
    dual = output.values[0].astype(np.float64)

    # The same image returns in every epoch: show each once, at its largest weight.
    examples, labels = hits["example"][0], hits["label"][0]
    counts = {example: int(np.sum(examples == example)) for example in examples}
    firsts = [int(np.argmax(examples == example)) for example in counts][:SHOWN]
    payloads = client.examples([int(examples[place]) for place in firsts])
    matches = [
        Match(
            example=int(examples[place]),
            label=int(labels[place]),
            weight=float(hits.scores[0, place]),
            count=counts[examples[place]],
            pixels=_pixels(payload),
        )
        for place, payload in zip(firsts, payloads, strict=True)
    ]
    return LayerAnswer(
        layer=layer,
        d_in=query.shape[1],
        rows=hits.coverage.rows,
        matches=matches,
        classes=[int(group) for group in sums.groups],
        sums=sums.values[0],
        parts=parts.values[0],
        initial=output.initial[0],
        dual=dual,
        layer_output=layer_output,
    )


def report(image: int, label: int, answers: list[LayerAnswer]) -> None:
    """Print the answers for one test image, by its id."""
    last = answers[-1]
    predicted = int(last.dual.argmax())
    print(f"Test image {image}: digit {label}, the network says {predicted}.")
    for answer in answers:
        print(f"\nLayer {answer.layer}: {answer.rows:,} rows of {answer.d_in}")
        print(f"  training images with the largest weight (rows of theirs among the top {K}):")
        for match in answer.matches:
            print(
                f"    example {match.example:>4}, digit {match.label}"
                f"   weight {match.weight:9.3f}   {match.count:>3} rows"
            )
        print("  sum of weights per class:")
        for name, value in (("class", answer.classes), ("sum", answer.sums / 1000)):
            cells = "".join(f"{x:>8}" if name == "class" else f"{x:8.1f}" for x in value)
            print(f"    {name:<14}{cells}{'   (thousands)' if name == 'sum' else ''}")
        print(f"  dual output against the layer's own: relative error {answer.error:.1e}")
    print(f"\nLayer {last.layer}'s output, once from memory and once from the trained layer:")
    for name, values in (
        ("class", [f"{x:>8}" for x in range(len(last.dual))]),
        ("dual form", [f"{x:8.3f}" for x in last.dual]),
        ("own output", [f"{x:8.3f}" for x in last.layer_output]),
    ):
        print(f"    {name:<14}{''.join(values)}")
    print(f"\nWhat each class's training images added to the output for {predicted}:")
    parts = last.parts[:, predicted]
    print(f"    {'class':<14}{''.join(f'{x:>8}' for x in last.classes)}{'initial':>10}{'total':>9}")
    total = parts.sum() + last.initial[predicted]
    cells = "".join(f"{x:8.3f}" for x in parts)
    print(f"    {'added':<14}{cells}{last.initial[predicted]:10.3f}{total:9.3f}\n")


def next_commands(folder: Path) -> list[str]:
    """Commands that work when pasted, the last of them a server that runs until Ctrl-C."""
    ask = ("--local", folder / "index")
    hidden = ("--layer", "2", "--query", folder / "query-2.npy")
    last = ("--layer", "4", "--query", folder / "query-4.npy")
    return [
        _shown("index", "inspect", folder / "index"),
        _shown("query", "top-k", *ask, *hidden, "-k", "5", "--where", "label = 5 and step < 100"),
        _shown("query", "sums", *ask, *hidden, "--group-by", "label"),
        _shown("query", "output", *ask, *last, "--at-step", "100"),
        _shown("serve", folder / "index"),
    ]


def _digits() -> Digits:
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.images))
    training = data.images[order[:TRAINED]]
    inputs = (data.images - training.mean()) / training.std()
    return Digits(
        training=torch.from_numpy(order[:TRAINED]),
        test=torch.from_numpy(order[TRAINED:]),
        inputs=torch.from_numpy(inputs).float().flatten(1),
        labels=torch.from_numpy(data.target).long(),
        pixels=(data.images * 255 / 16).astype(np.uint8),
    )


def _png(pixels: np.ndarray) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, format="PNG")
    return sink.getvalue()


def _pixels(payload: bytes | str | None) -> np.ndarray:
    assert isinstance(payload, bytes)
    return np.asarray(Image.open(io.BytesIO(payload)))


def _shown(*words: str | Path) -> str:
    """A `dualform` command as a person would paste it here."""
    program = DUALFORM
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    return shlex.join([str(program), *map(str, words)])


def _run(*words: str | Path) -> None:
    print(f"$ {_shown(*words)}", flush=True)
    subprocess.run([str(DUALFORM), *map(str, words)], check=True)
    print(flush=True)


@contextmanager
def _serving(index: Path, log: Path) -> Iterator[str]:
    """`dualform serve` on a free loopback port; yields HOST:PORT."""
    with open(log, "wb") as sink:
        process = subprocess.Popen(
            [str(DUALFORM), "serve", str(index), "--port", "0"],
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    try:
        while not (found := re.search(r"listening on (\S+)", log.read_text())):
            if process.poll() is not None:
                raise SystemExit(f"dualform serve ended:\n{log.read_text()}")
            time.sleep(0.05)
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("demo"))
    parser.add_argument("--image", type=int, default=8, help="which test image, 0 to 296")
    arguments = parser.parse_args()
    if not 0 <= arguments.image < 297:
        parser.error(f"--image {arguments.image}: there are test images 0 to 296")
    return arguments


if __name__ == "__main__":
    main()
