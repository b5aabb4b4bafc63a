"""Compiled models: several of one class, functions around them, whole graphs, and saved copies.

Each runs in a process of its own, as what was compiled before decides what happens.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import warm

SETUP = """
import sys, warnings
from pathlib import Path
import torch
from torch import nn
from dualform.record import CaptureError, Recorder
from dualform.store.recording import Recording

warnings.filterwarnings("ignore", "The .grad attribute")
folder = Path(sys.argv[1])


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def made(fullgraph=False):
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.compile(model, backend="aot_eager", fullgraph=fullgraph)


def train(model, optimizer, steps=3):
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 12)).square().mean().backward()
        optimizer.step()


def recorded(name, given=None, before=None):
    model, optimizer, compiled = given or made()
    with Recorder(model, optimizer, folder / name):
        if before is not None:
            before()
        train(compiled, optimizer)
    recording = Recording.open(folder / name)
    assert not any(recording.marks.values()), recording.marks
    assert [len(recording.passes(layer)) for layer in "ab"] == [3, 3]
    return model.state_dict()


def plain(given=None):
    model, optimizer, compiled = given or made()
    train(compiled, optimizer)
    return model.state_dict()


def same(one, other):
    assert all(torch.equal(one[name], other[name]) for name in one)

"""


def run(tmp_path: Path, body: str) -> str:
    result = warm.run(SETUP + body, tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.slow
def test_models_of_one_class(tmp_path: Path) -> None:
    """Recorded or not, in any order, also while another is recorded: each is what it is."""
    run(
        tmp_path,
        """
expected = plain()
same(recorded("1"), expected)
same(recorded("2"), expected)
same(plain(), expected)
same(recorded("3", before=plain), expected)  # a teacher of the same class that runs first
one = made()
same(plain(one), expected)
recorded("4", one)  # the very model that has run before
assert torch._dynamo.config.skip_nnmodule_hook_guards
""",
    )


@pytest.mark.slow
def test_a_compiled_function_around_the_model(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
model, optimizer, _ = made()


@torch.compile(backend="aot_eager")
def forward(x):
    return model(x)


train(forward, optimizer)
try:
    with Recorder(model, optimizer, folder / "1"):
        train(forward, optimizer)
except CaptureError as error:
    assert "torch._dynamo.reset()" in str(error)
    torch._dynamo.reset()
    recorded("2", (model, optimizer, forward))
else:
    raise AssertionError("its compiled code has no hooks")
""",
    )


@pytest.mark.slow
def test_a_whole_graph_is_refused_in_words(tmp_path: Path) -> None:
    """Whichever of the two is given."""
    run(
        tmp_path,
        """
for given in ("model", "compiled"):
    torch._dynamo.reset()
    model, optimizer, compiled = made(fullgraph=True)
    try:
        with Recorder(model if given == "model" else compiled, optimizer, folder / given):
            train(compiled, optimizer)
    except Exception as error:
        assert "fullgraph=False" in str(error), error
        # The recorder says it of what it is given; of what it can't know of, torch does.
        assert isinstance(error, CaptureError) == (given == "compiled"), error
    else:
        raise AssertionError("recorded")
    train(compiled, optimizer)
""",
    )


@pytest.mark.slow
def test_compiled_steps(tmp_path: Path) -> None:
    """They move weights as they do unrecorded, and the ledger follows them: compiled arithmetic
    takes Adam's and RAdam's factors from float32 counts of steps."""
    run(
        tmp_path,
        """
from dualform.engine import verify_index
from dualform.index import build_index


def compiled_steps(kind):
    model, _, _ = made()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1 if kind == "SGD" else 1e-3)
    step = torch.compile(optimizer.step, backend="aot_eager")
    return model, optimizer, step


def trained(model, optimizer, step, steps=20):
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 12)).square().mean().backward()
        step()


for kind in ("SGD", "AdamW", "RAdam"):
    torch._dynamo.reset()
    model, optimizer, step = compiled_steps(kind)
    with Recorder(model, optimizer, folder / kind):
        trained(model, optimizer, step)
    build_index(folder / kind, folder / f"{kind}-index")
    report = verify_index(folder / f"{kind}-index")
    assert report.ok, kind
    assert [layer.exact_steps for layer in report.layers] == [20, 20], report
    assert max(layer.weight_error for layer in report.layers) < 1e-4, report

    torch._dynamo.reset()
    unrecorded = compiled_steps(kind)
    trained(*unrecorded)
    same(model.state_dict(), unrecorded[0].state_dict())
""",
    )


@pytest.mark.slow
def test_saved_models_load_without_dualform(tmp_path: Path) -> None:
    """Whole, while they are recorded; and they compute and train as the recorded one does."""
    run(
        tmp_path,
        """
import copy
model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Recorder(model, optimizer, folder / "r"):
    train(model, optimizer)
    torch.save((model, optimizer), folder / "model.pt")
    other = copy.deepcopy(model)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1))
    train(model, optimizer)
    same(model.state_dict(), other.state_dict())
torch.save(model.state_dict(), folder / "state.pt")
assert [len(Recording.open(folder / "r").passes(layer)) for layer in "02"] == [6, 6]
""",
    )
    load = """
import sys
sys.modules["dualform"] = None
import torch
model, optimizer = torch.load(sys.argv[1] + "/model.pt", weights_only=False)
torch.manual_seed(1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 12)).square().mean().backward()
    optimizer.step()
state = torch.load(sys.argv[1] + "/state.pt")
assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
try:
    import dualform.record
except ImportError:
    print("alone")
"""
    command = [sys.executable, "-c", load, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.stdout == "alone\n", result.stderr[-3000:]
