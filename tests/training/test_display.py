"""What a person sees: a bar in a terminal, a line an epoch elsewhere."""

import os
import pty
import subprocess
import sys

import pytest

from dphybrid.training import display
from dphybrid.training.display import Display

PROGRAM = """
from dphybrid.training.display import Display
with Display() as shown:
    shown.epoch(0, 2, 3, 0)
    for step in range(3):
        shown.advance("loss 0.5")
        shown.metrics_line("within")
    shown.line("epoch 1/2")
"""


def test_a_pipe_gets_a_line_an_epoch_and_a_terminal_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    exec(PROGRAM)
    assert capsys.readouterr().out == "epoch 1/2\n"
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # the other end was closed
            pass
    os.close(ours)
    assert process.returncode == 0
    assert b"3/3" in shown
    assert b"within" not in shown
    assert b"epoch 1/2\r\n" in shown


def test_a_long_epoch_is_not_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 10.0, 31.0, 31.0, 40.0])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(clock))
    with Display() as shown:
        for text in ("soon", "late", "soon again"):
            shown.metrics_line(text)
    assert capsys.readouterr().out == "late\n"
