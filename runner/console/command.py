"""How every command speaks: failures in one line, and nothing from a library that the user cannot use.

Exit code 2 is a usage error, 1 any other failure; ``--verbose`` prints tracebacks and lets the libraries talk. Whatever
the standard streams are (closed, ASCII, a pipe whose reader has gone), no text is lost without a word.
"""

import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from typing import Any, NoReturn, TextIO

import click

from eagle3.runner.contract import CUDA_GRAPHS, RUNTIMES
from eagle3.runner.hardware.cpu_features import check_cpu_features

LONGEST_LINE = 600  # characters of a message; a library's can be pages

runtime_option = click.option(
    "--runtime",
    type=click.Choice(RUNTIMES),
    default="auto",
    show_default=True,
    help="What runs the methods; auto: ExecuTorch, or PyTorch for a CUDA artifact where ExecuTorch has no CudaBackend.",
)


cuda_graph_option = click.option(
    "--cuda-graph",
    type=click.Choice(CUDA_GRAPHS),
    default="auto",
    show_default=True,
    help="auto: where PyTorch runs the methods on a GPU, replay rounds as CUDA graphs; --verbose says what cannot be.",
)


def _say_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from eagle3.runner.console.versions import version_of

        click.echo(f"{ctx.find_root().info_name}, version {version_of('eagle3-export')}")
        ctx.exit()


version_option = click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_say_version, help="Show the version."
)


class OneLineFailures(click.Command):
    """A click command with ``--verbose``; any exception becomes ``Error: <one line>`` and exit code 1."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.params.append(click.Option(["--verbose"], is_flag=True, help="Tracebacks, and what libraries print."))

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        occupy_standard_descriptors()
        streams = sys.stdout, sys.stderr
        for stream in streams:
            _escape_what_it_lacks(stream)
        try:
            sys.exit(self._exit_code(*args, **kwargs))
        finally:
            for stream in streams:
                _let_go(stream)

    def _exit_code(self, *args: Any, **kwargs: Any) -> int:
        """Run the command; a failure is told."""
        try:
            if sys.stdout is None:
                raise click.ClickException("stdout is closed, nothing could be printed: type >/dev/null to do without")
            code = super().main(*args, **kwargs | {"standalone_mode": False})
            sys.stdout.flush()
            return code if isinstance(code, int) else 0
        except click.ClickException as error:  # click would print the usage before it
            tell(f"Error: {' '.join(error.format_message().split())}")
            return error.exit_code
        except (click.Abort, KeyboardInterrupt):
            tell("Interrupted.")
        except BrokenPipeError:  # the reader has what it wanted
            pass
        except OSError as error:
            tell(f"Error: stdout: {one_line(error)}")
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
            if verbose:
                traceback.print_exc()
            raise click.ClickException(one_line(error)) from error


def tell(line: str) -> None:
    """A line on stderr. That nobody can read it is no reason to stop."""
    with suppress(OSError):
        click.echo(line, file=sys.stderr)  # click's own choice of stream would write UTF-8 to an ASCII terminal


def verbose_note(line: str) -> None:
    """A line on stderr where the running command has ``--verbose``."""
    ctx = click.get_current_context(silent=True)
    if ctx is not None and ctx.meta.get("verbose"):
        tell(line)


def occupy_standard_descriptors() -> None:
    """Put the null device where stdin, stdout or stderr was closed.

    The next file opened would get that descriptor, and what native libraries print on 2 would end up in it. Python's
    ``sys.stderr``, None in such a process, is made to swallow; ``sys.stdout`` stays None for the caller to judge.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest that is free: this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process


def one_line(error: BaseException) -> str:
    """An exception's message in one line. What our own checks did not foresee is named by its type as well."""
    message = " ".join(str(error).split()) or type(error).__name__
    message = message if len(message) <= LONGEST_LINE else f"{message[:LONGEST_LINE]}..."
    if isinstance(error, (ValueError, OSError)) or type(error).__module__.startswith("eagle3"):
        return message
    return f"{type(error).__name__}: {message} (--verbose prints the traceback)"


@contextmanager
def calm_stderr() -> Iterator[None]:
    """Drop what ExecuTorch's runtime logs (cpuinfo, operator listings); ``--verbose`` keeps it.

    It writes to file descriptor 2 and, once its bindings are loaded, to Python's ``sys.stderr``.
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


def _escape_what_it_lacks(stream: TextIO | None) -> None:
    """A character that the encoding has not, or half a surrogate pair of a path, is printed as ``\\xe9``."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


def _let_go(stream: TextIO | None) -> None:
    """Drop what cannot be written any more: Python would try again at exit, print that it failed, and exit with 120."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):  # ValueError: it was closed meanwhile
        with suppress(OSError, ValueError):  # it has no descriptor
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def _calm_libraries() -> None:
    """torchao reports extensions that do not load, torch deprecations inside ExecuTorch: nothing for our users."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
