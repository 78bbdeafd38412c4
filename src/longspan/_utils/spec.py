"""Specs: strings such as ``local(window=64)`` that name an object and its options."""

import ast
import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from . import typecheck
from .aliases import suggestion

Spec = Annotated[str, "spec"]
"""Annotation of an option that holds a nested spec: ``parse`` passes its text on without evaluating it."""

_OPERATORS = {ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.Sub: operator.sub}
# Limits of characters, nesting and joined parts, above any practical spec. Joining n parts takes time O(n^3).
LONGEST, DEEPEST, JOINED = 1_000_000, 64, 100
_NESTED = (ast.expr, ast.keyword)


def parse(text: str, names: Mapping[str, Callable]) -> Any:
    """Evaluate a spec: a name, a call with literal arguments, nested specs joined by ``& | -``. Never ``eval``.

    ``names`` maps each known name to a callable; its signature defines the options.

    Raises ValueError for text that is not a spec, an unknown name, an unknown or missing option, a keyword-only option
    given by position, or a value that does not match the option's annotation. The message lists what is known.

    >>> parse("pair(first=1, second=-2.5)", {"pair": lambda *, first, second: (first, second)})
    (1, -2.5)

    An option annotated with ``Spec`` holds a nested spec, which is passed on as text.

    >>> def twice(of: Spec): return of
    >>> parse("twice(local(window=64))", {"twice": twice})
    'local(window=64)'
    """
    return _walk(_tree(text), text, names)


def _tree(text: str) -> ast.expr:
    if not isinstance(text, str):
        raise ValueError(f"a spec is a string such as 'linear' or 'local(window=64)', not {type(text).__name__}")
    if len(text) > LONGEST:
        raise ValueError(f"a spec of {len(text)} characters is too long; at most {LONGEST} are allowed")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    # Python's parser raises MemoryError for deep brackets.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"{typecheck.format_value(text)} is not a spec; a spec reads name or name(option=value, ...)"
        ) from error
    if _depth(tree.body) > DEEPEST:
        raise ValueError(f"{typecheck.format_value(text)} is nested more than {DEEPEST} deep")
    return tree.body


def split(text: str) -> list[str]:
    """Split the specs of a stack, ``"gla; gla; local(window=512)"``, one string per layer.

    Raises ValueError for an empty spec, and for anything but a string.

    >>> split("linear; softmax")
    ['linear', 'softmax']
    """
    if not isinstance(text, str):
        raise ValueError(f"specs are a string such as 'linear; softmax', not {type(text).__name__}")
    specs = [part.strip() for part in text.split(";")]
    if not all(specs):
        raise ValueError(
            f"empty spec in {typecheck.format_value(text)}; separate specs by single semicolons, e.g. 'linear; softmax'"
        )
    return specs


def joined(specs: Sequence[str]) -> str:
    """Join the specs of all layers with ``;``: the shortest text that gives them if it is tiled.

    >>> joined(["gla", "softmax", "gla", "softmax", "gla"])
    'gla; softmax'
    """
    count = next(n for n in range(1, len(specs) + 1) if all(s == specs[i % n] for i, s in enumerate(specs)))
    return "; ".join(specs[:count])


def head(text: str) -> str:
    """Return the name in a spec; "" if the spec is not a name with options.

    Raises ValueError for text that is not a spec.

    >>> head("local(window=64)"), head("band(8) | globals(2)")
    ('local', '')
    """
    match _tree(text):
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            return name
    return ""


def known(name: str, names: Mapping[str, object], kind: str = "name", hint: str = "") -> str:
    """Return ``name`` if it is known; otherwise raise a ValueError with a suggestion and the known names.

    ``hint`` ends the message.
    """
    if isinstance(name, str) and name in names:
        return name
    meant = suggestion(name, names) if isinstance(name, str) else ""
    guess = f" (did you mean {meant!r}?)" if meant else ""
    raise ValueError(f"unknown {kind} {typecheck.format_value(name)}{guess}; known: {', '.join(sorted(names))}{hint}")


