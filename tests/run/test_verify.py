"""`dphybrid verify` names what is damaged, and nothing else."""

from pathlib import Path

import pytest

from dphybrid.cli.main import main


def test_it_names_the_damaged_file(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--recipe", "toy", "--run-name", "one", "--tracking", "none"]) == 0
    capsys.readouterr()
    assert main(["verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("ok ") and line.endswith("whole") for line in lines)
    (checkpoint,) = (data_dir / "runs" / "one" / "checkpoints").glob("step-*")
    file = checkpoint / "blocks.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 0x40
    file.write_bytes(content)
    assert main(["verify", "one"]) == 1
    shown = capsys.readouterr().out
    assert "BAD" in shown
    assert "blocks.safetensors" in shown
    (prepared,) = (data_dir / "prepared").glob("toy-*")
    assert main(["verify", str(prepared)]) == 0
    assert main(["verify", "nowhere"]) == 2
    assert "runs: one" in capsys.readouterr().err
