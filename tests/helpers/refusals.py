"""Returns the line of a refusal."""

import pytest


def refusal(call, *args, **options) -> str:
    """Return the one line with which a call that must fail refuses what it was given."""
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        call(*args, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)
