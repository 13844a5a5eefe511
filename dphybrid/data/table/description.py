"""What preparing a table tells people: its columns with their roles, its parts, and what was left out."""

from collections.abc import Mapping
from typing import Any

from dphybrid.config.tables import ROLE_FIELDS, TableDataConfig
from dphybrid.data.table.encode import TableEncoder
from dphybrid.data.table.labels import Label
from dphybrid.data.table.reading import Table

UNSEEN_TOLD = 0.0005
"""Share of validation values without a training row from which on a person is told."""


def description(
    data: TableDataConfig,
    table: Table,
    encoder: TableEncoder,
    split: Mapping[str, Any],
    unseen: Mapping[str, float],
) -> list[str]:
    """Return what a table was taken for, in lines for people. split: rows of the parts, and their rates of a
    binary label. unseen: by column, the share of validation values that no training row has."""
    num_ids = {column["name"]: column["num_ids"] for column in encoder.id_columns}
    columns = table.columns
    wide = max(len("column"), *(len(_escaped(column.name)) for column in columns))
    lines = [
        f"  {data.path}: {len(table.answers_B):,} rows, label {table.label!r}: "
        f"{_label_text(encoder.answer, data)}"
    ]
    lines += [f"  {'column':<{wide}}  role            ids  values such as"]
    for column in columns:
        samples = ", ".join(_shown(text) for text in column.samples)
        reason = f"  ({column.reason})" if column.reason else ""
        lines.append(
            f"  {_escaped(column.name):<{wide}}  {column.role:<11} {num_ids.get(column.name, 0):>7,}  "
            f"{samples}{reason}"
        )
    rates = {part: split.get(f"{part}_label_rate") for part in ("train", "valid")}
    lines.append(
        f"  {split['train_rows']:,} rows to train"
        + ("" if rates["train"] is None else f" ({rates['train']:.1%} of them 1)")
        + f", {split['valid_rows']:,} to validate"
        + ("" if rates["valid"] is None else f" ({rates['valid']:.1%})")
        + f", {sum(num_ids.values()):,} table rows"
    )
    lines.append(f"  {table.split.text}")
    if new := {
        name: share
        for name, share in sorted(unseen.items(), key=lambda item: -item[1])[:5]
        if share >= UNSEEN_TOLD
    }:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in new.items())
        lines.append(f"  validation values that no training row has: {shares}")
    for name, (cells, items) in table.left_out.items():
        lines.append(
            f"  {name}: {cells:,} cells hold more items than are looked up, {items:,} items are left "
            "out; max_items in schema.toml"
        )
    lines.append(
        f"  Other roles: {', '.join(f'--data.{field}' for field in ROLE_FIELDS)} with column names, or "
        "--data.schema-file with an edited schema.toml of this folder; without a header columns are "
        "named 0, 1, ..."
    )
    if table.unlabelled:
        lines.append(
            f"  {table.unlabelled:,} rows without a value of {table.label!r} are left out: they have no "
            "answer to learn"
        )
    if data.weight:
        zero = f"; {table.weightless:,} rows with a weight of 0 are left out" if table.weightless else ""
        lines.append(f"  weights of rows, in loss and metrics: {data.weight}{zero}")
    if table.rejected:
        lines.append(
            f"  {len(table.rejected)} rows rejected: rejected.jsonl in the prepared folder says which and why"
        )
    return lines


def _label_text(answer: Label, data: TableDataConfig) -> str:
    """Say what the label was taken for."""
    if answer.task == "binary":
        return f"{answer.classes[1]!r} is 1, {answer.classes[0]!r} is 0"
    if answer.task == "multiclass":
        shown = ", ".join(_shown(repr(name)) for name in answer.classes[:8])
        text = f"{len(answer.classes)} classes, {shown}" + ", ..." * (len(answer.classes) > 8)
    elif answer.task == "counts":
        text = f"mean {answer.scale:.6g} in training"
    else:
        text = f"mean {answer.offset:.6g}, standard deviation {answer.scale:.6g} in training"
    told = "as data.task says" if data.task != "auto" else "--data.task overrules"
    return f"{answer.task} ({told}): {text}"


def _shown(text: str) -> str:
    return _escaped(text if len(text) <= 24 else text[:21] + "...")


def _escaped(text: str) -> str:
    """Return a text with line ends and other signs that move a terminal's cursor written out."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
