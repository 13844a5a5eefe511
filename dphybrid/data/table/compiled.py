"""Reading plain blocks of delimited text, as numba compiles it: separators found 64 bytes at a time, numbers
and keys of texts in one pass, and a dictionary a column.

A kernel has one argument, the address of a page of int64 numbers, most of them addresses (see
`dphybrid.embedding.compiled`). A plain block has one byte of separator and no quote; its lines end in \\n.
places (int32): -1, then the place of each separator and line end, `width` a line: cell c of line r lies
between places[r * width + c] and the next one. Cells lose the blanks at their edges.

A key (int64) stands for a text: 0 for none; up to 8 bytes it holds them, with the length in the highest byte
where there is room, and is the only one of that text; that of a longer one is a negative hash.

One file, as kernels are compiled together with the helpers beside them.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from dphybrid.embedding.vectors import (
    FLOAT32,
    fill,
    prefetch,
    read_float,
    read_int,
    read_int32,
    store,
    write_float,
    write_int,
    write_int32,
)

TILE_ROWS = 256
"""Rows whose cells are read column after column: their text stays in a core's second cache."""
MAX_DIGITS = 15
"""Digits up to which a number and its power of ten are exact in float64, and so their quotient is the
nearest."""
AHEAD = 12
"""Keys whose slots are asked for ahead."""
FEW_EDGES = 64
"""Edges up to which comparing with each of them is faster than a search."""
SLOT = 16
_I8, _I64 = ir.IntType(8), ir.IntType(64)
_BYTES, _BITS = ir.VectorType(_I8, 64), ir.VectorType(ir.IntType(1), 64)


def _at(builder: Any, address: Any, kind: ir.Type) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def equal_bytes(typing: Any, address: Any, sign: Any) -> Any:
    """Return one bit for each of 64 bytes: is it `sign`?"""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        text = builder.load(_at(builder, args[0], _BYTES), align=1)
        empty = ir.Constant(_BYTES, ir.Undefined)
        one = builder.insert_element(empty, builder.trunc(args[1], _I8), ir.IntType(32)(0))
        signs = builder.shuffle_vector(one, empty, ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64))
        return builder.bitcast(builder.icmp_unsigned("==", text, signs), _I64)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def lowest_bit(typing: Any, bits: Any) -> Any:
    """Return the place of the lowest bit that is set."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_I64, [_I64, ir.IntType(1)]), "llvm.cttz.i64"
        )
        return builder.call(function, [args[0], ir.IntType(1)(1)])

    return types.int64(types.int64), generate


def _reader(kind: ir.Type) -> Any:
    @intrinsic
    def read(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = builder.load(_at(builder, args[0], kind), align=1)
            return value if kind == _I64 else builder.zext(value, _I64)

        return types.int64(types.int64), generate

    return read


read_byte, read_word = _reader(_I8), _reader(_I64)


@intrinsic
def write_byte(typing: Any, address: Any, value: Any) -> Any:
    """Write the lowest byte of a number."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(builder.trunc(args[1], _I8), _at(builder, args[0], _I8))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@register_jitable
def cell_at(text: int, place: int) -> tuple[int, int]:
    """Return where the cell behind the separator at `place` begins and ends, without the blanks around it."""
    at, end = text + read_int32(place) + 1, text + read_int32(place + 4)
    if at < end and (read_byte(at) <= 32 or read_byte(end - 1) <= 32):
        while at < end and (read_byte(at) == 32 or 9 <= read_byte(at) <= 12):
            at += 1
        while at < end and (read_byte(end - 1) == 32 or 9 <= read_byte(end - 1) <= 12):
            end -= 1
    return at, end


@register_jitable
def short_key(at: int, length: int, stop: int) -> int:
    """Return the key of a text of less than 8 bytes; stop: the end of what may be read."""
    key = 0
    if at + 8 <= stop:
        key = read_word(at) & ((1 << (8 * length)) - 1)
    else:
        for b in range(length):
            key |= read_byte(at + b) << (8 * b)
    return key | (length << 56)


