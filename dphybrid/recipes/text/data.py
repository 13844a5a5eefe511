"""Reads text or source code, and numbers its tokens. Files named valid are the validation split, else whole
documents are held out.

Letters: B samples, T tokens of a sample.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dphybrid.config import ExperimentConfig
from dphybrid.data.batches import Array, Dataset
from dphybrid.data.store import PARTS, Content, Prepared, Progress, Source, source_digests
from dphybrid.data.table.delimited import encoding_of
from dphybrid.embedding.softmax import IGNORED
from dphybrid.recipes.text import TextDataConfig
from dphybrid.recipes.text.tokens import BytePairs, Tokens, Words, read_tokens, save_tokens
from dphybrid.training.checkpoint import read_state
from dphybrid.util.errors import UserError, counted, type_text
from dphybrid.util.files import given_path, no_such_file

_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".text", ".tokens", ".raw")
_SUFFIXES = (
    *_TEXT_SUFFIXES,
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala", ".js"),
    *(".ts", ".rb", ".php", ".sh", ".sql", ".r", ".jl", ".swift", ".lua", ".pl", ".cs", ".hs"),
)
_NO_SOURCES = frozenset(("__pycache__", "site-packages", "node_modules"))
"""Folders that hold other people's sources or none, like hidden ones."""

_HELD_TOPICS = ("binary", "formatstrings", "numbers", "operator-summary", "strings", "truth")
"""Validation topics of Python's language reference: a tenth of it, in which little repeats other topics. They
are the same for all seeds and versions, so that their figures can be compared."""
_MAX_HELD = 2.0
"""No document is held out that would make the validation split larger than this many times the size asked
for, unless all documents would."""


class _WindowDataset(Dataset):
    """Windows of T tokens without overlap; the target of a token is the next one. Each epoch after the first
    shifts the windows by a random number of tokens. num_bytes: of each token, if its text is known."""

    def __init__(self, tokens: Array, window: int, num_bytes: Array | None, offset: int = 0) -> None:
        self.tokens, self.window, self.num_bytes, self.offset = tokens, window, num_bytes, offset

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.window)

    def at_epoch(self, seed: int, epoch: int) -> "_WindowDataset":
        # The 1 separates these draws from those that shuffle the epoch. Neither epoch 0 nor validation, for
        # which `at_epoch` is not called, is shifted.
        offset = int(np.random.default_rng([seed, epoch, 1]).integers(0, len(self.tokens))) if epoch else 0
        return _WindowDataset(self.tokens, self.window, self.num_bytes, offset)

    def fetch(self, index_B: Array) -> dict[str, Tensor]:
        count = len(self.tokens)
        step_BT = index_B[:, None] * self.window + np.arange(self.window)
        place_BT = (self.offset + step_BT) % count
        ids_BT = self.tokens[place_BT].astype(np.int64)
        next_BT = self.tokens[(place_BT + 1) % count].astype(np.int64)
        # The last window is padded from the start of the text; padding has no targets.
        targets_BT = np.where(step_BT < count - 1, next_BT, IGNORED)
        batch = {"ids_BT": torch.from_numpy(ids_BT), "targets_BT": torch.from_numpy(targets_BT)}
        if self.num_bytes is not None:
            bytes_BT = np.where(step_BT < count - 1, self.num_bytes[next_BT], 0)
            batch["bytes_B"] = torch.from_numpy(bytes_BT.sum(1))
        return batch


def part_of(prepared: Prepared, name: str) -> Dataset:
    """Return a split ("train", "valid") of prepared text."""
    num_bytes = prepared.arrays.get("token_bytes")
    return _WindowDataset(prepared.arrays[f"{name}_tokens"], prepared.info["window"], num_bytes)


Documents = list[tuple[str, str]]
"""Names and texts."""


def _read_text(file: Path, encoding: str) -> str:
    """Return the whole text of a file. Raises UserError if it cannot be decoded."""
    raw, encoding = file.read_bytes(), encoding_of(file, encoding)
    try:
        text = raw.decode("utf-8-sig" if encoding == "utf-8" else encoding)
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(
            f"data.path={file}: is not {encoding.upper()} text (line {line}); set data.encoding=latin-1 or "
            "utf-16, or save it as UTF-8"
        ) from error


