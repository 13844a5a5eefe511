"""Pages: JSON files with a version and a checksum. They are written atomically, and reading a damaged one
raises an error. Paths inside the data folder are written relative to the page's own folder, so that a run's
folder may be renamed or copied, and the data folder moved."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from dphybrid.util.digests import value_digest
from dphybrid.util.errors import UserError, plain_words
from dphybrid.util.files import read_json, write_json

_SUM = "page_sha256"
_HERE = "$HERE/"
"""What a path relative to the page's folder begins with."""


class OtherVersion(UserError):
    """A page that another version of dphybrid wrote: it is not damaged."""


class Page(BaseModel):
    """A file whose values are the fields of a subclass. VERSION: of the subclass. DEPTH: how many folders
    above its own the data folder is; 0 for a page without paths, or one that may be elsewhere."""

    VERSION: ClassVar[int] = 1
    DEPTH: ClassVar[int] = 0
    # Metrics may be NaN or infinite, which standard JSON cannot represent: write Python's constants.
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a page. Raises UserError if it is missing or damaged, and OtherVersion."""
        values = read_json(path)
        if not isinstance(values, dict) or values.pop(_SUM, None) != value_digest(values):
            raise UserError(f"{path}: is damaged or was changed by hand (its values do not have its {_SUM})")
        # Before the fields, so that the message names the version and not a field that it has changed.
        if (version := values.pop("version", 1)) != cls.VERSION:
            reads = f"this dphybrid reads version {cls.VERSION}"
            raise OtherVersion(f"{path}: has version {version}, {reads}; use the dphybrid that wrote it")
        here = os.path.abspath(path.parent)

        def found(text: str) -> str:
            return os.path.normpath(f"{here}/{text.removeprefix(_HERE)}") if text.startswith(_HERE) else text

        try:
            return cls.model_validate(_mapped(found, values))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "the page"
            raise UserError(f"{path}: does not fit {cls.__name__}: {field}: {plain_words(first)}") from error

    def write(self, path: Path, depth: int | None = None) -> None:
        """Write the page atomically and durably. depth: instead of the class's DEPTH."""
        values = {"version": self.VERSION, **self.model_dump(mode="json")}
        here = path.absolute().parent
        if depth := self.DEPTH if depth is None else depth:
            root = f"{here.parents[depth - 1]}/"
            values = _mapped(
                lambda text: _HERE + os.path.relpath(text, here) if text.startswith(root) else text, values
            )
        write_json(path, {**values, _SUM: value_digest(values)})


def _mapped(change: Callable[[str], str], value: Any) -> Any:
    """Return a JSON value with each text in it, except keys, changed."""
    if isinstance(value, dict):
        return {key: _mapped(change, each) for key, each in value.items()}
    if isinstance(value, list):
        return [_mapped(change, each) for each in value]
    return change(value) if isinstance(value, str) else value
