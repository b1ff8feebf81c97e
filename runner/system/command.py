"""The output of every command: errors in one line, and no log output of libraries.

Exit code 2 is a usage error, 130 Ctrl-C, 143 SIGTERM, 1 any other failure. ``--verbose`` prints tracebacks and the
output of libraries. Whatever the standard streams are (closed, ASCII, a pipe whose reader has gone), no text is lost
silently.
"""

import difflib
import io
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

import click

from eagle3.runner.contract import CUDA_GRAPHS, RUNTIMES
from eagle3.runner.system.cpu_features import check_cpu_features

LONGEST_LINE = 600  # characters; a library's message can be pages long

runtime_option = click.option(
    "--runtime",
    type=click.Choice(RUNTIMES),
    default="auto",
    show_default=True,
    help="Host of the methods; auto: ExecuTorch, or PyTorch for a CUDA artifact if ExecuTorch has no CudaBackend.",
)


cuda_graph_option = click.option(
    "--cuda-graph",
    type=click.Choice(CUDA_GRAPHS),
    default="auto",
    show_default=True,
    help="auto: replay rounds as CUDA graphs if PyTorch runs the methods on a GPU; --verbose says why not.",
)


packed_weights_option = click.option(
    "--packed-weights",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="EAGLE3_PACKED_WEIGHTS",
    show_envvar=True,
    metavar="DIR",
    help="On a CPU, keep the weights in DIR as this processor reads them: later starts take a fraction of the time.",
)


def _say_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from eagle3.runner.system.machine import version_of

        click.echo(f"{ctx.find_root().info_name}, version {version_of('eagle3-export')}")
        ctx.exit()


version_option = click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_say_version, help="Show the version."
)


class Terminated(KeyboardInterrupt):
    """Raised for SIGTERM by a command that has files to remove. It unwinds the stack as Ctrl-C does."""


def closest(typed: str, names: Iterable[str]) -> str:
    """Return `` Did you mean 'NAME'?`` with the name that is closest to ``typed``, "" if none is close."""
    return "".join(f" Did you mean {name!r}?" for name in difflib.get_close_matches(typed, list(names), 1))


class NameChoice(click.Choice[str]):
    """A choice among names. The error for an unknown name ends with the closest one, or with the one that ``meant`` has
    for it."""

    def __init__(self, choices: Iterable[str], meant: Mapping[str, str] | None = None):
        super().__init__(list(choices))
        self._meant = meant or {}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ANN401 - click's
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            meant = self._meant.get(str(value).lower())
            hint = closest(str(value), self.choices) if meant is None else f" Did you mean {meant!r}?"
            self.fail(error.message + hint, param, ctx)


class NameList(NameChoice):
    """Several names with commas between them. ``ordered`` returns them in the order of the flag's value, each once."""

    def __init__(self, choices: Iterable[str], ordered: Callable[[list[str]], Iterable[str]]):
        super().__init__(choices)
        self._ordered = ordered

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ANN401 - click's
        named = [super(NameList, self).convert(name.strip(), param, ctx) for name in str(value).split(",")]
        return ",".join(self._ordered(named))