def options(maker: Callable) -> dict[str, inspect.Parameter]:
    """Return the options of ``maker`` by name: its parameters without ``self``, ``*args`` and ``**kwargs``."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p for name, p in _signature(maker).parameters.items() if name != "self" and p.kind not in variadic}


def _signature(maker: Callable) -> inspect.Signature:
    # Makers with ``__signature__`` are created in each call of ``parse``: a cache would keep them.
    return getattr(maker, "__signature__", None) or _read_signature(maker)


@functools.cache
def _read_signature(maker: Callable) -> inspect.Signature:
    return inspect.signature(maker, eval_str=True)


def _walk(node: ast.AST, text: str, names: Mapping[str, Callable]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return tuple(_walk(item, text, names) for item in items)
        case ast.Name(id=name):
            return _call(name, [], {}, text, names)
        case ast.Call(func=ast.Name(id=name), args=positional, keywords=keywords):
            if any(isinstance(a, ast.Starred) for a in positional) or any(k.arg is None for k in keywords):
                raise ValueError(
                    f"cannot read * or ** in spec {typecheck.format_value(text)}; write each option as name=value"
                )
            has = options(names[name]) if name in names else {}
            nested = [option for option, p in has.items() if p.annotation is Spec]
            first = list(has)[: len(positional)]
            arguments = [
                _nested(a) if at < len(first) and first[at] in nested else _walk(a, text, names)
                for at, a in enumerate(positional)
            ]
            given = {
                k.arg: _nested(k.value) if k.arg in nested else _option(k.arg, k.value, text, names) for k in keywords
            }
            return _call(name, arguments, given, text, names)
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            first, others = _chain(node)
            if len(others) >= JOINED:
                raise ValueError(
                    f"{typecheck.format_value(text)} joins {len(others) + 1} parts by & | -; at most {JOINED} can be"
                )
            value = _walk(first, text, names)
            for op, part in others:
                value = _combine(op, value, _walk(part, text, names), text)
            return value
    part = typecheck.format_value(ast.unparse(node))
    raise ValueError(
        f"cannot read {part} in spec {typecheck.format_value(text)}; a spec has names, options and literals only"
    )


def _nested(value: ast.expr) -> Any:
    """Return the text of a nested spec, written bare or as a string; numbers and bools are returned unchanged."""
    return value.value if isinstance(value, ast.Constant) else ast.unparse(value)


def _option(option: str | None, value: ast.AST, text: str, names: Mapping[str, Callable]) -> Any:
    used = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    if isinstance(value, ast.Name | ast.Call | ast.BinOp) and used and used.isdisjoint(names):
        bare = ast.unparse(value)
        meant = bare.capitalize() if bare in ("true", "false") else typecheck.format_value(bare)
        raise ValueError(
            f"unknown value {typecheck.format_value(bare)} of {option} in spec {typecheck.format_value(text)}; "
            f"write {option}={meant}"
        )
    return _walk(value, text, names)


def _combine(op: ast.operator, left: Any, right: Any, text: str) -> Any:
    numbers = (bool, int, float, str, tuple)
    if isinstance(left, numbers) or isinstance(right, numbers):
        raise ValueError(f"& | - join patterns, not numbers or strings, in spec {typecheck.format_value(text)}")
    try:
        return _OPERATORS[type(op)](left, right)
    except TypeError as error:
        raise ValueError(f"cannot join the parts of spec {typecheck.format_value(text)} by & | -: {error}") from error


def _call(name: str, arguments: list, keywords: dict, text: str, names: Mapping[str, Callable]) -> Any:
    maker = names[known(name, names)]
    has = options(maker)
    unknown = [k for k in keywords if k not in has]
    if unknown:
        meant = suggestion(unknown[0], has)
        guess = f" (did you mean {meant!r}?)" if meant else ""
        raise ValueError(f"{name} has no option {unknown[0]!r}{guess}; it has {', '.join(has) or 'none'}")
    try:
        bound = _signature(maker).bind(*arguments, **keywords)
    except TypeError as error:
        raise ValueError(
            f"cannot build {typecheck.format_value(text)}: {error}; {name} has {', '.join(has) or 'no options'}"
        ) from error
    for option, value in bound.arguments.items():
        if option in has:
            typecheck.check_type(option, value, has[option].annotation, name)
    return maker(*arguments, **keywords)


def _chain(node: ast.AST) -> tuple[ast.AST, list[tuple[ast.operator, ast.AST]]]:
    """Split ``a | b - c`` into its first part and the others, each with the operator before it."""
    others = []
    while isinstance(node, ast.BinOp):
        others.append((node.op, node.right))
        node = node.left
    return node, others[::-1]


def _depth(tree: ast.AST) -> int:
    """Return the nesting depth of a tree, without recursion; joined parts count as one level."""
    level, depth = [tree], 0
    while level:
        parts = [part for node in level for part in _parts(node)]
        level = [child for node in parts for child in ast.iter_child_nodes(node) if isinstance(child, _NESTED)]
        depth += 1
    return depth


def _parts(node: ast.AST) -> list[ast.AST]:
    first, others = _chain(node)
    return [first, *(part for _, part in others)]
