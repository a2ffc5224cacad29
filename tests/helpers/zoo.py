"""Small modules in the style of user code, made of the layers of torch.nn.

Each function gives (module, batch, loss) or a module of tokens; `NAMES` lists them. Hugging Face
families are in benchmarks/executor/external_modules.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

Batch = dict[str, Tensor]
Made = tuple[nn.Module, Callable[[int], Batch], Callable[[Any, Batch], Tensor]]
NAMES: list[str] = []

WIDTH = 16


def _loss(output: Any, batch: Batch) -> Tensor:
    """The mean squares of all that has a gradient."""
    if dataclasses.is_dataclass(output):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    parts = [
        leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    return sum((part.abs() if part.is_complex() else part).square().mean() for part in parts)  # type: ignore[return-value]


class Called(nn.Module):
    """`module` called in one way on x."""

    def __init__(
        self,
        module: nn.Module | None,
        call: Callable[[Any, Tensor], Any] = lambda module, x: module(x),
    ) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.module, x)


def _of(
    module: nn.Module | None,
    *size: int,
    call: Callable[[Any, Tensor], Any] = lambda module, x: module(x),
) -> Made:
    return Called(module, call), lambda count: {"x": torch.randn(count, *size)}, _loss


def _of_ids(module: nn.Module, length: int = 8) -> Made:
    return Called(module), lambda count: {"x": torch.randint(32, (count, length))}, _loss


def zoo(function: Callable[[], Any]) -> Callable[[], Any]:
    NAMES.append(function.__name__)
    return function


def _blocks(count: int = 4) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(count)]


# one submodule, or one parameter, under several names


@zoo
def same_layer_four_times() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(nn.Embedding(32, WIDTH), *[layer] * 4, nn.Linear(WIDTH, 32))


@zoo
def same_block_twice() -> nn.Module:
    block = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Embedding(32, WIDTH), block, nn.Linear(WIDTH, WIDTH), block, nn.Linear(WIDTH, 32)
    )


@zoo
def same_norm_twice() -> Made:
    norm = nn.BatchNorm1d(WIDTH)
    return _of(
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, 4)
        ),
        WIDTH,
    )


@zoo
def tied_weights() -> nn.Module:
    module = nn.Sequential(nn.Embedding(32, WIDTH), *_blocks(), nn.Linear(WIDTH, 32, bias=False))
    module[-1].weight = module[0].weight
    return module


@zoo
def tied_across_blocks() -> nn.Module:
    blocks = _blocks()
    for block in blocks[1:]:
        block[0].weight = blocks[0][0].weight
    return nn.Sequential(nn.Embedding(32, WIDTH), *blocks, nn.Linear(WIDTH, 32))


class _InList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([self.shared, nn.Linear(WIDTH, WIDTH), self.shared])
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.shared(self.table(ids))
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


@zoo
def attribute_and_list() -> nn.Module:
    return _InList()


# recurrent


@zoo
def rnn() -> Made:
    return _of(nn.RNN(8, WIDTH, batch_first=True), 5, 8)


@zoo
def lstm() -> Made:
    return _of(nn.LSTM(8, WIDTH, num_layers=2, batch_first=True, bidirectional=True), 5, 8)


@zoo
def gru() -> Made:
    return _of(nn.GRU(8, WIDTH, num_layers=2, batch_first=True), 5, 8)


@zoo
def lstm_with_projection() -> Made:
    return _of(nn.LSTM(8, WIDTH, proj_size=4, batch_first=True), 5, 8)


@zoo
def time_first_gru() -> Made:
    return _of(nn.GRU(8, WIDTH), 5, 8, call=lambda module, x: module(x.transpose(0, 1)))


@zoo
def rnn_cell() -> Made:
    return _of(nn.RNNCell(8, WIDTH), 8)


@zoo
def lstm_cell() -> Made:
    return _of(nn.LSTMCell(8, WIDTH), 8)


@zoo
def gru_cell() -> Made:
    return _of(nn.GRUCell(8, WIDTH), 8)


class _Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(8, WIDTH), nn.LSTMCell(WIDTH, WIDTH)])
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        states: list[Any] = [None, None]
        for step in x.unbind(1):
            for index, cell in enumerate(self.cells):
                states[index] = cell(step, states[index])
                step = states[index][0]
        return self.out(step)


@zoo
def unrolled_cells() -> Made:
    return _Unrolled(), lambda count: {"x": torch.randn(count, 4, 8)}, _loss


def _packed(module: nn.Module, x: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(
        x, torch.full((len(x),), x.shape[1]), batch_first=True
    )
    return nn.utils.rnn.pad_packed_sequence(module(packed)[0], batch_first=True)[0]


@zoo
def packed_lstm() -> Made:
    return _of(nn.LSTM(8, WIDTH, batch_first=True), 5, 8, call=_packed)


# attention


@zoo
def multihead_attention() -> Made:
    return _of(
        nn.MultiheadAttention(WIDTH, 4, batch_first=True),
        5,
        WIDTH,
        call=lambda module, x: module(x, x, x),
    )


@zoo
def multihead_attention_without_weights() -> Made:
    return _of(
        nn.MultiheadAttention(WIDTH, 4),
        5,
        WIDTH,
        call=lambda module, x: module(*[x.transpose(0, 1)] * 3, need_weights=False),
    )


@zoo
def multihead_attention_with_all_flags() -> Made:
    module = nn.MultiheadAttention(
        WIDTH,
        4,
        bias=False,
        add_bias_kv=True,
        add_zero_attn=True,
        kdim=WIDTH,
        vdim=8,
        batch_first=True,
    )
    return _of(
        module,
        5,
        WIDTH,
        call=lambda module, x: module(x, x, x[..., :8], average_attn_weights=False),
    )


def _masked(module: nn.Module, x: Tensor) -> Any:
    length = x.shape[1]
    padding = torch.zeros(len(x), length, dtype=torch.bool)
    padding[:, -1] = True
    return module(
        x,
        x,
        x,
        key_padding_mask=padding,
        attn_mask=nn.Transformer.generate_square_subsequent_mask(length),
        is_causal=True,
    )


@zoo
def multihead_attention_with_masks() -> Made:
    return _of(nn.MultiheadAttention(WIDTH, 4, batch_first=True), 5, WIDTH, call=_masked)


@zoo
def transformer() -> Made:
    module = nn.Transformer(WIDTH, 2, 2, 2, 32, dropout=0.0, batch_first=True)
    return _of(module, 5, WIDTH, call=lambda module, x: module(x, x.flip(1)))


@zoo
def transformer_encoder() -> Made:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    return _of(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), 5, WIDTH)


@zoo
def transformer_decoder() -> Made:
    layer = nn.TransformerDecoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
    return _of(
        nn.TransformerDecoder(layer, 2),
        5,
        WIDTH,
        call=lambda module, x: module(
            x,
            x,
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]),
            tgt_is_causal=True,
        ),
    )


# layers of torch.nn


@zoo
def bilinear() -> Made:
    return _of(nn.Bilinear(8, 8, 4), 8, call=lambda module, x: module(x, x))


@zoo
def embedding_bag() -> Made:
    return _of_ids(nn.EmbeddingBag(32, WIDTH))


@zoo
def embedding_bag_with_max_norm() -> Made:
    return _of_ids(nn.EmbeddingBag(32, WIDTH, mode="sum", max_norm=1.0))


@zoo
def embedding_with_max_norm() -> Made:
    return _of_ids(nn.Embedding(32, WIDTH, padding_idx=0, max_norm=1.0))


@zoo
def sparse_embedding() -> Made:
    return _of_ids(nn.Sequential(nn.Embedding(32, WIDTH, sparse=True), nn.Linear(WIDTH, 4)))


@zoo
def conv1d_net() -> Made:
    return _of(
        nn.Sequential(
            nn.Conv1d(3, 8, 3, padding=1),
            nn.BatchNorm1d(8),
            nn.GELU(),
            nn.MaxPool1d(2),
            nn.ConvTranspose1d(8, 3, 2),
        ),
        3,
        8,
    )


@zoo
def conv2d_net() -> Made:
    return _of(
        nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
            nn.SiLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(8, 8, 1, groups=4),
            nn.GroupNorm(2, 8),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        ),
        3,
        10,
        10,
    )


@zoo
def conv3d_net() -> Made:
    return _of(
        nn.Sequential(
            nn.Conv3d(1, 4, 3, padding="same", padding_mode="circular"),
            nn.BatchNorm3d(4),
            nn.PReLU(4),
            nn.MaxPool3d(2),
        ),
        1,
        4,
        4,
        4,
    )


@zoo
def indexed_max_pool() -> Made:
    def call(module: nn.Module, x: Tensor) -> Tensor:
        y, index = functional.max_pool2d(module(x), 2, return_indices=True)
        return functional.max_unpool2d(y, index, 2)

    return _of(nn.Conv2d(3, 4, 3, padding=1), 3, 8, 8, call=call)


@zoo
def batch_norm_momentum_none() -> Made:
    return _of(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 4)), 8)


@zoo
def batch_norm_without_statistics() -> Made:
    return _of(
        nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 4)
        ),
        8,
    )


@zoo
def sync_batch_norm() -> Made:
    return _of(nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8), nn.Linear(8, 4)), 8)


@zoo
def lazy_linear() -> Made:
    return _of(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 4)), 8)


@zoo
def upsample_and_shuffle() -> Made:
    return _of(
        nn.Sequential(
            nn.Conv2d(3, 12, 3),
            nn.PixelShuffle(2),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.ReflectionPad2d(1),
        ),
        3,
        6,
        6,
    )


@zoo
def fold_and_unfold() -> Made:
    return _of(
        nn.Conv2d(2, 2, 1),
        2,
        4,
        4,
        call=lambda module, x: functional.fold(
            functional.unfold(module(x), 2, stride=2), 4, 2, stride=2
        ),
    )


@zoo
def local_response_and_glu() -> Made:
    return _of(
        nn.Sequential(
            nn.Conv2d(2, 4, 1),
            nn.LocalResponseNorm(2),
            nn.GLU(1),
            nn.Softmax2d(),
            nn.Threshold(0.1, 0.0),
        ),
        2,
        4,
        4,
    )


@zoo
def adaptive_softmax() -> Made:
    return _of(
        nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 20, [5, 10]),
        WIDTH,
        call=lambda module, x: module(x, torch.arange(len(x)) % 20).loss,
    )


@zoo
def ctc_loss() -> Made:
    def call(module: nn.Module, x: Tensor) -> Tensor:
        logits = module(x).log_softmax(-1).transpose(0, 1)
        n = x.shape[0]
        return functional.ctc_loss(
            logits,
            torch.ones(n, 2, dtype=torch.long),
            torch.full((n,), x.shape[1]),
            torch.full((n,), 2),
        )

    return _of(nn.Linear(8, 5), 6, 8, call=call)


@zoo
def random_relu() -> Made:
    return _of(nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 4)), 8)


@zoo
def dropouts() -> Made:
    return _of(
        nn.Sequential(
            nn.Conv2d(2, 4, 1),
            nn.Dropout2d(0.1),
            nn.AlphaDropout(0.1),
            nn.FeatureAlphaDropout(0.1),
            nn.Dropout(0.1),
        ),
        2,
        4,
        4,
    )


@zoo
def distances() -> Made:
    return _of(
        nn.Linear(8, 8),
        3,
        8,
        call=lambda module, x: (
            torch.cdist(module(x), x),
            nn.PairwiseDistance()(module(x), x),
            nn.CosineSimilarity()(module(x), x),
        ),
    )


# parametrizations, lists and dicts of parameters


@zoo
def weight_norm() -> Made:
    return _of(
        nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4)), 8
    )


@zoo
def spectral_norm() -> Made:
    return _of(
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4)),
        8,
    )


@zoo
def orthogonal() -> Made:
    return _of(
        nn.Sequential(parametrizations.orthogonal(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4)), 8
    )


@zoo
def old_weight_norm() -> Made:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _of(
            nn.Sequential(
                nn.utils.weight_norm(nn.Linear(8, 8)),
                nn.ReLU(),
                nn.utils.spectral_norm(nn.Linear(8, 4)),
            ),
            8,
        )


class _Collections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(3)])
        self.named = nn.ParameterDict(
            {"scale": nn.Parameter(torch.ones(8)), "bias": nn.Parameter(torch.zeros(8))}
        )
        self.scalar = nn.Parameter(torch.tensor([1.5]))
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for row in self.rows:
            x = torch.tanh(x @ row) * self.scalar
        return x * self.named["scale"] + self.named["bias"]


@zoo
def parameter_collections() -> Made:
    return _Collections(), lambda count: {"x": torch.randn(count, 8)}, _loss


class _One(nn.Module):
    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self.one, self.out = nn.Parameter(parameter), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) * self.one.sum()


class _ByAScalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x * self.scale)) * self.scale)


@zoo
def scaled_by_a_scalar() -> Made:
    return _ByAScalar(), lambda count: {"x": torch.randn(count, 8)}, _loss


@zoo
def empty_parameter() -> Made:
    return _One(torch.zeros(0, 8)), lambda count: {"x": torch.randn(count, 8)}, _loss


# what a forward pass does besides


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * y.mean(0))
            self.calls += 1
        return self.out(y - self.mean)


@zoo
def updated_buffer() -> Made:
    return _Counts(), lambda count: {"x": torch.randn(count, 8)}, _loss


class _Assigns(_Counts):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return self.out(y - self.mean)


@zoo
def assigned_buffer() -> Made:
    return _Assigns(), lambda count: {"x": torch.randn(count, 8)}, _loss


class _CountsInPython(nn.Module):
    """Counts its calls where `place` says, and computes with the count, or only reports it."""

    total = 0

    def __init__(self, place: str, *, computes: bool) -> None:
        super().__init__()
        type(self).total = 0
        self.place, self.computes = place, computes
        self.calls, self.flip, self.log = 0, False, {"calls": 0}
        self.linear, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        count = self._counted()
        y = self.linear(x)
        return self.out(y.relu() if self.computes and count % 2 else y)

    def _counted(self) -> int:
        if self.place == "class":
            type(self).total += 1
            return type(self).total
        if self.place == "dict":
            self.log["calls"] += 1
            return self.log["calls"]
        if self.place == "flag":
            self.flip = not self.flip
            return int(self.flip)
        self.calls += 1
        return self.calls


def _counting(place: str, *, computes: bool = True) -> Made:
    made = _CountsInPython(place, computes=computes)
    return made, lambda count: {"x": torch.randn(count, 8)}, _loss


@zoo
def counts_in_the_module() -> Made:
    return _counting("module")


@zoo
def counts_in_the_class() -> Made:
    return _counting("class")


@zoo
def counts_in_a_dict() -> Made:
    return _counting("dict")


@zoo
def counts_by_a_flag() -> Made:
    return _counting("flag")


@zoo
def reports_its_calls() -> Made:
    return _counting("class", computes=False)


class _Chunked(nn.Module):
    """Reads parts of one parameter in calls that several shards make."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(32, 8) / 8)
        self.down = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both.chunk(2)
        return self.down(torch.sigmoid(x @ gate.T) * torch.tanh(x @ up.T))


