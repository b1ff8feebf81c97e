"""One build of the native runner for all files of this folder."""

import pytest
from native_build import build


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    return build(tmp_path_factory.mktemp("native"))
