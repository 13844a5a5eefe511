/* Piecewise-linear encoding of numbers and its gradient, included by rows.c. */

/* Numbers of a column are encoded LOT at a time, in loops that compilers turn into vectors, and outputs in vectors of 8, the
 * usual width. Explicit masks there, because compilers make branches of comparisons, which processors predict wrongly half
 * of the time. */
enum { LOT = 16 };
typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t eight_masks __attribute__((vector_size(32), aligned(4), may_alias));
#define EIGHT(place) (*(eight *)(place))
#define EIGHT_OF(place) (*(const eight *)(place))
#define WHERE(mask, values) ((eight)((mask) & (eight_masks)(values)))
#define EACH_EIGHT(d) for (int64_t d = 0; d < width / 8 * 8; d += 8)
#define EACH_OTHER(d) for (int64_t d = width / 8 * 8; d < width; d++)

struct lot { /* numbers of one column: each one's bin, how far it has come through it, and its squashed value */
    int32_t bin[LOT];
    float share[LOT], squashed[LOT];
};

INLINE void find_bins(const struct bins *b, int64_t column, int64_t row, int64_t count, struct lot *lot)
{
    const int64_t inputs = b->columns + b->flags;
    const float *edges = b->edges + column * (b->bins + 1), *from = b->dense + row * inputs + b->places[column];
    float value[LOT];
    for (int64_t l = 0; l < LOT; l++) {
        value[l] = from[MIN(l, count - 1) * inputs];
        lot->bin[l] = 0;
    }
    /* Bisection of the inner edges without branches. NaN passes all of them: the last bin. */
    for (int32_t num = (int32_t)b->bins; num > 1; num -= num / 2) {
        const int32_t half = num / 2;
        float middle[LOT];
        for (int l = 0; l < LOT; l++)
            middle[l] = edges[lot->bin[l] + half];
        for (int l = 0; l < LOT; l++)
            lot->bin[l] += middle[l] > value[l] ? 0 : half;
    }
    for (int l = 0; l < LOT; l++) {
        const float most = 1e9f < value[l] ? 1e9f : value[l], z = -1e9f > most ? -1e9f : most, third = z / 3;
        const float left = edges[lot->bin[l]], width = edges[lot->bin[l] + 1] - left;
        const float wide = width > 1e-30f ? width : 1e-30f; /* an empty bin must not divide by 0 */
        const float ratio = (value[l] - left) / wide, positive = 0 > ratio ? 0 : ratio;
        lot->share[l] = 1 < positive ? 1 : positive;
        lot->squashed[l] = z / __builtin_sqrtf(1 + third * third);
    }
}

static int sizes_fit(const struct bins *b)
{
    return b->rows >= 0 && b->columns >= 1 && b->flags >= 0 && b->bins >= 1 && b->width >= 1;
}

static int places_fit(const struct bins *b)
{
    for (int64_t n = 0; n < b->columns + b->flags; n++)
        if ((uint64_t)b->places[n] >= (uint64_t)(b->columns + b->flags))
            return 0;
    return 1;
}

/* Fill the table: a bin's start is that of the bin before plus its slope. */
INLINE void fill_table(const struct bins *b, int64_t width)
{
    const int64_t edges = b->bins + 1;
    for (int64_t n = 0; n < b->columns; n++) {
        const float *edge = b->edges + n * edges, *weight = b->weight + (n * edges + 1) * width;
        float *start = b->table + 2 * width * b->bins * n;
        memcpy(start, b->bias + n * width, width * sizeof *start);
        for (int64_t k = 0; k < b->bins; k++, start += 2 * width, weight += width) {
            const float used = edge[k + 1] > edge[k];
            for (int64_t d = 0; d < width; d++)
                start[width + d] = used * weight[d];
            for (int64_t d = 0; k + 1 < b->bins && d < width; d++)
                start[2 * width + d] = start[d] + start[width + d];
        }
    }
}

