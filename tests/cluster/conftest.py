"""Allow the models of these tests, which runs in foreign data folders name, to be imported."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _allow_the_tests_models() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DPHYBRID_FACTORY_PACKAGES", "tests")
        yield
