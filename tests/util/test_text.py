"""Texts of numbers."""

import pytest

from dphybrid.util.text import metric_text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.71234567, "0.7123"), (0.0, "0.0000"), (0.00003, "3e-05"), (-1.5, "-1.5000"), (123456.7, "1.235e+05")],
)
def test_a_metric_shows_four_digits_of_tiny_and_large_numbers_too(value: float, text: str) -> None:
    assert metric_text(value) == text
