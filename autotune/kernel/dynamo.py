"""Keeps `torch.compile` out of functions that work on addresses: it calls them between its graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import CodeType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_codes: list[CodeType] = []


def left_out(function: F) -> F:
    """Mark a function, which `torch.compile` then neither enters nor follows further.

    PyTorch's own decorator would have to import it; what it leaves on a function is all that is read.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "autotune.torch.matmul can be compiled into a graph"
    )
    _codes.append(function.__code__)
    if "torch" in sys.modules:
        leave_out_frames()
    return function


def leave_out_frames() -> None:
    """Leave out marked functions where they are called from what is compiled, once PyTorch is there."""
    with suppress(ImportError, AttributeError):  # another PyTorch: it may try, and gives up by itself
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
        for code in _codes:
            eval_frame.set_code_exec_strategy(code, skip)
