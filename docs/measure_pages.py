"""Check the size of pages in Chromium: the README has at most two screens, a page of the site at most five,
and no page is wider than a phone.

    python docs/measure_pages.py build/site

It prints the longest pages; the exit code is 1 if a page breaks a rule.
"""

import shutil
import sys
from pathlib import Path

SCREEN = 900
"""Height of a screen in pixels, at a width of 1440."""
PHONE = 390
"""Width of a phone in pixels."""
REFERENCE = ("api", "configure")
"""Pages without a limit: generated from the code with an entry per name, and read through search and table
of contents."""
README = Path(__file__).parent.parent / "README.md"
GITHUB = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>
* { box-sizing: border-box; }
body { margin: 0; font: 16px/1.5 "Noto Sans", Helvetica, Arial, sans-serif; }
article { max-width: 830px; margin: auto; }
article > * { margin: 0 0 16px; }
h1, h2 { margin-top: 24px; padding-bottom: 0.3em; border-bottom: 1px solid; line-height: 1.25; }
h2 { font-size: 1.5em; }
h1 { margin-top: 0; font-size: 2em; }
code { font: 85% "Liberation Mono", monospace; }
img { max-width: 100%; }
pre { padding: 16px; overflow: auto; background: #eee; }
pre code { display: block; line-height: 1.45; }
table { display: block; overflow: auto; border-collapse: collapse; }
th, td { padding: 6px 13px; border: 1px solid; }
</style><article>"""
"""Start of a page with the sizes and fonts that GitHub uses for a README."""
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]


def written(site: Path) -> dict[str, Path]:
    """Return the files of all pages by name. Also writes the README's page, as GitHub would show it."""
    from markdown import markdown

    readme = site / "readme-as-on-github.html"
    text = markdown(README.read_text(encoding="utf-8"), extensions=["tables", "fenced_code"])
    base = f'<base href="{README.parent.as_uri()}/">'  # for the pictures
    readme.write_text(base + GITHUB + text, encoding="utf-8")
    pages = {file.parent.name: file for file in sorted(site.glob("*/index.html"))}
    return {"README": readme, "index": site / "index.html"} | pages


def main(site: Path) -> int:
    """Measure all pages, print the results and return the exit code."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        print("pages not measured: no Chromium is installed")
        return 0
    heights, wrong = dict[str, int](), list[str]()
    with sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=chromium, args=FLAGS).new_page()
        for name, file in written(site).items():
            page.set_viewport_size({"width": 1440, "height": SCREEN})
            page.goto(file.resolve().as_uri())
            # The article, not the document: header and navigation do not count.
            heights[name] = page.evaluate("document.querySelector('article').scrollHeight")
            page.set_viewport_size({"width": PHONE, "height": SCREEN})
            if (width := page.evaluate("document.documentElement.scrollWidth")) > PHONE:
                wrong.append(f"{name}: {width} px wide on a phone of {PHONE}")
    screens = {name: height / SCREEN for name, height in heights.items() if name not in REFERENCE}
    for name, length in sorted(screens.items(), key=lambda item: -item[1]):
        if name == "README" or length > 4:
            print(f"{length:.2f} screens: {name}")
        if length > (2 if name == "README" else 5):
            wrong.append(f"{name}: {length:.2f} screens; split it by task")
    print(*wrong, sep="\n")
    # Fewer than three pages: the folder is not a built site, and nothing was checked.
    return 1 if wrong or len(screens) < 3 else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
