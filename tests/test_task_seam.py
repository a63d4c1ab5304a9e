"""A task answers every question that depends on it: no other code compares its name or its class."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from laconic import registry

ROOT = Path(registry.__file__).parents[1]
TASKS = ROOT / "laconic" / "tasks"
MODULES = sorted(
    path
    for package in registry.PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if TASKS not in path.parents and path != ROOT / "laconic" / "registry.py"
)
CLASSES = {
    node.name
    for path in TASKS.glob("*.py")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.ClassDef)
} - {"Tolerance", "Upload", "Preprocessing", "ImagePreprocess", "ImageText", "MarkedText", "PreferenceText"}
COMMON = {"tensors"}
"""Names of tasks that are words for something else too: as the key of a dict they mean nothing."""


def words(node: ast.AST) -> set[str]:
    """The string that a constant is, or the strings in a collection."""
    parts = [node, *(node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else ())]
    return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def is_task(node: ast.AST) -> bool:
    """Whether an expression is a task, by what it is called: `task`, `context.task`, `self._task`."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.strip("_") == "task"


def is_class(node: ast.AST) -> bool:
    """Whether an expression is the class of a task, or a collection with one in it."""
    return bool({part.id for part in ast.walk(node) if isinstance(part, ast.Name)} & CLASSES)


def is_name(node: ast.AST) -> bool:
    """Whether an expression is the name or the field of a task."""
    return isinstance(node, ast.Attribute) and node.attr in ("name", "field") and is_task(node.value)


def compares(node: ast.AST) -> bool:
    """Whether a comparison is with a task's class, or with a name that is written here. That a name which the user
    gave is the name of the task at hand may be asked."""
    match node:
        case ast.Compare():
            sides = [node.left, *node.comparators]
            given = all(is_name(side) or isinstance(side, ast.Name) for side in sides)
            named = any(words(side) & set(registry.TASKS) or is_class(side) for side in sides)
            return named or (any(is_name(side) for side in sides) and not given)
        case ast.MatchValue():
            return bool(words(node.value) & set(registry.TASKS))
        case ast.Dict():
            keys = [key for key in node.keys if key is not None]
            return any(words(key) & (set(registry.TASKS) - COMMON) or is_class(key) for key in keys)
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass")):
            return is_class(node.args[1])
        case ast.Call(func=ast.Name(id="getattr" | "hasattr")):
            return is_task(node.args[0])
    return False


def questions(code: str) -> Iterator[str]:
    """The places where code asks for a task's name or class."""
    for node in ast.walk(ast.parse(code)):
        if compares(node):
            yield f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node)[:80]}"


def test_no_module_outside_of_the_tasks_asks_for_the_name_or_the_class_of_a_task():
    for path in MODULES:
        assert list(questions(path.read_text())) == [], path


@pytest.mark.parametrize(
    "code",
    [
        "task.name == 'x'",
        "if self.task.field in ('x', 'y'): ...",
        "kind == 'text-generation'",
        "kind in {'tensors', 'other'}",
        "name != TextEmbedding.name",
        "type(task) is Tensors",
        "isinstance(task, TextTask)",
        "issubclass(kind, (int, Classification))",
        "HEADS = {'text-classification': 1}",
        "HEADS = {TextGeneration.name: 1}",
        "match kind:\n    case 'image-classification': ...",
        "getattr(checkpoint.task, 'max_tokens', None)",
    ],
)
def test_each_way_to_ask_is_found(code):
    assert len(list(questions(code))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "if context.task.self_supervised: print(context.task.name, {'task': task.name})",
        "if source.task.name != wanted: raise ValueError",
        "registry.resolve('task', 'text-embedding')",
        "{'tensors': 1}",
    ],
)
def test_what_a_task_answers_itself_may_be_asked(code):
    assert list(questions(code)) == []
