"""Columns of bags: their items, the same numbers on any devices, and growth."""

import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from dphybrid.data import Prepared, open_prepared
from dphybrid.data.table.encoder import Encoder, old_ids
from dphybrid.data.table.kinds import Column
from dphybrid.data.table.values import PADDING_ID
from dphybrid.parallel import resolve_devices
from dphybrid.recipes import ModelContext, find_recipe
from dphybrid.recipes.configs import load_config
from dphybrid.run.pages import Report
from dphybrid.run.trainer import warm_start
from dphybrid.serving.load import model_from_checkpoint
from dphybrid.serving.predict import Predictor
from dphybrid.training.checkpoint import read_state
from tests.commands import run_with
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


def trained(devices: str, data: list[str]) -> Report:
    values = ["recipe=ctr", f"devices={devices}", "data.label=y", "train.epochs=3", "train.batch_size=100"]
    return run_with(*values, *SIZES, *data)


@pytest.fixture
def quiet(unrecorded: None, tmp_path: Path) -> Path:
    return tmp_path


def test_cells_are_taken_apart() -> None:
    dirty = pl.Series(["a|b", " a | |b|", "||", None, "a", "a|a|b|c", "ä b|c"])
    bag = Column(name="tags", role="bag", max_items=3)
    found = [["a", "b"], ["a", "b"], [], None, ["a"], ["a", "a", "b"], ["ä b", "c"]]
    assert bag.read(dirty).to_list() == found
    assert bag.read(pl.Series([None, "|"], dtype=pl.String)).to_list() == [None, []]
    assert bag.read(pl.Series([12, None])).to_list() == [["12"], []]
    lists = Column(name="tags", role="bag", separator="[]").read(
        pl.Series(['["a", "b"]', "['c', None]", "d", "[1, 2]"])
    )
    assert lists.to_list() == [["a", "b"], ["c"], ["d"], ["1", "2"]]


def test_vocabulary_and_limits_come_from_the_schema_and_the_training_part(tmp_path: Path) -> None:
    held = write(tmp_path / "held.csv", [("a;new;a;a", "x", 1), ("rare", "x", 0)])
    rows = [("a;b;c;a;a", "x", 0), ("a;b", "x", 1), ("a;rare", "", 1), ("", "x", 0)] * 2
    rows[2] = ("a", "x", 1)
    schema = tmp_path / "s.toml"
    text = '[columns.tags]\nrole = "bag"\nseparator = ";"\nmax_items = 3\n'
    schema.write_text(text)
    told = {"bags": (), "ignore": ("title",), "delimiter": ",", "min_count": 2}
    told |= {"schema_file": str(schema), "valid_path": str(held)}
    prepared = made(tmp_path, rows, **told)
    (tags,) = Encoder.load(prepared.path / "encoder").bags
    assert tags.unseen == 0.5
    assert (tags.learned.to_list(), tags.separator, tags.max_items) == (["a", "b", "c"], ";", 3)
    assert 'separator = ";"\nmax_items = 3' in (prepared.path / "schema.toml").read_text()
    bags_BL = prepared.arrays["bags_BFL"][:, 0]
    # the third holds a rare item (seen once), the last no value
    assert bags_BL[[0, 1, 6, 3]].tolist() == [[2, 3, 4], [2, 3, -1], [2, 1, -1], [0, -1, -1]]
    assert bags_BL[8:].tolist() == [[2, 1, 2], [1, -1, -1]]
    assert "tags: a cell has 5 items; only the first 3 of each are used (max_items" in prepared.describe()


def test_only_items_of_a_bag_are_trained_and_devices_agree(quiet: Path) -> None:
    file = write(quiet / "x.csv", clicks(3000, 0))
    data = [f"data.path={file}", "data.bags=tags:|"]
    one = trained("cpu", data)
    three = trained("cpu*3", data)
    assert one.metrics["auc"] > 0.85  # the label hangs on the bag alone
    assert three.metrics["log_loss"] == pytest.approx(one.metrics["log_loss"], abs=1e-5)
    assert three.metrics["auc"] == pytest.approx(one.metrics["auc"], abs=1e-3)
    tables = [model_from_checkpoint(report.best_checkpoint).table.weight for report in (one, three)]
    torch.testing.assert_close(*tables, rtol=1e-4, atol=1e-5)
    predictor = Predictor(one.best_checkpoint)
    tags = ["t1|t3|t5", "t2|t4", "never|seen", "", None]
    scores = predictor.predict({"tags": tags, "title": ["Words 1!"] * 5})
    assert scores[0] > scores[1] + 0.1
    assert scores[3] == scores[4]
    alone = [predictor.predict({"tags": [each], "title": ["Words 1!"]})[0] for each in tags]
    assert alone == pytest.approx(scores.tolist(), abs=1e-6)  # whatever else the batch holds
    assert predictor.predict_file(str(file), quiet / "out.parquet").num_rows == 3000


