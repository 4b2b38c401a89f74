"""``autotune doctor``: what works on this machine, and what to install."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass

import click

from autotune.cli.options import json_option
from autotune.errors import AutotuneError, Rejected
from autotune.paths import install_command

NEEDED_EVERYWHERE = ("NVRTC", "records")


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``remedy`` is empty when there is nothing to do."""

    part: str
    works: bool
    says: str
    remedy: str = ""


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Report what works on this machine (driver, GPU, NVRTC, CuPy, cuBLAS, records), and what to install.

    Exit code 1 when kernels cannot be compiled or records not be kept; a missing GPU is not a failure.
    """
    probes = (("NVRTC", _nvrtc), ("records", _cache), ("driver", _driver), ("GPU", _gpu), ("NVML", _nvml))
    findings = [finding for part, probe in probes for finding in _probed(part, probe)]
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            click.echo(f"{'ok     ' if finding.works else 'missing'}  {finding.part:<8} {finding.says}")
            if finding.remedy:
                click.echo(f"{'':18}{finding.remedy}")
        ready = all(
            finding.works
            for finding in findings
            if finding.part in ("NVRTC", "records", "driver", "GPU", "CuPy")
        )
        click.echo(
            "this machine can tune"
            if ready
            else "this machine cannot measure; all that measures nothing works with --target"
        )
    if not all(finding.works for finding in findings if finding.part in NEEDED_EVERYWHERE):
        sys.exit(1)


def _probed(part: str, probe: Callable[[], Finding | list[Finding]]) -> list[Finding]:
    """Return what a probe finds; whatever is wrong with a machine, the report goes on to the end."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        try:
            found = probe()
        except AutotuneError as error:
            found = Finding(part, False, "not usable", _line(error))
        except Exception as error:
            found = Finding(part, False, f"cannot be asked ({type(error).__name__}: {_line(error)})")
    notes = [Finding(part, True, f"warns: {_line(each.message)}") for each in said]
    return [*(found if isinstance(found, list) else [found]), *notes]


def _line(error: object) -> str:
    """Return what an error says, in one line."""
    return " ".join(str(error).split())


def _nvrtc() -> Finding:
    from autotune.code.compiler import nvrtc
    from autotune.code.single import compile_bounded

    try:
        library = nvrtc()
        arch = library.supported_archs[0]
        made = compile_bounded('extern "C" __global__ void probe() {}', "probe", arch)
    except AutotuneError as error:
        return Finding("NVRTC", False, "not usable", _line(error))
    version = library.build
    if isinstance(made, Rejected):
        return Finding(
            "NVRTC",
            False,
            f"{version} from {library.path} does not compile: {made.why}",
            "pip install nvidia-cuda-nvrtc",
        )
    archs = library.supported_archs
    return Finding("NVRTC", True, f"{version} from {library.path}, compiles for {archs[0]} to {archs[-1]}")


def _cache() -> Finding:
    from autotune.records import Store
    from autotune.records.files import LEARNED

    store = Store()
    try:
        store.check_writable()
        folders = [entry for entry in store.root.iterdir() if entry.is_dir()] if store.root.is_dir() else []
        names = [file.name for folder in folders for file in folder.iterdir()]
        count = sum(name.endswith(".json") and name != LEARNED for name in names)
    except AutotuneError as error:
        return Finding("records", False, "cannot be kept", _line(error))
    except OSError as error:
        remedy = "set AUTOTUNE_CACHE_DIR to a folder of yours"
        return Finding("records", False, f"{error.filename} cannot be read ({error.strerror})", remedy)
    return Finding("records", True, f"{count} in {store.root}")


def _driver() -> Finding:
    import ctypes

    version = ctypes.c_int()
    remedy = "install the NVIDIA driver; nothing else of CUDA is needed"
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return Finding("driver", False, "no NVIDIA driver (libcuda.so.1)", remedy)
    except AttributeError:
        return Finding("driver", False, "libcuda.so.1 is not that of NVIDIA's driver", remedy)
    if status:
        return Finding("driver", False, f"cuDriverGetVersion reports error {status}", remedy)
    return Finding("driver", True, f"supports CUDA {version.value // 1000}.{version.value % 1000 // 10}")


def _gpu() -> list[Finding]:
    from autotune.values.device import current_device

    try:
        import cupy
        from cupy.cuda import runtime
    except ImportError as error:
        return [
            Finding(
                "CuPy",
                False,
                f"cannot be imported ({_line(error)})",
                f"{install_command('cuda13')} (driver 580 or later), or {install_command('cuda12')}",
            ),
            Finding("GPU", False, "not asked: CuPy is missing"),
        ]
    found = [Finding("CuPy", True, f"{cupy.__version__} for CUDA {runtime.runtimeGetVersion() // 1000}")]
    try:
        first = current_device(0)
        devices = [first, *(current_device(ordinal) for ordinal in range(1, runtime.getDeviceCount()))]
    except AutotuneError as error:
        return [*found, Finding("GPU", False, "none usable", _line(error))]
    for ordinal, device in enumerate(devices):
        says = (
            f"{ordinal}: {device.name}, compute capability {device.compute_capability}, "
            f"{device.sm_count} SMs, {device.shared_per_block} bytes of shared memory per block, "
            f"{device.l2_bytes >> 20} MiB L2, {device.memory_bytes >> 30} GiB"
        )
        found.append(Finding("GPU", True, says))
    return [*found, _cublas(runtime.driverGetVersion() // 1000)]


def _cublas(driver_major: int) -> Finding:
    import ctypes

    from autotune.measure.cublas import library_candidates

    for path in library_candidates(driver_major):
        try:
            ctypes.CDLL(path)
        except OSError:
            continue
        return Finding("cuBLAS", True, path)
    remedy = "pip install nvidia-cublas" if driver_major >= 13 else "pip install nvidia-cublas-cu12"
    return Finding("cuBLAS", False, "not found: winners are not compared with it", remedy)


def _nvml() -> Finding:
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception as error:  # clocks are a courtesy: whatever is wrong with NVML is not worth a failure
        return Finding("NVML", False, f"clocks are not recorded ({_line(error)})")
    return Finding("NVML", True, f"driver {version}: clocks and throttling are recorded")
