"""One prediction, from the query to the training images behind it: a walk through dualform.

    python examples/walkthrough.py

Runs in seconds on scikit-learn's digits, downloads nothing, and leaves its figures in
walkthrough/. The cells begin with "# %%": editors open the file as a notebook.
"""

# %% [markdown]
# # Which training images made this output?
#
# A linear layer trained by gradient descent is an attention layer over its own training memory:
#
#     W_T x  =  W_0 x  +  sum_t  a_t e_t          a_t = x_t . x
#
# `x_t` is what the layer saw for training datapoint t (the key), `e_t` the error signal that it
# received (the value), `x` what it sees now (the query). So whatever the network says can be taken
# apart, exactly, into what each training image added. Here is one digit that it gets wrong.

# %%
import io
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from dualform import plot
from dualform.client import Client, capture_queries, dual_form
from dualform.index import build_index
from dualform.record import Recorder

FOLDER = Path("walkthrough")
shutil.rmtree(FOLDER, ignore_errors=True)
FOLDER.mkdir()

# %% [markdown]
# ## The data, and a network
#
# 1,797 digits of 8 x 8 pixels; 1,500 to train on, 297 to ask about.

# %%
data = load_digits()
order = np.random.default_rng(0).permutation(len(data.target))
training, test = torch.from_numpy(order[:1500]), torch.from_numpy(order[1500:])
inputs = torch.from_numpy(data.data / 16).float()
labels = torch.from_numpy(data.target)
pixels = (data.images * 255 / 16).astype(np.uint8)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def png(image: np.ndarray) -> bytes:
    """An image as people will look at it."""
    sink = io.BytesIO()
    Image.fromarray(image).save(sink, format="PNG")
    return sink.getvalue()


# %% [markdown]
# ## Train, and record
#
# The usual loop, plus three lines: the recorder around it, a word on what goes in, and the images
# themselves, to be looked at later. Training is bit for bit what it was.

# %%
with Recorder(model, optimizer, FOLDER / "recording") as recorder:
    recorder.add_examples(training.numpy(), [png(pixels[i]) for i in training])
    for _ in range(4):
        for ids in training[torch.randperm(len(training))].split(32):
            recorder.annotate(label=labels[ids], example=ids)
            loss = nn.functional.cross_entropy(model(inputs[ids]), labels[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

build_index(FOLDER / "recording", FOLDER / "index")
client = Client.local(FOLDER / "index")  # Client("HOST:PORT") asks a server the same questions
for name, layer in client.index().layers.items():
    print(f"layer {name}: {layer.rows:,} rows of {layer.d_in}, {layer.exactness}")

# %% [markdown]
# ## The query
#
# The first test image that the network gets wrong. What each layer sees of it is the query.

# %%
with torch.no_grad():
    logits = model(inputs[test])
wrong = torch.nonzero(logits.argmax(1) != labels[test])[0, 0]
image, truth, said = int(test[wrong]), int(labels[test[wrong]]), int(logits[wrong].argmax())
right = float((logits.argmax(1) == labels[test]).double().mean())
print(f"Right on {right:.1%} of the test images.")
print(f"Image {image} shows digit {truth}, the network says {said}.")

queries = capture_queries(model, inputs[image : image + 1])  # {"0": float32 [1, 64], …}

# %% [markdown]
# ## What each layer attends to
#
# The training images with the largest attention weight. At layer 0 that is a dot product of pixels,
# and bright images win; further up it is what the network makes of them. An image comes back in
# every epoch; it is shown once, with how often it was seen.

# %%
figure = plot.matches(client, queries, image=png(pixels[image]))
plot.save(figure, FOLDER / "matches.png")

# %% [markdown]
# The 100 largest weights of each class, and the total per class. The sums say where the mass of
# the memory lies that this query calls up.

# %%
plot.save(plot.attention(client, queries, per_group=100), FOLDER / "attention.png")
plot.save(plot.sums(client, queries), FOLDER / "sums.png")
plot.save(plot.profile(client, queries, bins=47), FOLDER / "profile.png")

last = client.sums("4", queries["4"], group_by="label", absolute=True)
heaviest = last.groups[int(last.values[0].argmax())]
print(f"Layer 4 gives most weight to rows of class {heaviest}.")

# %% [markdown]
# ## The output, taken apart
#
# The initial part and what each class's rows added, for every logit. It adds up to the network's
# own output: nothing is estimated.

# %%
output = client.dual_output("4", queries["4"]).values[0]
difference = float(np.abs(output - logits[wrong].numpy()).max())
print(f"The dual output and the network's own differ by {difference:.1e} at most.")
assert difference < 1e-4

plot.save(plot.contributions(client, "4", queries["4"]), FOLDER / "contributions.png")

# %% [markdown]
# Weights tell which images are attended to; contributions tell what that did. The images that spoke
# most for the wrong answer have the largest contributions to its logit.

# %%
hits = client.top_k("4", queries["4"], k=200, rank_by="contribution", unit=said)
blamed = list(dict.fromkeys(hits["example"][0].tolist()))[:10]
print(f"Most for {said}: the images {blamed}, of the classes {labels[blamed].tolist()}.")

# %% [markdown]
# ## What if they had not been there?
#
# In the last layer's memory, mask the rows of these ten images and run the network again. This asks
# what the memory holds, not what training without them would have given: the other rows stay as
# they were recorded.

# %%
where = f"example not in ({', '.join(map(str, blamed))})"
with dual_form(model, client, layers=["4"], where=where):
    masked = model(inputs[image : image + 1])[0]
for name, values in (("as trained", logits[wrong]), ("without them", masked)):
    print(f"{name:>12}: logit {truth} {values[truth]:7.3f}, logit {said} {values[said]:7.3f}")
print(f"Without them the network says {int(masked.argmax())}.")

client.close()
print(f"The figures are in {FOLDER}/.")
