"""The row kernels, as numba compiles them: each a loop over blocks of rows that any number of threads may
enter at once.

A kernel has one argument, the address of a page of int64 numbers, most of them addresses. PAGE[0] counts the
blocks that were taken: whoever comes takes the next one until none is left. Blocks own their rows, so bits
depend neither on the threads nor on who took what.

Functions are made for constants (width, kinds of values, rule); `machine_code` has numba compile them and
keeps what comes of it.
"""

from typing import Any

from dphybrid.embedding import vectors
from dphybrid.embedding.sizes import AHEAD, DIGIT_BITS, DRAWN
from dphybrid.embedding.vectors import (
    any_less,
    exponent,
    fill,
    fraction,
    load,
    number,
    prefetch,
    read_float,
    read_int,
    read_int32,
    root,
    stack,
    store,
    store_as,
    store_rounded,
    take_next,
    total,
    uniform,
    where_less,
    widen,
    write_float,
    write_int,
    write_int32,
)

ITEM_BYTES = {vectors.FLOAT32: 4, vectors.FLOAT64: 8, vectors.BFLOAT16: 2}
SGD, ADAGRAD, ADAM, LAZY_ADAM = range(4)

LINE = 64
"""Bytes of a cache line, and of the longest vector."""
ROWS_AHEAD = 8
"""Rows to update whose memory is asked for ahead."""
TABLE_BYTES = 56


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


LOGARITHM = _numbers(
    "0.070376836292 -0.1151461031 0.1167699874 -0.12420140846 0.14249322787 "
    "-0.16668057665 0.20000714765 -0.24999993993 0.33333331174"
)
ERFINV_MIDDLE = _numbers(
    "2.81022636e-08 3.43273939e-07 -3.5233877e-06 -4.39150654e-06 0.00021858087 "
    "-0.00125372503 -0.00417768164 0.246640727 1.50140941"
)
ERFINV_TAIL = _numbers(
    "-0.000200214257 0.000100950558 0.00134934322 -0.00367342844 0.00573950773 "
    "-0.0076224613 0.00943887047 1.00167406 2.83297682"
)


