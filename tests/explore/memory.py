"""Two small memories to look at: digits with pictures, and texts with a row per letter."""

from __future__ import annotations

import io
import string
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from dualform.index import build_index
from dualform.record import Recorder

STEPS, BATCH, EXAMPLES, LR = 60, 24, 480, 0.2
LETTERS = string.ascii_lowercase + " "
TEXTS = [
    f"{who} {does} {what}"
    for who in ("the old crow", "a red fox", "my grey cat")
    for does in ("sees", "eats", "takes")
    for what in ("cheese", "grapes", "a fish", "corn")
]


@dataclass(frozen=True)
class Digits:
    """The index at `path` and what it is of.

    Attributes:
        images: float32 [480, 64], the keys of layer "0", by example.
        labels: int64 [480].
        model: As trained: layers "0" and "2".
        losses: Of each step, annotated as `loss`.
    """

    path: Path
    images: torch.Tensor
    labels: torch.Tensor
    model: nn.Sequential
    losses: list[float]

    def weights(self, query: np.ndarray) -> np.ndarray:
        """float64 [480]: what each example's rows in layer "0" weigh together."""
        once: np.ndarray = self.images.numpy().astype(np.float64) @ query.astype(np.float64)
        return once * self.times()

    def times(self) -> np.ndarray:
        """int64 [480]: how often training saw each."""
        return np.bincount(np.concatenate(batches()), minlength=EXAMPLES)


