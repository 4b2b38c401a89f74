"""Child processes that serve requests over a pipe, and can be killed.

Compilers and GPU kernels may hang, crash or corrupt their process; a thread cannot be stopped, a process can.
A fresh interpreter is started and nothing is forked or re-imported: neither CUDA state nor the user's
``__main__`` reaches the child, so a script needs no main guard. Linux ends the child with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import importlib
import os
import pickle
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import AutotuneError, MachineError, ToolchainError

if TYPE_CHECKING:  # they take 20 ms to import, and whoever finds his kernel compiled starts no child
    import subprocess
    from concurrent.futures import ThreadPoolExecutor
    from multiprocessing.connection import Connection

_TAIL_BYTES = 2048
_REAP_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Signals by which a program's own fault ends it; any other was sent by somebody: the kernel that was out of
# memory, an administrator, a batch system.
_OWN_SIGNALS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP}
_OUT_OF_MEMORY = re.compile(r"\bMemoryError\b|\bbad_alloc\b|[Cc]annot allocate memory|failed to map segment")

# The parent's sys.path arrives as the first message: unlike PYTHONPATH it takes effect only after the
# interpreter has started, as in the parent, and is not handed on to grandchildren.
_BOOTSTRAP = """\
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
from autotune.code.process import _run
_run(connection, parent=int(sys.argv[2]))
"""


class NoInterpreterError(ToolchainError):
    """No Python interpreter is known that could run a child process."""


class ChildDied(AutotuneError):
    """A child process ended, or sent something unreadable, before it answered.

    Attributes:
        how: "exit code 1", "killed by SIGSEGV", or what was wrong with its message.
        stderr: The end of what it wrote to its standard error, at most 2048 bytes.
        outside: Whether the machine ended it and not what it did: a signal that somebody sent, or no memory.
    """

    def __init__(self, service: str, how: str, stderr: str, outside: bool = False) -> None:
        quoted = f"; its stderr ends\n{stderr}" if stderr else ""
        super().__init__(f"process {service} ended: {how}{quoted}")
        self.how = how
        self.stderr = stderr
        self.outside = outside

    @property
    def summary(self) -> str:
        """One line: how it ended and the last line of its stderr."""
        lines = self.stderr.splitlines()
        return f"{self.how}: {lines[-1]}" if lines else self.how


class Child:
    """One process running ``service(connection, *args)``.

    Its stdin and stdout are the null device, its stderr is kept for `ChildDied`, and it ignores Ctrl-C, which
    is the parent's to handle.

    Args:
        service: "module:function", imported in the child; it serves `requests` until the parent closes.
        *args: Further arguments, pickled.
        env: Environment variables set in addition to the parent's; None removes one.

    Attributes:
        connection: The parent's end of the pipe, for `multiprocessing.connection.wait`.
        pid: Process id.

    Raises:
        NoInterpreterError: This process is an embedded interpreter, and no other is found.
        MachineError: The system starts no more processes.
    """

    def __init__(self, service: str, *args: object, env: Mapping[str, str | None] | None = None) -> None:
        import subprocess
        import tempfile
        from multiprocessing.connection import Pipe

        self._service = service
        self._too_late = subprocess.TimeoutExpired  # kept: nothing is imported while Python ends
        python = interpreter()
        try:
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 -- lives as long as the child
            self.connection, theirs = map(_above_the_standard_streams, Pipe())
            variables = {**os.environ, **(env or {})}
            with theirs:
                self._process = _popen(
                    [python, "-P", "-c", _BOOTSTRAP, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._stderr,
                    pass_fds=[theirs.fileno()],
                    env={name: value for name, value in variables.items() if value is not None},
                )
        except OSError as error:
            raise MachineError(
                f"a child process cannot be started ({error.strerror or error}): free memory, disk space, "
                "open files or processes, and call again"
            ) from None
        self.pid: int = self._process.pid
        self._stopped = False  # by us
        self.send(_import_path())
        self.send((service, args))

    def send(self, message: object) -> None:
        """Pickle a message and send it.

        Raises:
            ChildDied: The child is gone.
        """
        try:
            self.connection.send(message)
        except OSError:
            raise self._died() from None

    def poll(self, timeout: float = 0) -> bool:
        """Return whether `receive` would not block, waiting up to ``timeout`` seconds for it."""
        return self.connection.closed or self.connection.poll(timeout)

    def receive(self) -> Any:
        """Wait for a message of the child.

        Raises:
            ChildDied: The child ended first, or its message cannot be unpickled (then it is killed).
        """
        try:
            message = self.connection.recv_bytes()
        except (EOFError, OSError):
            raise self._died() from None
        try:
            return pickle.loads(message)
        except Exception as error:
            self.kill()
            raise self._died(f"its message cannot be unpickled ({type(error).__name__}: {error})") from error

    def alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def cpu_seconds(self) -> float | None:
        """CPU time that the process has used; None where the system does not tell, or it is gone."""
        try:
            facts = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(facts[11]) + int(facts[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime: proc(5)
        except (OSError, IndexError, ValueError):
            return None

    def paused(self) -> bool:
        """Return whether the process was stopped by a signal, or continued, since it started or was asked."""
        flags = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        try:
            return os.waitid(os.P_PID, self.pid, flags) is not None
        except OSError:
            return False

    def close(self, grace: float = 1.0) -> None:
        """Close the pipe, which ends an idle service; kill it if it still runs ``grace`` seconds later."""
        self.connection.close()
        with contextlib.suppress(self._too_late):
            self._process.wait(grace)
        self.kill()

    def kill(self) -> None:
        """Kill the process at once and reap it."""
        self.stop()
        self.connection.close()

    def stop(self) -> None:
        """Kill the process at once and reap it; what it had said can still be received."""
        self._stopped = self._stopped or self.alive()
        self._process.kill()
        with contextlib.suppress(self._too_late):  # a driver can hold a process for a while
            self._process.wait(_REAP_SECONDS)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _died(self, how: str = "") -> ChildDied:
        self.close()
        stderr, code = self._stderr_tail(), self._process.returncode
        sent = code is not None and code < 0 and -code not in _OWN_SIGNALS and not self._stopped
        outside = not how and (sent or _OUT_OF_MEMORY.search(stderr) is not None)
        return ChildDied(self._service, how or _ending(code), stderr, outside)

    def _stderr_tail(self) -> str:
        file = self._stderr.fileno()
        start = max(0, os.fstat(file).st_size - _TAIL_BYTES)
        return os.pread(file, _TAIL_BYTES, start).decode(errors="replace").strip()


def requests(connection: Connection, idle_s: float | None = None) -> Iterator[Any]:
    """Yield, in the child, each message of the parent until it closes the pipe, or sends none for so long."""
    with contextlib.suppress(EOFError, ConnectionResetError):
        while connection.poll(idle_s):
            yield connection.recv()


def _run(connection: Connection, parent: int) -> None:
    """Tie this process to its parent and run the service named by the next message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of a terminal; it is the parent's to handle as well
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        return
    service, args = connection.recv()
    module, _, function = service.partition(":")
    getattr(importlib.import_module(module), function)(connection, *args)


