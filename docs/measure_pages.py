"""Measure the pages of a built site in Chromium: at most three screens each, and no scrolling sideways.

    python docs/measure_pages.py build/site

It prints the longest pages; the exit code is 1 when a page breaks a rule.
"""

import shutil
import sys
from pathlib import Path

SCREEN = 900
"""Pixels of a screen's height, 1440 wide."""
PHONE = 390
REFERENCE = ("api", "api-recipes", "api-embedding", "api-parallel")
"""Pages without a limit: generated from docstrings, an entry a name, read by search and table of contents."""
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]


def main(site: Path) -> int:
    """Measure; return the exit code."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        print("pages not measured: no Chromium is installed")
        return 0
    heights, wrong = dict[str, int](), list[str]()
    with sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=chromium, args=FLAGS).new_page()
        for file in sorted([site / "index.html", *site.glob("*/index.html")]):
            name = file.parent.name if file.parent != site else "index"
            page.set_viewport_size({"width": 1440, "height": SCREEN})
            page.goto(file.resolve().as_uri())
            heights[name] = page.evaluate("document.querySelector('article').scrollHeight")
            page.set_viewport_size({"width": PHONE, "height": SCREEN})
            if (width := page.evaluate("document.documentElement.scrollWidth")) > PHONE:
                wrong.append(f"{name}: {width} px wide on a phone of {PHONE}")
    limited = {name: height for name, height in heights.items() if name not in REFERENCE}
    for name, height in sorted(limited.items(), key=lambda item: -item[1])[:5]:
        print(f"{height / SCREEN:.2f} screens: {name}")
        if height > 3 * SCREEN:
            wrong.append(f"{name}: {height / SCREEN:.2f} screens; split it by task")
    print(*wrong, sep="\n")
    return 1 if wrong or len(limited) < 2 else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
