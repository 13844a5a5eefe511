"""Names of metrics: those that MLflow takes (letters, digits and `_-./: `, at most 250, no empty part between
slashes), and the finer ones."""

import hashlib
import re
from functools import lru_cache

LEFT_OUT = "left_out.json"
"""Page in a model's folder that names the files that were too large to upload: path, bytes, sha256."""
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


_DETAILS = (
    "timing/",
    "timing_mean/",
    "timing_share/",
    "embedding/",
    "split/",
    "system/",
    "perf/step_ms_",
    "train/lr",
)
_ASKED_FOR = re.compile(r"system/(?:process_rss_mb|gpu\d+_(?:utilization_pct|memory_mb))")


@lru_cache(maxsize=4096)
def is_detail(name: str) -> bool:
    """Tell whether a metric is one that few people look for: it stands in the table of details, unless all
    are asked for."""
    return name.startswith(_DETAILS) and _ASKED_FOR.fullmatch(name) is None
