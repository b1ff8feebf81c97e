"""Runs commands in this process as a shell would run them."""

import click
from click.testing import CliRunner, Result


def run_command(command: click.Command, *args) -> Result:
    """Run a command that must succeed; a failure shows its output."""
    result = CliRunner().invoke(command, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output
    return result


def fail_command(command: click.Command, *args) -> tuple[int, str]:
    """Run a command that must fail. Returns its exit code and the one error line on stderr; a warning about a
    ``model.pte`` without a record may precede that line."""
    result = CliRunner().invoke(command, [str(arg) for arg in args])
    assert result.exit_code in (1, 2), result.output
    lines = [line for line in result.stderr.splitlines() if not line.startswith("Not checked: ")]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("Error: ")
    return result.exit_code, lines[0]
