"""Interactions: what is read, evaluated and recommended, against naive references, on any devices."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch.nn import functional as F

import dphybrid
from dphybrid.api.run import TrainedRun
from dphybrid.data import Prepared, batches
from dphybrid.parallel import resolve_devices
from dphybrid.recipes import ModelContext, find_recipe
from dphybrid.recipes.retrieval import RetrievalDataConfig, RetrievalModelConfig
from dphybrid.recipes.retrieval.ranking import recall_and_ndcg
from dphybrid.run.pages import Report
from tests.commands import command, run_with
from tests.conftest import own_settings
from tests.preparing import prepare
from tests.refusing import refused, refused_with


def write_rows(file: Path, num_rows: int = 400, num_users: int = 30, num_items: int = 25) -> None:
    """Interactions with a day; some items are far more frequent than others."""
    random = np.random.default_rng(0)
    chance = 1 / np.arange(1, num_items + 1)
    items = random.choice(num_items, num_rows, p=chance / chance.sum())
    users, days = random.integers(num_users, size=num_rows), random.integers(100, size=num_rows)
    lines = [f"u{user},i{item},{day}" for user, item, day in zip(users, items, days, strict=True)]
    file.write_text("\n".join(["user,item,day", *lines]) + "\n")


def small(folder: Path, **values: object) -> Prepared:
    write_rows(folder / "rows.csv")
    data = RetrievalDataConfig(path=str(folder / "rows.csv"), **{"cutoffs": (3, 8)} | values)  # type: ignore[arg-type]
    return prepare("retrieval", data, folder / "prepared", 0)


@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
def test_evaluation_is_that_of_a_naive_reference(
    devices: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dphybrid.embedding.ranking.SCORES", 7 * 7)  # blocks of items, a short one last
    data = small(tmp_path, valid_fraction=0.1)
    options = RetrievalModelConfig(dim=4, dtype="float64")
    context = ModelContext(resolve_devices(devices), data.info, options, 1)
    model, arrays = find_recipe("retrieval").new_model(context).eval(), data.arrays
    scores_UV = {}
    with torch.no_grad():
        found = list(batches(data.dataset("valid"), 7, seed=0, epoch=0, shuffle=False))
        vectors_VE = model.catalog()
        for batch in found:
            vectors = model.vectors(batch["history_BL"], batch["lengths_B"])
            for user in range(len(vectors)):
                scores_UV[len(scores_UV)] = vectors[user] @ vectors_VE.T
        found = [model(batch) for batch in found]
    outputs = {name: torch.cat([part[name] for part in found]) for name in found[0]}
    met = {user: set() for user in range(30)}
    for user, item in arrays["train_pairs"].tolist():
        met[user].add(item)
    for row, user in enumerate(arrays["valid_users"].tolist()):
        held = arrays["held_items"][arrays["held_starts"][user] : arrays["held_starts"][user + 1]].tolist()
        assert held
        assert not met[user] & set(held)
        open_items = [item for item in range(len(vectors_VE)) if item not in met[user]]
        ranked = sorted(open_items, key=lambda item: -float(scores_UV[row][item]))[:8]
        expected = [item in held for item in ranked] + [False] * (8 - len(ranked))
        assert outputs["found_BK"][row].tolist() == expected
        popular = [item in held for item in open_items[:8]] + [False] * (8 - len(open_items[:8]))
        assert outputs["popular_BK"][row].tolist() == popular
        logs = F.log_softmax(scores_UV[row][open_items], 0)
        loss = -sum(float(logs[open_items.index(item)]) for item in held)
        assert float(outputs["loss"][row]) == pytest.approx(loss)
        assert outputs["held_B"][row] == outputs["weight"][row] == len(held)


def test_recall_and_ndcg_are_their_definitions() -> None:
    found_BK = torch.tensor([[True, False, True, False], [False, False, False, False]])
    found = recall_and_ndcg(found_BK, torch.tensor([3, 1]), (2, 4, 9))
    assert next(iter(found)) == "ndcg_at_2"  # which decides: lists of runs show the first metric
    ideal = 1 + 1 / math.log2(3)
    for cutoff, recall, ndcg in ((2, 1 / 3, 1 / ideal), (4, 2 / 3, 1.5 / (ideal + 1 / 2))):
        assert found[f"recall_at_{cutoff}"] == pytest.approx(recall / 2)  # the other user's is 0
        assert found[f"ndcg_at_{cutoff}"] == pytest.approx(ndcg / 2)
    assert (found["recall_at_9"], found["ndcg_at_9"]) == (found["recall_at_4"], found["ndcg_at_4"])


def test_the_latest_rows_validate(tmp_path: Path) -> None:
    rows = [
        "who,what,when",
        "ann,film,2024-03-01",
        "ann,book,2024-01-05",
        "ann,book,2024-03-02",
        "bob,film,2024-02-01",
        "bob,song,2024-02-02",
        "ann,song,2024-12-31",
        "bob,disc,2024-12-30",
        "eve,film,2024-12-31",
        ",film,2024-01-01",
    ]
    (tmp_path / "rows.csv").write_text("\n".join(rows) + "\n")
    values = {"user": "who", "item": "what", "time": "when", "max_rejected": 0.2}
    config = RetrievalDataConfig(path=str(tmp_path / "rows.csv"), valid_fraction=0.35, **values)  # type: ignore[arg-type]
    data = prepare("retrieval", config, tmp_path / "prepared", 0)
    users, items = (pl.read_parquet(data.path / "encoder" / f"{name}s.parquet") for name in ("user", "item"))
    assert users["name"].to_list() == ["ann", "bob"]
    assert items["name"].to_list() == ["book", "film", "song"]  # by frequency, then by name
    assert users["history"].to_list() == [[0, 1, 0, 2], [1, 2]]  # ann's song of the validation split, too
    assert data.arrays["held_items"].tolist() == [2]  # ann's song; disc and eve have no training row
    assert data.arrays["valid_users"].tolist() == [0]
    assert "not evaluated: 1 row of unseen users, 1 of unseen items" in data.describe()
    assert data.manifest.rejected == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"user": "usr"}, ["has no column 'usr'", "user", "data.user"]),
        ({"time": "genre"}, ["data.time='genre'", "'g0'", "date"]),
        ({"time": "same"}, ["data.time='same'", "the same time"]),
        ({"user": "same", "valid_fraction": 0.025}, ["validation split: there is nothing to find in 1 row"]),
        ({"path": "/no/such.csv"}, ["data.path=/no/such.csv", "no such file"]),
    ],
)
def test_what_cannot_be_used_is_told(values: dict[str, object], words: list[str], tmp_path: Path) -> None:
    lines = [f"u{row // 20},i{row % 20},g{row % 2},1" for row in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["user,item,genre,same", *lines]) + "\n")
    config = RetrievalDataConfig(**{"path": str(tmp_path / "rows.csv")} | values)  # type: ignore[arg-type]
    with refused_with(words):
        prepare("retrieval", config, tmp_path / "prepared", 0)


def test_columns_that_are_not_used_are_named(tmp_path: Path) -> None:
    lines = [f"u{row // 20},i{row % 20},{row % 5}" for row in range(100)]
    (tmp_path / "rows.csv").write_text("\n".join(["user,item,stars", *lines]) + "\n")
    config = RetrievalDataConfig(path=str(tmp_path / "rows.csv"))
    told = prepare("retrieval", config, tmp_path / "prepared", 0).describe()
    assert "reading: not used: stars; every row counts as one interaction" in told


OPTIONS = ["recipe=retrieval", "data.negatives=64", "devices=cpu", "train.epochs=2"]
OPTIONS += ["train.batch_size=32", "model.softmax=sampled", "data.valid_fraction=0.1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Report, Path]]:
    """A model of the generated sample, and the folder of its data."""
    folder = tmp_path_factory.mktemp("retrieval") / "data"
    with pytest.MonkeyPatch.context() as patch:
        own_settings(patch, folder, TRACKING_URI="none")
        yield run_with(*OPTIONS, run_name="sample"), folder


def test_it_finds_the_planted_groups(trained: tuple[Report, Path]) -> None:
    metrics, beside = trained[0].metrics, trained[0].beside
    popular = re.fullmatch(r"most popular items ndcg_at_10 (0\.\d+) \(this run is 0\.\d+ better\)", beside)
    assert metrics["ndcg_at_10"] > 3 * float(popular[1])
    assert metrics["recall_at_50"] > 0.5


def test_recommendations_are_the_best_items_that_a_user_has_not_met(
    trained: tuple[Report, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dphybrid.embedding.ranking.SCORES", 4 * 100)
    found = dphybrid.load("sample", batch_size=4)
    encoder = Path(trained[0].best_checkpoint) / "encoder"
    users, items = (pl.read_parquet(encoder / f"{name}.parquet") for name in ("users", "items"))
    model = dphybrid.load_model("sample").eval()
    with torch.no_grad():
        vectors = [
            model.vectors(torch.tensor([met.to_list()]), torch.tensor([len(met)])) for met in users["history"]
        ]
        scores_UV = (torch.cat(vectors) @ model.catalog().T).numpy()
    asked = users["name"][5:15].to_list()
    frame = found.recommend(asked, k=7)
    assert frame.columns == ["user", "rank", "item", "score"]
    assert frame["user"].to_list() == [name for name in asked for _ in range(7)]
    for number, name in enumerate(users["name"]):
        if name in asked:
            scores_V = scores_UV[number].copy()
            scores_V[users["history"][number].to_numpy()] = -np.inf
            best = np.argsort(-scores_V)[:7]
            own = frame.filter(pl.col("user") == name)
            assert own["item"].to_list() == items["name"].gather(best).to_list()
            np.testing.assert_allclose(own["score"], scores_V[best], rtol=1e-5, atol=1e-6)
            assert own["rank"].to_list() == list(range(1, 8))
    # One at a time, with all scores at once: the same lists.
    monkeypatch.undo()
    alone = pl.concat([found.recommend(name, k=7) for name in asked])
    assert alone.drop("score").equals(frame.drop("score"))
    np.testing.assert_allclose(alone["score"], frame["score"], rtol=1e-5, atol=1e-6)
    assert found.recommend(asked, k=7).equals(frame)
    (user,) = users["name"][:1]
    everything = found.recommend(user, k=10**6)
    assert len(everything) == len(items) - users["history"][0].n_unique()
    assert found.recommend([]).is_empty()
    with refused("k=0"):
        found.recommend(user, k=0)


def test_a_frame_trains_and_its_other_columns_are_left_out(data_dir: Path) -> None:
    write_rows(data_dir.parent / "rows.csv", num_rows=200)
    frame = pl.read_csv(data_dir.parent / "rows.csv").with_columns(pl.struct("day").alias("nested"))
    given = {"recipe": "retrieval", "tracking": "none", "quiet": True}
    with refused("item='itm': data has no such column; did you mean 'item'"):
        dphybrid.train(frame, item="itm", **given)
    with refused("data.item='item': holds lists; name a column of single values"):
        dphybrid.train(frame.with_columns(pl.concat_list("item")), **given)
    with refused("2 of 200 rows cannot be read"):
        lacking = pl.when(pl.int_range(pl.len()) >= 2).then("user").alias("user")
        dphybrid.train(frame.with_columns(lacking), **given)
    run = dphybrid.train(frame, time="day", epochs=1, devices="cpu*2", **given)
    assert len(run.recommend("u1", k=3)) == 3


def test_a_user_is_found_by_a_number_of_any_type(unrecorded: None, tmp_path: Path) -> None:
    """As numpy has it in a frame's cells, and pandas beside a missing one."""
    frame = pl.DataFrame(
        {"user": [1000 + i % 9 for i in range(200)], "item": [i * i % 31 for i in range(200)]}
    )
    run = dphybrid.train(frame, recipe="retrieval", epochs=1, devices="cpu", quiet=True)
    wanted = run.recommend("1007", k=2)
    assert wanted["score"].null_count() == 0
    for user in (1007, np.int64(1007), 1007.0):
        assert run.recommend(user, k=2).equals(wanted)
    pl.DataFrame({"user": [None, 1007.0]}).write_parquet(tmp_path / "who.parquet")
    run.predictor.predict_file(tmp_path / "who.parquet", tmp_path / "top.parquet", top=2)
    assert pl.read_parquet(tmp_path / "top.parquet").equals(wanted)


