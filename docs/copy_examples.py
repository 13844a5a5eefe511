"""Copy the code of examples/ into the pages of docs/ that show it, below lines such as

<!-- examples/own_recipe.py:8 -->      from line 8 on
<!-- examples/tutorial.py:toy -->     between `# [start:toy]` and `# [end:toy]`

python docs/copy_examples.py
"""

import re
import textwrap
from pathlib import Path

DOCS = Path(__file__).parent
_COPY = re.compile(
    r"^(<!-- (?P<file>examples/[\w/]+\.py)(?::(?P<part>\w+))? -->\n```python\n)(?P<code>.*?)^```$",
    flags=re.DOTALL | re.MULTILINE,
)


def code_of(file: str, part: str | None) -> str:
    """Return the code of an example: from a line on, of a named part (without its indent), or all of it."""
    text = (DOCS.parent / file).read_text(encoding="utf-8")
    if part and part.isdigit():
        text = "\n".join(text.split("\n")[int(part) - 1 :])
    elif part:
        text = text.partition(f"# [start:{part}]\n")[2].partition(f"# [end:{part}]\n")[0]
    return textwrap.dedent(text.strip("\n")).strip() + "\n"


def copies(page: str) -> list[str]:
    """Return the code that a page's text shows of examples."""
    return [found["code"] for found in _COPY.finditer(page)]


def updated(page: str) -> str:
    """Return a page's text with the code that the examples have now."""
    return _COPY.sub(lambda found: f"{found[1]}{code_of(found['file'], found['part'])}```", page)


if __name__ == "__main__":
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (new := updated(text)) != text:
            path.write_text(new, encoding="utf-8")
            print(f"{path.name}: updated")