@register_jitable
def slot_of(key: int, mask: int) -> int:
    """Return the slot where the search for a key begins; mask: the number of slots less 1."""
    mixed = key * -7046029254386353131
    return (mixed ^ (mixed >> 32)) & mask


def find_kernel() -> Any:
    """Find the places of separators and line ends.

    PAGE: 1 text, 2 its bytes, 3 separator, 4 columns, 5 places, 6 how many there are (without the first).
    Out: 7 is 1 when every line has its columns."""

    def find(page: int) -> None:
        text, size, separator = read_int(page + 8), read_int(page + 16), read_int(page + 24)
        width, places, wanted = read_int(page + 32), read_int(page + 40), read_int(page + 48)
        write_int32(places, -1)
        count = 0
        whole = size & -64
        for at in range(0, whole, 64):
            marks = equal_bytes(text + at, separator) | equal_bytes(text + at, 10)
            while marks != 0 and count < wanted:
                count += 1
                write_int32(places + 4 * count, at + lowest_bit(marks))
                marks &= marks - 1
            if marks != 0:
                return
        for at in range(whole, size):
            byte = read_byte(text + at)
            if byte == separator or byte == 10:
                if count == wanted:
                    return
                count += 1
                write_int32(places + 4 * count, at)
        if count != wanted:
            return
        for end in range(width, count + 1, width):
            if read_byte(text + read_int32(places + 4 * end)) != 10:
                return
        write_int(page + 56, 1)

    return find


def read_kernel() -> Any:
    """Read columns as numbers or as keys of their texts.

    PAGE: 1 text, 2 its bytes, 3 places, 4 lines, 5 columns of text, 6 columns that are read as numbers (int64
    each) and 7 how many, 8 float64 a line of each, 9 int64 each: set to 1 where a cell is no number of at
    most MAX_DIGITS digits, 10 columns whose keys are read and 11 how many, 12 int64 a line of each, 13 keys
    of texts of at most 8 bytes that mean no value, and 14 how many, 15 float64 powers of ten."""

    def read(page: int) -> None:
        text, size, places = read_int(page + 8), read_int(page + 16), read_int(page + 24)
        rows, width = read_int(page + 32), read_int(page + 40)
        numeric, num_numeric, numbers = read_int(page + 48), read_int(page + 56), read_int(page + 64)
        odd, coded, num_coded = read_int(page + 72), read_int(page + 80), read_int(page + 88)
        keys, missing, num_missing = read_int(page + 96), read_int(page + 104), read_int(page + 112)
        powers = read_int(page + 120)
        for first in range(0, rows, TILE_ROWS):
            last = min(first + TILE_ROWS, rows)
            for n in range(num_numeric):
                place = places + 4 * (first * width + read_int(numeric + 8 * n))
                target = numbers + 8 * n * rows
                for r in range(first, last):
                    at, end = cell_at(text, place)
                    place += 4 * width
                    if at == end:
                        write_int(target + 8 * r, 0x7FF8000000000000)
                        continue
                    begin, sign = at, 1.0
                    if read_byte(at) == 45:
                        sign, at = -1.0, at + 1
                    if 0 < end - at <= 8 and at + 8 <= text + size:  # as whole numbers mostly are
                        word = (read_word(at) ^ 0x3030303030303030) << (64 - 8 * (end - at))
                        if ((word + 0x7676767676767676) | word) & -0x7F7F7F7F7F7F7F80 == 0:
                            word = 10 * word + (word >> 8)
                            word = (word & 0xFF000000FF) * 0xF424000000064 + (
                                (word >> 16) & 0xFF000000FF
                            ) * 0x271000000001
                            write_float(target + 8 * r, sign * (word >> 32))
                            continue
                    start, value, after = at, 0, 0
                    while at < end and 0 <= read_byte(at) - 48 <= 9 and at - start < 19:
                        value = 10 * value + read_byte(at) - 48
                        at += 1
                    digits = at - start
                    if digits > 0 and at + 1 < end and read_byte(at) == 46:
                        at += 1
                        start = at
                        while at < end and 0 <= read_byte(at) - 48 <= 9 and at - start < 19:
                            value = 10 * value + read_byte(at) - 48
                            at += 1
                        after = at - start
                        digits += after
                    if at == end and 0 < digits <= MAX_DIGITS:
                        number = sign * value
                        if after:
                            number /= read_float(powers + 8 * after)
                        write_float(target + 8 * r, number)
                        continue
                    write_int(target + 8 * r, 0x7FF8000000000000)
                    length, known = end - begin, False
                    if length <= 8:
                        key = read_word(begin) if length == 8 else short_key(begin, length, text + size)
                        for m in range(num_missing):
                            known = known or read_int(missing + 8 * m) == key
                    if not known:
                        write_int(odd + 8 * n, 1)
            for n in range(num_coded):
                place = places + 4 * (first * width + read_int(coded + 8 * n))
                target = keys + 8 * n * rows
                for r in range(first, last):
                    at, end = cell_at(text, place)
                    place += 4 * width
                    length = end - at
                    if length < 8:
                        write_int(target + 8 * r, short_key(at, length, text + size))
                        continue
                    key = read_word(at)
                    if length > 8 or (key >> 56) < 8:
                        key = (key ^ length) * -7046029254386353131
                        for word in range(at + 8, end - 7, 8):
                            key = (key ^ (key >> 32) ^ read_word(word)) * -4658895280553007687
                        key = (key ^ (key >> 32) ^ read_word(end - 8)) * -7046029254386353131
                        key = (key ^ (key >> 29)) | (-1 << 63)
                    write_int(target + 8 * r, key)

    return read