def test_a_grown_model_answers_as_before(quiet: Path) -> None:
    """New items of a bag, and new values of a category; held-out rows stay so."""

    def with_shops(rows: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
        shops = [n % 10 if n < 2900 else 10 + n % 2 for n in range(len(rows))]
        numbered = enumerate(zip(shops, rows, strict=True))
        return [
            (tags, title, f"s{shop}", f"{n * 7919 % 3001 / 8}", y) for n, (shop, (tags, title, y)) in numbered
        ]

    header = "tags,title,shop,price,y"
    first = write(quiet / "a.csv", with_shops(clicks(2000, 0, range(20))), header)
    both = [f"data.path={first}", "data.bags=tags:|"]
    report = trained("cpu", both)
    base = quiet / "data" / read_state(Path(report.best_checkpoint)).prepared
    rows = clicks(2000, 0, range(20)) + clicks(1000, 1, range(10, 30))
    rows[2001] = ("|".join(["t21"] * 9), "new", 1)  # longer than all before
    more = write(quiet / "b.csv", with_shops(rows), header)
    data = TableDataConfig(path=str(more), label="y", base=str(base))
    grown = prepare("ctr", data, quiet / "data" / "prepared", 1)
    assert len(grown.arrays["new_rows"]) > 700
    before = open_prepared(base).arrays  # files are read in order, so its rows keep their numbers
    assert not set(before["train_rows"].tolist()) & set(grown.arrays["valid_rows"].tolist())
    assert set(before["valid_rows"].tolist()) < set(grown.arrays["valid_rows"].tolist())
    earlier, now = (Encoder.load(path / "encoder") for path in (base, grown.path))
    assert set(now.bags[0].learned) > set(earlier.bags[0].learned)
    (new,), (old,) = ([c.learned for c in one.columns if c.name == "shop"] for one in (now, earlier))
    assert {*new} - {*old} == {"s10", "s11"}
    assert grown.arrays["bags_BFL"][:, 0].max() == now.bags[0].num_ids - 1 > earlier.bags[0].num_ids
    config = load_config(None, ["recipe=ctr", *SIZES])
    model = (
        find_recipe("ctr").new_model(ModelContext(resolve_devices("cpu"), grown.info, config.model, 1)).eval()
    )
    warm_start(Path(report.best_checkpoint), model, grown)
    champion = model_from_checkpoint(report.best_checkpoint).eval()
    ids_BF, bags_BFL = (np.array(grown.arrays[name]) for name in ("ids_BF", "bags_BFL"))
    ids = old_ids(earlier, now)
    old_BF = np.stack([ids[f][ids_BF[:, f]] for f in range(ids_BF.shape[1])], axis=1)
    bags = enumerate(ids[ids_BF.shape[1] :])
    old_BFL = np.stack(
        [np.where(bags_BFL[:, f] < 0, PADDING_ID, own[bags_BFL[:, f]]) for f, own in bags], axis=1
    )

    def logits(of: torch.nn.Module, ids_BF: np.ndarray, bags_BFL: np.ndarray) -> torch.Tensor:
        batch = {name: torch.from_numpy(np.array(grown.arrays[name])) for name in ("dense_BN", "labels_B")}
        batch |= {"ids_BF": torch.from_numpy(ids_BF).long(), "bags_BFL": torch.from_numpy(bags_BFL).long()}
        with torch.no_grad():
            return of(batch)["logits"]

    torch.testing.assert_close(logits(champion, old_BF, old_BFL), logits(model, ids_BF, bags_BFL))


@pytest.mark.parametrize("items", [pl.String, pl.Int64, pl.Categorical])
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
    file, schema = tmp_path / "x.parquet", tmp_path / "schema.toml"
    schema.write_text('[columns.tags]\nrole = "bag"\nseparator = ","\n')
    lists = pl.DataFrame({"tags": [["a|b", "c"]] * 40, "y": [0, 1] * 20})
    lists.cast({"tags": pl.Array(pl.String, 2)}).write_parquet(file)
    assert Encoder.load(from_file(file).path / "encoder").bags[0].learned.to_list() == ["a|b", "c"]
    lists.write_parquet(file)
    for given in ({}, {"schema_file": str(schema)}):  # lists need no separator, and may hold any
        prepared = from_file(file, **given)
        (tags,) = Encoder.load(prepared.path / "encoder").bags
        assert tags.learned.to_list() == ["a|b", "c"]


_ROLES = {"numeric": "numeric", "times": "time", "categorical": "categorical"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label": "tags"}, "data.label='tags': holds lists; name a column of single values"),
        ({"weight": "tags"}, "data.weight='tags': holds lists"),
        ({"split": "key", "split_column": "tags"}, "data.split_column='tags': holds lists"),
        *(({f: ("tags",)}, f"'tags' holds lists, but {r} columns need single") for f, r in _ROLES.items()),
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
