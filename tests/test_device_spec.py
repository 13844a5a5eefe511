"""The device grammar, without any hardware."""

import pytest

from dphybrid.util.device_spec import parse_device_spec
from tests.refusing import refused


@pytest.mark.parametrize(
    ("text", "names", "virtual"),
    [
        ("auto", (), False),
        ("cpu", ("cpu",), False),
        ("CPU * 3", ("cpu",) * 3, True),
        ("cuda", ("cuda:0",), False),
        ("cuda:0,cuda:1", ("cuda:0", "cuda:1"), False),
        ("cuda:1*4", ("cuda:1",) * 4, True),
        ("cuda:0,cuda:0", ("cuda:0",) * 2, True),
    ],
)
def test_reads(text: str, names: tuple[str, ...], virtual: bool) -> None:
    spec = parse_device_spec(text)
    assert (spec.names, spec.virtual) == (names, virtual)


WRONG = ["", "gpu", "cpu*0", "cpu*65", "cpu:1", "cpu,cuda:0", "cuda:x", "cuda:0,", "cuda:0,1", "cpu*-2"]


@pytest.mark.parametrize("text", [*WRONG, "cpu*" + "9" * 5000])
def test_refuses_with_a_remedy(text: str) -> None:
    with refused(r"; (use 1 to 64|use auto, |name one kind)"):
        parse_device_spec(text)
