"""The runs of these tests name the tests' own models, in data folders that are not the settings'."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _allow_the_tests_models() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DPHYBRID_FACTORY_PACKAGES", "tests")
        yield
