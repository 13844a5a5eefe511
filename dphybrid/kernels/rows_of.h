/* Row kernels for one type of stored values, included by rows.c once per type. TYPE: its name; STORED: its C type; REAL:
 * the C type of arithmetic. This file includes itself twice: with vectors of the processor's width, and with single
 * values (LANES 1), for rows whose width is not a multiple of the vector's. */
#ifndef LANES

#define LANES (VECTOR_BYTES / (int)sizeof(REAL))
#define WIDTH vector
typedef REAL PASTE(vec, TYPE, vector) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
#include "rows_of.h"
#undef LANES
#undef WIDTH

#define LANES 1
#define WIDTH single
#define IS_SINGLE
typedef REAL PASTE(vec, TYPE, single);
#include "rows_of.h"
#undef IS_SINGLE
#undef LANES
#undef WIDTH

#else

#define OF(name) PASTE(name, TYPE, WIDTH)
#define VEC OF(vec)
#define EACH_VECTOR(d) for (int64_t d = 0; d < dim; d += LANES)
#define LINE_LANES (LINE / (int)sizeof(REAL))

INLINE VEC OF(load)(const REAL *from)
{
    return *(const VEC *)from;
}

INLINE void OF(store)(REAL *to, VEC v)
{
    *(VEC *)to = v;
}

#ifdef IS_BFLOAT16
#ifdef IS_SINGLE
typedef uint32_t OF(wide);
typedef uint16_t OF(half);
#define CONVERT(v, type) ((type)(v))
#else
typedef uint32_t OF(wide) __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t OF(half) __attribute__((vector_size(VECTOR_BYTES / 2)));
#define CONVERT(v, type) __builtin_convertvector(v, type)
#endif

