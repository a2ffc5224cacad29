"""The operators of a tower as modules, beside those that it shares with the language model.

A tensor of a tower is [images of all sequences, tokens, features]. The patches of an image come
window by window, inside a window token by token, and inside a token of the language model row by
row: patches that attend to each other, and those that become one token, are neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.executor.models.attention_modules import Rotary
from parplan.executor.models.operators import PLAIN_ACTIVATIONS
from parplan.executor.tensors import local
from parplan.profiles.models.functions import Activations
from parplan.profiles.models.operator_graph import Operator
from parplan.profiles.models.spec import ModelSpec
from parplan.profiles.models.towers import CONVOLVED, Tower, sides

HEARD = {"frames": 1, "patches": 2}  # convolutions of sound, with their steps
LONGEST_WAVE = 10000.0  # of fixed positions, in tokens over 2 pi


def patch_places(tower: Tower, device: torch.device | None = None) -> Tensor:
    """Returns the row and the column of each patch in the order of its tensor: [patches, 2]."""
    rows, columns = tower.grid
    down, across = sides(tower.merged)
    window = max((kind.window for kind in tower.block_kinds), default=0)
    outer = sides(window) if window else (down, across)
    row_by_row = torch.arange(rows * columns, device=device)
    shape = (rows // outer[0], outer[0] // down, down, columns // outer[1], outer[1] // across)
    number = row_by_row.view(*shape, across).permute(0, 3, 1, 4, 2, 5).flatten()
    return torch.stack((number // columns, number % columns), dim=-1)


def token_order(tower: Tower, device: torch.device) -> Tensor:
    """Returns the place of each token of an image, row by row, in the order of its tensor."""
    down, across = sides(tower.merged)
    row, column = patch_places(tower, device)[:: tower.merged].unbind(-1)
    return row // down * (tower.grid[1] // across) + column // across


class Heard(nn.Module):
    """A convolution over neighbouring frames, the first and the last beside a frame of zeros.

    step              frames between two outputs
    shared_inputs     the frames, of which each rank reads all
    ranks_of_tokens   this rank and their number, where tensor-parallel ranks divide the outputs
    """

    on_shards = True
    shared_inputs = {0: 1}  # noqa: RUF012
    ranks_of_tokens: tuple[int, int] | None = None

    def __init__(self, operator: Operator, step: int) -> None:
        super().__init__()
        self.step = step
        for parameter in operator.parameters:
            empty = nn.Parameter(torch.empty(parameter.shape))
            self.register_parameter(parameter.name, empty)

    def forward(self, x: Tensor) -> Tensor:
        weight = local(self.weight).unflatten(1, (-1, CONVOLVED))
        padding = CONVOLVED // 2
        if self.ranks_of_tokens is not None:
            rank, ranks = self.ranks_of_tokens
            outputs = x.shape[1] // self.step // ranks
            x = functional.pad(x, (0, 0, padding, padding))[:, rank * outputs * self.step :]
            x, padding = x[:, : (outputs - 1) * self.step + CONVOLVED], 0
        out = functional.conv1d(
            x.transpose(1, 2), weight, local(self.bias), stride=self.step, padding=padding
        )
        return out.transpose(1, 2).contiguous()


class PatchRotary(Rotary):
    """Rotates queries and keys by the row and the column of their patch.

    The first half of the pairs turns by rows, the second by columns. With a class token patches are
    counted from 1, and the class token is not turned.
    """

    def __init__(self, model: ModelSpec, tower: Tower) -> None:
        super().__init__(model)
        self.tower = tower

    def tables(self, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of [tokens, 1, 1, size], computed in fp32."""
        places = patch_places(self.tower, x.device) + int(self.tower.class_token)
        if self.tower.class_token:
            places = torch.cat((places, places.new_zeros(1, 2)))
        even = torch.arange(0, size, 4, device=x.device, dtype=torch.float32)
        of_columns = even + 2 if self.tower.functions.columns_between else even
        angles = torch.cat(
            [
                torch.outer(places[:, axis].float(), self.theta ** -(exponents / size))
                for axis, exponents in enumerate((even, of_columns))
            ],
            dim=-1,
        )
        angles = torch.cat((angles, angles), dim=-1)[:, None, None]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class PatchTables(nn.Module):
    """Puts the class token behind the patches of each image, and adds the table of positions.

    ranks_of_tokens   this rank and their number, where tensor-parallel ranks divide the tokens
    """

    on_shards = True
    ranks_of_tokens: tuple[int, int] | None = None

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        if tower.class_token:
            self.class_token = nn.Parameter(torch.empty(tower.hidden_size))
        self.has_positions = tower.position_table
        self.fixed = tower.fixed_positions
        if tower.position_table:
            self.weight = nn.Parameter(torch.empty(tower.tokens, tower.hidden_size))

    @torch.no_grad()
    def fill_fixed(self) -> None:
        """Fills positions that are not trained with sines and cosines (Whisper)."""
        if not self.fixed:
            return
        tokens, features = self.weight.shape
        exponents = torch.arange(features // 2) / max(1, features // 2 - 1)
        angles = torch.outer(torch.arange(tokens), LONGEST_WAVE**-exponents)
        self.weight.copy_(torch.cat((angles.sin(), angles.cos()), dim=1))

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "class_token"):
            token = local(self.class_token).to(x.dtype).expand(len(x), 1, -1)
            x = torch.cat((x, token), dim=1)
        if not self.has_positions:
            return x
        rank, _ = self.ranks_of_tokens or (0, 1)
        return x + local(self.weight)[rank * x.shape[1] :][: x.shape[1]]


