"""The summary of a prepared table: columns and roles, both parts, what to check, what was left out."""

from collections.abc import Mapping

from dphybrid.data.table.encoder import Encoder
from dphybrid.data.table.reading import Table

_UNSEEN_TOLD = 0.0005
"""The summary names a column when more than this share of its validation values has no training row."""


def description(
    table: Table, encoder: Encoder, split_text: str, sizes: Mapping[str, object], unseen: Mapping[str, float]
) -> list[str]:
    """Return how a table was read, in lines for people. sizes: rows of the parts, and their rates of a
    binary label. unseen: by column, the share of validation values that no training row has."""
    data, label = table.plan.data, encoder.label
    overruled = "as data.task says" if data.task != "auto" else "--data.task overrules"
    how = "" if label.task == "binary" else f"{label.task} ({overruled}): "
    lines = [
        f"  {data.path}: {table.num_rows:,} rows, label {label.name!r}: {how}{_escaped(label.told())}",
        *_column_lines(table, encoder),
    ]
    rates = {part: sizes.get(f"{part}_label_rate") for part in ("train", "valid")}
    rows = sum(column["num_ids"] for column in encoder.id_columns)
    lines.append(
        f"  {sizes['train_rows']:,} rows to train"
        + ("" if rates["train"] is None else f" ({rates['train']:.1%} positive)")
        + f", {sizes['valid_rows']:,} to validate"
        + ("" if rates["valid"] is None else f" ({rates['valid']:.1%})")
        + f", {rows:,} table rows"
    )
    lines.append(f"  {split_text}")
    lines += [
        f"  check {_escaped(look.column.name)}, {look.column.role}: {look.reason}"
        for look in table.plan.looks
        if ";" in look.reason
    ]
    new = sorted(unseen.items(), key=lambda item: -item[1])[:5]
    if shares := ", ".join(f"{name} {share:.1%}" for name, share in new if share >= _UNSEEN_TOLD):
        lines.append(f"  validation values without a training row: {shares}")
    first, *others = data.role_fields() or [""]
    flags = f"--data.{first} NAMES, also {', '.join(others)}; or " if first else ""
    unnamed = "" if table.plan.first.header else " Columns without a header are named 0, 1, ..."
    return [
        *lines,
        *_left_out_lines(table, encoder),
        f"  to change a role: {flags}--data.schema-file with an edited copy of this folder's schema.toml."
        f"{unnamed}",
    ]


def _column_lines(table: Table, encoder: Encoder) -> list[str]:
    num_ids = {column["name"]: column["num_ids"] for column in encoder.id_columns}
    numbers = {column.name: column for column in encoder.numbers}
    rows = []
    for look in table.plan.looks:
        column = look.column
        parts = [part.name for part in numbers[column.name].parts] if column.name in numbers else []
        ids = sum(num_ids.get(name, 0) for name in {column.name, *parts})
        shown = ", ".join(_escaped(t if len(t) <= 24 else t[:21] + "...") for t in look.samples)
        reason = f"  ({look.reason})" if look.reason and ";" not in look.reason else ""
        rows.append((_escaped(column.name), column.role, ids, f"{shown}{reason}"))
    wide = max(len("column"), *(len(name) for name, *_ in rows))
    head = f"  {'column':<{wide}}  role         table rows  values such as"
    return [head, *(f"  {name:<{wide}}  {role:<11} {ids:>11,}  {shown}" for name, role, ids, shown in rows)]


def _left_out_lines(table: Table, encoder: Encoder) -> list[str]:
    data = table.plan.data
    lines = [
        f"  {column.name}: hardly any value comes twice, so all share one embedding; --data.ignore "
        f"{column.name} leaves the column out"
        for column in encoder.categories
        if not len(column.learned) and not column.hash_buckets
    ]
    lines += [
        f"  {bag.name}: {count:,} cells hold more than {bag.max_items} items, the rest is left out; "
        "max_items in schema.toml"
        for bag in encoder.bags
        if (count := table.counts[f"column {bag.name}"])
    ]
    if unlabelled := table.counts["label"]:
        lines.append(
            f"  {unlabelled:,} rows without a value of {table.plan.label.name!r} are left out: they "
            "have no answer to learn"
        )
    if data.weight:
        weightless = table.counts["weight"]
        zero = f"; {weightless:,} rows with a weight of 0 are left out" if weightless else ""
        lines.append(f"  weights of rows, in loss and metrics: {data.weight}{zero}")
    return lines


def _escaped(text: str) -> str:
    """Return a text with line ends and other signs that move a terminal's cursor written out."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
