"""Models as their libraries build them, from a configuration and of any width, each with data and
the training loop that people use for it: what `benchmarks.stacks` measures and the tests prove.

Nothing is downloaded: weights and data are random.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from dualform.record import Recorder, indexed

VOCABULARY, CLASSES = 50, 5

Example = Mapping[str, torch.Tensor]
Loop = Callable[..., None]
"""loop(stack, model, examples, optimizer, folder, run): trains in the order of the examples, one
step for each batch; `optimizer` is "SGD" or "AdamW"; `folder` is for what the framework itself
writes."""


class Run(NamedTuple):
    """Where a loop records, and by which options of the recorder."""

    path: Path
    options: Mapping[str, Any]


RATES = {"SGD": 0.02, "AdamW": 1e-3}


@dataclass(frozen=True)
class Stack:
    """One way in which people train.

    Attributes:
        model: Makes it, of a width, in torch's current random state.
        examples: Makes so many, with a seed; `example` is the id of each.
        loop: Trains it.
        columns: Of the examples, to annotate.
        batch: Examples in a step.
        takes: What the model's forward is given of them; the first alone, by place, if it has no
            `labels` among it.
    """

    model: Callable[[int], nn.Module]
    examples: Callable[[int, int], list[Example]]
    loop: Loop
    columns: tuple[str, ...]
    batch: int
    takes: tuple[str, ...]

    def train(
        self,
        model: nn.Module,
        optimizer: str,
        steps: int,
        folder: Path,
        path: Path | None,
        **options: Any,
    ) -> None:
        """Train on examples that come once each; recorded, by these options, if there is a path."""
        run = None if path is None else Run(path, options)
        model.train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the frameworks' own
            self.loop(self, model, self.examples(steps * self.batch, 1), optimizer, folder, run)

    def given(self, examples: Sequence[Example]) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """What the model's forward takes of some examples, by place and by name."""
        found = {name: torch.stack([e[name] for e in examples]) for name in self.takes}
        return ((), found) if "labels" in found else (tuple(found.values()), {})


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW, of what requires gradients."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "SGD":
        return torch.optim.SGD(trained, lr=RATES[name], momentum=0.9, weight_decay=1e-3)
    return torch.optim.AdamW(trained, lr=RATES[name], weight_decay=0.05)


def trainer(
    stack: Stack,
    model: nn.Module,
    examples: Sequence[Example],
    optimizer: str,
    folder: Path,
    run: Run | None,
) -> None:
    """transformers' Trainer, with its own optimizer, warm-up, decay and clipping."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from dualform.record.integrations.transformers import RecorderCallback

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(examples)

    arguments = TrainingArguments(
        str(folder),
        optim={"SGD": "sgd", "AdamW": "adamw_torch"}[optimizer],
        learning_rate=RATES[optimizer],
        weight_decay=0.05,
        warmup_steps=3,
        max_grad_norm=1.0,
        per_device_train_batch_size=stack.batch,
        num_train_epochs=1,
        use_cpu=True,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    callbacks = []
    if run is not None:
        callbacks = [RecorderCallback(run.path, annotate=stack.columns, options=run.options)]
    made = InOrder(model, arguments, train_dataset=examples, callbacks=callbacks)
    made.remove_callback(PrinterCallback)
    made.train()


def lightning(
    stack: Stack,
    model: nn.Module,
    examples: Sequence[Example],
    optimizer: str,
    folder: Path,
    run: Run | None,
) -> None:
    """Lightning's Trainer, clipping gradients."""
    from lightning import LightningModule, Trainer

    from dualform.record.integrations.lightning import RecorderCallback

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return loss_of(stack, self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.net, optimizer)

    callbacks = []
    if run is not None:
        callbacks = [RecorderCallback(run.path, annotate=stack.columns, options=run.options)]
    Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), torch.utils.data.DataLoader(examples, stack.batch))  # type: ignore[arg-type]


def accelerate(
    stack: Stack,
    model: nn.Module,
    examples: Sequence[Example],
    optimizer: str,
    folder: Path,
    run: Run | None,
) -> None:
    """A loop with accelerate, which clips."""
    from accelerate import Accelerator  # type: ignore[import-untyped]

    accelerator = Accelerator(cpu=True)
    loader: Any = torch.utils.data.DataLoader(examples, stack.batch)  # type: ignore[arg-type]
    net, optim, loader = accelerator.prepare(model, optimizer_of(model, optimizer), loader)

    def backward(loss: torch.Tensor) -> None:
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)

    _loop(stack, net, optim, loader, backward, run)


def plain(
    stack: Stack,
    model: nn.Module,
    examples: Sequence[Example],
    optimizer: str,
    folder: Path,
    run: Run | None,
) -> None:
    """A loop as torch's tutorials have it."""
    loader: Any = torch.utils.data.DataLoader(examples, stack.batch)  # type: ignore[arg-type]
    _loop(stack, model, optimizer_of(model, optimizer), loader, torch.Tensor.backward, run)


def _loop(
    stack: Stack,
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    backward: Callable[[torch.Tensor], Any],
    run: Run | None,
) -> None:
    recorder = None if run is None else Recorder(model, optimizer, run.path, **run.options)
    try:
        for batch in loader:
            if recorder is not None:
                recorder.annotate(**{name: batch[name] for name in (*stack.columns, "example")})
            optimizer.zero_grad()
            backward(loss_of(stack, model, batch))
            optimizer.step()
    finally:
        if recorder is not None:
            recorder.close()


