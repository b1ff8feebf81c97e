"""How every command speaks: failures in one line, and nothing from a library that the user cannot use.

Exit code 2 is a usage error, 1 any other failure; ``--verbose`` prints tracebacks and lets the libraries talk.
"""

import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import click

from eagle3.runner.contract import RUNTIMES

LONGEST_LINE = 600  # characters of a message; a library's can be pages

runtime_option = click.option(
    "--runtime",
    type=click.Choice(RUNTIMES),
    default="auto",
    show_default=True,
    help="What runs the methods; auto: ExecuTorch, or PyTorch for a CUDA artifact where ExecuTorch has no CudaBackend.",
)


class OneLineFailures(click.Command):
    """A click command with ``--verbose``; any exception becomes ``Error: <one line>`` and exit code 1."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.params.append(click.Option(["--verbose"], is_flag=True, help="Tracebacks, and what libraries print."))

    def main(self, *args, **kwargs):
        try:
            code = super().main(*args, **kwargs | {"standalone_mode": False})
        except click.ClickException as error:  # click would print the usage before it
            click.echo(f"Error: {' '.join(error.format_message().split())}", err=True)
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            click.echo("Interrupted.", err=True)
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context):
        verbose = ctx.meta["verbose"] = ctx.params.pop("verbose", False)
        if not verbose:
            _calm_libraries()
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:
            sys.exit(1)
        except Exception as error:
            if verbose:
                traceback.print_exc()
            raise click.ClickException(one_line(error)) from error


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


def _calm_libraries() -> None:
    """torchao reports extensions that do not load, torch deprecations inside ExecuTorch: nothing for our users."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
