"""A page of tables and pictures in one file: no server, no network, readable in MLflow's artifact view and from a mail."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path


@dataclass(frozen=True)
class Section:
    """A heading with a note, and a picture (PNG bytes, kept as `file` too) or a table (rows with equal keys)."""

    title: str
    note: str = ""
    file: str = ""
    picture: bytes = b""
    table: Sequence[Mapping[str, str]] = ()

    @property
    def data_uri(self) -> str:
        return f"data:image/png;base64,{base64.b64encode(self.picture).decode()}"


def write_page(folder: Path, title: str, sections: Sequence[Section]) -> Path:
    """Write `index.html` and the pictures into `folder`; return the page."""
    import jinja2

    folder.mkdir(parents=True, exist_ok=True)
    for section in sections:
        if section.picture:
            (folder / section.file).write_bytes(section.picture)
    source = files("dphybrid.tracking").joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    made = datetime.now().strftime("%Y-%m-%d %H:%M")
    page = folder / "index.html"
    page.write_text(environment.from_string(source).render(title=title, sections=sections, made=made), encoding="utf-8")
    return page