@zoo
def chunked_parameter() -> Made:
    return _Chunked(), lambda count: {"x": torch.randn(count, 8)}, _loss


@zoo
def frozen_parameters() -> nn.Module:
    module = nn.Sequential(nn.Embedding(32, WIDTH), *_blocks(), nn.Linear(WIDTH, 32))
    for part in module[:3]:
        part.requires_grad_(False)
    return module


@zoo
def frozen_in_the_middle() -> nn.Module:
    module = nn.Sequential(nn.Embedding(32, WIDTH), *_blocks(), nn.Linear(WIDTH, 32))
    module[2].requires_grad_(False)
    module[3][0].bias.requires_grad_(False)
    return module


@zoo
def nothing_learns() -> nn.Module:
    return nn.Sequential(nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)).requires_grad_(False)


class _Toggles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.teacher.requires_grad_(False)
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x) - target.detach()


@zoo
def toggled_gradient() -> Made:
    return _Toggles(), lambda count: {"x": torch.randn(count, 8)}, _loss


class _DropsLayers(nn.Module):
    def __init__(self, drawn: Callable[[], Any]) -> None:
        super().__init__()
        self.table = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(_blocks())
        self.head = nn.Linear(WIDTH, 32)
        self.drawn = drawn

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            if self.drawn() < 0.3:
                continue
            x = block(x)
        return self.head(x)


