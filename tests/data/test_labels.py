"""What a label is taken for, weights of rows, and dates that nobody named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dphybrid.data import Prepared
from dphybrid.data.table.encoder import Encoder
from dphybrid.data.table.labels import Label
from tests.preparing import table_of
from tests.refusing import refused, refused_with


def labelled(folder: Path, values: list[Any], num_rows: int = 60, **more: Any) -> Prepared:
    """Prepare a table whose label takes these values in turn."""
    word = ["ab"[i % 2] for i in range(num_rows)]
    return table_of(folder, {"w": word, "y": [values[i % len(values)] for i in range(num_rows)]}, **more)


SIZES = [20.5 + i for i in range(60)]


@pytest.mark.parametrize(
    ("values", "more", "task", "classes"),
    [
        (["red", "green", "blue"], {}, "multiclass", ("blue", "green", "red")),
        (["10", "9", "-1"], {}, "multiclass", ("-1", "9", "10")),
        (["1", "2", "many"], {}, "multiclass", ("1", "2", "many")),
        (list(range(20)), {}, "multiclass", tuple(map(str, range(20)))),
        (["yes", "no"], {"task": "multiclass"}, "multiclass", ("no", "yes")),
        (["0.5", "1.5"], {}, "binary", ("0.5", "1.5")),
        # A positive word is the positive class, which is last, also where it sorts first.
        (["Click", "none"], {}, "binary", ("none", "Click")),
        (["positive", "unknown"], {}, "binary", ("unknown", "positive")),
        (["click", "none"], {"task": "multiclass"}, "multiclass", ("click", "none")),
        (list(range(21)), {}, "regression", ()),
        ([1, 2, 300], {}, "regression", ()),
        (SIZES, {}, "regression", ()),
        ([1, 2, 3], {"task": "regression"}, "regression", ()),
        ([0, 1], {"task": "regression"}, "regression", ()),
        (["1206,50", "3,25", "7,125"], {"decimal": ","}, "regression", ()),
    ],
)
def test_what_a_label_is_taken_for(
    tmp_path: Path, values: list[Any], more: dict[str, Any], task: str, classes: tuple[str, ...]
) -> None:
    prepared = labelled(tmp_path, values, **more)
    label = Label.of(prepared.info)
    assert (label.task, label.classes) == (task, classes)
    assert Encoder.load(prepared.path / "encoder").label == label
    assert task in prepared.describe() or task == "binary"
    assert ("data.task" in prepared.describe()) == (task != "binary")
    labels_B, train = prepared.arrays["labels_B"], prepared.arrays["train_rows"]
    if classes:
        assert [classes[int(number)] for number in labels_B[: len(values)]] == [str(v) for v in values]
    else:
        assert labels_B[train].mean() == pytest.approx(0, abs=1e-5)
        assert labels_B[train].std() == pytest.approx(1, abs=1e-5)
        found = label.offset + label.scale * labels_B[: len(values)]
        plain_values = [float(str(v).replace(".", "").replace(",", ".")) for v in values]
        expected = plain_values if "decimal" in more else [float(v) for v in values]
        np.testing.assert_allclose(found, expected[: len(found)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "more", "words"),
    [
        (["", "NA", "?"], {}, ["data.label='y'", "none of the 60 rows", "has a value"]),
        (["a"], {}, ["data.label=y", "two different values", "column 'y' has 1: 'a'", "name another column"]),
        ([7], {"task": "regression"}, ["two different values", "column 'y' has 1: '7'"]),
        ([1, 2, 3], {"task": "binary"}, ["column 'y' has 3: '1', '2', '3'", "another data.task"]),
        ([*SIZES[:59], "soon"], {}, ["column 'y' holds 'soon', which is not a number", "data.missing"]),
        ([*SIZES[:59], "soon"], {"task": "regression"}, ["data.label", "'soon', which is not a number"]),
        ([f"n{i}" for i in range(1001)], {}, ["column 'y' has 1,001 different", "at most 1,000 classes"]),
        ([1, 2], {"weight": "y"}, ["data.weight='y'", "already the label"]),
        ([1, 2], {"weight": "w", "numeric": ("w",)}, ["data.numeric='w'", "already named as weight"]),
    ],
)
def test_labels_that_contradict_are_refused(
    tmp_path: Path, values: list[Any], more: dict[str, Any], words: list[str]
) -> None:
    with refused_with(words):
        labelled(tmp_path, values, max(60, len(values)), **more)


def test_weights_are_no_feature(tmp_path: Path) -> None:
    weights = [(1 + i % 3) / 2 for i in range(60)]
    columns = {"w": ["ab"[i % 2] for i in range(60)], "n": weights, "y": [i * 1.5 for i in range(60)]}
    prepared = table_of(tmp_path, columns, weight="n")
    assert prepared.arrays["weights_B"].tolist() == weights
    assert prepared.info["inputs"] == ["w"]
    train = prepared.arrays["train_rows"]
    mean = np.average(prepared.arrays["labels_B"][train], weights=prepared.arrays["weights_B"][train])
    assert mean == pytest.approx(0, abs=1e-6)
    for wrong, shown in (("0", "0"), ("-1", "-1"), ("", "None"), ("x", "'x'")):
        columns["n"] = [*weights[:40], wrong, *weights[41:]]
        with refused(rf"data\.weight='n': holds {shown}.* weights are numbers above 0"):
            table_of(tmp_path, columns, weight="n")
