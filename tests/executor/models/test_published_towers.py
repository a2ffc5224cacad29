"""Towers and projectors compute what transformers' modules of published families compute.

Each is read from its configuration, so that the reader's functions are tested too. The weights are
those of transformers, in the executor's layout, and images are compared as the projector puts their
tokens among those of the text.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from parplan.executor.checking.parity import forward
from parplan.executor.data.seen_images import IMAGE_PLACES, PIXELS
from parplan.executor.models.tower_modules import patch_places
from parplan.profiles.models.huggingface import entry_from_config
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.models.towers import Tower
from parplan.profiles.stack import NEUTRAL, AttentionKernel
from tests.helpers.executor_world import reference_layers

FIRST = 2  # place of the image
HEADS, HIDDEN = 4, 48
TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
VISION = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "image_size": 8,
    "patch_size": 2,
}
QWEN = {"depth": 2, "num_heads": HEADS, "patch_size": 2, "hidden_act": "quick_gelu"}
CONFIGS = {
    "qwen2_vl": {
        "text_config": {"model_type": "qwen2_vl_text", **TEXT},
        "vision_config": {**QWEN, "embed_dim": HIDDEN, "hidden_size": 32, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        "text_config": {"model_type": "qwen2_5_vl_text", **TEXT},
        "vision_config": {
            **QWEN,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "intermediate_size": 40,
            "out_hidden_size": 32,
            "window_size": 8,
            "fullatt_block_indexes": [1],
        },
    },
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", "head_dim": 8, **TEXT},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
            **VISION,
        },
        "mm_tokens_per_image": 4,
    },
    "llama4": {
        "text_config": {
            "model_type": "llama4_text",
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            **TEXT,
        },
        "vision_config": {
            "model_type": "llama4_vision_model",
            **VISION,
            "intermediate_size": 4 * HIDDEN,
            "projector_input_dim": 40,
            "projector_output_dim": 40,
            "vision_output_dim": 40,
        },
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", "head_dim": 8, **TEXT},
        "vision_config": {"model_type": "pixtral", "hidden_act": "silu", **VISION},
        "spatial_merge_size": 2,
    },
}
# patches of an image of any size; 4 x 6, and two windows of 4 x 4
PATCHES = {"qwen2_vl": 24, "qwen2_5_vl": 32}


def described(name: str) -> ModelSpec:
    spec = entry_from_config({"model_type": name, **CONFIGS[name]}, f"{name}/config.json").spec
    patches = PATCHES.get(name, spec.tower.patches)
    return replace(spec, tower=replace(spec.tower, patches=patches))


def ordered(images: Tensor, tower: Tower) -> Tensor:
    """The patches of images of [images, channels, rows, columns], in the executor's order."""
    side = images.shape[-1] // tower.grid[1]
    patches = nn.functional.unfold(images, side, stride=side).transpose(1, 2)
    places = patch_places(tower)
    return patches[:, places[:, 0] * tower.grid[1] + places[:, 1]]


def halves(weight: Tensor) -> Tensor:
    """Rows of heads whose neighbours turn together, columns first, as halves with rows first."""
    return weight.unflatten(0, (HEADS, 2, -1, 2)).flip(1).permute(0, 3, 1, 2, *_rest(weight))


def _rest(weight: Tensor) -> range:
    return range(4, 3 + weight.ndim)


