"""Columns of bags: their items, the same numbers on any devices, and growth."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from dphybrid.data import Prepared, open_prepared
from dphybrid.data.table.encoder import Encoder
from dphybrid.data.table.kinds import Column
from dphybrid.parallel import resolve_devices
from dphybrid.recipes import ModelContext, find_recipe
from dphybrid.recipes.configs import load_config
from dphybrid.run.pages import Report
from dphybrid.run.trainer import warm_start
from dphybrid.serving.load import model_from_checkpoint
from dphybrid.serving.predict import Predictor, tensors_of
from dphybrid.training.checkpoint import read_state
from tests.commands import run_with
from tests.conftest import own_settings
from tests.preparing import TableDataConfig, from_file, prepare
from tests.refusing import refused

SIZES = ["model.dim=8", "model.hidden=16", "model.layers=1", "model.dropout=0"]


def write(file: Path, rows: list[tuple[object, ...]], header: str = "tags,title,y") -> Path:
    file.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]))
    return file


def made(folder: Path, rows: list[tuple[object, ...]], **values: object) -> Prepared:
    """Prepare rows (tags, title, y)."""
    file = write(folder / "x.csv", rows)
    given = {"header": "yes", "valid_fraction": 0.25, "min_count": 1, "bags": ("tags:|",)}
    return from_file(file, **given | values)


def clicks(num_rows: int, seed: int, tags: range = range(30)) -> list[tuple[object, ...]]:
    """Rows whose label hangs on their tags alone: odd tags are for it, even ones against it."""
    random = np.random.default_rng(seed)
    rows: list[tuple[object, ...]] = []
    for _ in range(num_rows):
        held = random.choice(tags, random.integers(0, 6))
        chance = 1 / (1 + np.exp(-3 * sum(2 * (tag % 2) - 1 for tag in held)))
        tags_of_row = "|".join(f"t{tag}" for tag in held)
        rows.append((tags_of_row, f"Words {random.integers(5)}!", int(random.random() < chance)))
    return rows


def with_shops(rows: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    shops = [n % 10 if n < 2900 else 10 + n % 2 for n in range(len(rows))]
    numbered = enumerate(zip(shops, rows, strict=True))
    return [
        (tags, title, f"s{shop}", f"{n * 7919 % 3001 / 8}", y) for n, (shop, (tags, title, y)) in numbered
    ]


SHOPS = "tags,title,shop,price,y"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Path, Report]]]:
    """Trains on given devices, once on each."""
    folder = tmp_path_factory.mktemp("bags")
    file = write(folder / "a.csv", with_shops(clicks(2000, 0, range(20))), SHOPS)
    values = ["recipe=ctr", f"data.path={file}", "data.bags=tags:|", "data.label=y", "train.epochs=3"]

    @cache
    def on(devices: str) -> tuple[Path, Report]:
        return folder, run_with(*values, f"devices={devices}", "train.batch_size=100", *SIZES)

    with pytest.MonkeyPatch.context() as patch:
        own_settings(patch, folder / "data", TRACKING_URI="none")
        yield on


def test_cells_are_taken_apart() -> None:
    dirty = pl.Series(["a|b", " a | |b|", "||", None, "a", "a|a|b|c", "ä b|c"])
    bag = Column(name="tags", role="bag", max_items=3)
    found = [["a", "b"], ["a", "b"], [], None, ["a"], ["a", "a", "b"], ["ä b", "c"]]
    assert bag.read(dirty).to_list() == found
    assert bag.read(pl.Series([None, "|"], dtype=pl.String)).to_list() == [None, []]
    assert bag.read(pl.Series([12, None])).to_list() == [["12"], []]


def test_vocabulary_and_limits_come_from_the_training_part(tmp_path: Path) -> None:
    held = write(tmp_path / "held.csv", [("a;new;a;a", "x", 1), ("rare", "x", 0)])
    rows = [("a;b;c;a;a", "x", 0), ("a;b", "x", 1), ("a;rare", "", 1), ("", "x", 0)] * 2
    rows[2] = ("a", "x", 1)
    told = {"bags": ("tags:;",), "ignore": ("title",), "delimiter": ",", "min_count": 2, "max_items": 3}
    prepared = made(tmp_path, rows, **told, valid_path=str(held))
    (tags,) = Encoder.load(prepared.path / "encoder").bags
    assert tags.unseen == 0.5
    assert (tags.learned.to_list(), tags.separator, tags.max_items) == (["a", "b", "c"], ";", 3)
    bags_BL = prepared.arrays["bags_BFL"][:, 0]
    # the third holds a rare item (seen once), the last no value
    assert bags_BL[[0, 1, 6, 3]].tolist() == [[2, 3, 4], [2, 3, -1], [2, 1, -1], [0, -1, -1]]
    assert bags_BL[8:].tolist() == [[2, 1, 2], [1, -1, -1]]
    assert "tags: a cell has 5 items; only the first 3 of each are used (data.max" in prepared.describe()


def test_only_items_of_a_bag_are_trained_and_devices_agree(
    trained: Callable[[str], tuple[Path, Report]], tmp_path: Path
) -> None:
    (folder, one), (_, three) = trained("cpu"), trained("cpu*3")
    assert one.metrics["auc"] > 0.8  # the label hangs on the bag alone
    assert three.metrics["log_loss"] == pytest.approx(one.metrics["log_loss"], abs=1e-5)
    assert three.metrics["auc"] == pytest.approx(one.metrics["auc"], abs=1e-3)
    tables = [model_from_checkpoint(report.best_checkpoint).table.weight for report in (one, three)]
    torch.testing.assert_close(*tables, rtol=1e-4, atol=1e-5)
    predictor = Predictor(one.best_checkpoint)
    others = {"title": "Words 1!", "shop": "s1", "price": 9.5}
    tags = ["t1|t3|t5", "t2|t4", "never|seen", "", None]
    scores = predictor.predict({"tags": tags, **{name: [value] * 5 for name, value in others.items()}})
    assert scores[0] > scores[1] + 0.03
    assert scores[3] == scores[4]
    alone = {name: [value] for name, value in others.items()}
    found = [predictor.predict({"tags": [each], **alone})[0] for each in tags]
    assert found == pytest.approx(scores.tolist(), abs=1e-6)  # whatever else the batch holds
    assert predictor.predict_file(folder / "a.csv", tmp_path / "out.parquet").num_rows == 2000


def test_a_grown_model_answers_as_before(trained: Callable[[str], tuple[Path, Report]]) -> None:
    """New items of a bag, and new values of a category; held-out rows stay so."""
    folder, report = trained("cpu")
    base = folder / "data" / read_state(Path(report.best_checkpoint)).prepared
    rows = clicks(2000, 0, range(20)) + clicks(1000, 1, range(10, 30))
    rows[2001] = ("|".join(["t21"] * 9), "new", 1)  # longer than all before
    more = write(folder / "b.csv", with_shops(rows), SHOPS)
    data = TableDataConfig(path=str(more), label="y", base=str(base))
    grown = prepare("ctr", data, folder / "data" / "prepared", 1)
    assert len(grown.arrays["new_rows"]) > 700
    before = open_prepared(base).arrays  # files are read in order, so its rows keep their numbers
    assert not set(before["train_rows"].tolist()) & set(grown.arrays["valid_rows"].tolist())
    assert set(before["valid_rows"].tolist()) < set(grown.arrays["valid_rows"].tolist())
    earlier, now = (Encoder.load(path / "encoder") for path in (base, grown.path))
    assert set(now.bags[0].learned) > set(earlier.bags[0].learned)
    (new,), (old,) = ([c.learned for c in one.columns if c.name == "shop"] for one in (now, earlier))
    assert {*new} - {*old} == {"s10", "s11"}
    assert grown.arrays["bags_BFL"][:, 0].max() == now.bags[0].num_ids - 1 > earlier.bags[0].num_ids
    context = ModelContext(
        resolve_devices("cpu"), grown.info, load_config(None, ["recipe=ctr", *SIZES]).model, 1
    )
    model = find_recipe("ctr").new_model(context).eval()
    warm_start(Path(report.best_checkpoint), model, grown)
    champion = model_from_checkpoint(report.best_checkpoint).eval()
    table = pl.read_csv(more, infer_schema=False)

    def logits(of: torch.nn.Module, encoder: Encoder) -> torch.Tensor:
        with torch.no_grad():
            return of(tensors_of(encoder.encode(table, data.no_value)))["logits"]

    torch.testing.assert_close(logits(champion, earlier), logits(model, now))


@pytest.mark.parametrize("items", [pl.Int64, pl.Categorical])
def test_lists_in_parquet_are_bags(tmp_path: Path, items: type[pl.DataType]) -> None:
    rows = [(str(tags).replace("t", ""), *rest) for tags, *rest in clicks(60, 0)]
    texts = made(tmp_path, rows)
    tags, title, y = zip(*rows, strict=True)
    cells = [[None, *cell.split("|"), None] if cell else [] for cell in tags]
    lists = pl.Series("tags", cells, dtype=pl.List(pl.String)).cast(pl.List(items))
    pl.DataFrame({"tags": lists, "title": title, "y": y}).write_parquet(tmp_path / "x.parquet")
    lists = from_file(tmp_path / "x.parquet", valid_fraction=0.25, min_count=1)
    assert re.search(r"^ *tags +bag .*\(lists", lists.describe(), re.MULTILINE), lists.describe()
    for name in ("bags_BFL", "labels_B"):
        assert np.array_equal(lists.arrays[name], texts.arrays[name])


def test_items_of_lists_may_hold_a_separator(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    lists = pl.DataFrame({"tags": [["a|b", "c"]] * 40, "y": [0, 1] * 20})
    for table in (lists, lists.cast({"tags": pl.Array(pl.String, 2)})):
        table.write_parquet(file)
        (tags,) = Encoder.load(from_file(file).path / "encoder").bags
        assert tags.learned.to_list() == ["a|b", "c"]


_ROLES = ("numeric", "times", "categorical")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label": "tags"}, "data.label='tags': holds lists; name a column of single values"),
        ({"weight": "tags"}, "data.weight='tags': holds lists"),
        ({"split": "key", "split_column": "tags"}, "data.split_column='tags': holds lists"),
        *(({field: ("tags",)}, r"'tags': List\(String\) is no single value") for field in _ROLES),
    ],
)
def test_lists_are_read_as_bags_alone(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    pl.DataFrame({"tags": [["a", "b"]] * 40, "y": [0, 1] * 20}).write_parquet(tmp_path / "x.parquet")
    with refused(message):
        from_file(tmp_path / "x.parquet", **{"label": "y", **fields})


def test_lists_in_a_column_of_single_values_are_refused_later(tmp_path: Path) -> None:
    for name, cells in (("a", ["u", "v"] * 20), ("b", [["u"], ["v"]] * 20)):
        pl.DataFrame({"x": cells, "y": [0, 1] * 20}).write_parquet(tmp_path / f"{name}.parquet")
    with refused("columns of other types: 'x' holds lists in some files only; write one type"):
        from_file(tmp_path, label="y", min_count=1)
    encoder = Encoder.load(from_file(tmp_path / "a.parquet").path / "encoder")
    with refused(r"column 'x' holds List\(String\), but training had single values"):
        encoder.encode(pl.DataFrame({"x": [["u"]]}), ())
