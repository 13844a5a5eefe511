"""Writes examples/tutorial.ipynb: the cells of tutorial.py, executed on three virtual devices.

    python -m examples.make_notebook        # needs nbformat, nbclient and ipykernel

A cell of the script becomes a heading and a code cell. The lines of its last cell, the calls, become code
cells after the definitions that they use. Do not edit the notebook by hand.
"""

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("tutorial.py")
NOTEBOOK = SCRIPT.with_suffix(".ipynb")
_DEVICES = """import os

os.environ.setdefault("DPHYBRID_DEVICES", "cpu*3");  # three virtual devices; "auto" takes your GPUs"""


def cells_of(script: str) -> list[tuple[str, str]]:
    """Return the notebook's cells as (kind, text); kind is "markdown" or "code"."""
    head, *sections, last = script.split("# %%\n")
    title = ast.get_docstring(ast.parse(head)) or ""
    cells = [("markdown", f"# Tutorial\n\n{title.splitlines()[0]}"), ("code", _DEVICES)]
    # The body of `if __name__ == "__main__":`.
    calls = textwrap.dedent(last.partition(":\n")[2]).splitlines()
    for section in sections:
        # Without the marks with which the documentation includes parts of the script.
        code = re.sub(r"^# \[(?:start|end):.*\n", "", section, flags=re.MULTILINE).strip()
        sentence, _, code = code.partition("\n")
        heading, _, rest = sentence.removeprefix("# ").partition(": ")
        cells += [("markdown", f"## {heading}\n\n{rest[:1].upper()}{rest[1:]}"), ("code", code)]
        # The calls up to the last one that uses this section's definitions go below it.
        defined = {getattr(node, "name", "") for node in ast.parse(code).body} - {""}
        end = max(number for number, call in enumerate(calls, 1) if any(name in call for name in defined))
        cells.append(("code", "\n".join(calls[:end]) + ";"))  # the semicolon hides the returned value
        calls = calls[end:]
    return cells


def executed(cells: list[tuple[str, str]]) -> Any:
    """Return the notebook of these cells, executed."""
    import nbformat
    from nbclient import NotebookClient

    new = nbformat.v4
    page = new.new_notebook(
        cells=[
            (new.new_markdown_cell if kind == "markdown" else new.new_code_cell)(text, id=f"cell-{number}")
            for number, (kind, text) in enumerate(cells)
        ],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    NotebookClient(page, timeout=300, kernel_name="python3", record_timing=False).execute()
    # It names the version of the Python that ran the notebook, which would differ each time.
    page.metadata.pop("language_info", None)
    return page


def printed(page: Any) -> str:
    """Return what the code cells of a notebook printed."""
    outputs = [out for cell in page.cells if cell.cell_type == "code" for out in cell.outputs]
    return "".join(out.text for out in outputs if out.output_type == "stream")


if __name__ == "__main__":
    import nbformat

    nbformat.write(executed(cells_of(SCRIPT.read_text(encoding="utf-8"))), NOTEBOOK)
    print(NOTEBOOK)