@zoo
def layer_drop_by_torch() -> nn.Module:
    return _DropsLayers(lambda: torch.rand(()))


@zoo
def layer_drop_by_torch_item() -> nn.Module:
    return _DropsLayers(lambda: torch.rand(1).item())


@zoo
def layer_drop_by_python() -> nn.Module:
    import random

    return _DropsLayers(random.random)


@zoo
def layer_drop_by_numpy() -> nn.Module:
    import numpy as np

    return _DropsLayers(np.random.uniform)


def _checkpointed(reentrant: bool) -> nn.Module:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(32, WIDTH)
            self.blocks = nn.ModuleList(_blocks())
            self.head = nn.Linear(WIDTH, 32)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x)

    return Checkpointed()


@zoo
def checkpoint_inside() -> nn.Module:
    return _checkpointed(False)


@zoo
def reentrant_checkpoint_inside() -> nn.Module:
    return _checkpointed(True)


@zoo
def fourier() -> Made:
    return _of(
        nn.Linear(8, 8),
        8,
        call=lambda module, x: torch.fft.irfft(
            torch.fft.rfft(module(x)) * torch.exp(torch.tensor(1j))
        ),
    )


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x.to(torch.complex64) @ self.weight)


@zoo
def complex_parameter() -> Made:
    return _Complex(), lambda count: {"x": torch.randn(count, 8)}, _loss


