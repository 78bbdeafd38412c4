"""The playground at ``/``: one static page, and what it must know of the model."""

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .. import states
from .pool import Pool


def about(pool: Pool, codec: Any, grid: tuple[int, ...], max_tokens: int) -> dict[str, Any]:
    """Describe a model: the key ``longspan`` of an entry of ``/v1/models``.

    Args:
        pool: The pool of the model.
        codec: Text to tokens and back; None for a model without text.
        grid: The shape of an image, (height, width) or (height, width, 3), in the order of tokens; () for none.
        max_tokens: The largest ``max_tokens`` of a request.

    Returns:
        ``kind`` (text, image or tokens), ``vocab``, ``max_tokens``, ``slots``, ``forms`` (words of which each text
        begins with one; [] for any text) and ``state_bytes_per_stream``; for images also ``width``, ``height`` and
        ``channels``. Token 0 of an image is black, token vocab-1 is white.
    """
    kind, size = "text" if codec else "image" if grid else "tokens", {}
    if kind == "image":
        height, width, *channels = grid
        size = {"width": width, "height": height, "channels": channels[0] if channels else 1}
    return {
        "kind": kind,
        "vocab": pool.vocab,
        "max_tokens": max_tokens,
        "slots": pool.slots,
        "forms": list(getattr(codec, "forms", ())),
        "state_bytes_per_stream": states.nbytes(pool.state) // pool.slots,
        **size,
    }


async def playground(request: Request) -> Response:
    """GET /: the page. Its own script and style are all that its policy admits."""
    content, policy = _page()
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return Response(content, media_type="text/html; charset=utf-8", headers=headers)


@cache
def _page() -> tuple[str, str]:
    """The page, and the Content-Security-Policy with the hashes of its script and style."""
    content = resources.files("longspan.serving").joinpath("playground.html").read_text(encoding="utf-8")
    parts = {tag: re.findall(rf"<{tag}>(.*?)</{tag}>", content, re.DOTALL) for tag in ("script", "style")}
    rules = [f"{tag}-src {' '.join(map(_hash, found))}" for tag, found in parts.items()]
    policy = ["default-src 'none'", *rules, "connect-src 'self'", "img-src data:", "base-uri 'none'"]
    return content, "; ".join([*policy, "form-action 'none'", "frame-ancestors 'none'"])


def _hash(part: str) -> str:
    digest = hashlib.sha256(part.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
