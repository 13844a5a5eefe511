"""`prepare`: from a recipe and its data config to a prepared folder, made once."""

import json
from pathlib import Path

from dphybrid.config import DataConfig
from dphybrid.data.store import ENCODER_VERSION, Prepared, Source, build_once, combined_digest


def prepare(recipe: str, data: DataConfig, folder: Path, seed: int) -> Prepared:
    """Return the prepared data of a recipe under `folder`, building it when it is not there.

    seed: chooses what is held out. The same bytes and values give the same digest on any machine.
    Raises UserError for input that cannot be used; nothing half-made is left then.
    """
    from dphybrid.data import synthetic, table, text

    source: Source
    if recipe == "text":
        source = text.open_source(data, seed)
    elif recipe == "ctr":
        source = table.open_source(data, seed)
    else:
        source = synthetic.open_source(recipe, seed)
    facts = json.dumps({"recipe": recipe, "seed": seed, "encoder": ENCODER_VERSION, **source.options}, sort_keys=True)
    digest = combined_digest([facts.encode(), *source.digests()])
    return build_once(folder, recipe, digest, source.read)
