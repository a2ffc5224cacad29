"""Small modules of a user whose operators tensor parallelism divides, written by hand.

The factories give (module, batch, loss), as tests/helpers/traced_modules.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.traced_modules import Batch, Made, MadeWithLoss

WIDTH, HEADS, VOCAB, LENGTH = 32, 4, 64, 12

OPT = {
    "model_type": "opt",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "word_embed_proj_dim": WIDTH,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "layerdrop": 0.0,
}


class _Block(nn.Module):
    """Queries, keys and values are one matrix, one after the other; the MLP is gated."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).split(WIDTH, dim=-1)
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in parts)
        read = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(read.transpose(1, 2).reshape(batch, length, WIDTH))
        gate, value = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * value)


class Gpt(nn.Module):
    """The table is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(_Block(causal=True) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.table.weight)


def gpt() -> MadeWithLoss:
    def loss(logits: Tensor, batch: Batch) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def batch(size: int) -> Batch:
        return {key: torch.randint(VOCAB, (size, LENGTH)) for key in ("ids", "targets")}

    return Gpt(), batch, loss


class Woven(nn.Module):
    """Tied tables, a block that has two names, and skips from the first stage to the last.

    One table is the table of both languages and the head; the block is called once by each name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.target.weight = self.source.weight
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.source.weight
        self.shared = _Block(causal=True)
        self.blocks = nn.ModuleList([_Block(causal=True), self.shared])
        self.join = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        read, x = self.source(source), self.shared(self.target(target))
        first = x
        for block in self.blocks:
            x = block(x)
        x = self.join(torch.cat((x, read), dim=-1)) + first
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), source.flatten())


def woven() -> Made:
    return Woven(), lambda size: {
        key: torch.randint(VOCAB, (size, LENGTH)) for key in ("source", "target")
    }


class ThreeInARow(nn.Module):
    """Three matrices in a row: the first two are divided, unless a rule divides the last two."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (WIDTH, WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(first, second) for first, second in sizes)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.layers
        made = third(functional.gelu(second(first(x))))
        return (functional.layer_norm(x + made, (WIDTH,)) * x).mean()


def three_in_a_row() -> Made:
    return ThreeInARow(), lambda size: {"x": torch.randn(size, LENGTH, WIDTH)}


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        made: Tensor = 3 * x**2 * gradient
        return made


class _Cube(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _Cubed.apply(x)
        return made


class OwnActivation(nn.Module):
    """The activation is a torch.autograd.Function, which the tracer has no rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.cube = _Cube()

    def forward(self, x: Tensor) -> Tensor:
        made = self.down(self.cube(self.up(x)))
        return (functional.layer_norm(x + made, (WIDTH,)) * x).mean()


def own_activation() -> Made:
    return OwnActivation(), lambda size: {"x": torch.randn(size, LENGTH, WIDTH)}


class StoppedGate(nn.Module):
    """The same tensor is first read without gradient, and then with it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.layer_norm(self.first(x), (WIDTH,))
        with torch.no_grad():
            gate = self.up(x).sigmoid()
        return (x + self.down(self.up(x) * gate)).square().mean()


def stopped_gate() -> Made:
    return StoppedGate(), lambda size: {"x": torch.randn(size, WIDTH)}


class _Level(nn.Module):
    """A convolution whose channels are shifted by a linear function of the time."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(4, out)
        self.time = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, out))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return functional.silu(self.norm(self.conv(x)) + self.time(time)[:, :, None, None])


class TimedUNet(nn.Module):
    """A U-Net of a diffusion model: its linear layers are divided, its convolutions are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.down = nn.ModuleList([_Level(3, 16), _Level(16, WIDTH)])
        self.middle = _Block(causal=False)
        self.up = nn.ModuleList([_Level(2 * WIDTH, 16), _Level(32, 8)])
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        time = self.time(time)
        skips, x = [], noisy
        for level in self.down:
            x = level(x, time)
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        tokens = self.middle(x.flatten(2).transpose(1, 2))
        x = tokens.transpose(1, 2).reshape(x.shape)
        for level, skip in zip(self.up, reversed(skips), strict=True):
            x = level(torch.cat((functional.interpolate(x, scale_factor=2.0), skip), dim=1), time)
        return self.out(x)


def timed_unet() -> MadeWithLoss:
    def batch(size: int) -> Batch:
        images = {key: torch.randn(size, 3, 8, 8) for key in ("noisy", "clean")}
        return {**images, "time": torch.rand(size, 1)}

    return TimedUNet(), batch, lambda output, batch: functional.mse_loss(output, batch["clean"])
