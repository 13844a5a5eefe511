"""What docs/reliability.md says was tested is in the result files, and these name tests that are there."""

import json

from tests.gpu.proven import PAGE, RESULTS, ROOT, results, section


def test_the_section_is_made_from_the_result_files() -> None:
    assert PAGE.read_text().endswith(section()), "python -m tests.gpu.proven writes it anew"


def test_every_result_names_a_claim_and_tests_that_are_there() -> None:
    claims = json.loads((RESULTS / "claims.json").read_text())
    for result in results():
        assert result["shown"].keys() <= claims.keys()
        assert bool(result["shown"]) == bool(result["date"]), "what was not run shows nothing"
        for test in (test for tests in result["shown"].values() for test in tests):
            file, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(), test


def test_gpu_rows_say_that_they_were_not_run() -> None:
    (gpu,) = (result for result in results() if result["hardware"] == "GPU")
    assert gpu["date"] is None
    assert section().count("| not yet run |") == len(json.loads((RESULTS / "claims.json").read_text()))
