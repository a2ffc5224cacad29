"""Small modules of users that are not GPT or Llama, for the tracer and the executor.

They are functions that package.module:function can name. The modules of transformers and torch are
used as they are; the rest follows the papers that they are named after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = dict[str, Tensor]
Made = tuple[nn.Module, Callable[[int], Batch]]
MadeWithLoss = tuple[nn.Module, Callable[[int], Batch], Callable[[Any, Batch], Tensor]]

HUGGING_FACE: dict[str, dict[str, Any]] = {
    "t5": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "num_layers": 2,
        "d_model": 32,
        "d_ff": 64,
        "d_kv": 8,
        "num_heads": 4,
        "vocab_size": 64,
        "dropout_rate": 0.0,
    },
    "bert": {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "albert": {
        "model_type": "albert",
        "architectures": ["AlbertForMaskedLM"],
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "embedding_size": 16,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.0,
    },
    "vit": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
        "num_channels": 3,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}


def _images(size: int) -> Batch:
    return {"images": torch.randn(size, 3, 16, 16), "labels": torch.randint(10, (size,))}


def _of_images(logits: Tensor, batch: Batch) -> Tensor:
    return functional.cross_entropy(logits, batch["labels"])


class _Down(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(4, out)

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Each level's output joins the way back up: Ronneberger et al. 2015, arXiv 1505.04597."""

    def __init__(self, widths: tuple[int, ...] = (8, 16, 32)) -> None:
        super().__init__()
        ends = list(zip((3, *widths[:-1]), widths, strict=True))
        self.down = nn.ModuleList(_Down(first, out) for first, out in ends)
        self.middle = _Down(widths[-1], widths[-1])
        self.up = nn.ModuleList(_Down(2 * out, max(first, 8)) for first, out in reversed(ends))
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, noisy: Tensor) -> Tensor:
        skips, x = [], noisy
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for level, skip in zip(self.up, reversed(skips), strict=True):
            x = level(torch.cat((functional.interpolate(x, scale_factor=2.0), skip), dim=1))
        return self.out(x)


class Unlike(nn.Module):
    """Residual parts of two widths in turn, so that neighbouring shards have unlike sizes."""

    def __init__(self, widths: tuple[int, ...] = (16, 64, 16, 64, 16, 64)) -> None:
        super().__init__()
        self.enter = nn.Linear(12, 16)
        self.up = nn.ModuleList(nn.Linear(16, width) for width in widths)
        self.down = nn.ModuleList(nn.Linear(width, 16) for width in widths)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in widths)
        self.leave = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(functional.gelu(up(norm(x))))
        return self.leave(x)


def unlike() -> MadeWithLoss:
    return (
        Unlike(),
        lambda size: {"x": torch.randn(size, 12), "labels": torch.randint(3, (size,))},
        _of_images,
    )


class _Frozen(Unlike):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.up[3].parameters():
            parameter.requires_grad_(False)


def frozen() -> MadeWithLoss:
    _, batch, loss = unlike()
    return _Frozen(), batch, loss


def unet() -> MadeWithLoss:
    return (
        UNet(),
        lambda size: {"noisy": torch.randn(size, 3, 16, 16), "clean": torch.randn(size, 3, 16, 16)},
        lambda output, batch: functional.mse_loss(output, batch["clean"]),
    )


class _Residual(nn.Module):
    """Counts in the buffers of its batch norms, and writes into its activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.first(x)), inplace=True)
        y = self.norm2(self.second(y))
        y += x
        return y.relu_()


class ResNet(nn.Module):
    """He et al. 2016, arXiv 1512.03385."""

    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(_Residual(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


def resnet() -> MadeWithLoss:
    return ResNet(), _images, _of_images


class _Mixer(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.channels = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class MLPMixer(nn.Module):
    """Tolstikhin et al. 2021, arXiv 2105.01601."""

    def __init__(self, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*(_Mixer(16, width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(
            self.norm(self.blocks(self.patches(images).flatten(2).transpose(1, 2))).mean(dim=1)
        )


def mixer() -> MadeWithLoss:
    return MLPMixer(), _images, _of_images


class Translator(nn.Module):
    """torch.nn.Transformer's encoder and decoder over one table, which is the head as well."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(64, width)
        encoder = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        decoder = nn.TransformerDecoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder, layers, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, layers)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        visible = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1)
        memory = self.encoder(self.table(source))
        x = self.decoder(self.table(target[:, :-1]), memory, tgt_mask=visible, tgt_is_causal=True)
        return functional.cross_entropy(
            (x @ self.table.weight.t()).flatten(0, 1), target[:, 1:].flatten()
        )


def translator() -> Made:
    return Translator(), lambda size: {
        "source": torch.randint(64, (size, 12)),
        "target": torch.randint(64, (size, 9)),
    }


class Shares(nn.Module):
    """One block three times over, as ALBERT (Lan et al. 2020, arXiv 1909.11942)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(64, width)
        self.block = nn.TransformerEncoderLayer(
            width, 4, 64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


def shares() -> nn.Module:
    return Shares()


class InPlace(nn.Module):
    """Writes into activations, into views of them and into what it made of zeros."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).mul_(0.5)
            x[:, 0] *= 0.5
            shifted = torch.zeros(x.shape)
            shifted[:, 1:] = x[:, :-1]
            x = x + shifted
        return x.square().mean()


def in_place() -> Made:
    return InPlace(), lambda size: {"x": torch.randn(size, 16)}


class _Clipped(torch.autograd.Function):
    """tanh forward; backward as if it were the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class OwnGradient(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = _Clipped.apply(layer(x))
        return x.square().mean()


def own_gradient() -> Made:
    return OwnGradient(), lambda size: {"x": torch.randn(size, 16)}


class Mixture(nn.Module):
    """The computation depends on the values of its activations."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if x.sum() > 0:  # the line that the error names
                x = layer(x)
        return x.square().mean()


def depends_on_values() -> Made:
    return Mixture(), lambda size: {"x": torch.randn(size, 16)}
