"""What README, CONTRIBUTING and the pages of docs/ promise is what the code does."""

import importlib.util
import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from dphybrid.cli.main import COMMANDS, command_of
from dphybrid.config.settings import Settings
from dphybrid.recipes.configs import field_types
from dphybrid.recipes.registry import BUILT_IN, find_recipe
from tests.conftest import REPOSITORY

spec = importlib.util.spec_from_file_location("copy_examples", REPOSITORY / "docs/copy_examples.py")
assert spec is not None
assert spec.loader is not None
copy_examples = importlib.util.module_from_spec(spec)
spec.loader.exec_module(copy_examples)

PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in (
        REPOSITORY / "README.md",
        REPOSITORY / "CONTRIBUTING.md",
        *sorted((REPOSITORY / "docs").glob("*.md")),
    )
}
EVERYTHING = "\n".join(PAGES.values())
FENCES = {
    name: re.findall(r"^```([^\n]*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    for name, text in PAGES.items()
}


def python_of(page: str) -> list[str]:
    """The page's own Python; what it shows of examples/ is run by tests/test_examples.py."""
    copied = copy_examples.copies(PAGES[page])
    return [code for language, code in FENCES[page] if language == "python" and code not in copied]


def test_pages_show_the_code_of_the_examples() -> None:
    shown = {name: len(copy_examples.copies(text)) for name, text in PAGES.items()}
    assert sum(shown.values()) >= 9
    assert EVERYTHING.count("<!-- examples/") == sum(shown.values())
    assert "--8<--" not in EVERYTHING
    old = [name for name, text in PAGES.items() if copy_examples.updated(text) != text]
    assert old == [], "python docs/copy_examples.py copies the examples' code into the pages"


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)])
def test_its_python_runs(page: str, data_dir: Path, unrecorded: None) -> None:
    code = "\n".join(python_of(page)).replace("(20_000", "(4_000")  # fewer rows of own-loop.md
    exec(compile(code, page, "exec"), {"__name__": "page"})


def test_the_first_screen_splits_and_learns_as_it_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPHYBRID_DEVICES", "cpu*8")
    (code,) = python_of("README.md")
    exec(compile(code, "README.md", "exec"), {"__name__": "page"})
    told = capsys.readouterr().out
    assert float(re.findall(r"loss ([\d.]+)", told)[0]) < 0.02
    shares = re.findall(r"In Model: input size torch.Size\(\[(\d+), 5\]\)", told)
    assert shares == ["4", "4", "4", "4", "4", "4", "4", "2"]


def commands() -> list[str]:
    """Every command line of the project that a page shows, in a block or within a sentence."""
    lines = [
        line
        for fences in FENCES.values()
        for language, code in fences
        if language != "python"
        for line in code.replace("\\\n", " ").split("\n")
    ]
    inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", EVERYTHING, flags=re.DOTALL | re.MULTILINE))
    joined = " && ".join(" ".join(text.split()) for text in (*lines, *inline))
    parts = [part.strip().removeprefix("$ ") for part in joined.split("&&")]
    ours = re.compile(r"dphybrid |python -m (?:flows|dphybrid|benchmarks)[ .]")
    return sorted({part for part in parts if ours.match(part)})


@pytest.mark.parametrize("command", commands())
def test_a_command_is_there(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY))
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command, comments=True)
    if words[0] == "python":
        assert importlib.util.find_spec(words[2]) is not None
        if not words[2].startswith("flows."):
            return
        words = ["dphybrid", "train", *words[3:]]  # whose flags a flow takes
    words = words[1:]
    if len(words) < 2 and words[:1] != ["--help"]:  # a name in a sentence
        assert not words or words[0] in [name for names in COMMANDS.values() for name in names]
        return
    if "--help" in words:
        with pytest.raises(SystemExit, match="^0$"):
            command_of(words)
    else:
        command_of(words)


def test_flags_and_settings_are_ones_that_there_are() -> None:
    # of the pages' own recipe and column type
    own = {"data.num_ratings", "data.durations"}
    fields = {name for recipe in BUILT_IN for name in field_types(recipe)} | own
    flags = set(re.findall(r"--((?:data|model|table|train|checkpoint)\.[a-z][\w-]*)", EVERYTHING))
    assert len(flags) > 20
    assert {flag.replace("-", "_") for flag in flags} <= fields
    settings = set(re.findall(r"\bDPHYBRID_([A-Z_]+)\b", EVERYTHING)) - {"NAME"}
    of_tests = {"long_tests", "programs", "faults", "damages", "fuzz", "soak_minutes"}
    assert {name.lower() for name in settings} <= Settings.model_fields.keys() | of_tests


def test_files_and_names_are_where_it_says() -> None:
    paths = set(re.findall(r"`((?:dphybrid|docs|examples|tests|infra|flows)/[\w./]*)`", EVERYTHING))
    assert len(paths) > 20
    assert [path for path in paths if "NAME" not in path and not (REPOSITORY / path).exists()] == []
    for entry in re.findall(r"^(?:\||\d+\. ).*(?:\n   .*)*", PAGES["where.md"], flags=re.MULTILINE):
        named = re.findall(r"`(dphybrid/[\w/]+\.py)`", entry)
        files = [REPOSITORY / path for path in named if "NAME" not in path]
        there = "\n".join(file.read_text(encoding="utf-8") for file in files)
        for name in (
            re.findall(r"`([A-Z_][\w.]*|kinds|options|has_header|update_kernel|inferred_role)`", entry)
            if files
            else ()
        ):
            for part in name.split("."):
                assert part == "DPHYBRID_NAME" or re.search(rf"\b{part}\b", there), f"{name}: not in {files}"


def test_the_tree_of_files_is_the_tree_there_is() -> None:
    tree = PAGES["CONTRIBUTING.md"].partition("## Files")[2]
    listed = set(re.findall(r"^ {2}(\w+(?:\.py|/))", tree, flags=re.MULTILINE))
    folders = [path for folder in ("flows", "dphybrid") for path in (REPOSITORY / folder).iterdir()]
    there = {path.name + ("/" if path.is_dir() else "") for path in folders}
    assert listed == {name for name in there if not name.startswith("__") and name != "py.typed"}
    for name in re.findall(r"^([\w./]+)", tree.partition("```")[2], flags=re.MULTILINE):
        assert (REPOSITORY / name).exists(), name


def test_links_lead_somewhere() -> None:
    infra = {"infra/README.md": (REPOSITORY / "infra/README.md").read_text(encoding="utf-8")}
    for page, text in (PAGES | infra).items():
        folder = (REPOSITORY / page).parent if (REPOSITORY / page).exists() else REPOSITORY / "docs"
        for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text):
            assert (folder / target).exists(), f"{page}: {target}"


def test_each_network_has_its_picture() -> None:
    spec = importlib.util.spec_from_file_location("drawing", REPOSITORY / "docs/draw_networks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, columns in module.NETWORKS.items():
        file = f"pictures/network-{name}.svg"
        assert file in EVERYTHING
        assert (REPOSITORY / "docs" / file).read_text(encoding="utf-8") == module.drawing(name, columns)
    for recipe in ("ctr", "retrieval"):
        kinds = get_args(find_recipe(recipe).model.model_fields["kind"].annotation)
        missing = set(kinds) - {"auto"} - set(module.NETWORKS)
        assert not missing, (
            f"draw {missing} in docs/draw_networks.py and show the picture on its recipe's page"
        )
