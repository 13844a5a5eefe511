"""Which code the page of a run or checkpoint may name: any in one's own, allowed packages in others'."""

import os
from collections.abc import Mapping
from pathlib import Path

from dphybrid.config.settings import Settings
from dphybrid.util.importing import check_import

_CODE_FIELDS = ("recipe", "model.factory", "train.callbacks")
"""Fields of a config that name code as package.module:NAME."""


def check_code(
    config: Mapping[str, object], page: Path, settings: Settings, known: Mapping[str, object]
) -> None:
    """Raise UserError when a page that this user's runs did not write names code of a package that
    DPHYBRID_FACTORY_PACKAGES does not allow.

    known: values of a config that the user gave; code that it names as well is the user's choice.
    """
    if _is_own(page, settings):
        return
    chosen = {path for field in _CODE_FIELDS for path in _named(known, field)}
    for field in _CODE_FIELDS:
        for path in _named(config, field):
            if path not in chosen:
                check_import(
                    path, f"{page}: none of your own runs wrote it; {field}", settings.factory_packages
                )


def _named(config: Mapping[str, object], field: str) -> list[str]:
    """Return the import paths in a field; the name of an installed recipe is none."""
    value: object = config
    for part in field.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    values = value if isinstance(value, list | tuple) else [value]
    return [text for text in values if isinstance(text, str) and ":" in text]


def _is_own(page: Path, settings: Settings) -> bool:
    """Did this user's own runs write a page, or record it in the embedded store?"""
    place = page.resolve()
    roots = (settings.runs_dir, settings.mlflow_dir)
    return any(place.is_relative_to(root.resolve()) for root in roots) and place.stat().st_uid == os.getuid()
