"""Changes of Python source on its syntax tree: where a function is, and an expression in it."""

import ast
import copy
from collections.abc import Iterator


def scopes(tree: ast.Module, function: str) -> list[ast.AST]:
    """The definitions of a qualified name such as ``Class.method`` or ``outer.inner``; "" is the whole module."""
    return [node for name, node in named(tree) if name == function] if function else [tree]


def named(node: ast.AST, outer: tuple[str, ...] = ()) -> Iterator[tuple[str, ast.AST]]:
    """(qualified name, definition) of every function and class, from the outside in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield ".".join([*outer, child.name]), child
            yield from named(child, (*outer, child.name))
        else:
            yield from named(child, outer)


def replaced(tree: ast.Module, function: str, old: str, new: str) -> ast.Module:
    """A copy of the tree in which ``new`` stands for ``old`` inside ``function``.

    ``old`` and ``new`` are both expressions or both statements. They are compared as ``ast.unparse`` writes them, so
    spaces, line breaks, quotes and redundant parentheses play no part.

    Raises:
        ValueError: there is no such function, ``old`` does not occur there exactly once, or one text is no Python.
    """
    tree = copy.deepcopy(tree)
    where = f"{function}()" if function else "the module"
    found = scopes(tree, function)
    if not found:
        raise ValueError(f"there is no function or class {function!r}")
    before, after = _expression(old), _expression(new)
    if before is not None and after is not None:
        spots = [spot for scope in found for spot in _expressions(scope, before)]
        if len(spots) != 1:
            raise ValueError(f"{old!r} occurs {len(spots)} times in {where}")
        parent, field, index = spots[0]
        put(parent, field, index, after)
    else:
        first, second = _statements(old), _statements(new)
        runs = [run for scope in found for run in _runs(scope, first)]
        if len(runs) != 1:
            raise ValueError(f"{old!r} occurs {len(runs)} times in {where}")
        body, start = runs[0]
        body[start : start + len(first)] = second
    return ast.fix_missing_locations(tree)


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """(parent, field, index in the field's list or None, node) of every node below the tree, always in one order."""
    for field, value in ast.iter_fields(tree):
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(node, ast.AST):
                yield tree, field, index, node
                yield from places(node)


def put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    """Write a node where ``places`` found another."""
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def _expression(text: str) -> ast.expr | None:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return None


def _statements(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no Python: {error.msg}") from error


def _expressions(scope: ast.AST, wanted: ast.expr) -> Iterator[tuple[ast.AST, str, int | None]]:
    text = ast.unparse(wanted)
    for parent, field, index, node in places(scope):
        written = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
        if type(node) is type(wanted) and not written and ast.unparse(node) == text:
            yield parent, field, index


def _runs(scope: ast.AST, wanted: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int]]:
    texts = list(map(ast.unparse, wanted))
    for node in ast.walk(scope):
        for _, body in ast.iter_fields(node):
            if isinstance(body, list) and body and all(isinstance(one, ast.stmt) for one in body):
                have = list(map(ast.unparse, body))
                for start in range(len(have) - len(texts) + 1):
                    if have[start : start + len(texts)] == texts:
                        yield body, start
