"""Settings in Python functions that make a configuration: recipes of Megatron-Bridge.

A recipe is not run. Its assignments `cfg.model.x = 8`, the keywords of configurations that it makes
and the recipes that it begins with are followed, also into other files of its repository. Values
that are no constants keep their text. What stands under an `if` is not taken; it is listed.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from parplan.planner.export.fields.arguments import Given, Words
from parplan.profiles.documents.bounded import Hints, read_text
from parplan.profiles.documents.ranges import WHOLE
from parplan.profiles.errors import ConfigError

SEPARATOR = "::"  # between a file and the function of it, as in pytest's names
MOST_CHARACTERS = 1_000_000  # of a file; those of Megatron-Bridge have 60,000
MOST_LEVELS = 100  # of its syntax
MOST_CALLS = 2000
MOST_SETTINGS = 2000  # those of Megatron-Bridge have some hundreds
_DEEPEST = 12  # recipes that begin with one another
_CONVERSIONS = ("float", "int", "bool", "str")
_PACKAGE = "src"  # the folder of a repository that its modules are named from


@dataclass(slots=True)
class _Config:
    """A configuration as a recipe has made it so far, or a section of it.

    settings    by their whole path
    prefix      the path of the section with a dot, "" of the whole configuration
    """

    settings: dict[str, Given] = field(default_factory=dict)
    prefix: str = ""

    def section(self, name: str) -> _Config | None:
        """Returns a section, None where nothing is set in it."""
        prefix = f"{self.prefix}{name}."
        there = any(known.startswith(prefix) for known in self.settings)
        return _Config(self.settings, prefix) if there else None

    def get(self, path: str) -> Given | None:
        return self.settings.get(f"{self.prefix}{path}")

    def put(self, path: str, words: Words, where: str) -> None:
        """Sets a path, and forgets what was set below it."""
        whole = f"{self.prefix}{path}"
        if len(self.settings) >= MOST_SETTINGS:
            raise ConfigError(
                f"{where}: a recipe has more than {MOST_SETTINGS:,} settings",
                hint="give the recipe of one run",
            )
        below = f"{whole}."
        for known in [name for name in self.settings if name.startswith(below)]:
            del self.settings[known]
        self.settings[whole] = Given(whole, words, where)

    def pass_over(self, path: str, where: str) -> None:
        """Lists an assignment that is not taken."""
        name = f"if {self.prefix}{path}"
        self.settings[name] = Given(name, (), where)


_Value = _Config | ast.expr
_Scope = dict[str, _Value]


@dataclass(slots=True)
class _Reads:
    """The files that one recipe reads, each once, and the calls that may still be followed."""

    modules: dict[Path, _Module] = field(default_factory=dict)
    left: int = MOST_CALLS

    def module(self, path: Path) -> _Module:
        """Returns the recipes of a file. Raises ConfigError for one that is no Python."""
        if path not in self.modules:
            self.modules[path] = _module(path, self)
        return self.modules[path]

    def call(self, path: Path) -> None:
        """Counts a call. Raises ConfigError for too many, which recipes that branch make."""
        self.left -= 1
        if self.left < 0:
            raise ConfigError(
                f"{path}: its recipes call one another more than {MOST_CALLS:,} times",
                hint="give a recipe that says its settings itself",
            )


@dataclass(frozen=True, slots=True)
class _Module:
    """A Python file of recipes.

    functions   at its top, by their names
    assigned    the first value that each name has at its top
    imports     the module, its level and the name there of each name that is imported
    """

    path: Path
    reads: _Reads
    functions: Mapping[str, ast.FunctionDef]
    assigned: Mapping[str, ast.expr | None]
    imports: Mapping[str, tuple[str, int, str]]

    def constant(self, name: str, depth: int = 0) -> ast.Constant | None:
        """Returns the constant of a name, also one of another file; None if there is none."""
        if name in self.assigned:
            value = self.assigned[name]
            return value if isinstance(value, ast.Constant) else None
        source = self.imported(name)
        if source is None or depth >= _DEEPEST:
            return None
        return self.reads.module(source[0]).constant(source[1], depth + 1)

    def imported(self, name: str) -> tuple[Path, str] | None:
        """Returns the file that a name comes from and its name there, None if it is not there."""
        if name not in self.imports:
            return None
        module, level, original = self.imports[name]
        path = _module_file(self.path, module, level)
        return None if path is None else (path, original)


def recipe_settings(path: Path, name: str) -> tuple[Given, ...]:
    """Returns the settings of a recipe, each by its path such as `model.seq_length`.

    Raises ConfigError for a file that is no Python, or that has no such function.
    """
    module = _Reads().module(path)
    if module.functions.get(name) is None and module.imported(name) is None:
        known = ", ".join(recipe_names(path)) or "none"
        raise ConfigError(f"{path}: it has no recipe {name!r}", hint=f"use one of {known}")
    config = _made(module, name, {}, 0)
    return tuple(config.settings.values()) if isinstance(config, _Config) else ()


def recipe_names(path: Path) -> tuple[str, ...]:
    """Returns the functions of a file that other files can call. Raises ConfigError."""
    return tuple(
        node.name
        for node in _tree(path).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    )


def _module(path: Path, reads: _Reads) -> _Module:
    tree = _tree(path)
    assigned: dict[str, ast.expr | None] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(node, ast.Assign | ast.AnnAssign):
                assigned.setdefault(target.id, node.value)
    imports: dict[str, tuple[str, int, str]] = {}
    for statement in (each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)):
        for alias in statement.names:
            source = (statement.module or "", statement.level, alias.name)
            imports.setdefault(alias.asname or alias.name, source)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return _Module(
        path=path,
        reads=reads,
        functions={node.name: node for node in reversed(functions)},
        assigned=assigned,
        imports=imports,
    )


def _tree(path: Path) -> ast.Module:
    """Returns the syntax of a file. Raises ConfigError for one that is no Python or too large."""
    text = read_text(path, hints=Hints("check its name", "mend that line"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own style, which is not the user's now
            tree = ast.parse(text) if len(text) <= MOST_CHARACTERS else None
    except SyntaxError as error:
        raise ConfigError(
            f"{path}:{error.lineno}: it is no Python: {error.msg}", hint="mend that line"
        ) from None
    except (ValueError, RecursionError, MemoryError):  # numbers and brackets without end
        raise ConfigError(f"{path}: it is no Python of a recipe", hint="mend that file") from None
    if tree is None or not _is_plain(tree):
        raise ConfigError(
            f"{path}: more than {MOST_CHARACTERS:,} characters, syntax nested more than "
            f"{MOST_LEVELS} deep, or an integer of more than 18 digits",
            hint="give the file of one recipe alone",
        )
    return tree


def _is_plain(tree: ast.AST) -> bool:
    """True for a syntax tree of few levels without endless integers, looked at level by level."""
    level: list[ast.AST] = [tree]
    for _ in range(MOST_LEVELS):
        if not level:
            return True
        level = [below for node in level for below in ast.iter_child_nodes(node)]
        if any(_is_endless(node) for node in level):
            return False
    return False


def _is_endless(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, int) and value not in WHOLE


def _module_file(path: Path, dotted: str, level: int) -> Path | None:
    """Returns the file of a module that a file imports, None if its repository has none."""
    parts = dotted.split(".") if dotted else []
    if level > len(path.parents):
        return None
    if level:
        folders = [path.parents[level - 1]]
    else:
        folders = [parent / _PACKAGE for parent in path.parents] + list(path.parents)
    for folder in folders:
        plain = folder.joinpath(*parts)
        for file in (plain.with_suffix(".py"), plain / "__init__.py"):
            if file.is_file():
                return file
    return None


def _made(module: _Module, name: str, given: _Scope, depth: int) -> _Value | None:
    """Returns the configuration or the model of a function, None where it is not in the repository.

    given    its arguments by name; a configuration among them is changed in place
    """
    module.reads.call(module.path)
    function = module.functions.get(name)
    if function is None:
        source = module.imported(name)
        if source is None or depth >= _DEEPEST:
            return None
        return _made(module.reads.module(source[0]), source[1], given, depth + 1)
    scope = dict(given)
    returned = _follow(module, function.body, scope, depth)
    if returned is None or returned.value is None:
        return None
    value = _value(module, returned.value, scope, depth)
    of_model = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    return value if isinstance(value, _Config) or of_model else None


def _follow(module: _Module, body: list[ast.stmt], scope: _Scope, depth: int) -> ast.Return | None:
    """Follows statements, and returns the one that ends them, None at their end."""
    for node in body:
        if isinstance(node, ast.Return):
            return node
        if isinstance(node, ast.Expr):
            _value(module, node.value, scope, depth)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            value = _value(module, node.value, scope, depth)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                _assign(module, target, value, scope)
        elif isinstance(node, ast.If):
            ended = _branch(module, node, scope, depth)
            if ended is not None:
                return ended
    return None


def _branch(module: _Module, node: ast.If, scope: _Scope, depth: int) -> ast.Return | None:
    """Follows the branch that a condition takes, and lists the assignments of one that is open."""
    taken = _decided(node.test, scope)
    if taken is not None:
        return _follow(module, node.body if taken else node.orelse, scope, depth)
    for target in _assigned(node):
        config, path = _place(target, scope)
        if config is not None:
            config.pass_over(path, f"{module.path}:{target.lineno}")
    return None


def _decided(test: ast.expr, scope: _Scope) -> bool | None:
    """Returns whether `x is None` or `x is not None` holds, None for other conditions."""
    if not isinstance(test, ast.Compare) or not isinstance(test.left, ast.Name):
        return None
    if len(test.ops) != 1:  # a is b is None
        return None
    operation = test.ops[0]
    other = test.comparators[0]
    none = isinstance(other, ast.Constant) and other.value is None
    value = scope.get(test.left.id)
    known = isinstance(value, _Config | ast.Constant)
    if not none or not known or not isinstance(operation, ast.Is | ast.IsNot):
        return None
    is_none = isinstance(value, ast.Constant) and value.value is None
    return is_none == isinstance(operation, ast.Is)


def _assigned(node: ast.If) -> Iterator[ast.expr]:
    for below in ast.walk(node):
        if isinstance(below, ast.Assign):
            yield from below.targets


def _assign(module: _Module, target: ast.expr, value: _Value, scope: _Scope) -> None:
    if isinstance(target, ast.Name):
        scope[target.id] = value
        return
    config, path = _place(target, scope)
    if config is None or isinstance(value, _Config):
        return
    source, read = _place(_plain(value), scope)
    if source is not None:  # cfg.model.x = cfg.dataset.x
        known = source.get(read)
        if known is not None:
            config.put(path, known.words, f"{module.path}:{target.lineno}")
        return
    _put(config, path, value, scope, module)


def _plain(value: ast.expr) -> ast.expr:
    """Returns what a conversion such as `float(x)` converts."""
    converts = isinstance(value, ast.Call) and isinstance(value.func, ast.Name)
    if isinstance(value, ast.Call) and converts and ast.unparse(value.func) in _CONVERSIONS:
        return value.args[0] if value.args else value
    return value


def _place(target: ast.expr, scope: _Scope) -> tuple[_Config | None, str]:
    """Returns the configuration that an attribute belongs to, and its path in it."""
    names: list[str] = []
    while isinstance(target, ast.Attribute):
        names.append(target.attr)
        target = target.value
    config = scope.get(target.id) if isinstance(target, ast.Name) else None
    return (config if isinstance(config, _Config) else None), ".".join(reversed(names))


def _put(config: _Config, path: str, value: ast.expr, scope: _Scope, module: _Module) -> None:
    """Sets a path to a value; the keywords of a call that makes a section are below it."""
    config.put(path, _words(module, value, scope), f"{module.path}:{value.lineno}")
    if isinstance(value, ast.Call):
        for keyword in value.keywords:
            if keyword.arg is not None:
                _put(config, f"{path}.{keyword.arg}", keyword.value, scope, module)


def _value(module: _Module, node: ast.expr, scope: _Scope, depth: int) -> _Value:
    """Returns a configuration, or the expression with the names of a scope followed."""
    if isinstance(node, ast.Name):
        return scope[node.id] if node.id in scope else module.constant(node.id) or node
    if isinstance(node, ast.Attribute):
        config, path = _place(node, scope)
        return (config.section(path) if config is not None else None) or node
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return node
    if node.func.id == "ConfigContainer":
        return _container(module, node, scope)
    given = _bound(module, node, scope, depth)
    before = depth < _DEEPEST and not node.func.id.endswith("Config")
    made = _made(module, node.func.id, given, depth + 1) if before else None
    return node if made is None else made


def _container(module: _Module, node: ast.Call, scope: _Scope) -> _Config:
    config = _Config()
    for keyword in node.keywords:
        if keyword.arg is not None:
            _put(config, keyword.arg, keyword.value, scope, module)
    return config


def _bound(module: _Module, node: ast.Call, scope: _Scope, depth: int) -> _Scope:
    """Returns the arguments of a call by the names that its function gives them."""
    assert isinstance(node.func, ast.Name), "a call by name"
    source, name = module, node.func.id
    for _ in range(_DEEPEST):
        place = None if source.functions.get(name) else source.imported(name)
        if place is None:
            break
        source, name = source.reads.module(place[0]), place[1]
    function = source.functions.get(name)
    if function is None:
        return {}
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    values = [_value(module, each, scope, depth) for each in node.args]
    usual = function.args.defaults
    bound: _Scope = dict(zip(names[len(names) - len(usual) :], usual, strict=True))
    bound |= dict(zip(names, values, strict=False))
    for keyword in node.keywords:
        if keyword.arg is not None:
            bound[keyword.arg] = _value(module, keyword.value, scope, depth)
    return bound


def _words(module: _Module, node: ast.expr, scope: _Scope) -> Words:
    """Returns the words of a value: of a constant or a list, or the text of another expression.

    A call is the word that it is made with, such as `fp8_cs` of `precision("fp8_cs")`, and its name
    where it has none.
    """
    if isinstance(node, ast.Constant):
        return (_word(node.value),)
    if isinstance(node, ast.List | ast.Tuple):
        return tuple(word for each in node.elts for word in _words(module, each, scope))
    if isinstance(node, ast.Name):
        known = scope.get(node.id) or module.constant(node.id)
        return _words(module, known, {}) if isinstance(known, ast.expr) else (node.id,)
    if isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Call):
            return _words(module, called.value, scope)  # Bridge.of(NAME).method()
        first = _words(module, node.args[0], scope) if node.args else ()
        said = isinstance(node.args[0], ast.Constant | ast.Name) if node.args else False
        return first if said and first and not first[0].isdigit() else (ast.unparse(called),)
    return (ast.unparse(node),)


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else f"{value}"
