"""Specs: the one small language of the library. ``local(window=64)`` names a thing and its options."""

import ast
import difflib
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

_OPERATORS = {ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.Sub: operator.sub}


def parse(text: str, names: Mapping[str, Callable]) -> Any:
    """Evaluate a spec: a name, a call with literal arguments, nested specs joined by ``& | -``. Never ``eval``.

    ``names`` maps each known name to the callable that builds the thing; its signature says which options exist.

    Raises ValueError for text that is no spec, an unknown name, an unknown option, a missing option or an option given
    by position where only keywords are allowed; the message names what came and what is known.

    >>> parse("pair(first=1, second=-2.5)", {"pair": lambda *, first, second: (first, second)})
    (1, -2.5)
    """
    if not isinstance(text, str):
        raise ValueError(f"a spec is a string such as 'linear' or 'local(window=64)', not {type(text).__name__}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{text!r} is not a spec; a spec reads name or name(option=value, ...)") from error
    return _walk(tree.body, text, names)


def split(text: str) -> list[str]:
    """The specs of a stack, ``"gla; gla; local(window=512)"``, one string per layer.

    Raises ValueError for an empty one.

    >>> split("linear; softmax")
    ['linear', 'softmax']
    """
    specs = [part.strip() for part in text.split(";")]
    if not all(specs):
        raise ValueError(f"empty spec in {text!r}; specs are separated by single semicolons, e.g. 'linear; softmax'")
    return specs


def known(name: str, names: Mapping[str, object], kind: str = "name") -> str:
    """Return ``name`` if it is known; otherwise raise a ValueError that lists what is, and guesses what was meant."""
    if name in names:
        return name
    close = difflib.get_close_matches(name, names, n=1)
    guess = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(f"unknown {kind} {name!r}{guess}; known: {', '.join(sorted(names))}")


def options(maker: Callable) -> dict[str, inspect.Parameter]:
    """The options that ``maker`` takes, by name: its parameters other than ``self``, ``*args`` and ``**kwargs``."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(maker).parameters
    return {name: p for name, p in parameters.items() if name != "self" and p.kind not in variadic}


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
                raise ValueError(f"cannot read * or ** in spec {text!r}; write each option as name=value")
            arguments = [_walk(a, text, names) for a in positional]
            return _call(name, arguments, {k.arg: _option(k.arg, k.value, text, names) for k in keywords}, text, names)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _combine(op, _walk(left, text, names), _walk(right, text, names), text)
    raise ValueError(f"cannot read {ast.unparse(node)!r} in spec {text!r}; a spec has names, options and literals only")


def _option(option: str | None, value: ast.AST, text: str, names: Mapping[str, Callable]) -> Any:
    used = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    if isinstance(value, ast.Name | ast.Call | ast.BinOp) and used and used.isdisjoint(names):
        bare = ast.unparse(value)
        meant = bare.capitalize() if bare in ("true", "false") else repr(bare)
        raise ValueError(f"unknown value {bare!r} of {option} in spec {text!r}; write {option}={meant}")
    return _walk(value, text, names)


def _combine(op: ast.operator, left: Any, right: Any, text: str) -> Any:
    numbers = (bool, int, float, str, tuple)
    if isinstance(left, numbers) or isinstance(right, numbers):
        raise ValueError(f"& | - join patterns, not numbers or strings, in spec {text!r}")
    try:
        return _OPERATORS[type(op)](left, right)
    except TypeError as error:
        raise ValueError(f"cannot join the parts of spec {text!r} by & | -: {error}") from error


def _call(name: str, arguments: list, keywords: dict, text: str, names: Mapping[str, Callable]) -> Any:
    maker = names[known(name, names)]
    has = options(maker)
    unknown = [k for k in keywords if k not in has]
    if unknown:
        raise ValueError(f"{name} has no option {unknown[0]!r}; it has {', '.join(has) or 'none'}")
    try:
        inspect.signature(maker).bind(*arguments, **keywords)
    except TypeError as error:
        raise ValueError(f"cannot build {text!r}: {error}; {name} has {', '.join(has) or 'no options'}") from error
    return maker(*arguments, **keywords)
