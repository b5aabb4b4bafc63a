"""The networks of the retraining study, and every way of attribution that it compares.

A way gives, for each test image and each training image, how much the latter is said to raise the
margin of the former: the logit of the right class less the logsumexp of the others.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mislabelled import read
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dualform.client import Client
from dualform.index import build_index
from dualform.record import Recorder

BATCH, CHECKPOINTS = 64, 5
EPOCHS = {"mlp": 10, "vit": 15}
State = dict[str, torch.Tensor]


class Blocks(nn.Module):
    """A vision transformer of two blocks: 16 patches of 7 x 7 pixels, 32 wide, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(49, 32)
        self.place = nn.Parameter(torch.randn(16, 32) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images, float32 [n, 784], to logits [n, 10]."""
        patches = images.view(-1, 4, 7, 4, 7).transpose(2, 3).reshape(-1, 16, 49)
        seen = self.embed(patches) + self.place
        for block in self.blocks:
            seen = block(seen)
        logits: torch.Tensor = self.head(seen.mean(1))
        return logits


class Block(nn.Module):
    """Attention and two layers, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attend = nn.Linear(32, 96, bias=False)
        self.out, self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        """Float32 [n, 16, 32], and the same."""
        heads = self.attend(self.before(seen)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        seen = seen + self.out(mixed.transpose(1, 2).flatten(2))
        found: torch.Tensor = seen + self.down(F.gelu(self.up(self.between(seen))))
        return found


def margin(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The right logit less the logsumexp of the others, [n]."""
    right = logits.gather(1, labels[:, None])[:, 0]
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return right - others.logsumexp(1)


class Study:
    """The data, and how its networks are trained.

    Args:
        data: Folder whose MNIST/raw holds the .gz files.
        kind: "mlp" or "vit".
        examples, tests: How many training and test images.
    """

    def __init__(self, data: Path, kind: str, examples: int, tests: int) -> None:
        self.kind, self.examples = kind, examples
        self.images, self.labels = (part[:examples] for part in read(data, "train"))
        self.tests, self.truths = (part[:tests] for part in read(data, "t10k"))

    def network(self) -> nn.Module:
        """A fresh one."""
        if self.kind == "vit":
            return Blocks()
        layers = [nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
        return nn.Sequential(*layers)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD with momentum for the MLP, AdamW for the transformer."""
        if self.kind == "vit":
            return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(
        self,
        seed: int,
        chosen: np.ndarray,
        run: Callable[[nn.Module, Any, Any], None] | None = None,
    ) -> nn.Module:
        """A network trained on some of the images; `run` does the epochs instead of the loop."""
        torch.manual_seed(seed)
        model = self.network()
        optimizer = self.optimizer(model)
        rows = torch.from_numpy(chosen)

        def batches() -> Iterable[torch.Tensor]:
            return iter(torch.split(rows[torch.randperm(len(rows))], BATCH))

        if run is not None:
            run(model, optimizer, batches)
        else:
            for _ in range(EPOCHS[self.kind]):
                for batch in batches():
                    self.step(model, optimizer, batch)
        return model.eval()

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        """One step of training."""
        loss = F.cross_entropy(model(self.images[batch]), self.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def retrained(self, chosen: np.ndarray, seeds: int) -> np.ndarray:
        """Margins of the test images by networks trained on some images, the mean over seeds that
        no asked model has, float64 [tests]."""
        found = []
        for seed in range(seeds):
            model = self.train(1000 + seed, chosen)
            with torch.no_grad():
                found.append(margin(model(self.tests), self.truths).double().numpy())
        mean: np.ndarray = np.mean(found, axis=0)
        return mean

    def train_recorded(self, run: Path, seed: int) -> None:
        """Train on all images with the recorder, keep checkpoints, build the index."""

        def recorded(model: nn.Module, optimizer: Any, batches: Any) -> None:
            epochs = EPOCHS[self.kind]
            with Recorder(model, optimizer, run / "recording") as recorder:
                for epoch in range(epochs):
                    for batch in batches():
                        recorder.annotate(example=batch)
                        self.step(model, optimizer, batch)
                    if (epoch + 1) % (epochs // CHECKPOINTS) == 0:
                        torch.save(model.state_dict(), run / f"checkpoint-{epoch + 1:02d}.pt")
            torch.save(model.state_dict(), run / "trained.pt")

        run.mkdir(parents=True)
        self.train(seed, np.arange(self.examples), recorded)
        build_index(run / "recording", run / "index")
        shutil.rmtree(run / "recording")
        (run / "trained.json").write_text(json.dumps({"seed": seed}))

    def trained(self, run: Path) -> nn.Module:
        """The model of a run."""
        model = self.network()
        model.load_state_dict(torch.load(run / "trained.pt", weights_only=True))
        return model.eval()

    def checkpoints(self, run: Path) -> list[Path]:
        """Of a run, the earliest first."""
        return sorted(run.glob("checkpoint-*.pt"))


@dataclass(frozen=True)
class Way:
    """A way of attribution.

    Attributes:
        title: As the table names it.
        ask: Scores, float64 [tests, examples], the larger the more the image raised the margin; and
            the bytes on disk that it needs.
        needs: Packages beyond dualform's.
    """

    title: str
    ask: Callable[[Study, Path], tuple[np.ndarray, int]]
    needs: tuple[str, ...] = ()

    def ready(self) -> None:
        """Raise ImportError where a package is missing."""
        for name in self.needs:
            import_module(name)


def dualform(
    study: Study, run: Path, *, layers: Any = None, normalised: bool = False
) -> tuple[np.ndarray, int]:
    """Exact sums over every step by example; `normalised` by the root of self-influence."""
    model = study.trained(run)
    options: dict[str, Any] = {"layers": layers, "timeout": 3600, "max_residual": 1.0}
    with Client.local(run / "index") as client:
        found = client.scores(
            model, study.tests, target="margin", labels=study.truths, by="example", **options
        )
        scores = in_order(found)
        if normalised:
            alike = client.scores(
                model, study.images, target="loss", labels=study.labels, by="example", **options
            )
            influence = -np.diagonal(in_order(alike))
            scores = scores / np.sqrt(np.maximum(influence, np.quantile(influence, 0.05)))
    return scores, size(run / "index")


def in_order(found: Any) -> np.ndarray:
    """A matrix of scores with its columns by example id."""
    values: np.ndarray = found.values[:, np.argsort(np.asarray(found.groups, np.int64))]
    return values


def first_layer(study: Study) -> list[str]:
    """Its name."""
    return [next(name for name, part in study.network().named_modules() if is_linear(part))]


def is_linear(part: nn.Module) -> bool:
    """Whether a part is a linear layer."""
    return isinstance(part, nn.Linear)


def linear_names(study: Study) -> list[str]:
    """Of all linear layers."""
    return [name for name, part in study.network().named_modules() if is_linear(part)]


def last_layer(study: Study) -> list[str]:
    """Its name."""
    return linear_names(study)[-1:]


def gradients(
    model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, of: Callable[..., torch.Tensor]
) -> Iterable[torch.Tensor]:
    """Gradients over all parameters, in blocks of inputs, float32 [block, parameters]."""
    state = {name: value.detach() for name, value in model.named_parameters()}

    def single(parameters: State, one: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, parameters, one[None])
        return of(logits, label[None]).sum()

    each = torch.func.vmap(torch.func.grad(single), in_dims=(None, 0, 0))
    for start in range(0, len(inputs), 100):
        found = each(state, inputs[start : start + 100], labels[start : start + 100])
        yield torch.cat([part.flatten(1) for part in found.values()], 1)


def products(study: Study, run: Path, *, cosine: bool = False) -> tuple[np.ndarray, int]:
    """Products of gradients at the trained weights: of the tests' margins and training's loss."""
    model = study.trained(run)
    asked = torch.cat(list(gradients(model, study.tests, study.truths, margin)))
    blocks = []
    for block in gradients(model, study.images, study.labels, F.cross_entropy):
        blocks.append(-(asked @ (F.normalize(block) if cosine else block).T))
    return torch.cat(blocks, 1).double().numpy(), size(run / "trained.pt")


def tracin(study: Study, run: Path, *, fast: bool) -> tuple[np.ndarray, int]:
    """captum's TracInCP over all linear layers, or TracInCPFast over the last."""
    from captum.influence import TracInCP, TracInCPFast

    model = study.network().eval()
    kept = study.checkpoints(run)

    def load(into: nn.Module, path: str) -> float:
        into.load_state_dict(torch.load(path, weights_only=True))
        return 1.0

    data = TensorDataset(study.images, study.labels)
    loss = nn.CrossEntropyLoss(reduction="sum")
    shared: dict[str, Any] = {"checkpoints_load_func": load, "loss_fn": loss, "batch_size": 200}
    paths = [str(path) for path in kept]
    if fast:
        last = dict(model.named_modules())[last_layer(study)[0]]
        asked: Any = TracInCPFast(model, last, data, paths, **shared)
    else:
        names = linear_names(study)
        asked = TracInCP(
            model, data, paths, layers=names, sample_wise_grads_per_batch=True, **shared
        )
    found = asked.influence((study.tests, study.truths))
    return found.double().numpy(), sum(size(path) for path in kept)


def trak(study: Study, run: Path) -> tuple[np.ndarray, int]:
    """TRAK, gradients projected to 1,024 numbers by its own projector for CPUs, one model."""
    from trak import TRAKer
    from trak.projectors import BasicProjector, ProjectionType

    model, folder = study.trained(run), run / "trak"
    shutil.rmtree(folder, ignore_errors=True)
    parameters = sum(part.numel() for part in model.parameters())
    cpu = torch.device("cpu")
    projector = BasicProjector(parameters, 1024, 0, ProjectionType.rademacher, cpu, block_size=64)
    asked = TRAKer(
        model,
        "image_classification",
        train_set_size=study.examples,
        save_dir=str(folder),
        device="cpu",
        projector=projector,
        proj_dim=1024,
        use_half_precision=False,
    )
    asked.load_checkpoint(model.state_dict(), model_id=0)
    for batch in DataLoader(TensorDataset(study.images, study.labels), batch_size=100):
        asked.featurize(batch, num_samples=len(batch[0]))
    asked.finalize_features()
    asked.start_scoring_checkpoint("tests", model.state_dict(), 0, num_targets=len(study.tests))
    for batch in DataLoader(TensorDataset(study.tests, study.truths), batch_size=100):
        asked.score(batch, num_samples=len(batch[0]))
    scores = np.asarray(asked.finalize_scores("tests")).T
    return scores.astype(np.float64), size(folder)


def kronfluence(study: Study, run: Path) -> tuple[np.ndarray, int]:
    """kronfluence's EK-FAC over all linear layers."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.task import Task

    class Margins(Task):  # type: ignore[misc]
        """Cross-entropy in training, margins asked."""

        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Any:
            """Its labels, or drawn ones for the true Fisher matrix."""
            logits = model(batch[0])
            labels = batch[1]
            if sample:
                with torch.no_grad():
                    labels = torch.multinomial(logits.softmax(-1), 1)[:, 0]
            return F.cross_entropy(logits, labels, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Any:
            """Minus the margins, as a loss is."""
            return -margin(model(batch[0]), batch[1]).sum()

    folder = run / "kronfluence"
    shutil.rmtree(folder, ignore_errors=True)
    task = Margins()
    model = prepare_model(study.trained(run), task)
    quiet: dict[str, Any] = {"disable_tqdm": True, "log_level": 40}
    asked = Analyzer("margins", model, task, cpu=True, output_dir=str(folder), **quiet)
    training = TensorDataset(study.images, study.labels)
    asked.fit_all_factors("factors", training, per_device_batch_size=200)
    asked.compute_pairwise_scores(
        scores_name="scores",
        factors_name="factors",
        query_dataset=TensorDataset(study.tests, study.truths),
        train_dataset=training,
        per_device_query_batch_size=100,
        per_device_train_batch_size=200,
    )
    found = asked.load_pairwise_scores("scores")["all_modules"]
    return found.double().numpy(), size(folder)


def dattri(study: Study, run: Path) -> tuple[np.ndarray, int]:
    """dattri's EK-FAC over all linear layers, damping 0.001."""
    from dattri.algorithm.influence_function import IFAttributorEKFAC
    from dattri.task import AttributionTask

    model = study.trained(run)

    def loss(parameters: State, data: Any) -> torch.Tensor:
        logits = torch.func.functional_call(model, parameters, data[0])
        return F.cross_entropy(logits, data[1])

    def negative(parameters: State, data: Any) -> torch.Tensor:
        return -margin(torch.func.functional_call(model, parameters, data[0]), data[1]).mean()

    state = model.state_dict()
    asked = IFAttributorEKFAC(AttributionTask(loss, model, state), damping=1e-3)
    training: Dataset[Any] = TensorDataset(study.images, study.labels)
    asked.cache(DataLoader(training, batch_size=200))
    # Factors of the loss stay; what is asked about is the margin.
    asked.task = AttributionTask(loss, model, state, target_func=negative)
    tests = DataLoader(TensorDataset(study.tests, study.truths), batch_size=len(study.tests))
    found = asked.attribute(DataLoader(training, batch_size=study.examples), tests)
    return found.detach().T.double().numpy(), size(run / "trained.pt")


def size(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(part.stat().st_size for part in path.rglob("*") if part.is_file())


WAYS = {
    "all": Way("dualform, all layers", dualform),
    "first": Way("dualform, the first layer", lambda s, r: dualform(s, r, layers=first_layer(s))),
    "last": Way("dualform, the last layer", lambda s, r: dualform(s, r, layers=last_layer(s))),
    "normalised": Way(
        "dualform, all layers, by the root of self-influence",
        lambda s, r: dualform(s, r, normalised=True),
    ),
    "tracin": Way(
        f"captum TracInCP, {CHECKPOINTS} checkpoints",
        lambda s, r: tracin(s, r, fast=False),
        ("captum",),
    ),
    "tracinfast": Way(
        f"captum TracInCPFast, the last layer, {CHECKPOINTS} checkpoints",
        lambda s, r: tracin(s, r, fast=True),
        ("captum",),
    ),
    "trak": Way("TRAK, 1,024 numbers", trak, ("trak",)),
    "kronfluence": Way("kronfluence EK-FAC", kronfluence, ("kronfluence",)),
    "dattri": Way("dattri EK-FAC", dattri, ("dattri",)),
    "dot": Way("gradient dot", products),
    "cosine": Way("gradient cosine", lambda s, r: products(s, r, cosine=True)),
}
"""Every way, by the name that `--ways` takes."""
