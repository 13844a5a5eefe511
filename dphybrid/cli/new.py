"""Create a package for a recipe of your own.

examples:
  %(prog)s recipe films
  cd films && dphybrid train --recipe films.recipe:Films

It is a package with reader, model, metrics and test. It can be trained at once, on generated ratings. After
`pip install -e films`, use `--recipe films`.
"""

import importlib.util
import keyword
import re
from pathlib import Path
from typing import Literal

from dphybrid.cli.parser import Command, Positional
from dphybrid.recipes.registry import recipe_names
from dphybrid.util.errors import UserError
from dphybrid.util.files import making

_PACKAGE, _CLASS = "newrecipe", "NewRecipe"
"""The names of the sample's package and recipe class; the user's names replace them."""
_FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    "tests/test_{}.py": "test_newrecipe.py.txt",
    **{f"{{}}/{name}.py": f"{name}.py" for name in ("__init__", "reader", "model", "recipe")},
}
"""Path in the new folder -> file of the sample. {}: the package's name."""


class Flags(Command):
    """The flags of `new`."""

    kind: Positional[Literal["recipe"]]
    """What to create: recipe."""
    name: Positional[str]
    """Name of the package and the recipe: lower-case letters, digits, underscores."""

    def run(self) -> int:
        """Write the package into a new folder NAME."""
        name = self.name
        if not re.fullmatch(r"[a-z][a-z0-9_]*(?<!_)", name) or keyword.iskeyword(name):
            raise UserError(f"new recipe {name!r}: use lower-case letters, digits and _, as in film_club")
        taken = f"new recipe {name}: a recipe, file or package of that name exists; choose another"
        # Any module's name, not only a recipe's: the package would shadow it, or be shadowed.
        if name in recipe_names() or Path(name).exists() or importlib.util.find_spec(name) is not None:
            raise UserError(taken)
        folder, title = Path(name), "".join(word.capitalize() for word in name.split("_"))
        texts = {target.format(name): _sample(file, name, title) for target, file in _FILES.items()}
        try:
            with making(folder) as partial:
                for target, text in texts.items():
                    (partial / target).parent.mkdir(exist_ok=True)
                    (partial / target).write_text(text, encoding="utf-8")
        except FileExistsError as error:  # made by another process meanwhile
            raise UserError(taken) from error
        path = f"{name}.recipe:{title}"
        print(f"{folder}/: {', '.join(texts)}")
        print(f"cd {folder} && dphybrid train --recipe {path}; README.md says more")
        return 0


def _sample(file: str, name: str, title: str) -> str:
    """Return the text of a sample file, with the names of the new package and recipe class."""
    # examples/newrecipe of the sources. Located, not imported: importing its recipe would import torch.
    spec = importlib.util.find_spec(f"dphybrid.{_PACKAGE}")
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).with_name(file).read_text(encoding="utf-8")
    # The noqa marks answer this project's lint rules, which the user's package does not have.
    return re.sub(r"  # noqa: \w+", "", text).replace(_PACKAGE, name).replace(_CLASS, title)
