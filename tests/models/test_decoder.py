"""The decoder of recipe text: byte pairs, the memory of n-grams, bits per byte, and continuing a text."""

import math
from pathlib import Path

import pytest
import torch

import dphybrid
from dphybrid.recipes.text.decoder import Decoder
from dphybrid.recipes.text.tokens import BytePairs, Words, read_tokens, save_tokens
from dphybrid.util.errors import UserError
from tests.commands import command

pytest.importorskip("tokenizers")
SOURCE = (
    "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result"
)
SMALL = [
    *("--recipe", "text", "--model.kind", "decoder", "--model.dim", "16", "--model.hidden", "16"),
    *("--model.layers", "1", "--model.heads", "2", "--data.window", "16", "--train.epochs", "1"),
    *("--data.tokens", "bpe", "--data.vocabulary", "300"),
]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    for number in range(12):
        file = folder / f"part{number % 3}" / f"module{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(SOURCE.replace("total", f"total_{number}") * 8)
    (folder / "notes.txt").write_text("a file of text beside them")
    return folder


def test_byte_pairs_give_any_text_back() -> None:
    tokens = BytePairs.of([SOURCE] * 5, 300)
    for text in (SOURCE, "naïve 🙂\t\r\n\x00", "<end> is no sign here", ""):
        (ids,) = tokens.encode([text])
        assert tokens.decode([*ids, tokens.end]) == text
        assert int(tokens.num_bytes()[ids].sum()) == len(text.encode())
        assert all(0 <= number < tokens.end for number in ids)
    assert len(tokens.num_bytes()) == len(tokens) == tokens.end + 1
    assert tokens.num_bytes()[tokens.end] == 0


def test_a_checkpoint_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    for tokens in (BytePairs.of([SOURCE], 290), Words(("<unk>", "<end>", "a"))):
        folder = tmp_path / type(tokens).__name__
        folder.mkdir()
        save_tokens(tokens, folder)
        assert len(read_tokens(folder, len(tokens))) == len(tokens)
        with pytest.raises(UserError, match="different vocabularies"):
            read_tokens(folder, len(tokens) + 1)
    with pytest.raises(UserError, match="holds no tokens"):
        read_tokens(tmp_path, 3)


def test_no_token_sees_what_comes_after_it() -> None:
    torch.manual_seed(0)
    decoder = Decoder(8, 16, 2, 2, 0.0, None).double()
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rows, tokens = torch.randn(2, 9, 8).double(), torch.zeros(2, 9, dtype=torch.long)
    changed = rows.clone()
    changed[:, 5:] += 1
    before, after = decoder(rows, tokens), decoder(changed, tokens)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    # Positions are relative: an equal beginning, moved, attends in the same way.
    alone = decoder(rows[:, :1], tokens[:, :1])
    torch.testing.assert_close(alone[:, 0], before[:, 0])


def test_source_code_is_learned_and_continued(data_dir: Path, sources: Path) -> None:
    told = command(
        "train", *SMALL, "--data.path", str(sources), "--model.memory", "2000", "--devices", "cpu*2"
    )
    assert "byte pairs" in told
    assert "13 documents" in told
    (run,) = dphybrid.runs()
    metrics = run.metrics
    # The mean loss of a token is in nats; bytes and tokens are those of the validation split.
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert 0.1 * metrics["loss"] < metrics["bits_per_byte"] * math.log(2) < metrics["loss"]
    text = command("predict", run.name, "--prompt", "def total", "--length", "20", "--temperature", "0")
    assert text.startswith("def total")
    assert len(text) > len("def total\n")
    assert text == command(
        "predict", run.name, "--prompt", "def total", "--length", "20", "--temperature", "0"
    )


def test_what_cannot_be_continued_is_told(data_dir: Path, tmp_path: Path) -> None:
    assert "give either --data.path, or --prompt" in command("predict", "some-run", ends=2)
    assert "needs model.kind=decoder" in command("train", "--recipe", "text", "--model.memory", "100", ends=2)
    file = tmp_path / "words.txt"
    file.write_text("\n\n".join(f"one two three {number % 5}" for number in range(80)))
    command(
        "train", "--recipe", "text", "--data.path", str(file), "--data.window", "8", "--train.epochs", "1"
    )
    (run,) = dphybrid.runs()
    assert command("predict", run.name, "--prompt", "One two", "--length", "3").startswith("One two")
    assert "has no words" in command("predict", run.name, "--prompt", " ", ends=2)
