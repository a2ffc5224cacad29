"""Tiny Hugging Face configurations, modules of a user, and their reference in one process.

The reference is unmodified, without a mesh.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from parplan.costmodels.communication.mesh import Mesh
from parplan.executor.data.batches import synthetic_batches
from parplan.executor.external.external_source import open_source
from parplan.executor.external.structure import find_structure
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.huggingface import entry_from_config
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.spec import ModelSpec, Norm, Positions
from tests.helpers.executor_plans import SEQ_LENGTH, make_plan
from tests.helpers.executor_world import OPTIONS, STEPS, TrainingOutcome, reference_optimizer

_LLAMA_LIKE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ_LENGTH,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_LLAMA_LIKE, "pad_token_id": 3, "rope_theta": 500.0},
    "llama-tied": {"model_type": "llama", **_LLAMA_LIKE, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **_LLAMA_LIKE, "sliding_window": 5},
    "qwen2": {"model_type": "qwen2", **_LLAMA_LIKE, "tie_word_embeddings": True},
    "gemma": {"model_type": "gemma", **_LLAMA_LIKE, "head_dim": 8},
    "phi3": {
        "model_type": "phi3",
        **_LLAMA_LIKE,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "stablelm": {"model_type": "stablelm", **_LLAMA_LIKE},
    "starcoder2": {"model_type": "starcoder2", **_LLAMA_LIKE},
    "gpt_neox": {
        "model_type": "gpt_neox",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": SEQ_LENGTH,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": SEQ_LENGTH,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "opt": {
        "model_type": "opt",
        "vocab_size": 64,
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": SEQ_LENGTH,
        "dropout": 0.0,
        "word_embed_proj_dim": 32,
    },
}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return replace(entry_from_config(config, "config.json").spec, vocab_multiple=1)


def family_plan(name: str, **choices: Any) -> Plan:
    """A plan that runs the model of `CONFIGS[name]`."""
    config = CONFIGS[name]
    return replace(make_plan(spec_of(config), **choices), module=ModuleSource(huggingface=config))


def factory_plan(factory: str, **choices: Any) -> Plan:
    """A plan that runs what a function of this file returns."""
    return replace(
        make_plan(SMALL, **choices),
        module=ModuleSource(factory=f"tests.helpers.external_modules:{factory}"),
    )


SMALL = ModelSpec(
    name="small",
    num_layers=4,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    ffn_hidden_size=64,
    vocab_size=64,
    max_seq_length=SEQ_LENGTH,
    norm=Norm.RMS_NORM,
    positions=Positions.ROTARY,
    linear_bias=False,
    qkv_bias=False,
    tied_embeddings=False,
    vocab_multiple=1,
)


class SmallBlock(nn.Module):
    """Returns a tuple; turns queries and keys by the table that the whole model shares."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(32), nn.RMSNorm(32)
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor, *, angles: Tensor, visible: Tensor) -> tuple[Tensor, None]:
        query, key, value = (
            t.unflatten(-1, (4, 8)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        query = query * angles.cos() + query.flip(-1) * angles.sin()
        key = key * angles.cos() + key.flip(-1) * angles.sin()
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)))), None


class SmallModel(nn.Module):
    """Its mask depends on the token ids: nobody attends to token 7, but for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(SmallBlock() for _ in range(4))
        self.norm, self.logits = nn.RMSNorm(32), nn.Linear(32, 64, bias=False)
        self.register_buffer(
            "angles", torch.outer(torch.arange(SEQ_LENGTH), 0.1 ** torch.arange(8))
        )

    def forward(self, ids: Tensor) -> Tensor:
        past = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        visible = (past & (ids != 7)[:, None, None, :]) | torch.eye(
            ids.shape[1], dtype=torch.bool, device=ids.device
        )
        x = self.table(ids)
        for index in range(len(self.layers)):
            x, _ = self.layers[index](x, angles=self.angles, visible=visible)
        return self.logits(self.norm(x))


class FirstInputs(SmallModel):
    """Every block reads the output of the embedding again.

    More than one tensor goes from block to block.
    """

    def forward(self, ids: Tensor) -> Tensor:
        visible = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        x = first = self.table(ids)
        for layer in self.layers:
            x, _ = layer(
                x, angles=self.angles + first.mean(dim=-1, keepdim=True)[:, None], visible=visible
            )
        return self.logits(self.norm(x))


class Skips(SmallModel):
    """The layers after the blocks read the output of the embedding."""

    def forward(self, ids: Tensor) -> Tensor:
        visible = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        x = first = self.table(ids)
        for layer in self.layers:
            x, _ = layer(x, angles=self.angles, visible=visible)
        return self.logits(self.norm(x + first))


class ScalesBetween(SmallModel):
    """Something runs between two blocks, which no stage would own."""

    def forward(self, ids: Tensor) -> Tensor:
        visible = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x, angles=self.angles, visible=visible)[0] * 0.5
        return self.logits(self.norm(x))


class ReadsTable(SmallModel):
    """The head reads the token table behind its module's back."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.table.weight.mean()


class OwnsScale(SmallModel):
    """A parameter of the model itself, which holds the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))


class Hidden(SmallModel):
    """Returns no logits."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids)[..., :32]


class Looks(SmallModel):
    """The computation depends on the values of the tokens."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * (2 if bool((ids == 7).any()) else 1)


def small() -> nn.Module:
    return SmallModel()


def short() -> nn.Module:
    model = SmallModel()
    model.layers = model.layers[:3]
    return model


def wide() -> nn.Module:
    model = SmallModel()
    for block in model.layers:
        block.up, block.down = nn.Linear(32, 96, bias=False), nn.Linear(96, 32, bias=False)
    return model


def tied() -> nn.Module:
    model = SmallModel()
    model.logits.weight = model.table.weight
    return model


def frozen() -> nn.Module:
    model = SmallModel()
    model.table.requires_grad_(False)
    return model


def half() -> nn.Module:
    return SmallModel().to(torch.bfloat16)


def number() -> int:
    return 7


NOT_CALLABLE = 7


def reference_model(plan: Plan) -> nn.Module:
    """The module as its own library makes it, with the initial values of the plan's run."""
    source = open_source(plan, OPTIONS.seed)
    if plan.module.factory is not None:
        return source.model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(plan.module.huggingface)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config)
    )
    structure = find_structure(source.model, plan)
    for name in (*structure.embedding, *structure.blocks, *structure.head):
        source.fill(name, source.model.get_submodule(name))
    filled = dict(source.model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(filled[name])
    return model


def run_foreign_reference(plan: Plan) -> TrainingOutcome:
    """The same batches through the unmodified module, whole batch at once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = reference_model(plan)
    optimizer = reference_optimizer(model, OPTIONS)
    batches = synthetic_batches(replace(plan, mesh=Mesh(pp=1, dp=1, tp=1)), 0, OPTIONS.seed)
    losses = []
    norms = []
    first = {}
    for step in range(STEPS):
        ids, targets = batches(step)
        output = model(ids)
        logits = getattr(output, "logits", output)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            first = {
                f"model.{name}": p.grad.clone()
                for name, p in model.named_parameters(remove_duplicate=False)
            }
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), OPTIONS.clip_gradients).item())
        optimizer.step()
        losses.append(loss.item())
    return TrainingOutcome(
        losses=losses, norms=norms, gradients=first, states={}, collectives=Counter()
    )
