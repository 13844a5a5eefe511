"""What ends as a UserError: what it must say."""

import re
from collections.abc import Iterable
from typing import Any

import pytest

from dphybrid.util.errors import UserError


def refused(match: str) -> Any:
    """Expect a UserError that this pattern is found in."""
    return pytest.raises(UserError, match=match)


def refused_with(words: Iterable[str]) -> Any:
    """Expect a UserError that has each of these words."""
    return pytest.raises(UserError, match="(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in words))