def copy_block(ours: nn.Module, block: nn.Module, name: str) -> None:
    norms = {
        "qwen2_vl": ("norm1", "norm2"),
        "qwen2_5_vl": ("norm1", "norm2"),
        "gemma3": ("layer_norm1", "layer_norm2"),
        "llama4": ("input_layernorm", "post_attention_layernorm"),
        "mistral3": ("attention_norm", "ffn_norm"),
    }[name]
    for own, given in zip(("norm1", "norm2"), norms, strict=True):
        getattr(ours, own).load_state_dict(getattr(block, given).state_dict())
    attention = next(
        getattr(block, each) for each in ("attn", "self_attn", "attention") if hasattr(block, each)
    )
    for parameter, weight in ours.qkv.named_parameters():
        if hasattr(attention, "qkv"):
            parts = getattr(attention.qkv, parameter).chunk(3)
        else:
            parts = [getattr(getattr(attention, f"{of}_proj"), parameter) for of in "qkv"]
        if name == "llama4":
            parts = [*(halves(part).flatten(0, 3) for part in parts[:2]), parts[2]]
        heads = [part.unflatten(0, (HEADS, 1, -1)) for part in parts]
        weight.copy_(torch.cat(heads, dim=1).flatten(0, 2))
    out = next(
        getattr(attention, each)
        for each in ("proj", "out_proj", "o_proj")
        if hasattr(attention, each)
    )
    ours.attention_out.load_state_dict(out.state_dict())
    network = block.feed_forward if hasattr(block, "feed_forward") else block.mlp
    if hasattr(network, "gate_proj"):
        for parameter, weight in ours.fc1.named_parameters():
            gate, up = (
                getattr(network, f"{of}_proj").get_parameter(parameter) for of in ("gate", "up")
            )
            weight.copy_(torch.stack((gate, up), dim=1).flatten(0, 1))
        ours.fc2.load_state_dict(network.down_proj.state_dict())
    else:
        ours.fc1.load_state_dict(network.fc1.state_dict())
        ours.fc2.load_state_dict(network.fc2.state_dict())


class Theirs(nn.Module):
    """transformers' tower and projector."""

    def __init__(self, name: str) -> None:
        super().__init__()
        from transformers import AutoConfig
        from transformers.models.gemma3 import modeling_gemma3 as gemma3
        from transformers.models.llama4 import modeling_llama4 as llama4
        from transformers.models.mistral3 import modeling_mistral3 as mistral3
        from transformers.models.pixtral import modeling_pixtral as pixtral
        from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5_vl
        from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
        from transformers.models.siglip import modeling_siglip as siglip

        config = AutoConfig.for_model(name, **CONFIGS[name])
        vision = config.vision_config
        vision._attn_implementation = "eager"
        self.name = name
        tower, projector = {
            "qwen2_vl": (qwen2_vl.Qwen2VisionTransformerPretrainedModel, None),
            "qwen2_5_vl": (qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel, None),
            "gemma3": (
                siglip.SiglipVisionModel,
                gemma3.Gemma3MultiModalProjector,
            ),
            "llama4": (
                llama4.Llama4VisionModel,
                llama4.Llama4MultiModalProjector,
            ),
            "mistral3": (
                pixtral.PixtralVisionModel,
                mistral3.Mistral3MultiModalProjector,
            ),
        }[name]
        self.tower = tower(vision)
        self.projector = projector(config) if projector else None

    def forward(self, images: Tensor, tower: Tower) -> Tensor:
        """The tokens of an image, [tokens, features]."""
        if self.name.startswith("qwen"):
            grid = torch.tensor([[1, *tower.grid]])
            patches = ordered(images, replace(tower, blocks=()))[0]
            return self.tower(patches, grid_thw=grid).pooler_output
        seen = self.tower(images).last_hidden_state
        if self.name == "mistral3":
            return self.projector(seen.squeeze(0), torch.tensor([images.shape[2:]]))
        return self.projector(seen).flatten(0, -2)