def lanes_of(dim: int, item_bytes: int) -> int:
    """Return the largest power of two that divides `dim`, at most a cache line's: rows need no remainder
    then."""
    return min(dim & -dim, LINE // item_bytes)


def arrange_kernel() -> Any:
    """Find the unique keys of all ids and where each one's gradients lie. One thread.

    PAGE: 1 segments, 2 their number, 3 ids in all, 4 bits of a place, 5 bits of a key, 6 and 7 scratch (int64
    each id), 8 scratch (counts), 9 address of each id's gradient by unsorted place, 10 frozen keys (sorted),
    11 their number. Out: 12 number of unique keys, 13 keys, 14 bounds (int32 pairs), 15 addresses of
    gradients, sorted by key, 16 place among the unique keys by id (int32; 0: not wanted). A segment: address
    of int64 ids, their number, first key, address of gradients, bytes of one, address of each id's gradient's
    row or 0.
    """

    def arrange(page: int) -> None:
        segments, num_segments = read_int(page + 8), read_int(page + 16)
        count, place_bits, key_bits = read_int(page + 24), read_int(page + 32), read_int(page + 40)
        words, other, counts = read_int(page + 48), read_int(page + 56), read_int(page + 64)
        places, frozen, num_frozen = read_int(page + 72), read_int(page + 80), read_int(page + 88)
        keys, bounds = read_int(page + 104), read_int(page + 112)
        sorted_places, inverse = read_int(page + 120), read_int(page + 128)
        place, last_key, ascending = 0, -1, True
        for segment in range(num_segments):
            at = segments + 48 * segment
            ids, num_ids, first_key = read_int(at), read_int(at + 8), read_int(at + 16)
            for n in range(num_ids):
                key = read_int(ids + 8 * n) + first_key
                ascending = ascending and key >= last_key
                last_key = key
                write_int(words + 8 * place, (key << place_bits) | place)
                place += 1
        grads, row_bytes = read_int(segments + 24), read_int(segments + 32)
        direct = num_segments == 1 and read_int(segments + 40) == 0
        if not direct:
            place = 0
            for segment in range(num_segments):
                at = segments + 48 * segment
                grads, row_bytes, sources = read_int(at + 24), read_int(at + 32), read_int(at + 40)
                for n in range(read_int(at + 8)):
                    source = read_int(sources + 8 * n) if sources else n
                    write_int(places + 8 * place, grads + row_bytes * source)
                    place += 1
        if not ascending:
            passes = (key_bits + DIGIT_BITS - 1) // DIGIT_BITS
            digit_bits = (key_bits + passes - 1) // passes
            size, mask = 1 << digit_bits, (1 << digit_bits) - 1
            for p in range(passes):
                shift = place_bits + p * digit_bits
                for c in range(size):
                    write_int32(counts + 4 * c, 0)
                for n in range(count):
                    c = counts + 4 * ((read_int(words + 8 * n) >> shift) & mask)
                    write_int32(c, read_int32(c) + 1)
                before = 0
                for c in range(size):
                    here = read_int32(counts + 4 * c)
                    write_int32(counts + 4 * c, before)
                    before += here
                for n in range(count):
                    word = read_int(words + 8 * n)
                    c = counts + 4 * ((word >> shift) & mask)
                    target = read_int32(c)
                    write_int32(c, target + 1)
                    write_int(other + 8 * target, word)
                words, other = other, words
        place_mask = (1 << place_bits) - 1
        unique, last_key, f, skipped = -1, -1, 0, False
        for n in range(count):
            word = read_int(words + 8 * n)
            key, place = word >> place_bits, word & place_mask
            if key != last_key:
                while f < num_frozen and read_int(frozen + 8 * f) < key:
                    f += 1
                skipped = f < num_frozen and read_int(frozen + 8 * f) == key
                last_key = key
                if not skipped:
                    unique += 1
                    write_int(keys + 8 * unique, key)
                    write_int32(bounds + 8 * unique, n)
            if not skipped:
                write_int32(bounds + 8 * unique + 4, n + 1)
                if inverse:
                    write_int32(inverse + 4 * place, unique)
            found = grads + row_bytes * place if direct else read_int(places + 8 * place)
            write_int(sorted_places + 8 * n, found)
        for n in range(count, count + AHEAD):  # asked for ahead, but not used
            write_int(sorted_places + 8 * n, 0)
        write_int(page + 96, unique + 1)

    return arrange


def gather_kernel(dim: int, stored: int) -> Any:
    """Copy rows of several tables, whose ids take turns, bfloat16 as float32.

    PAGE: 1 ids (int64), 2 their number, 3 of a block, 4 tables (each: address of rows, their number), 5 their
    number, 6 target, 8 the place in the target of each id's row (int64), or 0: in order. Out: 7 is 1 when an
    id is no row of its table.
    """
    item, out_item = ITEM_BYTES[stored], ITEM_BYTES[stored] if stored != vectors.BFLOAT16 else 4
    lanes = lanes_of(dim, out_item)
    row_bytes = dim * item

    def gather(page: int) -> None:
        ids, count, size = read_int(page + 8), read_int(page + 16), read_int(page + 24)
        tables, tables_bytes, target = read_int(page + 32), 16 * read_int(page + 40), read_int(page + 48)
        places = read_int(page + 64)
        while True:
            first = take_next(page) * size
            if first >= count:
                return
            last = min(first + size, count)
            own, others = 16 * first % tables_bytes, 16 * (first + AHEAD) % tables_bytes
            for n in range(first, last):
                ahead = read_int(tables + others) + row_bytes * read_int(ids + 8 * min(n + AHEAD, last - 1))
                for line in range(0, row_bytes, LINE):
                    prefetch(ahead + line, 0)
                row = read_int(ids + 8 * n)
                if row < 0 or row >= read_int(tables + own + 8):
                    write_int(page + 56, 1)
                    return
                place = read_int(places + 8 * n) if places else n
                source, to = read_int(tables + own) + row_bytes * row, target + dim * out_item * place
                for d in range(0, dim, lanes):
                    store(to + d * out_item, load(source + d * item, stored, lanes))
                own, others = own + 16, others + 16
                if own == tables_bytes:
                    own = 0
                if others == tables_bytes:
                    others = 0

    return gather


def draw_kernel(stored: int) -> Any:
    """Fill values with normal ones, a function of (seed, place) alone.

    PAGE: 1 values, 2 groups of DRAWN of a block, 3 address of the first, 4 seed, 5 standard deviation
    (float64). The inverse of the normal distribution is Giles' ("Approximating the erfinv function", 2011),
    its logarithm that of Cephes: of sums and products, which have the same bits on every processor, as no
    library's logarithm has.
    """
    item, wide, rest_bytes = ITEM_BYTES[stored], DRAWN, 4 * DRAWN
    log_of, middle, tail = LOGARITHM, ERFINV_MIDDLE, ERFINV_TAIL
    real = vectors.FLOAT32

    def draw(page: int) -> None:
        count, size, values = read_int(page + 8), read_int(page + 16), read_int(page + 24)
        first = read_int(page + 48)
        end = -((-first - count) // wide)
        seed, scale = read_int(page + 32), read_float(page + 40) * 1.4142135623730951
        rest = stack(rest_bytes)
        zero, one, half = fill(0.0, real, wide), fill(1.0, real, wide), fill(0.5, real, wide)
        five, root_two = fill(5.0, real, wide), fill(1.4142135, real, wide)
        while True:
            begin = first // wide + take_next(page) * size
            if begin >= end:
                return
            for group in range(begin, min(begin + size, end)):
                noise = (seed ^ group) * -7046029254386353131
                noise = (noise ^ (noise >> 29)) * -4658895280553007687
                x = uniform(noise ^ (noise >> 32), 0, wide)
                y = (one - x) * (one + x)
                t = fraction(y)
                powers = exponent(y) + where_less(root_two, t, one, zero)
                t = where_less(root_two, t, t * half, t) - one
                p = fill(log_of[0], real, wide)
                for k in range(1, 9):
                    p = p * t + fill(log_of[k], real, wide)
                logarithm = powers * fill(0.6931471805599453, real, wide) + (t - t * t * (half - t * p))
                w = zero - logarithm
                inverse, near = fill(middle[0], real, wide), w - fill(2.5, real, wide)
                for k in range(1, 9):
                    inverse = inverse * near + fill(middle[k], real, wide)
                if any_less(five, w):
                    outer, far = fill(tail[0], real, wide), root(w) - fill(3.0, real, wide)
                    for k in range(1, 9):
                        outer = outer * far + fill(tail[k], real, wide)
                    inverse = where_less(five, w, outer, inverse)
                drawn = inverse * x * fill(scale, real, wide)
                n = group * wide - first
                if n >= 0 and n + wide <= count:
                    store_as(values + item * n, drawn, stored)
                else:
                    store(rest, drawn)
                    for k in range(max(0, -n), min(wide, count - n)):
                        store_as(values + item * (n + k), load(rest + 4 * k, real, 1), stored)

    return draw


def sum_kernel(dim: int, stored: int) -> Any:
    """Sum rows that lie anywhere, in order. PAGE: 1 sums to make, 2 of a block, 3 bounds (int32 pairs), 4
    places of rows, 5 target (0: not wanted), 6 squares of each sum's 2-norm (float64; 0: not wanted), 7
    number of places, 8 and 9 the address of place 0 and the bytes from a place to the next.
    """
    item, out_item = ITEM_BYTES[stored], ITEM_BYTES[stored] if stored != vectors.BFLOAT16 else 4
    kind = vectors.FLOAT64 if stored == vectors.FLOAT64 else vectors.FLOAT32
    lanes = lanes_of(dim, out_item)
    row_bytes = dim * item

    def sums(page: int) -> None:
        count, size, bounds = read_int(page + 8), read_int(page + 16), read_int(page + 24)
        places, target, squares = read_int(page + 32), read_int(page + 40), read_int(page + 48)
        last_place, base, step = read_int(page + 56) - 1, read_int(page + 64), read_int(page + 72)
        while True:
            begin = take_next(page) * size
            if begin >= count:
                return
            for u in range(begin, min(begin + size, count)):
                first, last = read_int32(bounds + 8 * u), read_int32(bounds + 8 * u + 4)
                for n in range(first, last):
                    ahead = base + step * read_int(places + 8 * min(n + AHEAD, last_place))
                    for line in range(0, row_bytes, LINE):
                        prefetch(ahead + line, 0)
                square = fill(0.0, kind, lanes)
                for d in range(0, dim, lanes):
                    summed = fill(0.0, kind, lanes)
                    if first < last:
                        row = base + step * read_int(places + 8 * first)
                        summed = load(row + d * item, stored, lanes)
                    for n in range(first + 1, last):
                        row = base + step * read_int(places + 8 * n)
                        summed = summed + load(row + d * item, stored, lanes)
                    if target:
                        store(target + (u * dim + d) * out_item, summed)
                    square = square + summed * summed
                if squares:
                    write_float(squares + 8 * u, number(total(square)))

    return sums


def update_kernel(rule: int, dim: int, stored: int) -> Any:
    """Sum each touched row's gradients in their order, scale, decay, apply the rule, write row and states:
    one pass over memory.

    PAGE: 1 touched rows, 2 of a block, 3 keys, 4 bounds, 5 addresses of gradients, 6 tables, 7 their number,
    8 weight decay, 9 learning rate, 10 eps, 11 and 12 betas, 13 and 14 bias corrections by step (float64), 15
    the last one's step. A table: first key, address of rows, of states 1 to 3, start of its noise, factor on
    its gradients. States: Adagrad: sum. Adams: mean, square, steps (int32).
    """
    item = ITEM_BYTES[stored]
    kind = vectors.FLOAT64 if stored == vectors.FLOAT64 else vectors.FLOAT32
    real = ITEM_BYTES[kind]
    lanes = lanes_of(dim, real)
    four = 4 * lanes
    in_fours = dim // four * four
    row_bytes, state_bytes = dim * item, dim * real
    is_sgd, is_adagrad, is_adam, is_lazy = (int(rule == one) for one in (SGD, ADAGRAD, ADAM, LAZY_ADAM))
    is_rounded = int(stored == vectors.BFLOAT16)
    has_moments = is_adam + is_lazy

    def update(page: int) -> None:
        count, size = read_int(page + 8), read_int(page + 16)
        keys, bounds = read_int(page + 24), read_int(page + 32)
        grads, tables, num_tables = read_int(page + 40), read_int(page + 48), read_int(page + 56)
        decay, rate, eps = read_float(page + 64), read_float(page + 72), fill(read_float(page + 80), kind, 1)
        beta1, beta2 = read_float(page + 88), read_float(page + 96)
        first_fix, second_fix, last_fix = read_int(page + 104), read_int(page + 112), read_int(page + 120)
        tables_end = tables + TABLE_BYTES * num_tables
        row_sum = stack(state_bytes)
        decay_L, rate_L = fill(decay, kind, lanes), fill(rate, kind, lanes)
        rest1_L, rest2_L = fill(1.0 - beta1, kind, lanes), fill(1.0 - beta2, kind, lanes)
        share = fill(1.0 / dim, kind, 1)
        while True:
            begin = take_next(page) * size
            if begin >= count:
                return
            at, next_key, factor = tables, -1, 1.0
            table_key, table, state1, state2, state3, noise = 0, 0, 0, 0, 0, 0
            end = min(begin + size, count)
            for u in range(begin, end):
                key = read_int(keys + 8 * u)
                if key >= next_key:
                    while at + TABLE_BYTES < tables_end and read_int(at + TABLE_BYTES) <= key:
                        at += TABLE_BYTES
                    next_key = read_int(at + TABLE_BYTES) if at + TABLE_BYTES < tables_end else 1 << 62
                    factor = read_float(at + 48)
                    table_key, table, noise = read_int(at), read_int(at + 8), read_int(at + 40)
                    state1, state2, state3 = read_int(at + 16), read_int(at + 24), read_int(at + 32)
                ahead = read_int(keys + 8 * min(u + ROWS_AHEAD, end - 1)) - table_key
                for line in range(0, row_bytes, LINE):
                    prefetch(table + row_bytes * ahead + line, 1)
                if is_adagrad:
                    prefetch(state1 + real * ahead, 1)
                if has_moments:
                    prefetch(state3 + 4 * ahead, 1)
                    for line in range(0, state_bytes, LINE):
                        prefetch(state1 + state_bytes * ahead + line, 1)
                if is_adam:
                    prefetch(state2 + real * ahead, 1)
                if is_lazy:
                    for line in range(0, state_bytes, LINE):
                        prefetch(state2 + state_bytes * ahead + line, 1)
                first, last = read_int32(bounds + 8 * u), read_int32(bounds + 8 * u + 4)
                for n in range(first, last):
                    grad = read_int(grads + 8 * (n + AHEAD))
                    for line in range(0, state_bytes, LINE):
                        prefetch(grad + line, 0)
                for d in range(0, in_fours, four):
                    grad = read_int(grads + 8 * first) + d * real
                    a, b = load(grad, kind, lanes), load(grad + lanes * real, kind, lanes)
                    c = load(grad + 2 * lanes * real, kind, lanes)
                    e = load(grad + 3 * lanes * real, kind, lanes)
                    for n in range(first + 1, last):
                        grad = read_int(grads + 8 * n) + d * real
                        a, b = a + load(grad, kind, lanes), b + load(grad + lanes * real, kind, lanes)
                        c = c + load(grad + 2 * lanes * real, kind, lanes)
                        e = e + load(grad + 3 * lanes * real, kind, lanes)
                    to = row_sum + d * real
                    store(to, a)
                    store(to + lanes * real, b)
                    store(to + 2 * lanes * real, c)
                    store(to + 3 * lanes * real, e)
                for d in range(in_fours, dim, lanes):
                    a = load(read_int(grads + 8 * first) + d * real, kind, lanes)
                    for n in range(first + 1, last):
                        a = a + load(read_int(grads + 8 * n) + d * real, kind, lanes)
                    store(row_sum + d * real, a)
                key -= table_key
                row, row_noise = table + row_bytes * key, 0
                square_L, factor_L = fill(0.0, kind, lanes), fill(factor, kind, lanes)
                if factor != 1.0 or decay != 0.0 or is_adagrad or is_adam:
                    for d in range(0, dim, lanes):
                        grad_L = load(row_sum + d * real, kind, lanes) * factor_L
                        if decay != 0.0:
                            grad_L = grad_L + decay_L * load(row + d * item, stored, lanes)
                        store(row_sum + d * real, grad_L)
                        square_L = square_L + grad_L * grad_L
                step_L, scale_L = rate_L, rate_L
                if is_adagrad:
                    summed = load(state1 + real * key, kind, 1) + total(square_L) * share
                    store(state1 + real * key, summed)
                    step_L = widen(fill(rate, kind, 1) / (root(summed) + eps), lanes)
                if has_moments:
                    steps = read_int32(state3 + 4 * key) + 1
                    write_int32(state3 + 4 * key, steps)
                    step = min(steps, last_fix)
                    fix = fill(rate, kind, 1) * fill(read_float(first_fix + 8 * step), kind, 1)
                    scale = fill(read_float(second_fix + 8 * step), kind, 1)
                    step_L, scale_L = widen(fix, lanes), widen(scale, lanes)
                    if is_adam:
                        second = load(state2 + real * key, kind, 1) * fill(beta2, kind, 1)
                        second = second + fill(1.0 - beta2, kind, 1) * (total(square_L) * share)
                        store(state2 + real * key, second)
                        step_L = widen(fix / (root(second) * scale + eps), lanes)
                if is_rounded:
                    row_noise = (noise ^ key) * -7046029254386353131
                    row_noise = (row_noise ^ (row_noise >> 29)) * -4658895280553007687
                    row_noise = row_noise ^ (row_noise >> 32)
                for d in range(0, dim, lanes):
                    grad_L = load(row_sum + d * real, kind, lanes)
                    row_L = load(row + d * item, stored, lanes)
                    if is_sgd + is_adagrad:
                        row_L = row_L - step_L * grad_L
                    else:
                        place = state1 + state_bytes * key + d * real
                        mean_L = load(place, kind, lanes)
                        mean_L = mean_L + (grad_L - mean_L) * rest1_L
                        store(place, mean_L)
                        if is_adam:
                            row_L = row_L - step_L * mean_L
                        else:
                            place = state2 + state_bytes * key + d * real
                            second_L = load(place, kind, lanes)
                            second_L = second_L + (grad_L * grad_L - second_L) * rest2_L
                            store(place, second_L)
                            row_L = row_L - step_L * mean_L / (root(second_L) * scale_L + widen(eps, lanes))
                    if is_rounded:
                        store_rounded(row + d * item, row_L, row_noise, d)
                    else:
                        store(row + d * item, row_L)

    return update
