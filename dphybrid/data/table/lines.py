"""Files as text in UTF-8, in blocks of whole lines: unpacked, decoded, and with all line ends as \\n.

What a file is follows from its first bytes, not from its name.
"""

import bz2
import codecs
import gzip
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import IncrementalNewlineDecoder
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from dphybrid.util.errors import UserError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK_BYTES = 2**23
"""Bytes of text read at a time."""
_MAX_LINE_BYTES = 2**26
"""With a longer line, a file is taken not to be a table."""
_HEAD_BYTES = 2**12
"""First bytes of a text from which its encoding is inferred."""
_ENCODINGS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before utf-16, with whose mark it begins
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_UNPACKERS: tuple[tuple[bytes, str, Callable[[IO[bytes]], Any]], ...] = (
    (rb"\x1f\x8b", "gzip", lambda raw: gzip.GzipFile(fileobj=raw)),
    (rb"BZh[1-9](1AY&SY|\x17rE)", "bzip2", bz2.BZ2File),
    (rb"\xfd7zXZ\0", "xz", lzma.LZMAFile),
    (rb"\x28\xb5\x2f\xfd", "Zstandard", zstd.ZstdFile),
)
"""Patterns of a packed file's first bytes, names, and how to unpack."""
_PACKING_ERRORS = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, zstd.ZstdError)
# A text may begin with the letters of some formats, but goes on with others.
_NO_TEXT = rb"[\x00-\x08\x0e-\x1f\x80-\xff]"
_BINARY = (
    (rb"PAR1" + _NO_TEXT, "parquet"),
    (rb"ARROW1\0", "arrow"),
    (rb"\xff{4}", "arrow stream"),
    (rb"FEA1" + _NO_TEXT, "a Feather file of version 1"),
    (rb"PK\x03\x04", "an Excel or zip file"),
    (rb"\xd0\xcf\x11\xe0", "an Excel file"),
    (rb"ORC" + _NO_TEXT, "an ORC file"),
    (rb"Obj\x01", "an Avro file"),
    (rb"SQLite format 3\0", "an SQLite database"),
    (rb"\x89HDF", "an HDF5 file"),
    (rb"\x80[\x02-\x05]", "a pickle"),
    (rb"%PDF-", "a PDF"),
)
"""Patterns of the first bytes of other formats, and their names."""
_LATIN = "the text is not UTF-8, so it is read as Latin-1 (Windows-1252); --data.encoding overrides this"
"""As browsers do. The five bytes that Windows-1252 leaves undefined occur in other encodings."""
_UTF8_SIGN = re.compile(rb"[\xc3-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")


def format_of(file: Path) -> str:
    """Return the format that a file's first bytes name, such as "parquet"; "text" for all others, which
    include packed ones."""
    with file.open("rb") as stream:
        head = stream.read(16)
    return next((name for sign, name in _BINARY if re.match(sign, head)), "text")


