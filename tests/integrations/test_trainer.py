"""A tiny Llama and a tiny GPT-2 trained by transformers' Trainer with AdamW under bf16 autocast; in
float32 by test_stacks.py."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualform.client import capture_queries
from dualform.engine import Index, verify_index
from dualform.index import build_index
from dualform.record import Recorder

transformers = pytest.importorskip("transformers")

STEPS, VOCABULARY = 12, 64


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    """Its layers are `Conv1D`s, and its head is tied to the embedding."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32
    )
    return transformers.GPT2LMHeadModel(config)


MODELS = {
    "llama": (llama, {"lm_head", "model.embed_tokens"}, 16),
    "gpt2": (gpt2, {"transformer.h.0.attn.c_attn", "transformer.wpe", "lm_head"}, 10),
}


@pytest.fixture(autouse=True)
def accelerate_forgets() -> Iterator[None]:
    """Trainer's settings of devices and precision are accelerate's for the whole process."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random token sequences."""

    def __init__(self) -> None:
        self.tokens = torch.randint(
            0, VOCABULARY, (48, 12), generator=torch.Generator().manual_seed(1)
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODELS)
def test_adamw_through_trainer(tmp_path: Path, kind: str) -> None:
    make, layers, number = MODELS[kind]
    model = make()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        weight_decay=0.1,
        warmup_steps=3,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=True,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Sequences())
    trainer.create_optimizer_and_scheduler(STEPS)
    with warnings.catch_warnings(), Recorder(model, trainer.optimizer, tmp_path / "recording"):
        trainer.train()
    build_index(tmp_path / "recording", tmp_path / "index")
    report = verify_index(tmp_path / "index")
    assert report.ok, [(each.layer, each.note) for each in report.layers if not each.ok]
    assert report.steps == STEPS
    tokens = Sequences().tokens[:3]
    modules = dict(model.named_modules())
    with Index.open(tmp_path / "index", device="cpu") as index:
        queries = capture_queries(model, tokens, layers=list(index.layers))
        assert layers <= set(index.layers)
        assert len(index.layers) == number
        for name, layer in index.layers.items():
            each, module = queries[name][:20], modules[name].float()
            looked_up = isinstance(module, torch.nn.Embedding)
            with torch.no_grad():
                x = torch.from_numpy(each)
                expected = (x @ module.weight if looked_up else module(x)).double().numpy()
            out = index.dual_output(name, each, max_residual=np.inf)
            assert out.residual is not None
            length = np.linalg.norm(expected, axis=1)
            whole = out.values.astype(np.float64) + out.residual
            assert (np.linalg.norm(whole - expected, axis=1) <= 2e-6 * length).all(), name
            share = float((np.linalg.norm(out.residual, axis=1) / length).max())
            if not looked_up:  # which autocast leaves alone
                assert layer.inexact
                assert "autocast" in layer.inexact[0][1]
                tied = (kind, name) == ("gpt2", "lm_head")  # its embedding is float32
                assert layer.manifest.encodings == (("float32" if tied else "bfloat16"),) * 2
                assert share <= 1e-2, (name, share)
            else:
                assert layer.inexact == []
                assert share <= 1e-5, (name, share)