@zoo
def double_parameter() -> Made:
    return _of(nn.Linear(8, 8).double(), 8, call=lambda module, x: module(x.double()))


@zoo
def bf16_parameter() -> Made:
    return _of(nn.Linear(8, 8).bfloat16(), 8, call=lambda module, x: module(x.bfloat16()))


@zoo
def integer_outputs() -> Made:
    return _of(
        nn.Linear(8, 8), 8, call=lambda module, x: (module(x), module(x).argmax(-1), module(x) > 0)
    )


@zoo
def in_place() -> Made:
    def call(module: nn.Module, x: Tensor) -> Tensor:
        y = module(x).add_(1.0)
        y[:, :2] *= 2.0
        y[:, 2:4].mul_(0.5).clamp_(max=3.0)
        return y.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8).unsqueeze(1).expand(-1, 3, -1)

    return _of(nn.Linear(8, 8), 8, call=call)


@zoo
def writes_into_its_input() -> Made:
    return _of(nn.Linear(8, 8), 8, call=lambda module, x: module(x.mul_(2.0)))


@dataclasses.dataclass
class Output:
    hidden: Tensor
    extra: Any = None


@zoo
def returns_a_dataclass() -> Made:
    return _of(
        nn.Linear(8, 8), 8, call=lambda module, x: Output(hidden=module(x), extra={"n": [x]})
    )


