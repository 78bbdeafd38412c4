"""Base class of builders."""

from collections.abc import Mapping
from typing import Any, Self


class BaseBuilder:
    """Parameters are attributes; an unknown one raises AttributeError. Each call of ``get()`` builds a new module."""

    @classmethod
    def from_kwargs(cls, strict: bool = True, **kwargs: Any) -> Self:
        """Call ``from_dictionary`` with the keyword arguments."""
        return cls.from_dictionary(kwargs, strict=strict)

    @classmethod
    def from_namespace(cls, args: Any, strict: bool = False) -> Self:
        """Call ``from_dictionary`` with an ``argparse`` namespace; other entries are ignored by default."""
        return cls.from_dictionary(vars(args), strict=strict)

    @classmethod
    def from_dictionary(cls, dictionary: Mapping[str, Any], strict: bool = True) -> Self:
        """Return a builder with these parameters.

        Args:
            dictionary: parameters by name.
            strict: raise an error for an unknown name; False ignores it.

        Raises:
            ValueError: a name is unknown, or a value is invalid.
        """
        builder = cls()
        for name, value in dictionary.items():
            try:
                setattr(builder, name, value)
            except AttributeError as error:
                if strict:
                    raise ValueError(f"The builder has no parameter {name!r}") from error
        return builder