def look_up_kernel() -> Any:
    """Turn keys into codes by a dictionary, which learns new texts.

    PAGE: 1 text, 2 places, 3 columns of text, 4 the column, 5 first line to do, 6 lines, 7 keys, 8 codes
    (uint32), 9 slots (key and entry, int64 each; key 0: free), 10 their number less 1, 11 texts of the
    entries one after another, 12 bytes for them, 13 ends of the texts (int64; entry 0 ends at 0), 14 entries
    at most, 15 entries that mean no value: code 0. In and out: 16 entries. Out: 17 lines done; fewer than
    all: there is no room."""

    def look_up(page: int) -> None:
        text, places, width = read_int(page + 8), read_int(page + 16), read_int(page + 24)
        column, first, rows = read_int(page + 32), read_int(page + 40), read_int(page + 48)
        keys, codes, slots = read_int(page + 56), read_int(page + 64), read_int(page + 72)
        mask, texts, room = read_int(page + 80), read_int(page + 88), read_int(page + 96)
        ends, most, none = read_int(page + 104), read_int(page + 112), read_int(page + 120)
        count = read_int(page + 128)
        for r in range(first, rows):
            prefetch(slots + SLOT * slot_of(read_int(keys + 8 * min(r + AHEAD, rows - 1)), mask), 0)
            key = read_int(keys + 8 * r)
            if key == 0:
                write_int32(codes + 4 * r, 0)
                continue
            slot, found = slot_of(key, mask), 0
            while found == 0:
                here = read_int(slots + SLOT * slot)
                if here == key and key > 0:
                    found = read_int(slots + SLOT * slot + 8)
                    continue
                if here != 0 and here != key:
                    slot = (slot + 1) & mask
                    continue
                at, end = cell_at(text, places + 4 * (r * width + column))
                length = end - at
                if here == key:
                    entry = read_int(slots + SLOT * slot + 8)
                    start = read_int(ends + 8 * (entry - 1))
                    same = read_int(ends + 8 * entry) - start == length
                    b = 0
                    while same and b < length:
                        same = read_byte(texts + start + b) == read_byte(at + b)
                        b += 1
                    if same:
                        found = entry
                    slot = (slot + 1) & mask
                    continue
                start = read_int(ends + 8 * count)
                if count == most or start + length > room:
                    write_int(page + 128, count)
                    write_int(page + 136, r)
                    return
                for b in range(length):
                    write_byte(texts + start + b, read_byte(at + b))
                count += 1
                write_int(ends + 8 * count, start + length)
                write_int(slots + SLOT * slot, key)
                write_int(slots + SLOT * slot + 8, count)
                found = count
            write_int32(codes + 4 * r, max(found - none, 0))
        write_int(page + 128, count)
        write_int(page + 136, rows)

    return look_up


