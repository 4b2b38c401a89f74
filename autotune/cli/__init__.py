"""The command line: every error becomes one line on stderr and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import click

from autotune import __version__
from autotune.cli.streams import escaped_streams, lost_output, replace_closed, say
from autotune.errors import AutotuneError
from autotune.outside import printable

COMMANDS = {  # name: (module, help); help stands here so that --help imports no command
    "tune": ("tune", "Search for the fastest kernel of a problem and store it."),
    "show": ("show", "Show a stored record and its finalists, two side by side, or list all."),
    "space": ("space", "Count a search space: what each rule removes, and why."),
    "emit": ("emit", "Print the CUDA source of a record, preset or config."),
    "ladder": ("ladder", "Climb from the naive kernel to the tuned one, step by step."),
    "bench": ("bench", "Time stored winners against cuBLAS and the best of cuBLASLt."),
    "export": ("export", "Write stored winners as CUDA files, a C header, or machine code."),
    "explain": ("explain", "Explain why a kernel is as fast as it is, or put two side by side."),
    "report": ("report", "Write a page of figures: search, finalists, roofline, source, record."),
    "learn": ("learn", "Learn from measured trials which kernels serve shapes that nobody tuned."),
    "replay": ("replay", "Compare search strategies on a sweep of measured configs, without a GPU."),
    "convert": ("convert", "Exchange measured configs with Kernel Tuner, T4 results and CSV files."),
    "cache": ("cache", "Look after the records: list, verify, prune, export, import."),
    "doctor": ("doctor", "Report what works on this machine, and what to install."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands in the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"autotune.cli.{COMMANDS[cmd_name][0]}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the short helps without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


INTERRUPTED = 130  # exit code, whichever signal it was
LONGEST_MESSAGE = 300  # characters of a foreign error's text
GRACE_S = 1.5  # from an interrupt to the end, whatever is under way
_interrupted: list[int] = []
_HELP_ASKED: tuple[type[click.UsageError], ...] = tuple(
    [click.exceptions.NoArgsIsHelpError] if hasattr(click.exceptions, "NoArgsIsHelpError") else []
)  # of Click 8.2; those before print the help themselves
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(cls=LazyGroup, context_settings=CONTEXT, invoke_without_command=True)
@click.version_option(__version__, prog_name="autotune")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Generate, verify and tune FP32 matrix-multiplication kernels for your GPU and your shapes."""
    ctx.obj = debug
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _interrupt(number: int, frame: object) -> NoReturn:
    """End as every interrupt does; at once if that takes long, or something swallows it, or at a second one.

    Nothing is lost then: trials are written as they become known, records whole, and children die with this
    process.
    """
    if _interrupted:
        os._exit(INTERRUPTED)
    _interrupted.append(number)
    last = threading.Timer(GRACE_S, os._exit, [INTERRUPTED])
    last.daemon = True
    last.start()
    raise KeyboardInterrupt


def _one_line(message: Warning | str, *where: object, **more: object) -> None:
    click.echo(f"autotune: {printable(str(message))}", err=True)


def main() -> None:
    """Run the command line; an error is one line on stderr.

    Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted, by Ctrl-C, SIGTERM or a terminal that hung up.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads would wait for cores that compile
    replace_closed()
    _interrupted.clear()
    handlers = {
        number: signal.signal(number, _interrupt)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # such as in a background job: it is meant to go on
    }
    try:
        with escaped_streams(), warnings.catch_warnings():
            warnings.showwarning = _one_line
            status = _run("--debug" in sys.argv)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    sys.exit(status)


def _run(debug: bool) -> int:
    """Run the command that the words name; return the exit code."""
    try:
        status = _answered()
        sys.stdout.flush()
        if not status and lost_output():
            say("autotune: standard output is closed: what was written there is lost")
            return 1
        return status if isinstance(status, int) else 0
    except click.ClickException as error:
        words = " ".join(error.format_message().split()).removesuffix(".")
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        say(f"autotune: {printable(words)}{hint}")
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        say("autotune: interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # who read stdout wants no more
        return 1
    except Exception as error:
        if _interrupted:  # what the interrupt broke off, such as an import, says so in its own way
            return INTERRUPTED
        if debug:
            raise
        say(f"autotune: {_line(error)}")
        return error.exit_code if isinstance(error, AutotuneError) else 1


def _answered() -> object:
    """Run the command that the words name, or print the help of a group without one; return its status."""
    try:
        return cli.main(standalone_mode=False, prog_name="autotune")
    except _HELP_ASKED as error:
        click.echo(error.format_message())
        return 0


def _line(error: Exception) -> str:
    """Return an error as one line: ours and the system's by what they say, any other with where it arose."""
    if isinstance(error, AutotuneError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return printable(error.strerror if error.filename is None else f"{error.filename}: {error.strerror}")
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(__file__).parents[1]
    ours = [frame for frame in frames if package in Path(frame.filename).parents]
    frame = (ours or frames)[-1]
    place = Path(frame.filename)
    where = place.relative_to(package.parent) if package in place.parents else place.name
    said = printable(" ".join(str(error).split()), LONGEST_MESSAGE)
    return (
        f"{type(error).__name__} at {where}, line {frame.lineno}{': ' if said else ''}{said} "
        "(a fault of autotune: 'autotune --debug ...' shows more; please report it)"
    )
