"""One way to hash texts."""

from __future__ import annotations

import hashlib


def digest_of(*texts: str) -> str:
    """Hash texts in this order, each kept apart from the next: SHA-256, hexadecimal."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
