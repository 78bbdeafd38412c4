"""Programs that write pages, pictures and packaged models of the repository: ``python -m longspan_lab.tools NAME``."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]  # of a clone, whose files these programs read and write
DOCS = ROOT / "docs"