def loss_of(stack: Stack, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of a batch; the model's own where it is given the labels."""
    if "labels" in stack.takes:
        found: torch.Tensor = model(**{name: batch[name] for name in stack.takes}).loss
        return found
    return nn.functional.cross_entropy(model(batch[stack.takes[0]]), batch["label"])


def sequences(length: int) -> Callable[[int, int], list[Example]]:
    """Random tokens, each its own label, as decoders take them."""

    def made(count: int, seed: int) -> list[Example]:
        stream = torch.Generator().manual_seed(seed)
        tokens = torch.randint(1, VOCABULARY, (count, length), generator=stream)
        return list(indexed([{"input_ids": row, "labels": row} for row in tokens]))

    return made


def sentences(length: int) -> Callable[[int, int], list[Example]]:
    """Random tokens padded to a length; a label for each, and a column with a value per token."""

    def made(count: int, seed: int) -> list[Example]:
        stream = torch.Generator().manual_seed(seed)
        found = []
        for i in range(count):
            tokens = torch.randint(1, VOCABULARY, (length,), generator=stream)
            there = torch.arange(length) < 2 + int(
                torch.randint(0, length - 1, (), generator=stream)
            )
            found.append(
                {
                    "input_ids": tokens * there,
                    "attention_mask": there.long(),
                    "part_of_speech": tokens % 7,
                    "labels": torch.tensor(i % 3),
                }
            )
        return list(indexed(found))

    return made


def pictures(size: int) -> Callable[[int, int], list[Example]]:
    """Random pictures of three channels, and a label each."""

    def made(count: int, seed: int) -> list[Example]:
        stream = torch.Generator().manual_seed(seed)
        pixels = torch.randn(count, 3, size, size, generator=stream)
        labels = torch.arange(count) % CLASSES
        pairs = zip(pixels, labels, strict=True)
        return list(indexed([{"pixels": picture, "label": label} for picture, label in pairs]))

    return made


def gpt2(width: int) -> nn.Module:
    """Conv1D layers, and a head that is tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(  # type: ignore[no-any-return]
        GPT2Config(vocab_size=VOCABULARY, n_embd=width, n_layer=2, n_head=2, n_positions=64)
    )


def llama(width: int) -> nn.Module:
    """With gated MLPs, grouped attention and a head of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(  # type: ignore[no-any-return]
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=False,
        )
    )


def lora(width: int) -> nn.Module:
    """Adapters in a Llama that is frozen."""
    import peft

    found = peft.get_peft_model(
        llama(width),
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]),
    )
    with torch.no_grad():  # B begins as zeros, and with it every gradient of A
        for name, parameter in found.named_parameters():
            if ".lora_B." in name:
                nn.init.normal_(parameter, std=0.02)
    return found  # type: ignore[no-any-return]


def mixtral(width: int) -> nn.Module:
    """Experts in tensors of three axes, two of four for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(  # type: ignore[no-any-return]
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    )


def bert(width: int) -> nn.Module:
    """A classifier of sentences, with dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(  # type: ignore[no-any-return]
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=2 * width,
            max_position_embeddings=64,
            num_labels=3,
        )
    )


def vit(pixels: int, width: int) -> nn.Module:
    """timm's, with patches of 4 by 4 and a class token."""
    import timm

    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=pixels,
        patch_size=4,
        embed_dim=width,
        depth=2,
        num_heads=2,
        num_classes=CLASSES,
    )


def swin(pixels: int, width: int) -> nn.Module:
    """timm's, with windows of 4 by 4 places, shifted in turn, and merged patches."""
    from timm.models.swin_transformer import SwinTransformer

    return SwinTransformer(
        img_size=pixels,
        patch_size=2,
        window_size=4,
        embed_dim=width,
        depths=(2, 2),
        num_heads=(2, 4),
        num_classes=CLASSES,
    )


def resnet(width: int) -> nn.Module:
    """timm's resnet18, with batch norm behind every convolution; 64 is the usual width."""
    import timm

    channels = [width, 2 * width, 4 * width, 8 * width]
    return timm.create_model("resnet18", channels=channels, num_classes=CLASSES)


_TEXT = ("input_ids", "labels")
_SENTENCE = ("input_ids", "attention_mask", "labels")


def stacks(tokens: int, pixels: int, batch: int) -> Mapping[str, Stack]:
    """By name.

    Args:
        tokens: Of an example, at most 64.
        pixels: Of a picture's side, a multiple of 16.
        batch: Examples in a step.
    """
    texts, padded, seen = sequences(tokens), sentences(tokens), pictures(pixels)
    parts = ("labels", "part_of_speech")
    return {
        "GPT-2, Trainer": Stack(gpt2, texts, trainer, ("labels",), batch, _TEXT),
        "Llama, Trainer": Stack(llama, texts, trainer, ("labels",), batch, _TEXT),
        "LoRA on Llama, Trainer": Stack(lora, texts, trainer, ("labels",), batch, _TEXT),
        "Mixtral, Trainer": Stack(mixtral, texts, trainer, ("labels",), batch, _TEXT),
        "BERT classifier, Trainer": Stack(bert, padded, trainer, parts, batch, _SENTENCE),
        "Swin (timm), accelerate": Stack(
            partial(swin, pixels), seen, accelerate, ("label",), batch, ("pixels",)
        ),
        "ViT (timm), Lightning": Stack(
            partial(vit, pixels), seen, lightning, ("label",), batch, ("pixels",)
        ),
        "resnet18 (timm), loop": Stack(resnet, seen, plain, ("label",), batch, ("pixels",)),
    }
