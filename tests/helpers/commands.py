"""Commands as a shell would run them, in this process."""

import click
from click.testing import CliRunner, Result


def run_command(command: click.Command, *args) -> Result:
    """Run to success; a failure shows what the command printed."""
    result = CliRunner().invoke(command, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output
    return result


def fail_command(command: click.Command, *args) -> tuple[int, str]:
    """Run to a failure: its exit code and the one line it printed on stderr, where a ``model.pte`` without a record
    may have been called unchecked before."""
    result = CliRunner().invoke(command, [str(arg) for arg in args])
    assert result.exit_code in (1, 2), result.output
    lines = [line for line in result.stderr.splitlines() if not line.startswith("Not checked: ")]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("Error: ")
    return result.exit_code, lines[0]
