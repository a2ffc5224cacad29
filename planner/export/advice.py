"""The changes of a launcher's configuration that gain most, alone and together.

Each change is of one setting. It is written in the launcher's arguments, read back and priced, and
the arguments that differ are what there is to change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from parplan.planner.export.exported import training_on
from parplan.planner.export.fields.arguments import Argument, Given, Words, written
from parplan.planner.export.fields.configured import Priced, price_settings
from parplan.planner.export.fields.launcher import Target
from parplan.planner.export.fields.settings import Settings
from parplan.planner.export.neighbours import neighbours
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.plan.plan import Plan
from parplan.planner.request import SearchOptions
from parplan.profiles.errors import ConfigError

_LEAST = 0.005  # share of a step that a change must gain to be said
_NEAR = 0.02  # share of a step; a setting whose changes all cost more is not tried again
_ROUNDS = 3  # changes that are made one after the other

ArgumentChange = tuple[str, Words | None, Words | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of one setting, or of several.

    arguments   those that differ: the name, the words before and after, None where it is absent
    settings    the settings with it
    configured  the configuration with it
    """

    arguments: tuple[ArgumentChange, ...]
    settings: Settings
    configured: Priced


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The changes after which a configuration fits and is faster.

    single     the best change of each setting, the fastest first
    together   several changes one after the other, each the best after the ones before; None where
               they gain no more than the best alone
    """

    single: tuple[Change, ...]
    together: Change | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adviser:
    """A configuration whose changes are tried.

    plan       that of the configuration
    settings   those of the configuration
    given      the arguments of its file
    """

    plan: Plan
    settings: Settings
    target: Target
    given: tuple[Given, ...]

    @property
    def limit_bytes(self) -> float:
        return limit_bytes(self.plan.cluster, self.plan.training.stack, SearchOptions())

    def changes(
        self, settings: Settings, of: Collection[str] | None = None
    ) -> dict[str, list[Change]]:
        """Returns the changes of settings that can run, by the setting.

        of    the names of the settings that are tried; None for all
        """
        before = dict(written(self.target.table, settings))
        found: dict[str, list[Change]] = {}
        for setting, other in neighbours(self.plan, settings, self.target):
            after = dict(written(self.target.table, other))
            if after != before and (of is None or setting in of):
                found.setdefault(setting, []).extend(self.priced_change(settings, before, after))
        return found

    def priced_change(
        self, settings: Settings, before: dict[str, Words], after: dict[str, Words]
    ) -> Iterator[Change]:
        """Yields the change from arguments to others, nothing where these cannot run."""
        given = tuple(Given(name, words, self.target.name) for name, words in after.items())
        training = training_on(self.target, self.plan.training)
        cluster = self.plan.cluster
        try:
            other = self.target.settings(given, self.plan.model, cluster.num_gpus)
            one = price_settings(other, self.plan.model, cluster, training)
        except ConfigError:
            return
        rows = {row.name: row for row in self.target.table}
        differing = tuple(
            (
                name,
                before.get(name, _default(rows[name], settings)),
                after.get(name, _default(rows[name], other)),
            )
            for name in dict.fromkeys((*before, *after))
            if before.get(name) != after.get(name)
        )
        yield Change(arguments=differing, settings=other, configured=one)

    def in_the_file(self, change: Change) -> Change:
        """Returns a change in the words of the file.

        Arguments of the file that would undo it, or that forbid it, are taken out with it: they say
        a setting in another word than the one that is written.
        """
        in_own_words = self._in_own_words(change)
        arguments = tuple(each for each in in_own_words if each[1] != each[2])
        named = {name for name, _, _ in arguments}
        kept = [each for each in self.given if each.name not in named]
        written_now = [
            Given(name, new, self.target.name) for name, _, new in arguments if new is not None
        ]
        others = {row.name for row in self.target.table if not row.facts}
        in_the_way = [each for each in kept if each.name in others]
        for out in ([], *([each] for each in in_the_way), in_the_way):
            rest = [each for each in kept if each not in out]
            if self._says((*rest, *written_now), change.settings):
                more = tuple((each.name, each.words, None) for each in out)
                return replace(change, arguments=self._of_files((*arguments, *more)))
        return replace(change, arguments=self._of_files(arguments))

    def _in_own_words(self, change: Change) -> Iterator[ArgumentChange]:
        """Yields the arguments of a change with the words that the file has for them."""
        own = {each.name: each.words for each in self.given}
        before = dict(written(self.target.table, self.settings))
        after = dict(written(self.target.table, change.settings))
        for name, was, new in change.arguments:
            if name in own or name not in before or not own:
                yield name, own.get(name, was), new
            elif name in after:  # the file says it by another argument
                yield name, None, new

    def _of_files(self, arguments: tuple[ArgumentChange, ...]) -> tuple[ArgumentChange, ...]:
        """Returns the arguments that files have; options of `plan read` only where none has."""
        stated = {row.name for row in self.target.stated}
        return tuple(each for each in arguments if each[0] not in stated) or arguments

    def _says(self, given: tuple[Given, ...], settings: Settings) -> bool:
        try:
            return self.target.settings(given, self.plan.model, self.plan.cluster.num_gpus) == (
                settings
            )
        except ConfigError:
            return False


def advice(
    plan: Plan, settings: Settings, target: Target, given: tuple[Given, ...] = (), most: int = 5
) -> Advice:
    """Returns the changes after which a configuration fits and is faster.

    plan    that of the configuration; where it does not fit, slower changes count too
    given   the arguments of its file
    """
    adviser = _Adviser(plan=plan, settings=settings, target=target, given=given)
    by_setting = adviser.changes(settings)
    base_s = plan.predicted.step_time_s.value
    fits = all(each.total <= each.capacity for each in plan.predicted.memory_gib)
    enough_s = base_s * (1 - _LEAST) if fits else float("inf")
    good = [
        min(useful, key=_step_s)
        for changes in by_setting.values()
        if (useful := _useful(changes, enough_s, adviser.limit_bytes))
    ]
    single = tuple(adviser.in_the_file(each) for each in sorted(good, key=_step_s)[:most])
    together = _together(adviser, by_setting, enough_s)
    gains = together is not None and (
        not single or _step_s(together) < _step_s(single[0]) * (1 - _LEAST)
    )
    return Advice(
        single=single, together=adviser.in_the_file(together) if together and gains else None
    )


def _useful(changes: list[Change], enough_s: float, limit: float) -> list[Change]:
    """Returns the changes that fit and take less than `enough_s`."""
    return [
        each for each in changes if each.configured.peak_bytes <= limit and _step_s(each) < enough_s
    ]


def _together(
    adviser: _Adviser, by_setting: dict[str, list[Change]], enough_s: float
) -> Change | None:
    """Returns several changes as one, None where they do not fit or gain nothing.

    The first is the fastest, or one that saves memory for what follows at hardly any cost.
    """
    most_s = adviser.plan.predicted.step_time_s.value * (1 + _NEAR)
    promising = {
        name
        for name, changes in by_setting.items()
        if enough_s == float("inf") or any(_step_s(each) < most_s for each in changes)
    }
    ends = [_path(adviser, by_setting, promising, enough_s)]
    near = [each for several in by_setting.values() for each in several if _step_s(each) < most_s]
    if near:
        lean = min(near, key=lambda each: each.configured.peak_bytes)
        after = adviser.changes(lean.settings, promising)
        ends.append(_path(adviser, after, promising, enough_s))
    fitting = [each for each in ends if each and each.configured.peak_bytes <= adviser.limit_bytes]
    return _from_the_file(adviser, min(fitting, key=_step_s)) if fitting else None


def _path(
    adviser: _Adviser,
    by_setting: dict[str, list[Change]],
    promising: Collection[str],
    enough_s: float,
) -> Change | None:
    """Returns the last of changes that are made one after the other.

    Each is the fastest that fits, or the leanest while none fits.
    """
    last: Change | None = None
    for _ in range(_ROUNDS):
        changes = [each for several in by_setting.values() for each in several]
        useful = _useful(changes, enough_s, adviser.limit_bytes)
        if useful:
            last = min(useful, key=_step_s)
            enough_s = _step_s(last) * (1 - _LEAST)
        elif enough_s == float("inf") and changes:
            last = min(changes, key=lambda each: each.configured.peak_bytes)
        else:
            break
        by_setting = adviser.changes(last.settings, promising)
    return last


def _from_the_file(adviser: _Adviser, change: Change) -> Change:
    """Returns the last of several changes with the arguments that differ from the first ones."""
    table, settings = adviser.target.table, adviser.settings
    before, after = dict(written(table, settings)), dict(written(table, change.settings))
    (whole,) = adviser.priced_change(settings, before, after)
    return whole


def _step_s(change: Change) -> float:
    return change.configured.price.step_s


def _default(row: Argument, settings: Settings) -> Words | None:
    """Returns the number that an argument stands for where it is left out, None for others."""
    if len(row.facts) != 1:
        return None
    value = getattr(settings, row.facts[0], None)
    if type(value) is not int:
        return None
    try:
        says = row.read((f"{value}",), {}) == {row.facts[0]: value}
    except ValueError:  # a word of another kind
        return None
    return (f"{value}",) if says else None
