"""Names that MLflow takes: letters, digits and `_-./: `, at most 250 of them, no empty part between slashes."""

import hashlib
import re
from functools import lru_cache

_MAX = 250
_STRANGE = re.compile(r"[^\w\-./: ]")


@lru_cache(maxsize=4096)
def safe_name(name: str) -> str:
    """Return `name`, or, where MLflow would refuse it, a readable substitute that no other name gets."""
    parts = [part for part in _STRANGE.sub("_", name).split("/") if part not in ("", ".", "..")]
    safe = "/".join(parts).strip() or "_"
    if safe == name and len(name) <= _MAX:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{safe[: _MAX - 7]}-{digest}"