@zoo
def returns_nested() -> Made:
    return _of(nn.Linear(8, 8), 8, call=lambda module, x: {"a": (module(x), [x.sum()]), "b": None})


@zoo
def without_parameters() -> Made:
    return _of(None, 8, call=lambda _, x: x.square())


@zoo
def one_parameter() -> Made:
    return _of(nn.PReLU(), 8)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class _Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.ones(8)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(_Scale.apply(x, self.weight))


@zoo
def custom_function() -> Made:
    return _Custom(), lambda count: {"x": torch.randn(count, 8)}, _loss


@zoo
def compiled() -> Made:
    return _of(torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))), 8)


class _Scriptable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


@zoo
def scripted() -> Made:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _of(torch.jit.script(_Scriptable()), 8)


@zoo
def data_parallel() -> Made:
    return _of(nn.DataParallel(nn.Linear(8, 8)), 8)


@zoo
def data_dependent_branch() -> Made:
    return _of(nn.Linear(8, 8), 8, call=lambda module, x: module(x) if x.sum() > 0 else x)


@zoo
def data_dependent_shape() -> Made:
    return _of(nn.Linear(8, 8), 8, call=lambda module, x: module(x)[x > 0])


@zoo
def reads_numpy() -> Made:
    return _of(
        nn.Linear(8, 8), 8, call=lambda module, x: module(x) * torch.from_numpy(x.detach().numpy())
    )


