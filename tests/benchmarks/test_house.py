"""The shape of the code: what is long or knows too many others is cut before it lands."""

from pathlib import Path

from benchmarks.house import REPOSITORY, files_of, measured

MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_MODULES = 450, 80, 20
MOST_FILES, MOST_LINES_OF_ALL = 214, 33_049
"""The aim is 190 files and 26,000 lines."""

PRODUCT = files_of(REPOSITORY / "dphybrid", REPOSITORY / "flows")


def test_no_file_or_function_is_too_long() -> None:
    assert {str(file.path): file.lines for file in PRODUCT if file.lines > MOST_LINES} == {}
    found = {f"{file.path}:{name}": length for file in PRODUCT for name, length in file.functions.items()}
    assert {name: length for name, length in found.items() if length > MOST_LINES_OF_A_FUNCTION} == {}


def test_no_file_knows_too_many_others() -> None:
    found = {str(file.path): len(file.modules) for file in PRODUCT}
    assert {name: count for name, count in found.items() if count > MOST_MODULES} == {}


def test_the_house_stays_within_its_size() -> None:
    lengths = [length for file in PRODUCT for length in file.functions.values()]
    assert sum(lengths) / len(lengths) <= 13
    assert len(PRODUCT) <= MOST_FILES
    assert sum(file.lines for file in PRODUCT) <= MOST_LINES_OF_ALL


def test_the_script_counts_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(
        "# not counted\nfrom typing import Any  # one\nimport dphybrid.util.files\n\nA = _B = 1\n\n\n"
        "class C:\n    def f(self) -> Any:\n        return 1\n\n    def _g(self) -> None: ...\n"
    )
    file = measured(tmp_path / "x.py")
    assert (file.lines, file.names, file.any_uses, file.comment_lines) == (11, 2, 1, 2)
    assert file.functions == {"f:9": 2, "_g:12": 1}
    assert file.modules == {"dphybrid.util.files"}
