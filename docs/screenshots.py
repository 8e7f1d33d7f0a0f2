"""Pictures of a report page for the docs: `python docs/screenshots.py PAGE.html` writes docs/images/page-*.png.

Needs playwright, pillow and a Chromium.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import BrowserContext, sync_playwright

IMAGES = Path(__file__).parent / "images"
# name: width and height of what is shown, and whether it is dark
PICTURES = {"desktop": (1100, 2500, "light"), "phone": (360, 1560, "light"), "dark": (1100, 1250, "dark")}
FLAGS = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync".split()


def main(page: Path) -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, sync_playwright() as playwright:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        context = playwright.chromium.launch_persistent_context(profile, executable_path=program, args=FLAGS)
        for name in PICTURES:
            take(context, page, name)
        context.close()


def take(context: BrowserContext, page: Path, name: str) -> None:
    width, height, scheme = PICTURES[name]
    view = context.new_page()
    view.set_viewport_size({"width": width, "height": height})
    view.emulate_media(color_scheme=scheme)
    view.goto(page.resolve().as_uri())
    file = IMAGES / f"page-{name}.png"
    view.screenshot(path=file)
    Image.open(file).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file.name}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
