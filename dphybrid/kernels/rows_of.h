/* Row kernels for one type of stored values and one width of vectors, included by rows.c once for each. TYPE: its name;
 * STORED: its C type; REAL: the C type of arithmetic. WIDTH: `vector`, of LANES values, for rows whose width is a multiple
 * of them; or `single` (LANES 1) for the others. */
#define OF(name) PASTE(name, TYPE, WIDTH)
#define VEC OF(vec)
#define EACH_VECTOR(d) for (int64_t d = 0; d < dim; d += LANES)
#define LINE_LANES (LINE / (int)sizeof(REAL))

#ifdef IS_SINGLE
#define LANES 1
typedef REAL VEC;
#else
#define LANES (VECTOR_BYTES / (int)sizeof(REAL))
typedef REAL VEC __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
#endif

INLINE VEC OF(load)(const REAL *from)
{
    return *(const VEC *)from;
}

INLINE void OF(store)(REAL *to, VEC v)
{
    *(VEC *)to = v;
}

#if defined(IS_BFLOAT16) || defined(IS_SMALL_FLOAT)
#ifdef IS_BFLOAT16
#define BITS uint16_t
#else
#define BITS STORED
#endif
#ifdef IS_SINGLE
typedef uint32_t OF(wide);
typedef uint16_t OF(middle);
typedef BITS OF(half);
#define CONVERT(v, type) ((type)(v))
#define WHERE(condition) ((condition) ? UINT32_MAX : 0)
#else
typedef uint32_t OF(wide) __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t OF(middle) __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef BITS OF(half) __attribute__((vector_size(LANES * sizeof(BITS))));
#define CONVERT(v, type) __builtin_convertvector(v, type)
#define WHERE(condition) ((OF(wide))(condition))
#endif
#undef BITS
#endif

#ifdef IS_SMALL_FLOAT
/* The exponent gets float32's bias. A subnormal number, of exponent 0, is one of exponent 1 less the leading 1: so nothing
 * here is subnormal in float32, which takes some processors long. From `top` on, numbers are infinity or NaN: all of
 * float16's last exponent, and the last number of float8 (e4m3fn). */
INLINE VEC OF(load_row)(const STORED *from)
{
    const uint32_t sign_place = 8 * sizeof(STORED) - 1, sign_bit = 1u << sign_place;
    const uint32_t top = sizeof(STORED) == 1 ? sign_bit - 1 : 31u << MANTISSA;
    OF(half) half;
    memcpy(&half, from, sizeof half);
    /* In two steps, as gcc 12 converts bytes to words of 32 bits one by one. */
    OF(wide) bits = CONVERT(CONVERT(half, OF(middle)), OF(wide)), sign = (bits & sign_bit) << (31 - sign_place);
    bits &= sign_bit - 1;
    OF(wide) is_small = WHERE(bits < (1u << MANTISSA)), is_top = WHERE(bits >= top);
    OF(wide) ones = is_small & ((BIAS + 1u) << 23);
    bits = (bits << (23 - MANTISSA)) + (BIAS << 23) + (is_small & (1u << 23)) + (is_top & (BIAS << 23));
    VEC v, one;
    memcpy(&v, &bits, sizeof v);
    memcpy(&one, &ones, sizeof one);
    v -= one;
    memcpy(&bits, &v, sizeof v);
    bits |= sign;
    memcpy(&v, &bits, sizeof v);
    return v;
}
#elif defined(IS_BFLOAT16)
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
    is_nan = WHERE(v != v);
    bits = (bits + (noise >> 16)) >> 16;
    OF(half) half = CONVERT((bits & ~is_nan) | (is_nan & 0x7FC0u), OF(half));
    memcpy(to, &half, sizeof half);
}
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

/* Multiply a row by its scale, or each block of its values by the block's. */
INLINE void OF(scale)(const struct lookup *l, int64_t id, REAL *row, int64_t dim)
{
    const int64_t blocks = MAX(l->scales_per_row, 1), width = dim / blocks;
    for (int64_t b = 0; b < blocks; b++) {
        const REAL scale = (REAL)scale_at(l, id * l->scales_per_row + b);
        for (int64_t d = b * width; d < (b + 1) * width; d += LANES)
            OF(store)(row + d, OF(load)(row + d) * scale);
    }
}