/* For each number its squashed value, then `width` outputs of its bin; then the flags. In torch's order of operations. */
INLINE void bin_rows(const struct bins *b, int64_t first, int64_t last, int64_t width)
{
    const int64_t columns = b->columns, bins = b->bins, step = columns * (1 + width) + b->flags;
    struct lot lot;
    for (int64_t row = first; row < last; row += LOT) {
        const int64_t count = MIN(LOT, last - row);
        for (int64_t n = 0; n < columns; n++) {
            const float *itself = b->weight + n * (bins + 1) * width;
            find_bins(b, n, row, count, &lot);
            for (int64_t l = 0; l < count; l++) {
                const float *start = b->table + 2 * width * (n * bins + lot.bin[l]), *slope = start + width;
                const float share = lot.share[l], squashed = lot.squashed[l];
                float *out = b->out + (row + l) * step + n * (1 + width);
                *out++ = squashed;
                EACH_EIGHT(d)
                {
                    const eight sum = EIGHT_OF(start + d) + share * EIGHT_OF(slope + d) + squashed * EIGHT_OF(itself + d);
                    EIGHT(out + d) = WHERE(~(sum < 0), sum);
                }
                EACH_OTHER(d)
                {
                    const float sum = start[d] + share * slope[d] + squashed * itself[d];
                    out[d] = sum < 0 ? 0 : sum;
                }
            }
        }
        for (int64_t l = 0; l < count; l++)
            for (int64_t f = 0; f < b->flags; f++)
                b->out[(row + l + 1) * step - b->flags + f] =
                    b->dense[(row + l) * (columns + b->flags) + b->places[columns + f]];
    }
}

/* The gradients of some columns' weights: each column is one thread's, in the order of the rows. */
INLINE void bin_columns(const struct bins *b, int64_t first, int64_t last, int64_t width)
{
    const int64_t bins = b->bins, step = b->columns * (1 + width) + b->flags;
    struct lot lot;
    for (int64_t n = first; n < last; n++) {
        const float *edges = b->edges + n * (bins + 1);
        float *table = b->table + 2 * width * bins * n, *itself = b->weight_grad + n * (bins + 1) * width;
        memset(table, 0, 2 * width * bins * sizeof *table);
        memset(itself, 0, width * sizeof *itself);
        for (int64_t row = 0; row < b->rows; row++) {
            const int64_t l = row % LOT;
            if (!l)
                find_bins(b, n, row, MIN(LOT, b->rows - row), &lot);
            const float *out = b->out + row * step + n * (1 + width) + 1, *grad = b->grad + (out - b->out);
            const float share = lot.share[l], squashed = lot.squashed[l];
            float *start = table + 2 * width * lot.bin[l];
            EACH_EIGHT(d)
            {
                const eight each = WHERE(EIGHT_OF(out + d) > 0, EIGHT_OF(grad + d));
                EIGHT(start + d) += each;
                EIGHT(start + width + d) += share * each;
                EIGHT(itself + d) += squashed * each;
            }
            EACH_OTHER(d)
            {
                const float each = out[d] > 0 ? grad[d] : 0;
                start[d] += each;
                start[width + d] += share * each;
                itself[d] += squashed * each;
            }
        }
        /* A bin's weight is its slope, and a part of the starts of all bins above. */
        float *above = b->bias_grad + n * width;
        memset(above, 0, width * sizeof *above);
        for (int64_t k = bins - 1; k >= 0; k--) {
            const float *start = table + 2 * k * width, *slope = start + width, used = edges[k + 1] > edges[k];
            float *weight = itself + (1 + k) * width;
            for (int64_t d = 0; d < width; d++) {
                weight[d] = used * (slope[d] + above[d]);
                above[d] += start[d];
            }
        }
    }
}

/* Calls with a constant for the usual width: its loops stay in registers. */
#define OF_WIDTH(call)  \
    if (b->width == 8)  \
        call(8);        \
    else                \
        call(b->width);

static void bins_of_rows(void *pointer, int64_t first, int64_t last)
{
    const struct bins *b = pointer;
#define CALL(width) bin_rows(b, first, last, width)
    OF_WIDTH(CALL)
#undef CALL
}

static void bins_of_columns(void *pointer, int64_t first, int64_t last)
{
    const struct bins *b = pointer;
#define CALL(width) bin_columns(b, first, last, width)
    OF_WIDTH(CALL)
#undef CALL
}

/* Fill the table. Returns 0 for sizes out of range. */
int bin_table(struct bins *b)
{
    if (!sizes_fit(b))
        return 0;
#define CALL(width) fill_table(b, width)
    OF_WIDTH(CALL)
#undef CALL
    return 1;
}

/* Encode numbers: find each one's bin among the column's edges and interpolate with the bin's start and slope. Returns 0
 * for sizes or places out of range. */
int embed(struct bins *b)
{
    if (!sizes_fit(b) || !places_fit(b))
        return 0;
    run(&b->team, bins_of_rows, b, b->rows, block_of(b->columns * (1 + b->width) * (int64_t)sizeof(float)));
    return 1;
}

/* Write the gradients of weight and bias, from those of `out`; `table` is scratch. Returns 0 for sizes or places out of
 * range. */
int embed_backward(struct bins *b)
{
    if (!sizes_fit(b) || !places_fit(b))
        return 0;
    run(&b->team, bins_of_columns, b, b->columns, 1);
    return 1;
}
