"""Tables of Gemma 4 and Qwen4-Exp in host memory, trained by the Trainer of transformers.

    python -m examples.memory.with_transformers

Small models with random weights. Each is trained twice, with its table resident and on the host, by the same
rule; the losses are equal. Needs transformers (`pip install 'dphybrid[trainers]'`).
"""

import copy
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.models.gemma4 import Gemma4ForCausalLM, Gemma4TextConfig
from transformers.models.qwen4_exp import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from dphybrid.embedding import (
    CombinedOptimizer,
    clip_rows_too,
    dense_parameters,
    host_tables,
    row_optimizer,
)
from examples.trainers.with_transformers import losses_of

VOCABULARY, STEPS = 1024, 10
TOKENS: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def gemma() -> PreTrainedModel:
    """Return a Gemma 4 whose per-layer rows are its largest table."""
    rows: dict[str, Any] = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 32}
    heads: dict[str, Any] = {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
        "num_kv_shared_layers": 0,
    }
    layers: dict[str, Any] = {
        "intermediate_size": 128,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    }
    return Gemma4ForCausalLM(Gemma4TextConfig(**SIZES, **TOKENS, **rows, **heads, **layers))


def qwen() -> PreTrainedModel:
    """Return a Qwen4-Exp whose hashed n-grams are its largest table."""
    rows: dict[str, Any] = {
        "ple_layer_ids": [2],
        "ngram_vocab_size_base": 5000,
        "heads_per_ngram": 2,
        "ple_embed_dim": 64,
    }
    experts: dict[str, Any] = {
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
    }
    experts |= {"num_experts_per_tok": 2}
    heads: dict[str, Any] = {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    heads |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "hc_lowrank": 16}
    index: dict[str, Any] = {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
    }
    index |= {"indexer_compress_ratio": 4}
    return Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**SIZES, **TOKENS, **rows, **experts, **heads, **index))


class Texts(Dataset[dict[str, Tensor]]):
    """Random texts."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(3, VOCABULARY, (STEPS * 4, 32), generator=random)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[number], "labels": self.tokens[number]}


def make_trainer(model: PreTrainedModel, rows: torch.optim.Optimizer, folder: str, **options: Any) -> Trainer:
    """Return a Trainer. rows: the table's optimizer; all else learns by AdamW."""
    of_rows = {id(weight) for group in rows.param_groups for weight in group["params"]}
    others = [parameter for parameter in dense_parameters(model) if id(parameter) not in of_rows]
    optimizer = CombinedOptimizer(torch.optim.AdamW(others, lr=1e-3), rows)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        max_steps=STEPS,
        logging_steps=1,
        train_sampling_strategy="sequential",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"save_strategy": "no", **options},
    )
    trainer = Trainer(model, arguments, train_dataset=Texts(), optimizers=(optimizer, constant))
    clip_rows_too(trainer)
    return trainer


def main() -> dict[str, tuple[list[float], list[float]]]:
    """Return the losses of each model, with a resident table and with one on the host."""
    found = {}
    for make in (gemma, qwen):
        torch.manual_seed(0)
        resident = make()
        hosted = copy.deepcopy(resident)
        (name,) = host_tables(hosted, larger_than=300e3)  # of real models 256e6, the default
        table = resident.get_submodule(name)
        assert isinstance(table, nn.Embedding)
        table.sparse = True
        with tempfile.TemporaryDirectory() as folder:
            losses = []
            for model, rows in (
                (resident, torch.optim.Adagrad([table.weight], lr=0.01)),
                (hosted, row_optimizer("lazy-adagrad", hosted, lr=0.01)),
            ):
                trainer = make_trainer(model, rows, folder)
                trainer.train()
                losses.append(losses_of(trainer))
        print(f"{name}: loss {losses[1][0]:.4f} -> {losses[1][-1]:.4f}, resident {losses[0][-1]:.4f}")
        found[make.__name__] = losses[0], losses[1]
    return found


if __name__ == "__main__":
    main()