def _ending(returncode: int | None) -> str:
    if returncode is None:
        return f"it closed its pipe and cannot be reaped {_REAP_SECONDS:g} s after SIGKILL"
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def interpreter() -> str:
    """Find the Python that runs child processes.

    That is `sys.executable`, or what ``multiprocessing.set_executable`` was told. In a program that embeds
    Python that is empty, or the program itself, which must not be started again: then it is the interpreter
    of the same version where the libraries are.

    Raises:
        NoInterpreterError: There is none.
    """
    from multiprocessing.spawn import get_executable

    stated = os.fsdecode(get_executable() or "")
    version = "python{}.{}".format(*sys.version_info[:2])
    if _runs(stated) and "py" in os.path.basename(stated).lower():
        return stated
    for prefix in dict.fromkeys((sys.exec_prefix, sys.base_exec_prefix)):
        for name in (version, "python3"):
            if _runs(path := os.path.join(prefix, "bin", name)):
                return path
    raise NoInterpreterError(
        f"no Python is known that could run child processes: sys.executable is {sys.executable!r} and "
        f"{sys.exec_prefix}/bin has no {version}. Call multiprocessing.set_executable with the path of one"
    )


def _runs(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _above_the_standard_streams(end: Connection) -> Connection:
    """Return a connection whose number is none of 0 to 2, which it gets where standard streams are closed."""
    if end.fileno() > 2:
        return end
    with end:
        from multiprocessing.connection import Connection

        return Connection(fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))


def _import_path() -> list[str]:
    """Return `sys.path` with absolute entries; those relative to a folder that is gone are left out."""
    found = []
    for entry in sys.path:
        with contextlib.suppress(FileNotFoundError):
            found.append(os.path.abspath(entry))
    return found


def _popen(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
    """Start a process from a thread that lives as long as this process.

    Linux sends the parent-death signal when the *thread* that started the child ends, see prctl(2).
    """
    import subprocess

    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    if threading.current_thread() is threading.main_thread():
        return start(*args, **kwargs)
    return _starter().submit(start, *args, **kwargs).result()


@functools.cache
def _starter() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(1, "autotune-starter")


os.register_at_fork(after_in_child=_starter.cache_clear)  # a forked copy has no such thread
