"""Which documents are held out."""

from pathlib import Path

import pytest

from dphybrid.recipes.text import TextDataConfig
from dphybrid.recipes.text.data import held_out
from dphybrid.recipes.text.tokens import tokenize
from dphybrid.util.files import read_json
from tests.preparing import prepare
from tests.refusing import refused


@pytest.mark.parametrize("seed", range(6))
def test_documents_are_held_out_at_random_but_never_a_huge_one(seed: int) -> None:
    held = held_out([50] * 40, 0.1, seed)
    assert len(held) == 4
    assert held == held_out([50] * 40, 0.1, seed) != held_out([50] * 40, 0.1, seed + 1)
    assert held_out([1000, 30], 0.1, seed) == {1}
    assert held_out([600, 500], 0.1, seed) == {1}
    assert held_out([30, 31], 0.9, seed) in ({0}, {1})


def test_files_of_nested_folders_are_documents(tmp_path: Path) -> None:
    for name in ("a/one.txt", "a/b/two.md", "b/one.txt", "b/pictures.png"):
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(f"{name} has its own words. " * 30)
    config = TextDataConfig(path=str(tmp_path / "texts"), window=8)
    prepared = prepare("text", config, tmp_path / "prepared", 0)
    assert "3 documents" in prepared.describe()
    assert set(prepared.manifest.facts["held_out"]) <= {"a/one.txt", "a/b/two.md", "b/one.txt"}
    (tmp_path / "texts/b/one.txt").rename(tmp_path / "texts/b/three.txt")
    assert not prepare("text", config, tmp_path / "prepared", 0).reused


def test_files_named_train_valid_and_test_are_these_parts(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    for name, word in (
        ("wiki.train.tokens", "one"),
        ("wiki.valid.tokens", "two"),
        ("more/test.txt", "three"),
    ):
        (folder / name).write_text(f"{word} same words <eos>\n" * 30)
    (folder / "README.md").write_text("about the data")
    prepared = prepare("text", TextDataConfig(path=str(folder), window=8), tmp_path / "prepared", 0)
    assert prepared.parts == ["train", "valid", "test"]
    words = read_json(prepared.path / "encoder/words.json")["words"]
    assert sorted(words) == ["<end>", "<eos>", "<unk>", "one", "same", "words"]
    assert [words[number] for number in prepared.arrays["test_tokens"][:5]] == [
        *("<unk>", "same", "words", "<eos>", "<end>")
    ]
    assert "1 other file left out" in prepared.describe()
    (folder / "wiki.valid.tokens").unlink()
    again = prepare("text", TextDataConfig(path=str(folder), window=8), tmp_path / "prepared", 0)
    assert again.parts == ["train", "valid", "test"]
    assert len(again.arrays["train_tokens"]) == 27 * 5


def test_words_keep_their_marks_and_signs_stay_whole(tmp_path: Path) -> None:
    assert tokenize("हिन्दी भाषा, ที่ Cafe\u0301!") == ["हिन्दी", "भाषा", ",", "ที่", "café", "!"]
    assert tokenize("<unk> <eos> </s> a<b") == ["<unk>", "<eos>", "</s>", "a", "<", "b"]
    assert tokenize("Don't x_1 = 3.5!") == ["don", "'", "t", "x_1", "=", "3", ".", "5", "!"]
    file = tmp_path / "x.txt"
    file.write_bytes("\n".join(f"naïve café {i % 9}" for i in range(99)).encode("latin-1"))
    prepared = prepare(
        "text", TextDataConfig(path=str(file), window=8, encoding="latin-1"), tmp_path / "p", 0
    )
    assert {"naïve", "café"} <= {*read_json(prepared.path / "encoder/words.json")["words"]}
    with refused("is not UTF-8 text .line 1.; set data.encoding=latin-1 or utf-16, or save it as UTF-8"):
        prepare("text", TextDataConfig(path=str(file), window=8), tmp_path / "p", 0)


def test_a_blank_last_line_makes_no_paragraph(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("".join(f"line {i} of some\n" for i in range(60)) + "\n")
    prepared = prepare("text", TextDataConfig(path=str(tmp_path / "x.txt"), window=4), tmp_path / "p", 0)
    assert "whole document" in prepared.describe()