INLINE void OF(copy)(const struct lookup *l, int64_t first, int64_t last, int64_t dim)
{
    const STORED *rows = l->rows;
    const int64_t *ids = l->flat, *places = l->places, end = l->count - 1;
#define ROW(n) (places ? (const STORED *)(intptr_t)places[n] : rows + ids[n] * dim)
    for (int64_t n = first; n < last; n++) {
        int64_t ahead = MIN(n + AHEAD, end);
        prefetch_for_reading((const char *)ROW(ahead), dim * (int64_t)sizeof(STORED));
        if (l->scales_per_row)
            __builtin_prefetch((const char *)l->scales + ids[ahead] * l->scales_per_row * SCALE_BYTES[l->scale_type], 0);
        const STORED *from = ROW(n);
        REAL *to = (REAL *)l->out + n * dim;
        EACH_VECTOR(d) OF(store)(to + d, OF(load_row)(from + d));
        if (l->scales)
            OF(scale)(l, ids[n], to, dim);
    }
#undef ROW
}

static void OF(copies)(void *pointer, int64_t first, int64_t last)
{
    const struct lookup *l = pointer;
#define CALL(dim) OF(copy)(l, first, last, dim)
    BY_DIM(CALL, l->dim)
#undef CALL
}

#ifndef IS_SMALL_FLOAT
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

struct OF(row) { /* a row, its states and the sum of its gradients */
    STORED *weights;
    REAL *mean, *square, *grad;
    int32_t *steps;
    int64_t updates;
    uint32_t noise;
};

INLINE VEC OF(weight)(const struct OF(row) *r, int64_t d)
{
    return OF(load_row)(r->weights + d);
}

INLINE void OF(set)(const struct OF(row) *r, int64_t d, VEC weight)
{
    OF(store_row)(r->weights + d, weight, r->noise, d);
}

/* Add the decay times the row to its gradient. */
INLINE void OF(add_decay)(const struct update *u, const struct OF(row) *r, int64_t dim)
{
    const REAL decay = (REAL)u->decay;
    if (decay != 0)
        EACH_VECTOR(d) OF(store)(r->grad + d, OF(load)(r->grad + d) + decay * OF(weight)(r, d));
}

INLINE REAL OF(mean_square)(const struct OF(row) *r, int64_t dim)
{
    return OF(square_of)(r->grad, dim) * (REAL)(1.0 / (double)dim);
}

#include "rules.h"

INLINE struct OF(row) OF(row_of)(const struct update *u, int64_t id, REAL *grad, int64_t dim)
{
    return (struct OF(row)){(STORED *)u->rows + id * dim,
                            (REAL *)u->mean + id * u->mean_values,
                            (REAL *)u->square + id * u->square_values,
                            grad,
                            u->steps + (u->steps ? id : 0),
                            u->updates,
                            (uint32_t)mixed(u->noise ^ (uint64_t)id)};
}

INLINE void OF(prefetch_row)(const struct update *u, int64_t id, int64_t dim)
{
    const struct OF(row) r = OF(row_of)(u, id, NULL, dim);
    prefetch_for_writing((const char *)r.weights, dim * (int64_t)sizeof(STORED));
    prefetch_for_writing((const char *)r.mean, u->mean_values * (int64_t)sizeof(REAL));
    prefetch_for_writing((const char *)r.square, u->square_values * (int64_t)sizeof(REAL));
    if (u->steps)
        prefetch_for_writing((const char *)r.steps, 1);
}

INLINE void OF(update)(const struct update *u, int64_t first, int64_t last, int64_t dim)
{
    const struct arrange *a = u->arranged;
    _Alignas(LINE) REAL sum[MAX_DIM];
    for (int64_t k = first; k < last; k++) {
        OF(prefetch_row)(u, a->keys[MIN(k + ROWS_AHEAD, a->num_unique - 1)], dim);
        OF(sum_gradients)(a, k, sum, dim);
        const struct OF(row) row = OF(row_of)(u, a->keys[k], sum, dim);
#define CASE(rule)                \
    case RULE(rule):              \
        OF(rule)(u, &row, dim);   \
        break;
        switch (u->rule) {
            EACH_RULE(CASE)
        }
#undef CASE
    }
}

static void OF(updates)(void *pointer, int64_t first, int64_t last)
{
    const struct update *u = pointer;
#define CALL(dim) OF(update)(u, first, last, dim)
    BY_DIM(CALL, u->dim)
#undef CALL
}

#endif
#undef CONVERT
#undef WHERE
#undef OF
#undef VEC
#undef EACH_VECTOR
#undef LINE_LANES
#undef BY_DIM
#undef LANES
