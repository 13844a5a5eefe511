"""The size and shape of the code: lines, files, names, functions, imports, comments.

python -m benchmarks.house            a line for each package of dphybrid/, and one for all of them
python -m benchmarks.house FOLDER...  the same for other folders
"""

import ast
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True)
class File:
    """The measures of one Python file.

    lines: without lines that are only a comment, so that a limit on lines never costs a comment.
    functions: name -> number of lines. names: number of public classes, functions and CONSTANTS.
    any_uses: how often `Any` occurs. modules: those of dphybrid that it imports, except under TYPE_CHECKING.
    comment_lines: lines with a comment.
    """

    path: Path
    lines: int
    functions: dict[str, int] = field(default_factory=dict)
    names: int = 0
    any_uses: int = 0
    modules: frozenset[str] = frozenset()
    comment_lines: int = 0


def measured(path: Path) -> File:
    """Return the measures of a file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    # With the line number, as methods of several classes may have the same name.
    functions = {
        f"{node.name}:{node.lineno}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    with path.open("rb") as stream:
        tokens = list(tokenize.tokenize(stream.readline))
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    return File(
        path,
        len(text.splitlines()) - sum(token.line.lstrip().startswith("#") for token in comments),
        functions,
        sum(1 for _ in _public(tree)),
        sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes),
        frozenset(_own_modules(tree)),
        len(comments),
    )


def _public(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            # walk, as a target may be a tuple: A, B = 1, 2
            found = (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
            names = [name for name in found if name.isupper()]
        yield from (name for name in names if not name.startswith("_"))


def _own_modules(tree: ast.Module) -> Iterator[str]:
    typing_only = [
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dphybrid"):
            if node not in typing_only:
                yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("dphybrid"))


def files_of(*folders: Path) -> list[File]:
    """Return the measures of all Python files below some folders."""
    return [measured(path) for folder in folders for path in sorted(folder.rglob("*.py"))]


def row(name: str, files: list[File]) -> str:
    """Return the line of the table for a package."""
    lengths = [length for file in files for length in file.functions.values()]
    lines = sum(file.lines for file in files)
    return (
        f"{name:<24} {len(files):>5} {lines:>7,} {max(file.lines for file in files):>7} "
        f"{sum(file.names for file in files):>6} {sum(file.any_uses for file in files):>5} "
        f"{sum(lengths) / max(1, len(lengths)):>6.1f} {max(lengths, default=0):>7} "
        f"{max(len(file.modules) for file in files):>7} "
        f"{sum(file.comment_lines for file in files) / max(1, lines):>8.1%}"
    )


def main() -> None:
    folders = [Path(text) for text in sys.argv[1:]]
    if not folders:
        rooms = [path for path in sorted((REPOSITORY / "dphybrid").iterdir()) if path.is_dir()]
        folders = [room for room in rooms if list(room.glob("*.py"))] + [REPOSITORY / "flows"]
    print(
        f"{'package':<24} {'files':>5} {'lines':>7} {'longest':>7} {'names':>6} {'Any':>5} {'mean f':>6} "
        f"{'longest':>7} {'imports':>7} {'comments':>8}"
    )
    for folder in folders:
        print(row(folder.name, files_of(folder)))
    # dphybrid/__init__.py and __main__.py, which are in no package below it.
    top = [] if sys.argv[1:] else [measured(path) for path in sorted((REPOSITORY / "dphybrid").glob("*.py"))]
    print(row("all", files_of(*folders) + top))


if __name__ == "__main__":
    main()
