"""The images of a sequence, for models with a tower."""

from __future__ import annotations

from dataclasses import replace

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelSpec, text_alone


def with_images(model: ModelSpec, images: int | None, tokens: int | None) -> ModelSpec:
    """Returns a model whose sequences have some images of some tokens, both the model's where None.

    Without images it is the text model alone. Raises ConfigError for a model without a tower, and
    for a tower whose images have another number of tokens.
    """
    tower = model.tower
    if tower is None:
        for option, given in (("images-per-sequence", images), ("image-tokens", tokens)):
            if given:
                raise ConfigError(
                    f"--{option} is {given}, {model.name} has no tower for images",
                    hint=f"leave out --{option}",
                )
        return model
    if images == 0 and not tower.attended:
        return text_alone(model)
    if tower.attended and images not in (None, 1):
        raise ConfigError(
            f"--images-per-sequence is {images}, a sequence of {model.name} has one recording",
            hint="leave out --images-per-sequence",
        )
    if tokens is not None and tower.fixed_patches and tokens != tower.image_tokens:
        raise ConfigError(
            f"--image-tokens is {tokens}, an image of {model.name} has {tower.image_tokens}",
            hint="leave out --image-tokens, and count its tiles with --images-per-sequence",
        )
    patches = tower.patches if tokens is None else tokens * tower.merged
    return replace(model, tower=replace(tower, patches=patches, images=images or tower.images))


def images_phrase(model: ModelSpec) -> tuple[str, ...]:
    """Returns the phrase of the images that a request assumes, if it has any."""
    tower = model.tower
    if tower is None or tower.attended:
        return ()
    return (f"--images-per-sequence {tower.images} (of {tower.image_tokens} tokens)",)


def require_room(model: ModelSpec, seq_length: int) -> None:
    """Raises ConfigError if a sequence is shorter than its images."""
    tower = model.tower
    if tower is not None and tower.images * tower.image_tokens > seq_length:
        raise ConfigError(
            f"{tower.images} images of {tower.image_tokens} tokens are longer than the sequence "
            f"of {seq_length}",
            hint="use a larger --seq-length or fewer --images-per-sequence",
        )
