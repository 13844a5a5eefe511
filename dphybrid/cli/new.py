"""Write a package with a recipe of your own: reader, model, metrics, test.

examples:
  %(prog)s recipe films
  cd films && dphybrid train --recipe films.recipe:Films

The package trains at once, on made-up ratings; `pip install -e films` makes it a recipe by name.
"""

import argparse
import importlib.util
import keyword
import re
from pathlib import Path

from dphybrid.cli.parser import Parser
from dphybrid.recipes.registry import recipe_names
from dphybrid.util.errors import UserError
from dphybrid.util.files import making

_PACKAGE, _CLASS = "newrecipe", "NewRecipe"
"""What the sample package is called, and its recipe."""
_PLACES = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    "tests/test_{}.py": "test_newrecipe.py.txt",
    **{f"{{}}/{name}.py": f"{name}.py" for name in ("__init__", "reader", "model", "recipe")},
}
"""Where each file of the sample goes; {}: the package."""


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    parser.add_argument("kind", choices=["recipe"], help="what to write")
    parser.add_argument("name", metavar="NAME", help="package and recipe: small letters, digits, underscores")


def run(args: argparse.Namespace) -> int:
    """Write the package into a new folder NAME."""
    name: str = args.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*(?<!_)", name) or keyword.iskeyword(name):
        raise UserError(f"new recipe {name!r}: use small letters, digits and underscores, as in film_ratings")
    if name in recipe_names() or Path(name).exists() or importlib.util.find_spec(name) is not None:
        raise UserError(f"new recipe {name}: a recipe, file or package here has that name; take another")
    folder, title = Path(name), "".join(word.capitalize() for word in name.split("_"))
    texts = {place.format(name): _sample(file, name, title) for place, file in _PLACES.items()}
    with making(folder) as partial:
        for place, text in texts.items():
            (partial / place).parent.mkdir(exist_ok=True)
            (partial / place).write_text(text, encoding="utf-8")
    path = f"{name}.recipe:{title}"
    print(f"{folder}/: {', '.join(texts)}")
    print(f"cd {folder} && dphybrid train --recipe {path}; README.md says more")
    return 0


def _sample(file: str, name: str, title: str) -> str:
    """Return a file of the sample for a package of that name."""
    # found, not imported: the sample's recipe would bring torch
    spec = importlib.util.find_spec(f"dphybrid.recipes.{_PACKAGE}")
    assert spec is not None
    assert spec.origin is not None
    # Its lint marks are for this project's rules.
    text = Path(spec.origin).with_name(file).read_text(encoding="utf-8")
    return re.sub(r"  # noqa: \w+", "", text).replace(_PACKAGE, name).replace(_CLASS, title)
