"""Split points by name: the submodules at whose first operator a stage begins."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from parplan.planner.traced.counted_operators import CountedOperators
from parplan.profiles.errors import ConfigError, did_you_mean

OPTION = "--stages"
OTHERS = ("uniform", "parameters", "ilp")  # what the option takes besides


def split_places(
    counted: CountedOperators, cuts: Sequence[int], names: Sequence[str]
) -> tuple[int, ...]:
    """Returns the legal cut before the first operator of each submodule, in the order of `names`.

    Raises ConfigError for a name that no operator has, one that begins the model, one where no
    stage can begin, and names that are not in the order in which the module runs them.
    """
    firsts = _first_places(counted)
    places: list[int] = []
    for name in names:
        if name not in firsts:
            raise _unknown_error(counted, name, firsts)
        place = counted.snapped(firsts[name], cuts)
        if place is None:
            raise _no_cut_error(counted, name, firsts[name])
        if places and place <= places[-1]:
            raise ConfigError(
                f"{OPTION} has {name} after {names[len(places) - 1]}, the module runs it no later",
                hint="give the names in the order in which the module runs them",
            )
        places.append(place)
    return tuple(places)


def _unknown_error(counted: CountedOperators, name: str, known: Collection[str]) -> ConfigError:
    modules = ", ".join(each for each in known if "." not in each)
    return ConfigError(
        f"{OPTION} has {name!r}, {counted.model.name} has no such submodule",
        hint=did_you_mean(name, (*known, *OTHERS)) or f"its modules are {modules}",
    )


def _first_places(counted: CountedOperators) -> dict[str, int]:
    """Returns the first operator of each submodule that computes something of the samples."""
    firsts: dict[str, int] = {}
    for place, (path, traced) in enumerate(
        zip(counted.paths, counted.model.operators, strict=True)
    ):
        for depth in range(1, len(path) + 1) if not traced.constant else ():
            firsts.setdefault(".".join(path[:depth]), place)
    return firsts


def _no_cut_error(counted: CountedOperators, name: str, place: int) -> ConfigError:
    alive = counted.values.alive(place)
    if not alive:
        return ConfigError(
            f"{OPTION}: {name} begins the module, and its first stage begins there anyway",
            hint="leave that name out",
        )
    makers = dict.fromkeys(
        counted.model.operators[counted.values.by_name[value].maker].path or "the module"
        for value, _ in alive
    )
    return ConfigError(
        f"{OPTION}: no stage can begin at {name}, values of {', '.join(makers)} cross there and "
        "cannot be handed on",
        hint="name another submodule; --cross-skips hands on skip connections",
    )
