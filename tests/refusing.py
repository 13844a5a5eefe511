"""Expect a UserError and check its message."""

import re
from collections.abc import Iterable
from typing import Any

import pytest

from dphybrid.util.errors import UserError


def refused(match: str) -> Any:
    """Expect a UserError whose message matches this pattern somewhere."""
    return pytest.raises(UserError, match=match)


def refused_with(words: Iterable[str]) -> Any:
    """Expect a UserError whose message contains all of these texts, in any order."""
    return pytest.raises(UserError, match="(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in words))
