"""What a person does at first, run by scripts/release.py where no checkout is.

The numbers are those that NumPy and the trained layer tell too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import dualform
from dualform.client import Client, capture_queries
from dualform.record import Recorder


def run(*words: str) -> str:
    """What the installed command says."""
    command = Path(sys.executable).with_name("dualform")
    done = subprocess.run([command, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


assert Path(dualform.__file__).is_relative_to(sys.prefix), dualform.__file__
assert run("--version") == f"dualform {dualform.__version__}\n"

torch.manual_seed(0)
inputs, wanted = torch.randn(64, 5), torch.randn(64, 3)
model = torch.nn.Sequential(torch.nn.Linear(5, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with Recorder(model, optimizer, "recording") as recorder:
    for ids in torch.arange(64).split(8):
        recorder.annotate(example=ids)
        loss = (model(inputs[ids]) - wanted[ids]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
run("index", "build", "recording", "index")
run("index", "verify", "index")

queries = capture_queries(model, inputs[:2])["0"]
np.save("queries.npy", queries)
asked = ("--local", "index", "--layer", "0", "--query", "queries.npy")
table = run("query", "top-k", *asked, "-k", "3")
weights = inputs.numpy().astype(np.float64) @ queries.T.astype(np.float64)
best = np.argsort(-weights, axis=0)[:3].T
with Client.local("index") as client:
    hits = client.top_k("0", queries, k=3)
    output = client.dual_output("0", queries).values
assert (hits["example"] == best).all(), (hits["example"], best)
assert str(best[0, 0]) in table.split(), table
assert np.allclose(output, model(inputs[:2]).detach().numpy(), atol=1e-5)
print("recorded, built, verified and asked where no checkout is")