class JoinedPatches(nn.Module):
    """Makes one token of neighbouring patches: their mean, or their features side by side."""

    on_shards = True

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, x: Tensor) -> Tensor:
        patches = x[:, : self.tower.patches]
        if self.tower.pooled:
            return patches.unflatten(1, (-1, self.tower.merged)).mean(dim=2)
        if self.tower.class_token:
            patches = patches.contiguous()
        return patches.unflatten(1, (-1, self.tower.merged)).flatten(2)


class ProjectorActivation(nn.Module):
    """The activation behind a product of the projector."""

    on_shards = True

    def __init__(self, function: Activations) -> None:
        super().__init__()
        self.function = PLAIN_ACTIVATIONS[function]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class ImageTokens(nn.Module):
    """Puts the tokens of the images among those of the text, in place of what is there.

    shared_inputs     the tokens of images, of which each tensor-parallel rank reads all
    ranks_of_tokens   this rank and their number, where tensor-parallel ranks divide the tokens
    """

    on_shards = True
    shared_inputs = {0: 1}  # noqa: RUF012
    ranks_of_tokens: tuple[int, int] | None = None

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, projected: Tensor, embedded: Tensor, first: Tensor) -> Tensor:
        """Returns the tokens of the sequences.

        projected   tokens of images, [images of all sequences, tokens of an image, features]
        embedded    [sequences, tokens of a sequence, features]
        first       the place of the first token of each image, [sequences, images of a sequence]
        """
        places = (first[..., None] + token_order(self.tower, first.device)).flatten(1)
        tokens = projected.reshape(len(embedded), -1, embedded.shape[-1])
        if self.ranks_of_tokens is None:
            return embedded.scatter(1, _rows(places, embedded), tokens)
        held, (rank, _) = embedded.shape[1], self.ranks_of_tokens
        places = places - rank * held
        places = places.where((places >= 0) & (places < held), held)  # a row for those of others
        padded = functional.pad(embedded, (0, 0, 0, 1))
        return padded.scatter(1, _rows(places, padded), tokens)[:, :held].contiguous()


def _rows(places: Tensor, x: Tensor) -> Tensor:
    """Returns the index of all features of tokens at `places` of `x`, [sequences, tokens]."""
    return places[..., None].expand(-1, -1, x.shape[-1])
