"""The tower of a model: the network that makes tokens of images or of sound.

It runs between the token embedding and the blocks of the language model (profiles/models/parts/
tower.py). Its sizes are its own, and so is its number of tokens: those of its images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from parplan.profiles.errors import ConfigError, coerce_choice
from parplan.profiles.models.blocks import BlockRun, block_kinds, require_positive
from parplan.profiles.models.functions import Activations

_FORBID = {"extra": "forbid"}
CONVOLVED = 3  # frames that a convolution reads
ENDS = 2  # layers beside its blocks: the patches and the projector


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """One product of the projector.

    width      features of its output
    activated  an activation function is behind it
    """

    __pydantic_config__ = _FORBID

    width: int
    bias: bool = False
    activated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerFunctions:
    """The functions of a tower, which change its values and none of its costs.

    activation             of its blocks; None: silu where they are gated, else gelu-tanh
    projector_activation   of the projector
    norm_epsilon           of all its norms
    rope_theta             the base of the rotary angles, half of which are of rows of patches, and
                           half of columns
    columns_between        the frequencies of columns lie between those of rows (Pixtral); False:
                           they are the same (Qwen2-VL, Llama 4)
    """

    __pydantic_config__ = _FORBID

    activation: Activations | None = None
    projector_activation: Activations = Activations.GELU
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0
    columns_between: bool = False

    def __post_init__(self) -> None:
        coerce_choice(self, "projector_activation", Activations)
        if self.activation is not None:
            coerce_choice(self, "activation", Activations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """The shape of a tower, and the images of a sequence.

    name             the word that its classes of blocks begin with: vision, audio
    attended         the blocks of the language model attend to its output (Whisper); False: the
                     projector makes tokens that stand among those of the text
    patches          tokens of one image before the projector
    images           images of a sequence
    patch_features   numbers that make one patch: channels x height x width x frames
    frame_features   numbers of a frame, of which two become a patch by two convolutions over three
                     neighbours, both activated (Whisper); 0: no frames
    patch_bias       whether the product of the patches has a bias
    fixed_patches    an image has this many patches, and no other number
    class_token      a trained token beside the patches, which the projector leaves out
    position_table   a position for each token
    fixed_positions  the positions are not trained
    key_bias         False: queries and values have a bias, keys have none
    norm_first, norm_last   a norm before the first block, and behind the last
    rms_norm         False: layer norms with biases
    rotary           queries and keys are rotated
    blocks           runs of unlike blocks; a window is a group of patches that attend to each other
    merged           patches that become one token of the language model
    pooled           they become their mean; False: they lie side by side
    projector_norm, projector_rms_norm   a norm of either kind before they are joined, or behind
                     their mean
    projector        the products up to the width of the language model
    functions        functions without cost
    """

    __pydantic_config__ = _FORBID

    name: str = "vision"
    attended: bool = False
    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_hidden_size: int
    patches: int
    images: int = 1
    patch_features: int
    frame_features: int = 0
    patch_bias: bool = False
    fixed_patches: bool = False
    class_token: bool = False
    position_table: bool = False
    fixed_positions: bool = False
    norm_first: bool = False
    norm_last: bool = False
    rms_norm: bool = False
    rotary: bool = False
    gated_ffn: bool = False
    linear_bias: bool = True
    qkv_bias: bool = True
    key_bias: bool = True
    blocks: tuple[BlockRun, ...] = ()
    merged: int = 1
    pooled: bool = False
    projector_norm: bool = False
    projector_rms_norm: bool = False
    projector: tuple[Projection, ...] = ()
    functions: TowerFunctions = TowerFunctions()

    def __post_init__(self) -> None:
        where = f"the {self.name} tower"
        for record in (self, *self.projector):
            require_positive(record, where, zero=("frame_features",))
        for run in self.blocks:
            require_positive(run, where, zero=("window", "chunk"))
        for size, parts, of in (
            (self.hidden_size, self.num_heads, "heads"),
            (self.patches, self.merged, "patches of one token"),
        ):
            if size % parts:
                raise ConfigError(f"{where}: {size} is not a multiple of the {parts} {of}")
        if bool(self.projector) == self.attended:
            needed = "leave out projector" if self.attended else "give projector"
            raise ConfigError(
                f"{where} has {len(self.projector)} products in its projector, and attended is "
                f"{str(self.attended).lower()}",
                hint=needed,
            )
        if self.attended and (self.images > 1 or self.merged > 1 or self.class_token):
            raise ConfigError(
                f"{where} is attended, it has one image a sequence, of tokens as they are",
                hint="leave out images, merged and class_token",
            )

    @property
    def tokens(self) -> int:
        """Tokens of an image in the blocks of the tower."""
        return self.patches + self.class_token

    @property
    def image_tokens(self) -> int:
        """Tokens of an image among those of the text."""
        return 0 if self.attended else self.patches // self.merged

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the patches of an image, as near to a square as they can be.

        Patches that become one token of the language model are a square of them where their number
        is a square, else a part of a row. A window is such a square of patches too.
        """
        most = max((kind.window for kind in self.block_kinds), default=0)
        rows, columns = sides(self.merged)
        window_rows, window_columns = sides(most) if most else (1, 1)
        unit = math.lcm(rows, window_rows), math.lcm(columns, window_columns)
        if self.patches % (unit[0] * unit[1]):
            unit = rows, columns
        down, across = sides(self.patches // (unit[0] * unit[1]))
        return unit[0] * down, unit[1] * across

    @property
    def width(self) -> int:
        """Features of its output."""
        return self.hidden_size if self.attended else self.projector[-1].width

    @property
    def block_kinds(self) -> tuple[BlockRun, ...]:
        """The kind of each block, in their order."""
        return block_kinds(self.blocks, self.num_layers)

    @property
    def divided_widths(self) -> tuple[int, ...]:
        """Widths of the projector that tensor parallelism divides, 0 for a product it does not.

        An activated product and the one behind it are divided as the two of a block.
        """
        divided: list[int] = []
        for product in self.projector[:-1]:
            begins = product.activated and not (divided and divided[-1])
            divided.append(product.width if begins else 0)
        return (*divided, 0)


def sides(number: int) -> tuple[int, int]:
    """Returns two factors of a number that are as near to each other as can be, the less first."""
    less = next(each for each in range(math.isqrt(number), 0, -1) if number % each == 0)
    return less, number // less