def test_unknown_users_get_the_popular_items(trained: tuple[Report, Path], tmp_path: Path) -> None:
    run = TrainedRun(trained[1] / "runs" / "sample")
    items = pl.read_parquet(run.checkpoint / "encoder" / "items.parquet")["name"]
    frame = run.recommend(["u1", "nobody"], k=3)
    assert frame["item"].to_list()[3:] == items[:3].to_list()
    assert frame["score"].null_count() == 3
    (tmp_path / "who.csv").write_text("user,age\nu1,3\nnobody,4\nodd,4,4\nu1,5\n")
    predict = ["predict", "sample", "--data.path", str(tmp_path / "who.csv"), "--top", "3"]
    predict += ["--data.max-rejected", "0.5"]
    for ending in ("csv", "parquet"):
        told = command(*predict, "--out", str(tmp_path / f"top.{ending}"))
        assert "The 3 best items for 2 users" in told
        assert "Without a known item: 1 user," in told
        (rejected,) = (tmp_path / f"top.{ending}.rejected.jsonl").read_text().splitlines()
        assert json.loads(rejected)["line"] == 4
        assert f"top.{ending}.rejected.jsonl lists them with the reasons" in told
    assert pl.read_csv(tmp_path / "top.csv", schema=frame.schema).drop("score").equals(frame.drop("score"))
    assert pl.read_parquet(tmp_path / "top.parquet").equals(frame)
    assert run.predict({"user": ["u1", "nobody"]}).head(3).equals(frame.head(3))
    for more, words in (
        (["--keep", "age"], "--keep, --threshold: only for recipes that score rows"),
        (["--top", "0"], "--top: is given 2 times; give it once"),
    ):
        assert words in command(*predict, "--out", str(tmp_path / "no.csv"), *more, ends=2)
    assert not (tmp_path / "no.csv").exists()


def test_later_interactions_are_evaluated_as_a_test_part(data_dir: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.csv")
    rows = pl.read_csv(tmp_path / "rows.csv", infer_schema=False)
    rows[:300].write_csv(tmp_path / "early.csv")
    later = pl.concat([rows[300:], pl.DataFrame({**rows[:1].to_dicts()[0], "user": "a stranger"})])
    later.write_csv(tmp_path / "later.csv")
    given = {"cutoffs": [3, 8], "epochs": 2, "devices": "cpu", "quiet": True, "tracking": "none"}
    path = str(tmp_path / "early.csv")
    run = dphybrid.train(path, test=str(tmp_path / "later.csv"), recipe="retrieval", **given)
    for found in (run.evaluate(later), run.evaluate(tmp_path / "later.csv")):
        assert found.metrics == pytest.approx(run.test_metrics)
        assert re.search("101 rows; .* items to find; not evaluated: 1 row of unseen users", found.text())
    with refused("there is nothing to find in 300 rows"):
        run.evaluate(rows[:300])
    with refused("the rows have no column 'item'"):
        run.evaluate(rows.drop("item"))