class OneLineFailures(click.Command):
    """A click command with ``--verbose``; any exception becomes ``Error: <one line>`` and exit code 1.

    ``headings`` groups the options of ``--help``: the name of the first option of each group to the group's title.
    """

    def __init__(self, *args: Any, headings: Mapping[str, str] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._headings = {} if headings is None else {"version": "Other", **headings}
        self.params.append(click.Option(["--verbose"], is_flag=True, help="Print tracebacks and what libraries print."))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            kind = error.param.type if error.param is not None else None
            if isinstance(kind, click.IntRange) and error.message.endswith("is not a valid integer range."):
                bounds = " to ".join(str(bound) for bound in (kind.min, kind.max) if bound is not None)
                bounds += " or more" if kind.max is None else ""
                says = f"{error.message.partition(' is not ')[0]} is no whole number: type {bounds}."
                raise click.BadParameter(says, error.ctx, error.param) from None
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: list[tuple[str, list[tuple[str, str]]]] = [("Options", [])]
        for param in (each for each in self.get_params(ctx) if isinstance(each, click.Option)):
            if (title := self._headings.get(param.name or "")) is not None:
                groups.append((title, []))
            if (record := param.get_help_record(ctx)) is not None:
                groups[-1][1].append(record)
        for title, records in groups:
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        occupy_standard_descriptors()
        streams = sys.stdout, sys.stderr
        for stream in streams:
            _escape_unencodable(stream)
        try:
            sys.exit(self._exit_code(*args, **kwargs))
        finally:
            for stream in streams:
                _discard_unwritable(stream)

    def _exit_code(self, *args: Any, **kwargs: Any) -> int:
        """Run the command, report a failure, and return the exit code."""
        try:
            if sys.stdout is None:
                raise click.ClickException(
                    "stdout is closed, nothing could be printed: type >/dev/null to discard the output"
                )
            code = super().main(*args, **kwargs | {"standalone_mode": False})
            sys.stdout.flush()
            return code if isinstance(code, int) else 0
        except click.ClickException as error:  # click would print the usage before it
            tell(f"Error: {' '.join(error.format_message().split())}")
            return error.exit_code
        except (click.Abort, KeyboardInterrupt) as error:  # click turns KeyboardInterrupt into Abort
            tell("Interrupted.")
            return 128 + (signal.SIGTERM if isinstance(error.__cause__ or error, Terminated) else signal.SIGINT)
        except BrokenPipeError:  # the reader closed the pipe, which is no failure
            pass
        except OSError as error:
            tell(f"Error: stdout: {error.strerror or one_line(error)}")
        return 1

    def invoke(self, ctx: click.Context) -> object:
        verbose = ctx.meta["verbose"] = ctx.params.pop("verbose", False)
        if not verbose:
            _calm_libraries()
        try:
            check_cpu_features()
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and _of_stdout(error):
                raise
            if verbose:
                traceback.print_exc()
            raise click.ClickException(one_line(error)) from error


def tell(line: str) -> None:
    """Print a line to stderr. A stderr that cannot be written to is not an error."""
    with suppress(OSError):
        click.echo(line, file=sys.stderr)  # click's own choice of stream would write UTF-8 to an ASCII terminal


def verbose_note(line: str) -> None:
    """Print a line to stderr if the running command has ``--verbose``."""
    ctx = click.get_current_context(silent=True)
    if ctx is not None and ctx.meta.get("verbose"):
        tell(line)


def occupy_standard_descriptors() -> None:
    """Open the null device on each descriptor of stdin, stdout and stderr that is closed.

    Otherwise the next file opened would get that descriptor, and native libraries would print into it. ``sys.stderr``,
    which is None in such a process, becomes a file that discards its input. ``sys.stdout`` stays None, so that the
    caller can see it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free descriptor
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process


def one_line(error: BaseException) -> str:
    """Return an exception's message in one line, with its type if it is not one that our own checks raise."""
    says = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    message = " ".join(says.split()) or type(error).__name__
    message = message if len(message) <= LONGEST_LINE else f"{message[:LONGEST_LINE]}..."
    if isinstance(error, (ValueError, OSError)) or type(error).__module__.startswith("eagle3"):
        return message
    return f"{type(error).__name__}: {message} (--verbose prints the traceback)"


@contextmanager
def calm_stderr() -> Iterator[None]:
    """Discard the log of ExecuTorch's runtime (cpuinfo, operator listings), unless with ``--verbose``.

    The runtime writes to file descriptor 2 and, once its bindings are loaded, to Python's ``sys.stderr``.
    """
    ctx = click.get_current_context(silent=True)
    if ctx is not None and ctx.meta.get("verbose"):
        yield
        return
    occupy_standard_descriptors()
    with suppress(OSError):
        sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def _of_stdout(error: OSError) -> bool:
    """Return True if an error is about stdout: click's ``echo`` raised it, or stdout still holds text that cannot be
    written."""
    if traceback.extract_tb(error.__traceback__)[-1].filename == click.utils.__file__:
        return True
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _escape_unencodable(stream: TextIO | None) -> None:
    """Make the stream print characters that its encoding lacks, and lone surrogates of a path, as ``\\xe9``."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


def _discard_unwritable(stream: TextIO | None) -> None:
    """Discard buffered text that cannot be written. Python would try again at exit, report it, and exit with 120."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):  # ValueError if the stream is closed
        with suppress(OSError, ValueError):  # a stream may have no descriptor
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


@contextmanager
def calm_libraries() -> Iterator[None]:
    """Silence the warnings of libraries within the context, for functions that are also called without a command. With
    ``--verbose`` nothing is silenced."""
    ctx = click.get_current_context(silent=True)
    if ctx is not None and ctx.meta.get("verbose"):
        yield
        return
    logged = logging.root.manager.disable
    with warnings.catch_warnings():
        _calm_libraries()
        try:
            yield
        finally:
            logging.disable(logged)


def _calm_libraries() -> None:
    """Silence the warnings of libraries: torchao's about extensions that do not load, torch's about deprecations inside
    ExecuTorch. They do not help users."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
