"""The images of sequences: numbers of their patches, and their places among the tokens of the text.

They are synthetic and depend only on the global index of a sequence, so that every mesh trains on
the same. The first token of a sequence is of the text. A token of an image is no target.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parplan.executor.data.batches import NO_TOKEN, Batches, sequences_of
from parplan.executor.run_options import Options, derived_seed
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.towers import Tower

PIXELS = "pixels"  # numbers of the patches of images
IMAGE_PLACES = "image_places"  # of the first token of each image
Images = Callable[[int], dict[str, Tensor]]  # by these names
_PIXELS, _PLACES = 1, 2  # draws of one sequence


def build_images(plan: Plan, dp_rank: int, options: Options) -> Images | None:
    """Returns a function from the step to the images of a data-parallel rank, by name.

    pixels         [rows, images of a sequence, patches, features of a patch]
    image_places   the place of the first token of each image, [rows, images]
    None in a model without a tower. Raises ConfigError for a run on a file, which has no images.
    """
    tower = plan.model.tower
    if tower is None:
        return None
    if options.data is not None:
        raise ConfigError(
            f"{options.data}: a file of token ids has no images for the {tower.name} tower",
            hint="leave --data out to train on synthetic images, or plan the text alone with "
            "--images-per-sequence 0",
        )
    return synthetic_images(plan, dp_rank, options.seed)


def synthetic_images(plan: Plan, dp_rank: int, seed: int) -> Images:
    """Normal values, at places that are drawn evenly."""
    tower = plan.model.tower
    assert tower is not None, "the model has a tower"

    def pixels(index: int) -> Tensor:
        shape = (tower.images, *pixel_shape(tower))
        return torch.empty(shape).normal_(generator=_generator(seed, index, _PIXELS))

    of_pixels = sequences_of(plan, dp_rank, pixels)
    places = synthetic_places(plan, dp_rank, seed)
    return lambda step: {PIXELS: of_pixels(step), IMAGE_PLACES: places(step)}


def pixel_shape(tower: Tower) -> tuple[int, int]:
    """Returns the patches of an image and the numbers of each; of sound the frames."""
    if tower.frame_features:
        return 2 * tower.patches, tower.frame_features
    return tower.patches, tower.patch_features


def synthetic_places(plan: Plan, dp_rank: int, seed: int) -> Callable[[int], Tensor]:
    """Returns a function from the step to the place of the first token of each image."""
    tower, length = plan.model.tower, plan.training.seq_length
    assert tower is not None, "the model has a tower"

    def places(index: int) -> Tensor:
        return drawn_places(tower, length, _generator(seed, index, _PLACES))

    return sequences_of(plan, dp_rank, places)


def _generator(seed: int, index: int, draw: int) -> torch.Generator:
    return torch.Generator().manual_seed(derived_seed(derived_seed(seed, index), draw))


def drawn_places(tower: Tower, length: int, generator: torch.Generator) -> Tensor:
    """Returns places of the images of a sequence, behind at least one token of the text."""
    each, count = tower.image_tokens, tower.images
    text_before = torch.randint(1, length - each * count + 1, (count,), generator=generator)
    return text_before.sort().values + each * torch.arange(count)


def of_text(batches: Batches, plan: Plan, dp_rank: int, seed: int) -> Batches:
    """Returns batches whose targets are `NO_TOKEN` where they would be tokens of images."""
    tower = plan.model.tower
    if tower is None or not tower.image_tokens:
        return batches
    places = synthetic_places(plan, dp_rank, seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids, targets = batches(step)
        behind = torch.arange(tower.image_tokens) - 1  # a token predicts the one behind it
        of_images = (places(step)[..., None] + behind).flatten(1)
        return ids, targets.scatter(1, of_images, NO_TOKEN)

    return batch


def num_targets(plan: Plan) -> int:
    """Returns the tokens of a step that the loss is a mean of: those of the text, of all pools."""
    return plan.whole_batch.of * (plan.training.seq_length - plan.model.image_tokens)
