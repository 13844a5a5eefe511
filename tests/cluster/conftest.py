"""The data folders of these tests lie elsewhere than the settings' one: their runs name the tests' own models."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _allow_the_tests_models() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DPHYBRID_FACTORY_PACKAGES", "tests")
        yield