@contextmanager
def unpacked(file: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file, unpacked if it is gzip, bzip2, xz or Zstandard; also the raw file, whose position says how
    much was read. Raises UserError if the packed file is damaged or incomplete."""
    with file.open("rb", buffering=0) as raw:
        head = raw.read(16)
        raw.seek(0)
        name, unpack = next(((n, u) for sign, n, u in _UNPACKERS if re.match(sign, head)), ("", None))
        if unpack is None:
            yield raw, raw
            return
        try:
            yield cast(IO[bytes], unpack(raw)), raw
        except _PACKING_ERRORS as error:
            raise _damaged(file, name, error) from error
        except OSError as error:
            if error.errno is not None:  # bz2 raises OSError for wrong bytes, without a number
                raise
            raise _damaged(file, name, error) from error


def _damaged(file: Path, name: str, error: Exception) -> UserError:
    return UserError(
        f"data.path={file}: is not a complete {name} file: {error}; compress it again, or give it "
        "uncompressed"
    )


def whole_lines(file: Path, encoding: str, notes: list[str]) -> Iterator[tuple[bytes, int, bool]]:
    """Yield a file's text in blocks of whole lines, in UTF-8, with all line ends as \\n. With each block,
    also yield the bytes read so far, and whether it is the last one.

    encoding: auto or a name that Python knows. What was inferred goes to `notes`. Raises UserError if the
    file cannot be unpacked or decoded, and for lines without end.
    """
    rest, line, plain = "", 0, True
    with unpacked(file) as (stream, raw):
        first = stream.read(min(_HEAD_BYTES, BLOCK_BYTES))
        known = _encoding(first, encoding, notes)
        decoder, newlines = codecs.getincrementaldecoder(known)(), IncrementalNewlineDecoder(None, True)
        block = first + stream.read(BLOCK_BYTES - len(first))
        while block:
            following = stream.read(BLOCK_BYTES)
            last = not following
            try:
                text = decoder.decode(block, last)
            except UnicodeDecodeError as error:
                # Only a file without any UTF-8 sign is taken for Latin-1.
                is_latin = encoding == "auto" and known == "utf-8" and plain
                if not is_latin or _UTF8_SIGN.search(error.object):
                    raise _undecodable(file, known, line, error) from error
                known, decoder = "cp1252", codecs.getincrementaldecoder("cp1252")()
                notes.append(_LATIN)
                try:
                    text = decoder.decode(error.object, last)
                except UnicodeDecodeError as odd:
                    raise _undecodable(file, "UTF-8 or Latin-1", line, odd) from odd
            plain = plain and text.isascii()
            # Concatenated files have byte-order marks inside, too.
            text = rest + newlines.decode(text, last).replace("\ufeff", "")
            text += "\n" * (last and not text.endswith("\n"))
            cut = text.rfind("\n") + 1
            text, rest, block = text[:cut], text[cut:], following
            if text:
                # Halves of a pair that are no sign of their own cannot be written as UTF-8.
                found = text.encode("utf-8", "replace")
                yield found, raw.tell(), last
                line += count_sign(found, b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                raise UserError(
                    f"data.path={file}: has a line of over {_MAX_LINE_BYTES:,} bytes, so it is not "
                    "read as a table; give a text file with line ends"
                )


def _encoding(first: bytes, encoding: str, notes: list[str]) -> str:
    """Return the encoding of a text with these first bytes."""
    marked = next((name for mark, name in _ENCODINGS if first.startswith(mark)), None)
    if encoding != "auto":
        # The mark decides the order of bytes; utf-8-sig would remove only the first mark.
        given = codecs.lookup(encoding).name
        return "utf-8" if given == "utf-8-sig" else marked or given if given.startswith("utf-16") else given
    if marked is None and first.count(0) > len(first) // 4:
        marked = "utf-16-le" if first[1::2].count(0) > first[::2].count(0) else "utf-16-be"
    if marked not in (None, "utf-8"):
        notes.append(f"the text is {str(marked).upper()}; --data.encoding overrides this")
    return marked or "utf-8"


def _undecodable(file: Path, name: str, line: int, error: UnicodeDecodeError) -> UserError:
    """line: number of lines before the block that cannot be decoded."""
    good = error.object[: error.start].decode(error.encoding, "ignore")
    line += len(re.findall("\r\n?|\n", good)) + 1
    return UserError(
        f"data.path={file}: is not {name.upper() if name == 'utf-8' else name} text (line {line}); set "
        "data.encoding, such as latin-1 or utf-16, or save it as UTF-8"
    )


def read_text(file: Path, encoding: str, notes: list[str]) -> str:
    """Return the whole text of a file. Raises UserError as `whole_lines` does."""
    return b"".join(text for text, *_ in whole_lines(file, encoding, notes)).decode()


def count_sign(block: bytes, sign: bytes) -> int:
    """Return how often a byte occurs. `bytes.count` takes four times as long for frequent bytes."""
    signs = np.frombuffer(block, np.uint8)
    return sum(int(np.count_nonzero(signs[i : i + 2**20] == sign[0])) for i in range(0, len(signs), 2**20))


def line_ends(text: bytes) -> np.ndarray:
    """Return for each line the position behind it."""
    return np.flatnonzero(np.frombuffer(text, np.uint8) == 10) + 1
