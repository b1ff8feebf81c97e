"""The page on the keys of JSON is that of its descriptions. tests/runner/commands/test_json_keys.py compares them with
the commands."""

from key_tables import PAGE, page


def test_the_page_is_current():
    assert PAGE.read_text() == page(), "type python tests/helpers/key_tables.py"
