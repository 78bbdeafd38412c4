"""BibTeX entries of the papers of mechanisms."""

import re
import unicodedata

from . import Attention


def bibtex(cls: type[Attention]) -> str:
    """Return the paper of a mechanism as a BibTeX entry."""
    authors, title, year = cls.citation
    family = _letters(re.split(r",| and ", authors)[0])
    # The first word of more than three letters, which skips articles and most prepositions.
    word = next((w for w in map(_letters, title.split()) if len(w) > 3), _letters(title))
    fields = {
        "author": f"{{{authors}}}",
        "title": f"{{{{{title}}}}}",
        "year": f"{{{year}}}",
        "eprint": f"{{{cls.paper}}}",
        "archivePrefix": "{arXiv}",
        "url": f"{{https://arxiv.org/abs/{cls.paper}}}",
    }
    lines = ",\n".join(f"  {name} = {value}" for name, value in fields.items())
    return f"@misc{{{family}{year}{word},\n{lines},\n}}"


def _letters(text: str) -> str:
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]", "", plain.lower())
