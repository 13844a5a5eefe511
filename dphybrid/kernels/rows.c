/* Kernels on rows of embedding tables in host memory: look up, sort, sum, update. Also bins and pairs.
 *
 * __init__.py calls them through ctypes, so they run without the GIL and use no Python API. The caller keeps all memory
 * alive and passes its sizes; here every id is compared with the number of rows before anything is written.
 *
 * Results have the same bits for any number of threads and on any processor: work is cut into blocks that own
 * their rows, sums have one order for all vector widths, and -ffp-contract=off forbids fused multiply-adds.
 */
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define PASTE_(a, b, c) a##_##b##_##c
#define PASTE(a, b, c) PASTE_(a, b, c)

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

/* AHEAD: gradients are prefetched this many occurrences before their use; ROWS_AHEAD: rows, for writing, this many rows
 * before. Measured with 53,248 ids of 1M rows of 64: an update took 1.9 ms with gradients prefetched by occurrence, 2.8 ms
 * by row; prefetching rows for writing saved another sixth. */
enum { LINE = 64, AHEAD = 24, ROWS_AHEAD = 8, DIGIT_BITS = 11, MAX_PASSES = 6, MAX_DIM = 16384 };
enum { BLOCK_BYTES = 1 << 16 }; /* of rows that a thread takes at a time */
enum stored { FLOAT32, FLOAT64, BFLOAT16, STORED_TYPES, FLOAT16 = STORED_TYPES, FLOAT8, PUBLISHED_TYPES };
enum scale { SCALE_FLOAT32, SCALE_BFLOAT16, SCALE_EXPONENT }; /* the last: 2^(byte - 127), or NaN of 255 */
#include "rules.h"
#define RULE(name) RULE_##name
#define NUMBERED(name) RULE(name),
enum rule { EACH_RULE(NUMBERED) RULES };

/* ------------------------------------------------------------------ arguments; __init__.py parses these declarations */

typedef void task(void *);
typedef void team_call(task *, void *, unsigned, unsigned);
struct team {
    team_call *parallel; /* GOMP_parallel of torch's OpenMP, or NULL */
    int64_t threads;
};
struct lookup {
    struct team team;
    const int64_t *ids;
    int64_t count;
    const void *rows; /* NULL if they lie in pieces */
    int64_t num_rows, dim, stored;
    const void *const *pieces; /* where the rows of each piece begin */
    const int64_t *starts;     /* number of the first row of each piece, ascending */
    int64_t num_pieces;
    int64_t *places;    /* scratch, count: address of each id's row; NULL without pieces */
    const void *scales; /* factors of the rows; NULL if there are none */
    int64_t scale_type, scales_per_row; /* 0 a row: one for all */
    void *out;     /* float64 or float32 */
    int64_t *flat; /* out: a copy of the ids */
    int64_t wrong; /* out: position of the first id that is not a row, or count */
};
struct segment { /* the gradient of ids[n] is row n of `rows` */
    const int64_t *ids;
    int64_t count;
    const char *rows;
    int64_t row_bytes;
};
struct arrange { /* ids of one table, which has `num_rows` rows */
    const struct segment *segments;
    int64_t num_segments, count, num_rows;
    uint64_t *words;   /* scratch, 2 x count */
    int64_t *unsorted; /* scratch, count: addresses of gradients; NULL if there is one segment */
    int64_t *keys;     /* out, room for count: unique, ascending */
    int32_t *bounds;   /* out, room for 2 x count: first and end of each key's occurrences in `places` */
    int64_t *places;   /* out, count: address of each occurrence's gradient, sorted by key */
    int32_t *inverse;  /* out, count: index of each id in `keys`; may be NULL */
    int64_t num_unique, wrong_segment, wrong_place; /* out */
};
struct sums { /* sums of gradients by row, for arranged ids */
    struct team team;
    const struct arrange *arranged;
    int64_t dim, stored;
    void *target;        /* num_unique x dim */
    int64_t target_step; /* values from one row of target to the next */
    double *squares;     /* out: squared 2-norm of each sum; may be NULL */
};
struct update { /* of a table's rows. mean, square: Adam's moments; Adagrad's sum is `square`. steps: of each row; for
                 * AdamW, the number of the table's update that last touched it */
    struct team team;
    struct arrange *arranged; /* in and out: the table's ids */
    int64_t rule;
    double lr, decay, eps, beta1, beta2;
    int64_t stored, dim;
    const double *fix1, *fix2; /* bias corrections 1 / (1 - beta1^k), 1 / sqrt(1 - beta2^k) for k = 0 to last_fix */
    int64_t last_fix, num_rows;
    int64_t updates; /* number of the table's updates, including this one */
    uint64_t noise;  /* seed of stochastic rounding, for bfloat16 */
    void *rows, *mean, *square;
    int32_t *steps;
    int64_t mean_values, square_values; /* of each row: its width, 1, or 0 if the rule has no such state */
};
struct bins { /* see EmbeddedBins */
    struct team team;
    const float *dense;                 /* rows x (columns + flags) */
    const int64_t *places;              /* in a row of `dense`: those of the numbers, then those of the flags */
    const float *edges, *weight, *bias; /* columns x (bins + 1), the same x width, and columns x width */
    float *table;                       /* columns x bins x (start, slope) x width */
    float *out;                         /* rows x (columns x (1 + width) + flags) */
    const float *grad;                  /* of out */
    float *weight_grad, *bias_grad;
    int64_t rows, columns, flags, bins, width;
};

