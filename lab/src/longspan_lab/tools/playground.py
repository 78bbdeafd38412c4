"""Draw the playground: ``python -m longspan_lab.tools playground``.

It writes docs/images/playground.png and playground-dark.png, serves the pretrained model of text, and needs
Chromium, Pillow and the extra ``serve``.
"""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from .._utils.plots import dark_path
from . import ROOT

PICTURE = ROOT / "docs" / "images" / "playground.png"
sys.path.insert(0, str(ROOT / "tests"))

Browser: Any = importlib.import_module("browser").Browser  # of the tests


def main() -> None:
    command = [sys.executable, "-m", "longspan", "serve", "text", "--port", "0", "--prefix-mb", "16"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            found = re.search(r"http://\S+?(?=/v1)", server.stdout.readline())
            assert found is not None
            for path, dark in ((PICTURE, False), (dark_path(PICTURE), True)):
                _draw(found.group(), path, dark)
                # A page has few colors.
                Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
                print(path)
        finally:
            server.terminate()


def _draw(url: str, path: Path, dark: bool) -> None:
    fields = {"prompt": "The old man looked at the sea and ", "seed": 3, "temperature": 0.7, "max_tokens": 300}
    with Browser() as browser, browser.page(url, width=900, height=700, dark=dark) as page:
        for name, value in fields.items():
            page.write(f"#{name}", str(value))
        page.click("#run")
        page.until("items[0] && !items[0].control")
        # The beginning of a word.
        page.js("globalThis.cut = items[0].text.lastIndexOf(' ', 94) + 1; items[0].put(cut); items[0].open()")
        page.write(".panel input", "daughter ")
        page.click(".panel button")
        page.until("items[1].text.length > 300")
        page.js("items[0].put(cut); items[0].open(false); scrollTo(0, 0)")
        page.until("!items[0].panel.hidden && items[0].control === null")
        page.picture(path)
