"""The benchmark of a whole job: its own script beside plain PyTorch's, on few rows."""

from pathlib import Path

import pytest

from benchmarks.whole_job import ALONE, OURS, PLAIN, run, text


@pytest.mark.nightly
def test_both_scripts_predict_the_same_rows_and_the_table_compares_them(tmp_path: Path) -> None:
    found = run(tmp_path, 3000, 1000, 1, [OURS + ALONE, PLAIN])
    assert list(found["ways"]) == [OURS + ALONE, PLAIN]
    for way in found["ways"].values():
        assert way["cpu_s"] > 0
        assert way["peak_mib"] > 100
        assert 0.55 < way["auc"] < found["best_auc"]
    assert f"{OURS}{ALONE} / {PLAIN}" in text(found)