@dataclass(frozen=True)
class _TextSource(Source):
    """Source of documents: the topics of Python's reference, the files of a folder, or the paragraphs of one
    file.

    Attributes:
        root: The file or folder; None: the reference.
        parts: The files of each part; without files for "valid", documents of "train" are held out.
        num_left_out: Text files whose names say no part, where others' do.
    """

    data: TextDataConfig
    seed: int
    root: Path | None
    parts: Mapping[str, tuple[Path, ...]]
    num_left_out: int

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file for part in self.parts.values() for file in part)

    @property
    def options(self) -> dict[str, object]:
        names = {part: [self._name(file) for file in files] for part, files in self.parts.items()}
        return self.data.model_dump(mode="json", exclude={"path", "test_path"}) | {"parts": names}

    def _name(self, file: Path) -> str:
        """Return the path below the folder, not the folder's own: a moved folder is the same data."""
        root = self.root or file
        return file.relative_to(root).as_posix() if file.is_relative_to(root) else ""

    def digests(self, progress: Progress) -> list[bytes]:
        own = [] if self.root else [repr(sorted(_python_reference().items())).encode()]
        return [*own, *source_digests(self.files, progress)]

    @property
    def num_test_digests(self) -> int:
        return len(self.parts.get("test", ()))

    def documents(self, part: str) -> Documents:
        """Return the documents of a part that have text."""
        files, encoding = self.parts[part], self.data.encoding
        if not files:
            found = sorted(_python_reference().items())
        elif len(files) > 1:
            found = [(self._name(file), _read_text(file, encoding)) for file in files]
        else:
            text = _read_text(files[0], encoding).strip()
            # Without blank lines each line is a document, so that there is something to hold out.
            paragraphs = re.split(r"\n\s*\n", text) if re.search(r"\n\s*\n", text) else text.splitlines()
            found = [(f"paragraph {number}", paragraph) for number, paragraph in enumerate(paragraphs, 1)]
        return [(name, text) for name, text in found if text.strip()]

    def _parts(self, where: str) -> dict[str, Documents]:
        """Return the documents of each part. Raises UserError if there is nothing to hold out."""
        parts = {name: self.documents(name) for name in self.parts}
        if "valid" not in parts:
            documents = parts["train"]
            if len(documents) < 2:
                raise UserError(
                    f"data.path={where}: found {counted(len(documents), 'document')} with words; two are "
                    "needed, one of them for validation"
                )
            if self.root is None:
                held = {i for i, (name, _) in enumerate(documents) if name in _HELD_TOPICS}
            else:
                held = held_out([len(text) for _, text in documents], self.data.valid_fraction, self.seed)
            parts["train"] = [document for i, document in enumerate(documents) if i not in held]
            parts["valid"] = [document for i, document in enumerate(documents) if i in held]
        return {name: parts[name] for name in PARTS if name in parts}

    def read(self, progress: Progress, scratch: Path) -> Content:
        d, where = self.data, str(self.root) if self.root else "the Python reference"
        progress("read documents", 0, 1)
        parts = self._parts(where)
        training = [text for _, text in parts["train"]]
        progress("number tokens", 0, 1)
        known: Tokens = (
            BytePairs.of(training, d.vocabulary) if d.tokens == "bpe" else Words.of(training, d.min_count)
        )
        lines = [f"  text from {where}: {counted(sum(map(len, parts.values())), 'document')}, {known.note}"]
        if self.num_left_out or "valid" in self.parts:
            left = counted(self.num_left_out, "other file")
            lines.append(f"  parts by the names of files; {left} left out")
        arrays = dict[str, Array]()
        for name, documents in parts.items():
            arrays[f"{name}_tokens"] = tokens = _tokens(known, documents)
            if len(tokens) <= d.window:
                raise UserError(
                    f"data.path={where}: the {name} part has {len(tokens)} tokens, fewer than "
                    f"data.window={d.window} needs; give more text, a smaller data.window, or another "
                    "data.valid_fraction"
                )
            whole = "" if self.parts.get(name) else f"{counted(len(documents), 'whole document')}, "
            lines.append(
                f"  {len(tokens):,} tokens to train"
                if name == "train"
                else f"  {name} split: {whole}{_counted(tokens, known)}"
            )
        info: dict[str, object] = {"num_words": len(known), "window": d.window, "end": known.end}
        if (num_bytes := known.num_bytes()) is not None:
            arrays["token_bytes"], info["bytes"] = num_bytes, True
        extra = {"held_out": [name for name, _ in parts["valid"]]}
        return Content(arrays, info, lines, extra=extra, save=partial(save_tokens, known))


def _tokens(known: Tokens, documents: Documents) -> Array:
    """Return the tokens of documents in one array, with the end after each: windows may cross documents."""
    texts = [text for _, text in documents]
    return np.array([n for ids in known.encode(texts) for n in (*ids, known.end)], np.int32)


def _counted(tokens: Array, known: Tokens) -> str:
    """Return how many tokens there are, and the share of unknown words among them."""
    unknown = f", {float((tokens == 0).mean()):.1%} of them <unk>" if isinstance(known, Words) else ""
    return f"{len(tokens):,} tokens{unknown}"


