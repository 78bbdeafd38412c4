"""Checks values against annotations, for specs, configs and constructors."""

import contextlib
import dataclasses
import functools
import inspect
import operator
import reprlib
import sys
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

_FLOAT32 = 3.4028234663852886e38  # the largest float32, the narrowest dtype of weights and constants
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a string", types.NoneType: "None"}


def check_type(name: str, value: Any, kind: Any, owner: str = "") -> None:
    """Raise ValueError unless ``value`` matches the annotation ``kind``.

    An int is a whole number of 64 bits and not a bool; a float is an int or a float that is finite in float32, and not
    a bool. Tuples, Literals, unions and classes are checked; any other annotation accepts everything.

    >>> check_type("window", 2.5, int, "local")
    Traceback (most recent call last):
    ...
    ValueError: local: window=2.5 must be a whole number
    """
    if not _fits(value, kind):
        tame = isinstance(value, int | float) and _fits(type(value)(1), kind)
        limits = ", finite and within the range of int64 and float32" if tame else ""
        raise ValueError(f"{owner}{owner and ': '}{name}={format_value(value)} must be {type_name(kind)}{limits}")


def as_int(name: str, value: Any) -> int:
    """Return a whole number as an int: numpy's and a tensor of one element too, but no bool and no float.

    >>> as_int("top", 2.5)
    Traceback (most recent call last):
    ...
    ValueError: top=2.5 must be a whole number
    """
    # A tensor of bools has an index too; torch is not imported here.
    if not isinstance(value, bool) and str(getattr(value, "dtype", "")) != "torch.bool":
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise ValueError(f"{name}={format_value(value)} must be a whole number")


def check_fields(made: Any) -> None:
    """Raise ValueError unless every field of a dataclass matches its annotation."""
    kinds = _kinds(type(made))
    for field in dataclasses.fields(made):
        check_type(field.name, getattr(made, field.name), kinds[field.name])


def with_checked_types(init: Callable[..., None], owner: str) -> Callable[..., None]:
    """Wrap an ``__init__`` so that arguments are checked against annotations and converted to float where annotated."""
    signature = functools.cache(lambda: inspect.signature(init, eval_str=True))

    @functools.wraps(init)
    def __init__(self, *args: Any, **options: Any) -> None:
        parameters = signature().parameters
        bound = signature().bind(self, *args, **options)
        for name, value in bound.arguments.items():
            if parameters[name].kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                check_type(name, value, parameters[name].annotation, owner)
                if name == "context_dim" and value < 0:
                    raise ValueError(f"{owner}: context_dim={value} must not be negative; 0 means dim")
                if parameters[name].annotation is float:
                    # torch accepts no ints of more than 64 bits.
                    bound.arguments[name] = float(value)
        init(*bound.args, **bound.kwargs)

    return __init__


def type_name(kind: Any) -> str:
    """Return an annotation in words.

    >>> type_name(int | tuple[int, int]), type_name(Literal["a", "b"])
    ('a whole number or (a whole number, a whole number)', "'a' or 'b'")
    """
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        return f"a {parts[1]}"
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, parts))
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(map(type_name, parts))
    if get_origin(kind) is tuple and parts[1:] == (...,):
        return f"a tuple, each of it {type_name(parts[0])}"
    if get_origin(kind) is tuple:
        return f"({', '.join(map(type_name, parts))})"
    return _WORDS.get(kind) or f"a {getattr(kind, '__name__', kind)}"


def format_value(value: Any) -> str:
    """Return a value for a message: its repr on one line, shortened."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    # A list may contain one list so often that its repr would be huge.
    text = repr(value) if isinstance(value, str) else _SHORT.repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Annotated:
        return _fits(value, get_args(kind)[0])
    origin, parts = get_origin(kind), get_args(kind)
    if kind in (int, float) and isinstance(value, bool):
        return False
    if kind is float and isinstance(value, int | float):
        return abs(value) <= _FLOAT32
    if kind is int:
        return isinstance(value, int) and -sys.maxsize - 1 <= value <= sys.maxsize
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is tuple and isinstance(value, tuple):
        each = parts[:1] * len(value) if parts[1:] == (...,) else parts
        return len(value) == len(each) and all(map(_fits, value, each))
    kind = origin or (types.NoneType if kind is None else kind)
    return isinstance(value, kind) if isinstance(kind, type) and kind is not inspect.Parameter.empty else True


@functools.cache
def _kinds(made: type) -> dict[str, Any]:
    return get_type_hints(made)
