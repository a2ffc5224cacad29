"""The places of a source file that only a run on GPUs reaches.

They are the functions that ask for a GPU, use its runtime, pin memory, copy without blocking, or
make or join a group of ranks. Every place belongs to a path of `plan doctor` (paths.py).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

# functions of profiles/profiler/gpus.py, and of torch where it has a GPU to itself
_CALLED = {
    "backend_of",
    "batch_isend_irecv",
    "current_stream",
    "device_of",
    "forked_random",
    "gpu",
    "init_process_group",
    "is_gpu",
    "own_gpu",
    "pin_memory",
    "record_stream",
    "to_device",
}
_KEYWORDS = {"non_blocking", "pin_memory", "use_non_blocking_copy", "use_pinned_memory"}
_NAMES = {"cuda", "nccl", "ProcessGroupNCCL"}
_TEXTS = {"cuda", "nccl"}


def gpu_places(root: Path, folder: str) -> Iterator[str]:
    """Yields the places below `root / folder` as `file.py:Class.function`, each once."""
    for file in sorted((root / folder).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for name in dict.fromkeys(_in_tree(tree, "")):
            yield f"{file.relative_to(root).as_posix()}:{name or '<module>'}"


def _in_tree(node: ast.AST, inside: str) -> Iterator[str]:
    """Yields the function around each use of a GPU."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _in_tree(child, f"{inside}.{child.name}".lstrip("."))
            continue
        if _uses_gpu(child):
            yield inside
        yield from _in_tree(child, inside)


def _uses_gpu(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        return name in _CALLED or any(each.arg in _KEYWORDS for each in node.keywords)
    if isinstance(node, ast.Attribute):
        return node.attr in _NAMES
    return isinstance(node, ast.Constant) and node.value in _TEXTS
