"""A framework's own data-parallel training of two ranks: `ranks.py FRAMEWORK FOLDER`.

The second is a fork of the first, which has imported the framework by then.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path

import torch
from torch import nn


def trainer(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from dualform.record.integrations.transformers import RecorderCallback

    config = LlamaConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    ids = torch.randint(0, 20, (22, 6))
    data = [{"input_ids": row, "labels": row, "example": i} for i, row in enumerate(ids)]
    arguments = TrainingArguments(
        str(folder / "out"),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    callback = RecorderCallback(folder / "run")
    Trainer(LlamaForCausalLM(config), arguments, train_dataset=data, callbacks=[callback]).train()


def lightning(folder: Path) -> None:
    from lightning import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    from dualform.record.integrations.lightning import RecorderCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    data = torch.utils.data.TensorDataset(torch.randn(22, 4), torch.arange(22) % 2)
    Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        callbacks=[RecorderCallback(folder / "run", annotate={"label": 1})],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    ).fit(Module(), torch.utils.data.DataLoader(data, 3))


def main(framework: str, folder: Path) -> int:
    """How both ended."""
    warnings.simplefilter("ignore")
    importlib.import_module(
        {"trainer": "transformers.trainer", "lightning": "lightning"}[framework]
    )
    torch.manual_seed(0)
    second = os.fork()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if second else "1"
    {"trainer": trainer, "lightning": lightning}[framework](folder)
    return os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]) if second else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
