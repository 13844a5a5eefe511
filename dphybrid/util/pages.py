"""Pages: JSON files with a version and a checksum. They are written atomically, and reading a damaged one
raises an error. Paths in the page's own folder and in the data folder are written relative to these, so that
a run's folder may be renamed or copied, and the data folder moved."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from dphybrid.util.digests import value_digest
from dphybrid.util.errors import UserError, plain_words
from dphybrid.util.files import read_json, write_json

_SUM = "page_sha256"


class OtherVersion(UserError):
    """A page that another version of dphybrid wrote: it is not damaged."""


class Page(BaseModel):
    """A file whose values are the fields of a subclass. VERSION: of the subclass. DEPTH: how many folders
    above its own the data folder is; 0 for a page without paths."""

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
        try:
            return cls.model_validate(_moved(values, [pair[::-1] for pair in cls._folders(path)]))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "the page"
            raise UserError(f"{path}: does not fit {cls.__name__}: {field}: {plain_words(first)}") from error

    def write(self, path: Path) -> None:
        """Write the page atomically and durably."""
        values = {"version": self.VERSION, **self.model_dump(mode="json")}
        if self.DEPTH:
            values = _moved(values, self._folders(path))
        write_json(path, {**values, _SUM: value_digest(values)})

    @classmethod
    def _folders(cls, path: Path) -> list[tuple[str, str]]:
        """Return the page's folder and the data folder, each with what paths in it begin with in the file."""
        here, data = (os.path.abspath(path.parent / Path(*[".."] * up)) for up in (0, cls.DEPTH))
        return [(f"{here}/", "$HERE/"), (f"{data}/", "$DATA/")]


def _moved(values: Any, folders: Iterable[tuple[str, str]]) -> Any:
    """Return a JSON value whose texts begin with the second of a pair where they began with the first."""
    text = json.dumps(values)
    for before, after in folders:
        text = text.replace(json.dumps(before)[:-1], json.dumps(after)[:-1])
    return json.loads(text)