def batches() -> list[np.ndarray]:
    """The examples of each step."""
    rng = np.random.default_rng(3)
    each = EXAMPLES // BATCH
    epochs = [rng.permutation(EXAMPLES) for _ in range(STEPS // each)]
    return [part for epoch in epochs for part in np.split(epoch, each)]


def make_digits(folder: Path) -> Digits:
    """64-32-10, trained by SGD; examples whose id is a multiple of five have no picture."""
    data = load_digits()
    images = torch.from_numpy((data.data[:EXAMPLES] / 16).astype(np.float32))
    labels = torch.from_numpy(data.target[:EXAMPLES].astype(np.int64))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    with Recorder(model, optimizer, folder / "recording") as recorder:
        for ids in map(torch.from_numpy, batches()):
            recorder.annotate(label=labels[ids], example=ids)
            loss = nn.functional.cross_entropy(model(images[ids]), labels[ids])
            optimizer.zero_grad()
            loss.backward()
            recorder.annotate_step(loss=loss)
            losses.append(loss.item())
            optimizer.step()
        kept = [each for each in range(EXAMPLES) if each % 5]
        pictures = (data.images[:EXAMPLES] * 255 / 16).astype(np.uint8)
        recorder.add_examples(kept, [png(pictures[each]) for each in kept])
    build_index(folder / "recording", folder / "digits")
    return Digits(folder / "digits", images, labels, model, losses)


def make_texts(folder: Path) -> Path:
    """A model of the next letter; examples are called by texts, payloads are what it read."""
    torch.manual_seed(2)
    model = nn.Sequential(
        OrderedDict(
            table=nn.Embedding(len(LETTERS), 12),
            hidden=nn.Linear(12, 24),
            relu=nn.ReLU(),
            head=nn.Linear(24, len(LETTERS)),
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    names = [f"text {number:02}" for number in range(len(TEXTS))]
    rng = np.random.default_rng(4)
    with Recorder(model, optimizer, folder / "recording") as recorder:
        for _ in range(40):
            chosen = int(rng.integers(len(TEXTS)))
            letters = torch.tensor([[LETTERS.index(each) for each in TEXTS[chosen]]])
            recorder.annotate(example=[names[chosen]])
            logits = model(letters[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), letters[0, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        recorder.add_examples(names, TEXTS)
    build_index(folder / "recording", folder / "texts")
    return folder / "texts"


@dataclass(frozen=True)
class Many:
    """The index at `path` of 100,000 examples, each a class of its own, seen once; layer "0".

    Attributes:
        keys: float32 [100000, 3].
        text: 10.5 MB, kept of examples 0, 7 and of the one with the largest weight for 7, `best`.
        model: "FILE.py:FUNCTION", which prepares texts.
    """

    path: Path
    keys: torch.Tensor
    text: str
    best: int
    model: str


def make_many(folder: Path) -> Many:
    """A linear layer 3-2, trained by SGD in five steps."""
    rows, text = 100_000, "it was a dark night; " * 500_000
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    keys = torch.from_numpy(np.random.default_rng(5).standard_normal((rows, 3)).astype(np.float32))
    with Recorder(model, optimizer, folder / "recording") as recorder:
        for ids in torch.arange(rows).split(20_000):
            recorder.annotate(label=ids, example=ids)
            optimizer.zero_grad()
            model(keys[ids]).square().mean().backward()
            optimizer.step()
        best = int((keys.double() @ keys[7].double()).argmax())
        recorder.add_examples([best, 0, 7], [text] * 3)
    build_index(folder / "recording", folder / "many")
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    (folder / "many.py").write_text(MANY.replace("WEIGHTS", repr(weights)))
    return Many(folder / "many", keys, text, best, f"{folder / 'many.py'}:trained")


def make_wide(folder: Path) -> tuple[Path, str]:
    """An index of a layer with 100,000 output units, and its model, FILE.py:FUNCTION."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 100_000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.randn(60, 4), torch.randint(100_000, (60,))
    with Recorder(model, optimizer, folder / "recording") as recorder:
        for ids in torch.arange(60).split(20):
            recorder.annotate(label=labels[ids], example=ids)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[ids]), labels[ids]).backward()
            optimizer.step()
    build_index(folder / "recording", folder / "wide")
    torch.save((model.state_dict(), inputs), folder / "wide.pt")
    (folder / "wide.py").write_text(WIDE.replace("FILE", str(folder / "wide.pt")))
    return folder / "wide", f"{folder / 'wide.py'}:trained"


MANY = """\
import torch
from torch import nn

def trained():
    model = nn.Sequential(nn.Linear(3, 2))
    model.load_state_dict({name: torch.tensor(value) for name, value in WEIGHTS.items()})
    return model, lambda text: torch.tensor([[text.count("dark") / 5e5, len(text) / 1e7, 1.0]])
"""

WIDE = """\
import torch
from torch import nn

def trained():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 100_000))
    weights, inputs = torch.load("FILE", weights_only=True)
    model.load_state_dict(weights)
    return model, inputs
"""

MODEL = """\
import io
import numpy as np
import torch
from PIL import Image
from torch import nn

def trained():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model.load_state_dict(torch.load("STATE", weights_only=True))
    return model, prepare

def own():
    return trained()[0], torch.load("INPUTS", weights_only=True)

def prepare(payload):
    pixels = np.asarray(Image.open(io.BytesIO(payload)), np.float32)
    return torch.from_numpy(pixels / 255).reshape(1, 64)
"""


def write_model(digits: Digits, folder: Path, function: str = "trained") -> str:
    """The trained model as its user has it: FILE.py:FUNCTION; "own" brings 20 inputs."""
    torch.save(digits.model.state_dict(), folder / "state.pt")
    torch.save(digits.images[:20].clone(), folder / "inputs.pt")
    text = MODEL.replace("STATE", str(folder / "state.pt"))
    (folder / "reader.py").write_text(text.replace("INPUTS", str(folder / "inputs.pt")))
    return f"{folder / 'reader.py'}:{function}"


def a_picture(digits: Digits, example: int) -> bytes:
    """An example as a PNG file."""
    return png((digits.images[example].reshape(8, 8).numpy() * 255).astype(np.uint8))


def kept(digits: Digits, example: int) -> torch.Tensor:
    """What `prepare` makes of the picture that was kept of an example: float32 [1, 64]."""
    return (digits.images[example : example + 1] * 255).floor() / 255


def png(pixels: np.ndarray) -> bytes:
    """uint8 [height, width] as PNG."""
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, format="PNG")
    return sink.getvalue()