def copy_ends(layers: nn.ModuleDict, theirs: Theirs, model: ModelSpec) -> None:
    name, tower, projector = theirs.name, theirs.tower, theirs.projector
    patches, last = layers["block0"], layers[f"block{model.tower.num_layers + 1}"]
    if name.startswith("qwen"):
        patches.patches.weight.copy_(tower.patch_embed.proj.weight.flatten(1))
        last.projector_norm.load_state_dict(tower.merger.ln_q.state_dict())
        last.projection0.load_state_dict(tower.merger.mlp[0].state_dict())
        last.projection1.load_state_dict(tower.merger.mlp[2].state_dict())
    elif name == "gemma3":
        convolution, table = tower.embeddings.patch_embedding, tower.embeddings.position_embedding
        patches.patches.weight.copy_(convolution.weight.flatten(1))
        patches.patches.bias.copy_(convolution.bias)
        patches.positions.weight.copy_(_in_order(table.weight, model.tower))
        last.norm.load_state_dict(tower.post_layernorm.state_dict())
        last.projector_norm.weight.copy_(projector.mm_soft_emb_norm.weight + 1)
        last.projection0.weight.copy_(projector.mm_input_projection_weight.t())
    elif name == "llama4":
        table = tower.positional_embedding_vlm
        patches.patches.weight.copy_(tower.patch_embedding.linear.weight)
        patches.positions.class_token.copy_(tower.class_embedding)
        patches.positions.weight.copy_(torch.cat((_in_order(table[:-1], model.tower), table[-1:])))
        patches.norm.load_state_dict(tower.layernorm_pre.state_dict())
        last.norm.load_state_dict(tower.layernorm_post.state_dict())
        adapter = tower.vision_adapter.mlp
        products = (adapter.fc1, adapter.fc2, projector.linear_1)
        for number, product in enumerate(products):
            getattr(last, f"projection{number}").load_state_dict(product.state_dict())
    else:
        patches.patches.weight.copy_(tower.patch_conv.weight.flatten(1))
        patches.norm.load_state_dict(tower.ln_pre.state_dict())
        last.projector_norm.load_state_dict(projector.norm.state_dict())
        # theirs joins features by feature, ours by patch
        joined = projector.patch_merger.merging_layer.weight.unflatten(1, (-1, model.tower.merged))
        last.projection0.weight.copy_(joined.transpose(1, 2).flatten(1))
        last.projection1.load_state_dict(projector.linear_1.state_dict())
        last.projection2.load_state_dict(projector.linear_2.state_dict())


def _in_order(table: Tensor, tower: Tower) -> Tensor:
    places = patch_places(tower)
    return table[places[:, 0] * tower.grid[1] + places[:, 1]]


def copy(layers: nn.ModuleDict, theirs: Theirs, model: ModelSpec) -> None:
    copy_ends(layers, theirs, model)
    blocks = {
        "gemma3": lambda tower: tower.encoder.layers,
        "llama4": lambda tower: tower.model.layers,
        "mistral3": lambda tower: tower.transformer.layers,
    }.get(theirs.name, lambda tower: tower.blocks)(theirs.tower)
    for number, block in enumerate(blocks):
        copy_block(layers[f"block{number + 1}"], block, theirs.name)


@pytest.mark.parametrize(
    "kernel", [AttentionKernel.FLASH, pytest.param(AttentionKernel.UNFUSED, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_tower_computes_what_transformers_computes_with_the_same_weights(name, kernel):
    pytest.importorskip("transformers")
    model = described(name)
    tower = model.tower
    torch.manual_seed(0)
    theirs = Theirs(name)
    training = TrainingSpec(global_batch_size=1, seq_length=32, attention=kernel, stack=NEUTRAL)
    layers = reference_layers(model, training, 0)
    seen = nn.ModuleDict({f"block{at}": layers[f"block{at}"] for at in range(tower.num_layers + 2)})
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        copy(layers, theirs, model)
    channels = tower.patch_features // 4
    images = torch.randn(1, channels, 2 * tower.grid[0], 2 * tower.grid[1])
    inputs = {PIXELS: ordered(images, tower)[None], IMAGE_PLACES: torch.tensor([[FIRST]])}

    ours = forward(seen, torch.zeros(1, 32, model.hidden_size), images=inputs)
    expected = theirs(images, tower)

    tokens = ours[0, FIRST : FIRST + tower.image_tokens]
    torch.testing.assert_close(tokens, expected, rtol=1e-4, atol=1e-5)
    assert not ours[0, FIRST + tower.image_tokens :].any()
    for output in (tokens, expected):
        output.square().sum().backward()
    patches = {
        "gemma3": lambda it: it.tower.embeddings.patch_embedding,
        "llama4": lambda it: it.tower.patch_embedding.linear,
        "mistral3": lambda it: it.tower.patch_conv,
    }.get(name, lambda it: it.tower.patch_embed.proj)(theirs)
    own = seen["block0"].patches.weight.grad
    torch.testing.assert_close(own, patches.weight.grad.flatten(1), rtol=1e-3, atol=1e-4)