INLINE VEC OF(load_row)(const STORED *from)
{
    OF(half) half;
    memcpy(&half, from, sizeof half);
    OF(wide) bits = CONVERT(half, OF(wide)) << 16;
    VEC v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* Round stochastically: add noise (a hash of the row's noise and the column) below the 16 bits that are kept, then cut.
 * NaN stays NaN; adding to its bits could turn it into a number. */
INLINE void OF(store_row)(STORED *to, VEC v, uint32_t row_noise, int64_t column)
{
    static const uint32_t PLACES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    OF(wide) noise, bits, is_nan;
    memcpy(&noise, PLACES, sizeof noise);
    memcpy(&bits, &v, sizeof v);
    noise = (noise + (uint32_t)column) * 0x9E3779B1u + row_noise;
    noise = (noise ^ noise >> 16) * 0x85EBCA6Bu;
    noise = (noise ^ noise >> 13) * 0xC2B2AE35u;
#ifdef IS_SINGLE
    is_nan = v != v ? UINT32_MAX : 0;
#else
    is_nan = (OF(wide))(v != v);
#endif
    bits = (bits + (noise >> 16)) >> 16;
    OF(half) half = CONVERT((bits & ~is_nan) | (is_nan & 0x7FC0u), OF(half));
    memcpy(to, &half, sizeof half);
}
#undef CONVERT
#else
INLINE VEC OF(load_row)(const STORED *from)
{
    return OF(load)(from);
}

INLINE void OF(store_row)(STORED *to, VEC v, uint32_t row_noise, int64_t column)
{
    (void)row_noise, (void)column;
    OF(store)(to, v);
}
#endif

INLINE REAL OF(root)(REAL x)
{
    return sizeof(REAL) == 4 ? (REAL)__builtin_sqrtf((float)x) : (REAL)__builtin_sqrt((double)x);
}

INLINE VEC OF(roots)(VEC v)
{
#ifdef IS_SINGLE
    return OF(root)(v);
#else
    for (int lane = 0; lane < LANES; lane++)
        v[lane] = OF(root)(v[lane]);
    return v;
#endif
}

/* The number of partial sums for squares: the largest power of two that divides the row's width, at most the values of a
 * cache line. So the order of the sum depends only on the row, not on the processor's vectors. */
INLINE int OF(lanes_of)(int64_t dim)
{
    return (int)MIN(dim & -dim, LINE_LANES);
}

/* The sum of all lanes: add the upper half to the lower half until one value is left. */
INLINE REAL OF(total)(const VEC *parts, int lanes)
{
    REAL values[LINE_LANES];
    memcpy(values, parts, sizeof values);
    for (int half = lanes / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++)
            values[lane] += values[lane + half];
    return values[0];
}

INLINE REAL OF(square_of)(const REAL *sum, int64_t dim)
{
    int lanes = OF(lanes_of)(dim), parts = lanes / LANES;
    VEC squares[LINE_LANES / LANES] = {0};
    EACH_VECTOR(d)
    {
        VEC g = OF(load)(sum + d);
        squares[d / LANES & (parts - 1)] += g * g;
    }
    return OF(total)(squares, lanes);
}

/* Calls with a constant for common widths: loops of known length are unrolled and stay in registers. */
#ifdef IS_SINGLE
#define BY_DIM(call, dim) call(dim);
#else
#define BY_DIM(call, dim)        \
    switch (dim) {               \
    case 16: call(16); break;    \
    case 32: call(32); break;    \
    case 64: call(64); break;    \
    case 128: call(128); break;  \
    case 256: call(256); break;  \
    default: call(dim);          \
    }
#endif

INLINE void OF(copy)(const struct lookup *l, int64_t first, int64_t last, int64_t dim)
{
    const STORED *rows = l->rows;
    const int64_t *ids = l->flat, end = l->count - 1;
    for (int64_t n = first; n < last; n++) {
        prefetch_for_reading((const char *)(rows + ids[MIN(n + AHEAD, end)] * dim), dim * (int64_t)sizeof(STORED));
        const STORED *from = rows + ids[n] * dim;
        REAL *to = (REAL *)l->out + n * dim;
        EACH_VECTOR(d) OF(store)(to + d, OF(load_row)(from + d));
    }
}

static void OF(copies)(void *pointer, int64_t first, int64_t last)
{
    const struct lookup *l = pointer;
#define CALL(dim) OF(copy)(l, first, last, dim)
    BY_DIM(CALL, l->dim)
#undef CALL
}

INLINE void OF(prefetch_gradient)(const int64_t *places, int64_t num_places, int64_t at, int64_t dim)
{
    prefetch_for_reading((const char *)(intptr_t)places[MIN(at + AHEAD, num_places - 1)], dim * (int64_t)sizeof(REAL));
}

/* Sum one row's gradients, in their order. The number of gradients is hard for the processor to predict, and each wrong
 * guess is expensive, so narrow rows have only one loop over the gradients; wide ones copy a single gradient. */
INLINE void OF(sum_gradients)(const struct arrange *a, int64_t unique, REAL *sum, int64_t dim)
{
    const int64_t *places = a->places, num_places = a->count;
    int64_t n = a->bounds[2 * unique], end = a->bounds[2 * unique + 1], d = 0;
    const REAL *grad = (const REAL *)(intptr_t)places[n];
    OF(prefetch_gradient)(places, num_places, n, dim);
    if (dim > 4 * LANES && end - n == 1) {
        EACH_VECTOR(d) OF(store)(sum + d, OF(load)(grad + d));
        return;
    }
    for (; d + 4 * LANES <= dim; d += 4 * LANES) {
        VEC a = OF(load)(grad + d), b = OF(load)(grad + d + LANES);
        VEC c = OF(load)(grad + d + 2 * LANES), e = OF(load)(grad + d + 3 * LANES);
        for (int64_t at = n + 1; at < end; at++) {
            if (!d)
                OF(prefetch_gradient)(places, num_places, at, dim);
            const REAL *next = (const REAL *)(intptr_t)places[at] + d;
            a += OF(load)(next), b += OF(load)(next + LANES);
            c += OF(load)(next + 2 * LANES), e += OF(load)(next + 3 * LANES);
        }
        OF(store)(sum + d, a), OF(store)(sum + d + LANES, b);
        OF(store)(sum + d + 2 * LANES, c), OF(store)(sum + d + 3 * LANES, e);
    }
    for (; d < dim; d += LANES) {
        VEC a = OF(load)(grad + d);
        for (int64_t at = n + 1; at < end; at++) {
            if (!d)
                OF(prefetch_gradient)(places, num_places, at, dim);
            a += OF(load)((const REAL *)(intptr_t)places[at] + d);
        }
        OF(store)(sum + d, a);
    }
}

INLINE void OF(sum)(const struct sums *s, int64_t first, int64_t last, int64_t dim)
{
    for (int64_t u = first; u < last; u++) {
        REAL *sum = (REAL *)s->target + u * s->target_step;
        OF(sum_gradients)(s->arranged, u, sum, dim);
        if (s->squares)
            s->squares[u] = (double)OF(square_of)(sum, dim);
    }
}

static void OF(sums)(void *pointer, int64_t first, int64_t last)
{
    const struct sums *s = pointer;
#define CALL(dim) OF(sum)(s, first, last, dim)
    BY_DIM(CALL, s->dim)
#undef CALL
}

/* base to the power of exponent, by products alone: pow() of C libraries differs in the last bits. */
INLINE double OF(power)(double base, int64_t exponent)
{
    double power = 1;
    for (; exponent > 0; exponent >>= 1, base *= base)
        if (exponent & 1)
            power *= base;
    return power;
}

/* Update one row and its states with the sum of its gradients. */
INLINE void OF(change)(const struct update *u, const struct table *t, int64_t id, REAL *sum, int64_t dim, int64_t rule)
{
    STORED *row = (STORED *)t->rows + id * dim;
    REAL *means = (REAL *)t->mean + id * dim, *squares = (REAL *)t->square + id * dim, *square = (REAL *)t->square + id;
    const REAL lr = (REAL)u->lr, decay = (REAL)u->decay, eps = (REAL)u->eps;
    const REAL rest1 = (REAL)(1.0 - u->beta1), rest2 = (REAL)(1.0 - u->beta2);
    REAL mean_square = 0, step = lr, scale = 1, kept = 1, second_kept = 1;
    if (decay != 0 && rule != ADAMW)
        EACH_VECTOR(d) OF(store)(sum + d, OF(load)(sum + d) + decay * OF(load_row)(row + d));
    if (rule == ADAGRAD || rule == ADAM)
        mean_square = OF(square_of)(sum, dim) * (REAL)(1.0 / (double)dim);
    if (rule == ADAGRAD) {
        *square += mean_square;
        step = lr / (OF(root)(*square) + eps);
    } else if (rule == ADAM || rule == LAZY_ADAM) {
        int64_t steps = t->steps[id] + 1, fix = MIN(steps, u->last_fix);
        t->steps[id] = (int32_t)steps;
        step = lr * (REAL)u->fix1[fix], scale = (REAL)u->fix2[fix];
        if (rule == ADAM) {
            *square = *square * (REAL)u->beta2 + rest2 * mean_square;
            step = step / (OF(root)(*square) * scale + eps);
        }
    } else if (rule == ADAMW) { /* catch up on the decays of all table updates since the row was last touched */
        int64_t waited = t->updates - t->steps[id];
        t->steps[id] = (int32_t)t->updates;
        kept = (REAL)OF(power)(1.0 - u->lr * u->decay, waited), second_kept = (REAL)OF(power)(u->beta2, waited);
        scale = (REAL)u->fix2[MIN(t->updates, u->last_fix)];
    }
    uint32_t row_noise = (uint32_t)mixed(t->noise ^ (uint64_t)id);
    EACH_VECTOR(d)
    {
        VEC g = OF(load)(sum + d), w = OF(load_row)(row + d);
        if (rule == SGD || rule == ADAGRAD)
            w -= step * g;
        else if (rule == ADAMW || rule == LAZY_ADAGRAD) { /* LAZY_ADAGRAD: beta2 = 0 and second_kept = 1 make it a plain sum */
            VEC second = OF(load)(squares + d) * second_kept + g * g * rest2;
            OF(store)(squares + d, second);
            w = w * kept - step * g / (OF(roots)(second) * scale + eps);
        } else {
            VEC mean = OF(load)(means + d);
            mean += (g - mean) * rest1;
            OF(store)(means + d, mean);
            if (rule == ADAM)
                w -= step * mean;
            else {
                VEC second = OF(load)(squares + d);
                second += (g * g - second) * rest2;
                OF(store)(squares + d, second);
                w -= step * mean / (OF(roots)(second) * scale + eps);
            }
        }
        OF(store_row)(row + d, w, row_noise, d);
    }
}

INLINE void OF(prefetch_row)(const struct update *u, const struct table *t, int64_t id, int64_t dim)
{
    int64_t row_bytes = dim * (int64_t)sizeof(STORED), state_bytes = dim * (int64_t)sizeof(REAL);
    prefetch_for_writing((const char *)t->rows + id * row_bytes, row_bytes);
    if (u->rule == ADAGRAD || u->rule == ADAM)
        prefetch_for_writing((const char *)((REAL *)t->square + id), 1);
    if (u->rule >= ADAM)
        prefetch_for_writing((const char *)(t->steps + id), 1);
    if (u->rule == ADAM || u->rule == LAZY_ADAM)
        prefetch_for_writing((const char *)t->mean + id * state_bytes, state_bytes);
    if (u->rule == LAZY_ADAGRAD || u->rule >= LAZY_ADAM)
        prefetch_for_writing((const char *)t->square + id * state_bytes, state_bytes);
}

INLINE void OF(update)(const struct update *u, int64_t first, int64_t last, int64_t dim, int64_t rule)
{
    const struct table *t = u->tables, *end = u->tables + u->num_tables;
    const struct arrange *a = u->arranged;
    _Alignas(LINE) REAL sum[MAX_DIM];
    for (int64_t k = first; k < last; k++) {
        int64_t key = a->keys[k], ahead = a->keys[MIN(k + ROWS_AHEAD, a->num_unique - 1)];
        while (t + 1 < end && t[1].first_key <= key)
            t++;
        OF(prefetch_row)(u, t, MIN(ahead - t->first_key, t->num_rows - 1), dim);
        OF(sum_gradients)(a, k, sum, dim);
        OF(change)(u, t, key - t->first_key, sum, dim, rule);
    }
}

static void OF(updates)(void *pointer, int64_t first, int64_t last)
{
    const struct update *u = pointer;
    if (u->rule == ADAGRAD) { /* a constant rule, so that no vector needs a branch */
#define CALL(dim) OF(update)(u, first, last, dim, ADAGRAD)
        BY_DIM(CALL, u->dim)
#undef CALL
    } else {
#define CALL(dim) OF(update)(u, first, last, dim, u->rule)
        BY_DIM(CALL, u->dim)
#undef CALL
    }
}

#undef OF
#undef VEC
#undef EACH_VECTOR
#undef LINE_LANES
#undef BY_DIM

#endif
