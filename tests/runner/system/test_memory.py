"""Sizes in messages are in a unit that does not round them to nothing."""

import pytest

from eagle3.runner.system.machine import size_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (99_999, "99,999 bytes"),
        (400_000, "0.4 MB"),
        (42_000_000, "42.0 MB"),
        (1_100_000_000, "1.1 GB"),
        (10**15, "1,000,000.0 GB"),
    ],
)
def test_a_size_is_in_the_largest_unit_that_shows_it(count, text):
    assert size_text(count) == text
