"""What checkpoints from elsewhere may import."""

import pytest

from dphybrid.util.importing import check_import
from tests.refusing import refused


@pytest.mark.parametrize(
    ("path", "packages", "allowed"),
    [
        ("dphybrid.recipes.ctr:Ctr", "", True),
        ("dphybrid_evil:make", "", False),
        ("mine.models:make", "others, mine", True),
        ("mineral:make", "mine", False),
        ("os:system", "mine,", False),
        (".mine:make", "mine", False),
    ],
)
def test_packages_are_allowed_by_their_whole_names(path: str, packages: str, allowed: bool) -> None:
    if allowed:
        check_import(path, "a file", packages)
        return
    with refused("^a file = .* would run code of package"):
        check_import(path, "a file", packages)
