"""Pages: JSON files with a version and a checksum. They are written atomically, and reading a damaged one
raises an error. Paths inside the data folder are written relative to it, so that the folder may be moved."""

from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from dphybrid.util.digests import value_digest
from dphybrid.util.errors import UserError, plain_words
from dphybrid.util.files import read_json, write_json

_SUM = "page_sha256"
_DATA_DIR = "$DPHYBRID_DATA_DIR/"
"""What a path inside the data folder begins with on a page."""


class Page(BaseModel):
    """A file whose values are the fields of a subclass. DEPTH: how many folders above its own the data folder
    is; 0 for a page without paths, or one that may be elsewhere."""

    VERSION: ClassVar[int] = 1
    DEPTH: ClassVar[int] = 0
    # Metrics may be NaN or infinite, which standard JSON cannot represent: write Python's constants.
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    version: int = VERSION

    @classmethod
    def read(cls, path: Path, data_dir: Path | None = None) -> Self:
        """Read a page. data_dir: the data folder of a page without DEPTH. Raises UserError if it is missing,
        damaged, or of a later version."""
        values = read_json(path)
        if not isinstance(values, dict) or values.pop(_SUM, None) != value_digest(values):
            raise UserError(f"{path}: is damaged or was changed by hand (its values do not have its {_SUM})")
        # Before the fields, so that the message names the version and not a field that it has changed.
        if isinstance(version := values.get("version", 1), int) and version > cls.VERSION:
            later = f"has version {version}, this dphybrid reads up to {cls.VERSION}"
            raise UserError(f"{path}: {later}; update dphybrid")
        if root := data_dir or (path.absolute().parents[cls.DEPTH] if cls.DEPTH else None):
            values = _replaced(values, _DATA_DIR, f"{root}/")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the page"
            raise UserError(f"{path}: does not fit {cls.__name__}: {place}: {plain_words(first)}") from error

    def write(self, path: Path, data_dir: Path | None = None) -> None:
        """Write the page atomically and durably. data_dir: as `read` takes it."""
        values = self.model_dump(mode="json")
        if root := data_dir or (path.absolute().parents[self.DEPTH] if self.DEPTH else None):
            values = _replaced(values, f"{root}/", _DATA_DIR)
        write_json(path, {**values, _SUM: value_digest(values)})


def _replaced(value: Any, before: str, after: str) -> Any:
    """Return a JSON value with another beginning of all texts in it that begin with `before`."""
    if isinstance(value, dict):
        return {key: _replaced(each, before, after) for key, each in value.items()}
    if isinstance(value, list):
        return [_replaced(each, before, after) for each in value]
    return (
        after + value.removeprefix(before) if isinstance(value, str) and value.startswith(before) else value
    )
