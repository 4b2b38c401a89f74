"""`cached_property` without the lock that Python 3.11 holds meanwhile, closed for ever in a forked child."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Generic, TypeVar

T = TypeVar("T")

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property(Generic[T]):  # noqa: N801
        """An attribute that is computed when it is first asked for, as in Python 3.12.

        The lock of 3.11 is one for all instances; a child forked while another thread of its parent computes
        would wait for it for ever.
        """

        def __init__(self, function: Any) -> None:
            self.function = function
            self.__doc__ = function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self.name] = self.function(instance)
            return value


__all__ = ["cached_property"]
