"""Tables of flags in documents, generated from the commands' own help.

A document names the flags that its readers need in a comment; the table below it is generated up to the next comment::

    <!-- flags of eagle3-run: --chain-len --stop -->
    <!-- end of flags -->

``python tests/helpers/flag_tables.py`` writes every table anew. tests/project/test_flag_tables.py checks that they are
current.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from places import ROOT

from eagle3.export.cli import main as export_main
from eagle3.export.fit_command import main as fit_main
from eagle3.runner.commands.bench import main as bench_main
from eagle3.runner.commands.inspect import main as inspect_main
from eagle3.runner.commands.run import main as run_main
from eagle3.runner.serve.cli import main as serve_main

COMMANDS = {
    "eagle3-export": export_main,
    "eagle3-fit": fit_main,
    "eagle3-run": run_main,
    "eagle3-bench": bench_main,
    "eagle3-inspect": inspect_main,
    "eagle3-serve": serve_main,
}
BLOCK = re.compile(r"^<!-- flags of (?P<command>\S+): (?P<flags>[^>]*) -->\n.*?^<!-- end of flags -->$", re.S | re.M)
HEAD = "| flag | what it does |\n| --- | --- |\n"


def documents() -> Iterator[Path]:
    yield from (ROOT / "README.md", ROOT / ".github" / "CONTRIBUTING.md")
    for top in ("export", "runner", "targets", "scripts"):
        yield from sorted((ROOT / top).rglob("*.md"))


def row(command: str, flag: str) -> str:
    """Return the row of a flag: its names and values, then its help. Raises KeyError if the command lacks it."""
    options = {name: each for each in COMMANDS[command].params for name in each.opts}
    names, text = options[flag].get_help_record(click.Context(COMMANDS[command]))
    names = re.sub(r" INTEGER( RANGE)?$", " N", names)
    text = re.sub(r"(?<=<=)x|x(?=[<>]=)", "N", " ".join(text.split()))
    names, text = (cell.replace("|", "\\|") for cell in (names, text))
    return f"| `{names}` | {text} |\n"


def current(text: str) -> str:
    """Return a document's text with every table of flags generated anew."""

    def table(found: re.Match[str]) -> str:
        rows = "".join(row(found["command"], flag) for flag in found["flags"].split())
        return f"{found[0].splitlines()[0]}\n{HEAD}{rows}<!-- end of flags -->"

    return BLOCK.sub(table, text)


if __name__ == "__main__":
    for path in documents():
        path.write_text(current(path.read_text()))
