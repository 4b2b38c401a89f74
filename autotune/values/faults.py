"""What an error of CUDA means for whoever made the call, whichever library raised it."""

from __future__ import annotations

import re

_MEANINGS = (  # (what the text holds, in small letters without blanks and underscores; what that means)
    (
        r"illegaladdress|illegalmemory|illegalinstruction|misaligned|launchfail|launchtime|invalidpc(?!i)"
        r"|hardwarestack|invalidaddressspace|cudaerrorassert|device-sideassert|eccuncorrectable",
        "a kernel that ran earlier in this process, of whatever library, failed ({}), and CUDA refuses all "
        "work of the process from then on: start a new one (compute-sanitizer names the kernel)",
    ),
    (
        r"initializationerror|notinitialized|forkedsubprocess|beforefork",
        "CUDA cannot be used in this process ({}), as after a fork of one that had used it: start children "
        "by multiprocessing's 'spawn' method, or use the GPU in the children alone",
    ),
    (
        r"streamcapture|capturedevent|streamiscapturing",
        "a stream is being captured, which forbids what this call has to do ({}): make the same call once "
        "before the capture",
    ),
    (r"memoryallocation|outofmemory", "the GPU has too little free memory ({}): free some"),
)
_NAME = r"cudaError\w+|CUDA_ERROR_\w+"
_CUDA = rf"{_NAME}|CUDA error|CUDARuntimeError|CUDADriverError|Cuda\w*Error|forked subprocess"


def cuda_fault(error: BaseException) -> str | None:
    """Return in one line what an error of CUDA means, whoever raised it; None of any other error.

    Errors are recognised by their text: the classes of CuPy, PyTorch, JAX and Numba need not be installed.
    """
    text = f"{type(error).__name__}: {error}"
    if type(error).__name__ != "OutOfMemoryError" and not re.search(_CUDA, text):
        return None
    return known_fault(text) or f"CUDA refuses the call: {' '.join(str(error).split())}"


def known_fault(text: str) -> str | None:
    """Return what the text of an error of CUDA means, where more is known than it says itself."""
    plain = re.sub(r"[\s_]", "", text).lower()
    name = re.search(_NAME, text)
    said = name[0] if name else " ".join(text.partition("\n")[0].split())
    return next((meaning.format(said) for pattern, meaning in _MEANINGS if re.search(pattern, plain)), None)