def later_text(
    checkpoint: Path, config: ExperimentConfig, _: object, rows: object
) -> tuple[Dataset, list[str]]:
    """Return text as a test part has it, in the tokens of the checkpoint. rows: the path of a file or folder,
    or a list of documents. Raises UserError for text without words."""
    info = read_state(checkpoint).info
    known = read_tokens(checkpoint, int(info["num_words"]))
    where = "the rows"
    if isinstance(rows, str | Path):
        where = f"data.path={rows}"
        source = open_source(TextDataConfig(path=str(rows), encoding=config.data.model_dump()["encoding"]), 0)
        if len(source.parts) > 1:
            raise UserError(
                f"{where}: has files named {' and '.join(source.parts)}; name those to evaluate on"
            )
        documents = source.documents("train")
    elif isinstance(rows, Sequence) and all(isinstance(text, str) for text in rows):
        documents = [("", text) for text in rows if text.strip()]
    else:
        raise UserError(f"the rows: are {type_text(rows)}; give a path, or a list of texts")
    tokens = _tokens(known, documents)
    if len(tokens) < 2:
        raise UserError(f"{where}: holds no words; give some text")
    line = f"{counted(len(documents), 'document')}, {_counted(tokens, known)}"
    return _WindowDataset(tokens, int(info["window"]), known.num_bytes()), [line]


def held_out(sizes: Sequence[int], fraction: float, seed: int) -> set[int]:
    """Return the numbers of the documents to hold out, drawn by `seed` until they have about `fraction` of
    the text. Leaves out documents that are far too large; if all are, takes the smallest. At least one
    document stays for training."""
    wanted = fraction * sum(sizes)
    held, taken = set[int](), 0
    # Random, because the files of a folder often have an order, such as by date.
    for number in np.random.default_rng(seed).permutation(len(sizes)).tolist():
        fits = taken + sizes[number] <= _MAX_HELD * wanted and len(held) < len(sizes) - 1
        if taken < wanted and fits:
            held.add(number)
            taken += sizes[number]
    return held or {min(range(len(sizes)), key=sizes.__getitem__)}


def _python_reference() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise UserError(
            "this Python comes without pydoc_data, the default text; install your system's full Python, or "
            "give text with data.path"
        ) from error
    return topics


def _parts_of(files: Sequence[Path], root: Path) -> dict[str, tuple[Path, ...]]:
    """Return the files of the parts that their folders' names, or a word between dots of their own names,
    such as wiki.train.tokens, say. All are for training unless some are and others are not."""
    parts: dict[str, list[Path]] = {}
    for file in files:
        folders, name = file.relative_to(root).parent.parts, re.sub(r"[-_]?\d+", "", file.name.lower())
        for words in (folders, name.split(".")):
            if len(named := {*words} & {*PARTS}) == 1:
                parts.setdefault(min(named), []).append(file)
                break
    by_part = {name: tuple(parts[name]) for name in PARTS if name in parts}
    return by_part if "train" in by_part and len(by_part) > 1 else {"train": tuple(files)}


def open_source(data: TextDataConfig, seed: int) -> _TextSource:
    """Find the files of the text. Raises UserError for a missing path, an empty file, a folder without
    text."""
    test = None if data.test_path is None else given_path(data.test_path, "data.test_path")
    if test and not test.is_file():
        raise UserError(f"data.test_path={data.test_path}: no such file; give a file with text")
    of_test: dict[str, tuple[Path, ...]] = {"test": (test,)} if test else {}
    if data.path is None:
        data.check_unset("valid_fraction", "the language reference has validation topics of its own")
        return _TextSource(data, seed, None, {"train": ()} | of_test, 0)
    root = given_path(data.path, "data.path")
    if not root.exists():
        raise no_such_file(data.path, "data.path")
    files = _text_files(root) if root.is_dir() else (root,)
    parts = _parts_of(files, root) if root.is_dir() else {"train": files}
    if not sum(given_path(str(file), "data.path").stat().st_size for file in files):
        raise UserError(f"data.path={data.path}: is empty; give a file with text")
    if test and ("test" in parts or test.resolve() in (file.resolve() for file in files)):
        raise UserError(
            f"data.test_path={data.test_path}: data.path has a test file, too, or this one; keep one of them"
        )
    if "valid" in parts:
        data.check_unset("valid_fraction", f"{parts['valid'][0].name} is the validation split")
    return _TextSource(data, seed, root, parts | of_test, len(files) - sum(map(len, parts.values())))


def _text_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of text and source code below a folder. Raises UserError if there are none."""
    # Sorted: the order decides which documents the seed holds out.
    below = sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    files = tuple(
        folder / file
        for file in below
        if file.name.lower().endswith(_SUFFIXES)
        and not any(part in _NO_SOURCES or part.startswith(".") for part in file.parts[:-1])
    )
    if not files:
        endings = ", ".join(_TEXT_SUFFIXES)
        raise UserError(f"data.path={folder}: holds neither text ({endings}) nor source code; give some")
    return files