def grow_kernel() -> Any:
    """Copy slots into more of them. PAGE: 1 slots, 2 their number, 3 free slots, 4 their number less 1."""

    def grow(page: int) -> None:
        slots = read_int(page + 8)
        count = read_int(page + 16)
        free = read_int(page + 24)
        mask = read_int(page + 32)
        for s in range(count):
            key = read_int(slots + SLOT * s)
            if key != 0:
                slot = slot_of(key, mask)
                while read_int(free + SLOT * slot) != 0:
                    slot = (slot + 1) & mask
                write_int(free + SLOT * slot, key)
                write_int(free + SLOT * slot + 8, read_int(slots + SLOT * s + 8))

    return grow


def count_kernel() -> Any:
    """Count codes. PAGE: 1 codes (uint32), 2 rows, 3 codes a row, 4 a byte a row: 0 or 1, 5 counts (int64,
    two a code: of rows with 0, and with 1)."""

    def count(page: int) -> None:
        codes, rows, items = read_int(page + 8), read_int(page + 16), read_int(page + 24)
        held, counts = read_int(page + 32), read_int(page + 40)
        for r in range(rows):
            place = counts + 8 * read_byte(held + r)
            for n in range(r * items, (r + 1) * items):
                at = place + 16 * read_int32(codes + 4 * n)
                write_int(at, read_int(at) + 1)

    return count


def ids_kernel() -> Any:
    """Put ids of several columns side by side. PAGE: 1 rows, 2 columns (three int64 each), 3 their number, 4
    int32 for each row and column. A column of numbers: float64 a row, edges, how many: 0 for nan, else 1 +
    the edges that are not above it. A column of codes: uint32 a row, int32 by code, -1."""

    def ids(page: int) -> None:
        rows, columns, width = read_int(page + 8), read_int(page + 16), read_int(page + 24)
        target = read_int(page + 32)
        for first in range(0, rows, TILE_ROWS):
            last = min(first + TILE_ROWS, rows)
            for c in range(width):
                source = read_int(columns + 24 * c)
                table = read_int(columns + 24 * c + 8)
                count = read_int(columns + 24 * c + 16)
                at = target + 4 * (first * width + c)
                if count < 0:
                    for r in range(first, last):
                        write_int32(at, read_int32(table + 4 * read_int32(source + 4 * r)))
                        at += 4 * width
                    continue
                for r in range(first, last):
                    value, below, left = read_float(source + 8 * r), 0, count
                    if count <= FEW_EDGES:  # compared several at a time
                        for e in range(count):
                            below += read_float(table + 8 * e) <= value
                        left = 0
                    while left > 0:
                        half = (left + 1) >> 1
                        below += half * (read_float(table + 8 * (below + half - 1)) <= value)
                        left -= half
                    write_int32(at, (below + 1) * (value == value))
                    at += 4 * width

    return ids


def dense_kernel() -> Any:
    """Standardize a column. PAGE: 1 rows, 2 float64 a row (nan: no value), 3 log(1 + |x|) of them, or 0: as
    they are, 4 mean, standard deviation and the largest one (float64), 5 is 1 where a second number tells the
    missing ones, 6 float32 of the first row, 7 bytes from row to row."""

    def dense(page: int) -> None:
        rows, raw, logs = read_int(page + 8), read_int(page + 16), read_int(page + 24)
        facts, indicator = read_int(page + 32), read_int(page + 40)
        target, step = read_int(page + 48), read_int(page + 56)
        mean, std, most = read_float(facts), read_float(facts + 8), read_float(facts + 16)
        for r in range(rows):
            value = read_float(raw + 8 * r)
            missing = value != value
            if logs:
                size = read_float(logs + 8 * r)
                value = size if value >= 0.0 else -size
            value = min(max((value - mean) / std, -most), most)
            if missing:
                value = 0.0
            store(target, fill(value, FLOAT32, 1))
            if indicator:
                store(target + 4, fill(1.0 if missing else 0.0, FLOAT32, 1))
            target += step

    return dense
