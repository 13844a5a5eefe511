"""What to try after a run that loses to a baseline, by its data, its columns and its curve: three lines."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from dphybrid.config import ExperimentConfig, fields_of
from dphybrid.data.table.whole import AMOUNTS

_MANY_UNSEEN = 0.3
"""A column is doubtful if so many of its validation values have no training row."""
_FEW_ROWS = 5000
"""With fewer training rows, a smaller network overfits less."""


def advice(
    config: ExperimentConfig,
    facts: Mapping[str, Any],
    num_rows: int,
    importance: Mapping[str, float],
    best_epoch: int,
    epochs: int,
) -> list[str]:
    """Return what to try, as sentences with flags. facts: the manifest's facts about the columns. num_rows:
    of the training split. best_epoch: counted from 1. epochs: how many were trained."""
    lines = [_columns(facts, importance), _epochs(config, best_epoch, epochs), _network(config, num_rows)]
    return [line for line in lines if line]


def _columns(facts: Mapping[str, Any], importance: Mapping[str, float]) -> str:
    """Return which columns to read otherwise; empty for data without columns."""
    columns: Sequence[Mapping[str, Any]] = facts.get("columns", ())
    if not columns:
        return ""
    unseen = max(facts.get("unseen", {}).items(), key=lambda item: item[1], default=("", 0.0))
    needless = [name for name, lost in importance.items() if lost <= 0]
    amounts = [str(column["name"]) for column in columns if AMOUNTS in str(column.get("reason", ""))]
    if lists := [str(column["name"]) for column in columns if _looks_like_lists(column)]:
        names = ",".join(lists[:4])
        return f"columns: cells of {names} look like lists of values; try --data.bags {names}"
    if unseen[1] >= _MANY_UNSEEN:
        return (
            f"columns: {unseen[1]:.0%} of the validation values of {unseen[0]} have no training row; try "
            f"--data.ignore {unseen[0]}"
        )
    if amounts:
        names = ",".join(amounts[:4])
        return f"columns: whole numbers are read as amounts; if they are ids, --data.categorical {names}"
    if needless:
        names = ",".join(needless[:4])
        return f"columns: shuffling these does not harm validation; try --data.ignore {names}"
    return "columns: dphybrid prepare shows how each is read; --data.bags, --data.categorical, ... change it"


def _looks_like_lists(column: Mapping[str, Any]) -> bool:
    return column["role"] == "categorical" and any(
        mark in str(text) for text in column.get("samples", ()) for mark in "|;"
    )


def _epochs(config: ExperimentConfig, best_epoch: int, epochs: int) -> str:
    rate = config.train.lr
    if best_epoch >= epochs:
        return f"epochs: the last of {epochs} was the best; try --train.epochs {max(2 * epochs, 4)}"
    if best_epoch <= 2:
        why = "it learns too fast"
        return f"epochs: the best was {best_epoch} of {epochs}, {why}; try --train.lr {rate / 3:.2g}"
    return (
        f"epochs: the best was {best_epoch} of {epochs}, so more do not help; try --train.lr {rate / 2:.2g}"
    )


def _network(config: ExperimentConfig, num_rows: int) -> str:
    """Return which network to try; empty for a model without kinds."""
    fields, model = fields_of(type(config.model)), config.model.model_dump()
    if num_rows < _FEW_ROWS and model.get("hidden", 0) > 32:
        return f"network: {num_rows:,} rows are few for it; try --model.hidden 32 --model.dim 4"
    if "kind" not in fields or get_origin(fields["kind"].annotation) is not Literal:
        return ""
    others = [kind for kind in get_args(fields["kind"].annotation) if kind not in (model["kind"], "auto")]
    return f"network: {model['kind']} is one of several; try --model.kind {' or '.join(others[:3])}"
