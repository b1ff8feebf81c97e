"""The tables of flags in documents are those of the commands."""

import pytest
from flag_tables import BLOCK, COMMANDS, current, documents, row
from places import ROOT


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_tables_of_flags_are_current(document):
    text = document.read_text()
    assert current(text) == text, "type python tests/helpers/flag_tables.py"
    assert "| flag |" not in BLOCK.sub("", text), "a table of flags has a comment that names them"


def test_a_flag_is_shown_with_its_values_and_its_default():
    port = "| `--port N` | Port to listen on; 0 takes a free one. [default: 8000; 0<=N<=65535] |\n"
    assert row("eagle3-serve", "--port") == port
    assert row("eagle3-run", "--chain-len").startswith("| `--chain-len K\\|auto` | ")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_that_a_command_lacks_cannot_be_in_a_table(command):
    with pytest.raises(KeyError, match="--nothing"):
        current(f"<!-- flags of {command}: --verbose --nothing -->\n<!-- end of flags -->")


def test_a_table_that_has_aged_is_found():
    aged = "before\n<!-- flags of eagle3-run: --stats -->\n| old |\n<!-- end of flags -->\nafter\n"
    mended = current(aged)
    assert "| old |" not in mended and row("eagle3-run", "--stats") in mended
    assert mended.startswith("before\n") and mended.endswith("-->\nafter\n") and current(mended) == mended
