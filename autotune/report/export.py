"""What C and C++ use of tuned kernels: CUDA files with a launch function, a header, machine code.

The templates of these files lie in `exported/`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune import __version__
from autotune.code import cubins
from autotune.code.compiler import stated_arch
from autotune.code.depot import Depot
from autotune.code.scale import scaling
from autotune.code.templates import environment
from autotune.errors import RecordMissing, Rejected, ToolchainError
from autotune.kernel.choices import Choice, Choices
from autotune.measure.verify import error_bound
from autotune.records import Store
from autotune.values import typed
from autotune.values.device import Device
from autotune.values.measurement import Argument
from autotune.values.problem import Problem

_TEMPLATES = Path(__file__).with_name("exported")
ALIGNMENT = 16  # bytes that every operand's address must be a multiple of: no access is wider
STATUSES = (  # what a launch returns; what is positive is a cudaError_t
    ("AUTOTUNE_OK", 0, "it was launched, or there was nothing to do"),
    ("AUTOTUNE_NULL", -1, "A, B or C is a null pointer"),
    ("AUTOTUNE_MISALIGNED", -2, f"A, B, C or the workspace is not aligned to {ALIGNMENT} bytes"),
    ("AUTOTUNE_BETA", -3, "beta is not 0, and this kernel never reads C: export the problem with beta 1"),
    ("AUTOTUNE_WORKSPACE", -4, "the kernel needs a workspace, and it is a null pointer"),
    ("AUTOTUNE_NO_KERNEL", -5, "no exported kernel computes this problem"),
)
PARAMETERS: dict[Argument, str] = {
    "alpha": "float alpha",
    "a": "const float* A",
    "b": "const float* B",
    "beta": "float beta",
    "c": "float* C",
    "workspace": "float* workspace",
}


@dataclass(frozen=True)
class Export:
    """A kernel to be exported.

    Attributes:
        choice: Its config and source, and where they come from.
        device: The GPU it is for.
    """

    choice: Choice
    device: Device

    @property
    def problem(self) -> Problem:
        """What it computes."""
        return self.choice.source.problem

    @property
    def name(self) -> str:
        """Name of its launch function and of its files."""
        problem = self.problem
        words = ["autotune_sgemm", problem.layout, *map(str, (problem.m, problem.n, problem.k))]
        words += [f"batch{problem.batch}"] * (problem.batch > 1)
        words += ["beta"] * problem.beta + [problem.math] * (problem.math != "ffma")
        return "_".join(words)

    @property
    def arch(self) -> str:
        """What it is compiled for, such as "sm_90"."""
        return stated_arch(self.choice.source.text, self.device.arch)

    @property
    def nvcc_flags(self) -> str:
        """Flags of nvcc for the architecture; no PTX for one like sm_90a, which nvcc would make for sm_90."""
        if self.arch.endswith("a"):
            return f"-gencode arch={self.arch.replace('sm', 'compute')},code={self.arch}"
        return f"-arch={self.arch}"

    def kernel(self, entry: str) -> str:
        """Return the name of a kernel in the CUDA file."""
        return f"{self.name}_{'kernel' if entry == self.choice.source.entry else entry}"

    @property
    def origin(self) -> str:
        """Where its config comes from and how fast it was, in one line."""
        record = self.choice.record
        if self.choice.served == "predicted":
            return f"predicted to be fastest ({self.choice.place}), not measured for this problem"
        if record is None or record.timing is None:
            return f"{self.choice.place}, not measured"
        speed = f"{record.timing.median_ms:.4g} ms"
        if record.vs_cublas is not None:
            speed += f", {record.vs_cublas:.3f} x cuBLAS"
        return f"{self.choice.place}: {speed}, {record.created[:10]}"


def to_export(problem: Problem, device: Device, store: Store, *, substitute: bool = False) -> Export:
    """Choose the kernel to export for a problem.

    Args:
        problem: What is to be computed.
        device: Where.
        substitute: Take what `best_kernel` would where this very problem has no record.
        store: Where records are looked up.

    Raises:
        RecordMissing: There is no record, and nothing else may be taken; the message names the command.
        UsageError: No kernel family computes the problem on the device.
    """
    choices = Choices(problem, device, store)
    found = next(choices.all() if substitute else choices.exact(), None)
    if found is None:
        raise RecordMissing(
            f"{choices.missing()}: run '{choices.command}', or add --any for what is predicted to be fastest"
        )
    return Export(found, device)


def cuda_file(export: Export) -> str:
    """Write the kernel with its launch function and, under AUTOTUNE_SELF_CHECK, a program that checks it.

    The file stands alone, and any number of them link into one program.
    """
    return (
        environment(_TEMPLATES)
        .get_template("kernel.cu.jinja")
        .render(
            **_names([export]),
            each=export,
            text=_embedded(export),
            scale=scaling(export.problem),
            bound=error_bound(export.problem.k, export.problem.math),
        )
    )


def header_file(exports: Sequence[Export], name: str) -> str:
    """Write the C header of several kernels, with a function that finds the one for a problem.

    Args:
        exports: The kernels.
        name: Of the file, from which the include guard is made.
    """
    guard = re.sub(r"\W", "_", name).upper()
    return (
        environment(_TEMPLATES)
        .get_template("kernels.h.jinja")
        .render(**_names(exports), exports=exports, guard=guard)
    )


def cubin_files(export: Export, depot: Depot) -> tuple[bytes, str]:
    """Return the machine code, and as JSON how it is launched.

    Raises:
        ToolchainError: It does not compile, or NVRTC is missing.
    """
    choice, source = export.choice, export.choice.source
    nvrtc = None if choice.record is None else choice.record.toolchain.nvrtc
    binary = cubins.load_or_compile(source.text, source.entry, export.device.arch, nvrtc=nvrtc, depot=depot)
    if isinstance(binary, Rejected):
        raise ToolchainError(f"the kernel of {export.problem} does not compile: {binary.why}")
    launch: dict[str, Any] = {
        "arch": binary.arch,
        "kernels": [
            {**vars(each), "arguments": [PARAMETERS[name] for name in each.arguments]}
            for each in source.launch.kernels
        ],
        "workspace_bytes": source.launch.workspace_bytes,
        "alignment": ALIGNMENT,
        "problem": typed.plain(export.problem),
        "config": dict(choice.config),
        "nvrtc": binary.nvrtc,
        "origin": export.origin,
    }
    return binary.cubin, json.dumps(launch, indent=2) + "\n"


def _embedded(export: Export) -> str:
    """Return the source with kernel names of its own, so that files of one family link into one program."""
    source = export.choice.source
    start = source.text.index("__global__")
    named = source.text[start:]
    for each in source.launch.kernels:
        named = re.sub(rf"\b{re.escape(each.entry)}(?=\s*[(;])", export.kernel(each.entry), named)
    return (source.text[:start] + named).rstrip("\n")


def _names(exports: Sequence[Export]) -> dict[str, Any]:
    facts = {"version": __version__, "statuses": STATUSES, "alignment": ALIGNMENT, "parameters": PARAMETERS}
    return {**facts, "device": exports[0].device}
