"""Sphinx: a picture with versions for dark pages and for phones is shown in the one that fits.

``NAME-dark.png`` next to ``NAME.png`` is for dark pages, and ``NAME-narrow.png``, which may be dark too, for phones.
``docs/static/narrow.css`` and the theme choose by class.
"""

from pathlib import Path
from typing import Any

from docutils import nodes

# Ending of the name -> the class of the dark or light page, and that of the width.
VERSIONS = {"": "only-light", "-dark": "only-dark"}
WIDTHS = {"": "only-wide", "-narrow": "only-narrow"}


def show_versions(app: Any, doctree: nodes.document) -> None:
    """Put the other versions of each picture next to it."""
    folder = Path(doctree["source"]).parent
    for image in list(doctree.findall(nodes.image)):
        uri = Path(image["uri"])
        if uri.suffix == ".svg":
            image["classes"] += ["chart", "scrolls"]
        if "://" in image["uri"] or not (folder / uri.with_name(f"{uri.stem}-dark{uri.suffix}")).exists():
            continue
        has_narrow = (folder / uri.with_name(f"{uri.stem}-narrow{uri.suffix}")).exists()
        # A wide chart without a narrow version scrolls on a phone.
        widths = WIDTHS if has_narrow else {"": "scrolls"}
        versions = []
        for width, width_class in widths.items():
            for dark, dark_class in VERSIONS.items():
                version = image.copy()
                version["uri"] = str(uri.with_name(f"{uri.stem}{width}{dark}{uri.suffix}").as_posix())
                version["classes"] = [*image["classes"], "chart", dark_class, width_class]
                versions.append(version)
        image.replace_self(versions)


def setup(app: Any) -> None:
    # Before Sphinx collects the files of pictures.
    app.connect("doctree-read", show_versions, priority=100)