struct pairs { /* of `vectors` vectors a sample: first, if it is not NULL, and rows */
    struct team team;
    const float *first, *rows;
    float *out;        /* samples x (dim, if there is a first, + vectors x (vectors - 1) / 2) */
    const float *grad; /* of out */
    float *first_grad, *rows_grad;
    int64_t samples, vectors, dim;
};

/* ------------------------------------------------------------------ threads */

struct job {
    void (*run)(void *args, int64_t first, int64_t last);
    void *args;
    int64_t count, block;
    _Atomic int64_t next;
};

/* Each thread takes the next block until none is left: threads that started late, or run slowly, get fewer. */
static void take_blocks(void *pointer)
{
    struct job *job = pointer;
    int64_t first;
    while ((first = atomic_fetch_add(&job->next, job->block)) < job->count)
        job->run(job->args, first, MIN(first + job->block, job->count));
}

static void run(const struct team *team, void (*part)(void *, int64_t, int64_t), void *args, int64_t count, int64_t block)
{
    struct job job = {part, args, count, block, 0};
    if (team->parallel && team->threads > 1 && count > block)
        team->parallel(take_blocks, &job, (unsigned)team->threads, 0);
    else
        take_blocks(&job);
}

static const int64_t STORED_BYTES[] = {4, 8, 2, 2, 1}, REAL_BYTES[] = {4, 8, 4}, SCALE_BYTES[] = {4, 2, 1};

static int64_t block_of(int64_t row_bytes)
{
    return BLOCK_BYTES / row_bytes + 1;
}

/* Whether the kernels support rows of this width and type. The caller has refused others already, with their names. */
static int fits(int64_t dim, int64_t stored)
{
    return dim >= 1 && dim <= MAX_DIM && stored >= 0 && stored < STORED_TYPES;
}

INLINE void prefetch_for_reading(const char *place, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += LINE)
        __builtin_prefetch(place + at, 0);
}

INLINE void prefetch_for_writing(const char *place, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += LINE)
        __builtin_prefetch(place + at, 1);
}

/* A 64-bit hash. The shifts are arithmetic (of signed values), unlike in usual mixers: they must stay so, because files
 * contain rows that were drawn this way. */
INLINE uint64_t mixed(uint64_t seed)
{
    int64_t noise = (int64_t)(seed * 0x9E3779B97F4A7C15u);
    noise = (int64_t)((uint64_t)(noise ^ noise >> 29) * 0xBF58476D1CE4E5B9u);
    return (uint64_t)(noise ^ noise >> 32);
}

