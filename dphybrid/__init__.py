"""Hybrid models: embedding tables in host memory, dense blocks data-parallel on GPUs, every batch split
recorded."""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

# `python -m dphybrid` puts the working folder first among the places of imports, and others may be able to
# write there. While Python looks for the module to run, sys.argv[0] is -m.
_MODULE = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] if sys.argv[:1] == ["-m"] else []
if any(name.partition(".")[0] == __name__ for name in _MODULE) and not sys.flags.safe_path:
    del sys.path[0]

# Where other processes compute, too, OpenMP's threads must sleep while they wait for one another, not spin:
# spinning made steps of some milliseconds 4 to 20 times as long. Read by torch when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Without this, a product's last bits depend on where its inputs lie in memory: MKL takes other instructions
# for addresses that are no multiple of 64. Read by MKL at its first product.
os.environ.setdefault("MKL_CBWR", "AUTO")

# Servers of this machine are reached directly, whatever proxy leads to others.
if any(name.lower().endswith("_proxy") for name in os.environ):
    _direct = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    _direct += [host for host in ("127.0.0.1", "localhost") if host not in _direct]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, _direct))

if TYPE_CHECKING:
    from dphybrid.api.estimator import HybridClassifier, HybridRegressor
    from dphybrid.api.run import runs, tracking_uri
    from dphybrid.api.training import train
    from dphybrid.serving.load import load_model
    from dphybrid.serving.predict import load

__version__ = "0.1.0"
__all__ = [
    "HybridClassifier",
    "HybridRegressor",
    "__version__",
    "load",
    "load_model",
    "runs",
    "tracking_uri",
    "train",
]

_PLACES = {
    "HybridClassifier": "dphybrid.api.estimator",
    "HybridRegressor": "dphybrid.api.estimator",
    "load": "dphybrid.serving.predict",
    "load_model": "dphybrid.serving.load",
    "runs": "dphybrid.api.run",
    "tracking_uri": "dphybrid.api.run",
    "train": "dphybrid.api.training",
}
"""Public name -> the module that defines it, imported on first use. So `import dphybrid` loads neither torch
nor polars nor scikit-learn."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'dphybrid' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


# Without this, tab completion in notebooks would not offer a name before its first use.
def __dir__() -> list[str]:
    return [*globals(), *_PLACES]
