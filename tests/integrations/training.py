"""What the tests of training frameworks share: tiny models of token sequences, and their data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

VOCABULARY, EXAMPLES = 50, 40


@pytest.fixture(autouse=True)
def accelerate_forgets() -> Iterator[None]:
    """Trainer's settings of devices and precision are accelerate's for the whole process."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def bert(kind: str = "BertForSequenceClassification", **settings: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
        **settings,
    )
    return getattr(transformers, kind)(config)


def llama() -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            tie_word_embeddings=False,
        )
    )


def sentences(labels: str = "one") -> list[dict[str, Any]]:
    """Examples of different lengths; a label each, or one per token with -100 for the first."""
    random = torch.Generator().manual_seed(1)
    found = []
    for i in range(EXAMPLES):
        length = int(torch.randint(3, 10, (), generator=random))
        tokens = torch.randint(1, VOCABULARY, (length,), generator=random).tolist()
        label: Any = i % 3
        if labels == "each":
            label = [-100, *(token % 3 for token in tokens[1:])]
        found.append(
            {
                "input_ids": tokens,
                "labels": label,
                "document": f"page {i // 4}",
                "weight": [token / 2 for token in tokens],
                "number": i,
            }
        )
    return found