INLINE float scale_at(const struct lookup *l, int64_t at)
{
    uint32_t bits;
    float scale;
    if (l->scale_type == SCALE_FLOAT32)
        return ((const float *)l->scales)[at];
    if (l->scale_type == SCALE_BFLOAT16)
        bits = (uint32_t)((const uint16_t *)l->scales)[at] << 16;
    else {
        uint32_t exponent = ((const uint8_t *)l->scales)[at];
        bits = exponent == 0 ? 1u << 22 : exponent == 255 ? 0x7FC00000u : exponent << 23;
    }
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

/* The piece that holds a row. */
INLINE int64_t piece_of(const struct lookup *l, int64_t id)
{
    int64_t piece = 0;
    for (int64_t left = l->num_pieces; left > 1;) { /* no branch on the id */
        int64_t half = left / 2;
        piece += l->starts[piece + half] <= id ? half : 0;
        left -= half;
    }
    return piece;
}

/* ------------------------------------------------------------------ by type of value and width of vector */

typedef struct { uint16_t bits; } bfloat16;

#define WIDTH vector
#include "rows_of_types.h"
#undef WIDTH
#define WIDTH single
#define IS_SINGLE
#include "rows_of_types.h"

typedef void part(void *, int64_t, int64_t);
#define BY_WIDTH(name, type, real, dim) ((dim) % (VECTOR_BYTES / (int)sizeof(real)) ? name##_##type##_single : name##_##type##_vector)
#define BY_TYPE(name, stored, dim)                             \
    ((stored) == FLOAT32   ? BY_WIDTH(name, float32, float, dim)  \
     : (stored) == FLOAT64 ? BY_WIDTH(name, float64, double, dim) \
                           : BY_WIDTH(name, bfloat16, float, dim))

/* ------------------------------------------------------------------ look up */

/* Copy rows. Returns 0, with `out` untouched, if an id is not a row. */
int look_up(struct lookup *l)
{
    l->wrong = l->count;
    if (l->places ? l->dim < 1 || l->num_pieces < 1 || l->stored < 0 || l->stored >= PUBLISHED_TYPES : !fits(l->dim, l->stored))
        return 0;
    /* The calling thread checks all ids, as starting a second team would cost more than the check. It copies them, and
     * the team reads the copy: another thread of the caller cannot change an id after it was checked. */
    for (int64_t n = 0; n < l->count; n++) {
        int64_t id = l->ids[n];
        if ((uint64_t)id >= (uint64_t)l->num_rows) {
            l->wrong = n;
            return 0;
        }
        l->flat[n] = id;
        if (l->places) {
            int64_t piece = piece_of(l, id), row_bytes = l->dim * STORED_BYTES[l->stored];
            l->places[n] = (int64_t)(intptr_t)l->pieces[piece] + (id - l->starts[piece]) * row_bytes;
        }
    }
    part *copy = l->stored == FLOAT8    ? BY_WIDTH(copies, float8, float, l->dim)
                 : l->stored == FLOAT16 ? BY_WIDTH(copies, float16, float, l->dim)
                                        : BY_TYPE(copies, l->stored, l->dim);
    run(&l->team, copy, l, l->count, block_of(l->dim * STORED_BYTES[l->stored]));
    return 1;
}

/* ------------------------------------------------------------------ sort */

struct digits { /* of a radix sort: a word is a key, shifted left by place_bits, and its position in the ids */
    int place_bits, digit_bits, passes, ascending;
    uint32_t counts[MAX_PASSES][1 << DIGIT_BITS];
};

/* Write the words and count their digits, of all passes at once. Returns 0 at the first id that is not a row. */
static int read_ids(struct arrange *a, struct digits *d)
{
    uint64_t last = 0, mask = ((uint64_t)1 << d->digit_bits) - 1;
    int64_t place = 0;
    for (int64_t s = 0; s < a->num_segments; s++) {
        const struct segment segment = a->segments[s];
        for (int64_t n = 0; n < segment.count; n++, place++) {
            int64_t id = segment.ids[n];
            if ((uint64_t)id >= (uint64_t)a->num_rows) {
                a->wrong_segment = s, a->wrong_place = n;
                return 0;
            }
            uint64_t key = (uint64_t)id;
            d->ascending &= key >= last;
            last = key;
            a->words[place] = key << d->place_bits | (uint64_t)place;
            if (a->unsorted)
                a->unsorted[place] = (int64_t)(intptr_t)segment.rows + segment.row_bytes * n;
            for (int p = 0; p < d->passes; p++)
                d->counts[p][key >> p * d->digit_bits & mask]++;
        }
    }
    return 1;
}

/* Sort the words by key, stably (radix sort, lowest digit first). Returns the half of `words` that holds the result. */
static uint64_t *sort_words(uint64_t *words, int64_t count, struct digits *d)
{
    uint64_t *other = words + count, mask = ((uint64_t)1 << d->digit_bits) - 1;
    for (int p = 0; p < d->passes; p++) {
        int shift = d->place_bits + p * d->digit_bits;
        uint32_t before = 0, *counts = d->counts[p];
        for (uint64_t c = 0; c <= mask; c++) {
            uint32_t here = counts[c];
            counts[c] = before;
            before += here;
        }
        for (int64_t n = 0; n < count; n++)
            other[counts[words[n] >> shift & mask]++] = words[n];
        uint64_t *sorted = other;
        other = words, words = sorted;
    }
    return words;
}

static int bits_of(int64_t value)
{
    return 64 - __builtin_clzll((uint64_t)value | 1);
}

/* Find the unique keys of all ids, and the addresses of each key's gradients in order of occurrence. Returns 0 if an id
 * is not a row (wrong_segment >= 0), or if a key and a position do not fit into 64 bits together (-1). */
int arrange(struct arrange *a)
{
    struct digits d = {.place_bits = bits_of(a->count), .ascending = 1};
    int key_bits = bits_of(a->num_rows - 1);
    d.passes = (key_bits + DIGIT_BITS - 1) / DIGIT_BITS;
    a->wrong_segment = -1;
    a->num_unique = 0;
    if (d.place_bits + key_bits > 64 || d.passes > MAX_PASSES || a->count >= INT32_MAX)
        return 0;
    d.digit_bits = (key_bits + d.passes - 1) / d.passes;
    if (!read_ids(a, &d))
        return 0;
    /* Ids that ascend already, such as those of a lookup's unique rows, need no sort. */
    uint64_t *words = d.ascending ? a->words : sort_words(a->words, a->count, &d);
    uint64_t place_mask = ((uint64_t)1 << d.place_bits) - 1, last_key = UINT64_MAX;
    const char *rows = a->num_segments ? a->segments->rows : NULL;
    int64_t row_bytes = a->num_segments ? a->segments->row_bytes : 0, unique = -1, first = 0;
    for (int64_t n = 0; n < a->count; n++) {
        uint64_t key = words[n] >> d.place_bits, place = words[n] & place_mask;
        /* No branch: processors cannot predict which ids occur again. */
        unique += key != last_key;
        first = key != last_key ? n : first;
        last_key = key;
        a->keys[unique] = (int64_t)key;
        a->bounds[2 * unique] = (int32_t)first;
        a->bounds[2 * unique + 1] = (int32_t)n + 1;
        if (a->inverse)
            a->inverse[place] = (int32_t)unique;
        a->places[n] = a->unsorted ? a->unsorted[place] : (int64_t)(intptr_t)rows + row_bytes * (int64_t)place;
    }
    a->num_unique = unique + 1;
    return 1;
}

/* ------------------------------------------------------------------ sum, update */

/* Sum each row's gradients, in order of occurrence. */
int sum_rows(struct sums *s)
{
    if (!fits(s->dim, s->stored) || s->stored == BFLOAT16)
        return 0;
    run(&s->team, BY_TYPE(sums, s->stored, s->dim), s, s->arranged->num_unique, block_of(s->dim * REAL_BYTES[s->stored]));
    return 1;
}

/* Arrange the ids; then, in one pass over memory, sum each touched row's gradients, apply weight decay and the rule, and
 * write row and states. Returns 0, with the table untouched, if `arrange` does or an id is beyond the last row. */
int update_rows(struct update *u)
{
    const struct arrange *a = u->arranged;
    if (!arrange(u->arranged) || !fits(u->dim, u->stored) || u->rule < 0 || u->rule >= RULES)
        return 0;
    if (a->num_unique && a->keys[a->num_unique - 1] >= u->num_rows)
        return 0;
    run(&u->team, BY_TYPE(updates, u->stored, u->dim), u, a->num_unique, block_of(u->dim * STORED_BYTES[u->stored]));
    return 1;
}

#include "bins.h"
#include "pairs.h"