@zoo
def routes_by_nonzero() -> Made:
    return _of(
        nn.Linear(8, 8), 8, call=lambda module, x: module(x[(x[:, 0] > 0).nonzero().squeeze(1)])
    )


@zoo
def raises_by_itself() -> Made:
    def call(module: nn.Module, x: Tensor) -> Tensor:
        raise ValueError("this module cannot run")

    return _of(nn.Linear(8, 8), 8, call=call)


@zoo
def wrong_shapes() -> Made:
    return _of(nn.Linear(8, 8), 7)


@zoo
def raises_when_made() -> Made:
    raise KeyError("hidden")


@zoo
def vmapped() -> Made:
    return _of(nn.Linear(8, 8), 3, 8, call=lambda module, x: torch.vmap(module)(x))


@zoo
def gradient_inside() -> Made:
    def call(module: nn.Module, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(module(x).sum(), x, create_graph=True)[0]

    return _of(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), 8, call=call)


class _Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        self.linear.register_forward_hook(lambda module, inputs, output: output * 2)
        self.linear.weight.register_hook(lambda gradient: gradient * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.register_hook(lambda gradient: gradient)
        return self.out(y)


@zoo
def hooked() -> Made:
    return _Hooked(), lambda count: {"x": torch.randn(count, 8)}, _loss


class _Caches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.cache: dict[int, Tensor] = {}
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if 8 not in self.cache:
            self.cache[8] = torch.arange(8.0)
        y = self.linear(x) + self.cache[8]
        if self.last is not None:
            y = y + self.last
        self.last = y.detach().mean(0)
        return y


@zoo
def keeps_activations() -> Made:
    return _Caches(), lambda count: {"x": torch.randn(count, 8)}, _loss


@zoo
def einsum_and_scatter() -> Made:
    def call(module: nn.Module, x: Tensor) -> Tensor:
        y = torch.einsum("bij,bkj->bik", module(x), x)
        index = torch.arange(3).expand(len(x), 3, 3)
        return (
            torch.zeros_like(y)
            .scatter_add(1, index, y)
            .cumsum(1)
            .sort(-1)
            .values.topk(2, -1)
            .values
        )

    return _of(nn.Linear(8, 8), 3, 8, call=call)


@zoo
def soft_mixture_of_experts() -> Made:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = (
                nn.Linear(8, 4),
                nn.ModuleList(nn.Linear(8, 8) for _ in range(4)),
            )

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.router(x).softmax(-1).topk(2, -1)
            mixed = torch.stack([expert(x) for expert in self.experts], 1)
            return (
                mixed.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 8)) * weights.unsqueeze(-1)
            ).sum(1)

    return Mixture(), lambda count: {"x": torch.randn(count, 8)}, _loss


class _MasksLate(nn.Module):
    """The first layers decide, without gradient, the mask at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        mask = (x > 0).float()
        for block in self.blocks[1:]:
            x = torch.relu(block(x))
        return self.out(x * mask)


@zoo
def masks_late() -> Made:
    return _MasksLate(), lambda count: {"x": torch.randn(count, 8)}, _loss


class _LargeTable(nn.Module):
    """Reads a table that is no parameter."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.zeros(rows, 1024))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.table[0, :8]


@zoo
def large_buffer() -> Made:
    return _LargeTable(2**24), lambda count: {"x": torch.randn(count, 8)}, _loss
