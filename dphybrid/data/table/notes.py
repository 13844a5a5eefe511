"""What is said of columns of texts that the reader did not type: what they look like, and the option or the
line of polars that types them."""

import polars as pl

from dphybrid.util.text import as_flags

_LOOKED_AT = 10_000
_MOSTLY = 0.95
"""Share of the texts that must be numbers, or look like dates, for something to be said."""
_FEW_OTHERS = 3
_STARTS_LIKE = r"^\W*(?:[A-Z]{2,3}\W)?\d|^[A-Za-z]{3,9} \d"
"""Begins with a digit, perhaps behind a sign or a currency, or with the name of a month."""
_DATES = (
    r"^(?:\d{4}[/.-]\d{1,2}[/.-]\d{1,2}|\d{1,2}[/.-](?:\d{1,2}|[A-Za-z]{3})[/.-](?:\d{4}|\d{2})"
    r"|[A-Za-z]{3,9} \d{1,2},? \d{4}|\d{1,2} [A-Za-z]{3,9} \d{4})(?:[ T,]|$)"
)
_GROUPS = r"^[^\d,]*\d{1,3}(?:,\d{3})+(?:\.\d+)?[^\d,]*$"


def remedy(name: str, texts: pl.Series) -> str:
    """Return what a column of texts looks like, and what types it; empty if it holds plain categories. texts:
    stripped, None for no value."""
    known = texts.drop_nulls()
    known = known.gather_every(1 + len(known) // _LOOKED_AT)
    if not len(known):
        return ""
    column = f'pl.col("{name}")'
    if known.str.contains(r"(?s)^\[.*\]$").all():
        return f"lists in brackets; {column}.str.json_decode(pl.List(pl.String))"
    odd = known.filter(known.cast(pl.Float64, strict=False).is_null())
    if not len(odd):
        zeros = known.str.contains(r"^-?0\d").any()
        return "" if zeros else f"numbers written as texts; {column}.cast(pl.Float64, strict=False)"
    if len(odd) < len(known) and (
        len(odd) <= (1 - _MOSTLY) * len(known) or (odd.n_unique() == 1 and 2 * len(odd) < len(known))
    ):
        values = odd.unique(maintain_order=True).head(_FEW_OTHERS).to_list()
        shown = ", ".join(map(repr, values))
        flag = as_flags({"data.missing": values})
        return f"numbers, but {shown} among them; {flag} if that is no value, else correct it"
    if _share(known.str.contains(_STARTS_LIKE)) < _MOSTLY:
        return ""
    if _share(known.str.contains(_DATES)) >= _MOSTLY:
        line = f"{column}.str.to_datetime(FORMAT, strict=False)"
        return f"dates such as {known[0]!r}; --data.dateformat FORMAT, or {line}"
    has_groups = _share(known.str.contains(_GROUPS)) > 0.5
    if not has_groups and _share(known.str.contains(r"^[^\d,]*\d+,\d+\D*$")) > 0.5:
        return f"numbers with decimal commas, such as {known[0]!r}; --data.decimal ,"
    numbers = known.str.replace_all(r"[^\d.-]", "").cast(pl.Float64, strict=False)
    has_units = known.str.extract(r"([A-Za-z%°]+)\W*$").n_unique() > 1
    if has_units or known.str.contains(r"\d[-:/ ]\d|^0\d").any() or _share(numbers.is_not_null()) < _MOSTLY:
        return ""
    line = f'{column}.str.replace_all(r"[^\\d.-]", "").cast(pl.Float64, strict=False)'
    return f"numbers with signs, such as {known[0]!r}; {line}"


def _share(mask: pl.Series) -> float:
    return float(mask.mean() or 0)  # type: ignore[arg-type]
