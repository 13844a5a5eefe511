"""How text becomes token ids and back: words, or byte-pair encoding (BPE). A checkpoint keeps it in
`encoder/`, so that a model can continue a text."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from dphybrid.util.errors import UserError
from dphybrid.util.files import read_json, write_json, write_text

_UNKNOWN, _END = "<unk>", "<end>"
_WORDS_FILE, _BPE_FILE = "words.json", "bpe.json"

_MARKS = "".join(
    chr(point)
    for point in (*range(0x300, 0x1F000), *range(0xE0100, 0xE01F0))
    if unicodedata.category(chr(point)).startswith("M")
)
"""Combining marks, such as the vowels of Hindi and Thai, which are part of a word but not of \\w; and the
joiners between letters."""
_WORD = rf"\w[\w{_MARKS}\u200c\u200d]*"
_TOKEN = re.compile(rf"<(?:unk|eos|bos|pad|sep|cls|mask|/?s|\|\w+\|)>|{_WORD}|[^\w\s]")


def tokenize(text: str) -> list[str]:
    """Return words, punctuation marks and signs such as <eos>, in lower case. Accents are composed."""
    return _TOKEN.findall(unicodedata.normalize("NFC", text.lower()))


@dataclass(frozen=True)
class Words:
    """Words of the training split by frequency; the others are `<unk>`, id 0.

    note: how many there are, for people. end: the id after each document.
    """

    words: tuple[str, ...]
    note: str = ""
    end: ClassVar[int] = 1

    @classmethod
    def of(cls, texts: Iterable[str], min_count: int) -> Self:
        """Return the words that occur at least `min_count` times in the training texts."""
        counts = Counter(word for text in texts for word in tokenize(text))
        # Ties by name, so that the same text gives the same ids.
        kept = sorted(
            (word for word, count in counts.items() if count >= min_count and word != _UNKNOWN),
            key=lambda word: (-counts[word], word),
        )
        rare = f"{len(counts) - len(kept):,} seen fewer than {min_count} times became {_UNKNOWN}"
        return cls((_UNKNOWN, _END, *kept), f"{len(kept) + 2:,} words ({rare})")

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without `end`."""
        numbers = {word: number for number, word in enumerate(self.words)}
        return [[numbers.get(word, 0) for word in tokenize(text)] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[number] for number in ids)

    def num_bytes(self) -> None:
        """Return None: ids do not give the text back."""

    def save(self, folder: Path) -> None:
        write_json(folder / _WORDS_FILE, {"words": self.words})


@dataclass(frozen=True)
class BytePairs:
    """Byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019), learned from the training
    split. tokenizer: of the library `tokenizers`. Any text has ids, and ids give the text back."""

    tokenizer: Any

    @classmethod
    def of(cls, texts: Sequence[str], size: int) -> Self:
        """Learn `size` tokens from the training texts; one of them is `end`."""
        library = _tokenizers()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=size - 1,
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @property
    def end(self) -> int:
        # Not a token of the tokenizer, which would find it in a text that has its name.
        return int(self.tokenizer.get_vocab_size())

    @property
    def note(self) -> str:
        return f"{len(self):,} byte pairs"

    def __len__(self) -> int:
        return self.end + 1

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in self.tokenizer.encode_batch(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode([number for number in ids if number != self.end]))

    def num_bytes(self) -> np.ndarray:
        """Return the bytes of text that each token stands for."""
        # The library writes a token with one character for each byte.
        tokens = [self.tokenizer.id_to_token(number) for number in range(self.end)]
        return np.array([*map(len, tokens), 0], np.int32)

    def save(self, folder: Path) -> None:
        write_text(folder / _BPE_FILE, self.tokenizer.to_str())


Tokens = Words | BytePairs


def save_tokens(tokens: Tokens, folder: Path) -> None:
    """Write the tokens into prepared data; checkpoints copy its folder `encoder`."""
    (folder / "encoder").mkdir(exist_ok=True)
    tokens.save(folder / "encoder")


def read_tokens(checkpoint: Path, num_tokens: int) -> Tokens:
    """Return the tokens of a checkpoint. num_tokens: that its model was trained with. Raises UserError if the
    checkpoint has none, or those of another vocabulary."""
    words, pairs = (checkpoint / "encoder" / name for name in (_WORDS_FILE, _BPE_FILE))
    tokens: Tokens
    if pairs.is_file():
        tokens = BytePairs(_tokenizers().Tokenizer.from_str(pairs.read_text(encoding="utf-8")))
    elif words.is_file():
        tokens = Words(tuple(read_json(words)["words"]))
    else:
        raise UserError(
            f"{checkpoint}: holds no tokens ({_WORDS_FILE} or {_BPE_FILE} in encoder/); train it again"
        )
    if len(tokens) != num_tokens:
        raise UserError(
            f"{checkpoint}: its tokens are {len(tokens):,} and its model knows {num_tokens:,}; they are of "
            "different vocabularies, so use another checkpoint"
        )
    return tokens


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise UserError(
            "data.tokens=bpe: needs the package tokenizers; pip install 'dphybrid[text]', or use "
            "data.tokens=words"
        ) from error
    return tokenizers
