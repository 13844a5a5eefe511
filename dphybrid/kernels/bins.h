/* Piecewise-linear encoding of numbers and its gradient, included by rows.c. */

/* A number's bin among its column's inner edges, and how far it has come through it. */
INLINE int64_t bin_of(const struct bins *b, int64_t column, float value, float *share)
{
    const int64_t edges = b->bins - 1;
    const float *inner = b->inner + column * edges, *left = inner;
    /* Bisection without branches. NaN passes all edges: the last bin. */
    int64_t num = edges;
    for (; num > 1; num -= num / 2)
        left += !(left[num / 2 - 1] > value) * (num / 2);
    const int64_t place = column * b->bins + (left - inner) + (num == 1 && !(left[0] > value));
    const float ratio = (value - b->left[place]) / b->wide[place];
    *share = ratio < 0 ? 0 : ratio > 1 ? 1 : ratio;
    return place;
}

/* For each number: its squashed value, then `width` outputs of its bin, in torch's order of operations. */
INLINE void bin_rows(const struct bins *b, int64_t first, int64_t last, int64_t width)
{
    for (int64_t at = first * b->columns, n = 0; at < last * b->columns; at++, n = n + 1 < b->columns ? n + 1 : 0) {
        float share;
        const int64_t place = bin_of(b, n, b->dense[at], &share);
        const float squashed = b->squashed[at];
        const float *start = b->table + 2 * width * place, *slope = start + width, *itself = b->itself + width * n;
        float *out = b->out + (1 + width) * at;
        out[0] = squashed;
        for (int64_t d = 0; d < width; d++) {
            const float sum = start[d] + share * slope[d] + squashed * itself[d];
            out[1 + d] = sum < 0 ? 0 : sum;
        }
    }
}

/* The gradients of some columns' table and weights: each column is one thread's, in the order of the rows. */
INLINE void bin_columns(const struct bins *b, int64_t first, int64_t last, int64_t width)
{
    for (int64_t n = first; n < last; n++) {
        float *itself = b->itself_grad + width * n;
        for (int64_t row = 0; row < b->rows; row++) {
            const int64_t at = row * b->columns + n;
            float share;
            float *start = b->table_grad + 2 * width * bin_of(b, n, b->dense[at], &share), *slope = start + width;
            const float squashed = b->squashed[at];
            const float *grad = b->grad + (1 + width) * at + 1, *out = b->out + (1 + width) * at + 1;
            for (int64_t d = 0; d < width; d++) {
                const float each = out[d] > 0 ? grad[d] : 0;
                start[d] += each;
                slope[d] += share * each;
                itself[d] += squashed * each;
            }
        }
    }
}

static void bins_of_rows(void *pointer, int64_t first, int64_t last)
{
    const struct bins *b = pointer;
    if (b->width == 8) /* the usual width: with a constant, the loop stays in registers */
        bin_rows(b, first, last, 8);
    else
        bin_rows(b, first, last, b->width);
}

static void bins_of_columns(void *pointer, int64_t first, int64_t last)
{
    const struct bins *b = pointer;
    if (b->width == 8)
        bin_columns(b, first, last, 8);
    else
        bin_columns(b, first, last, b->width);
}

/* Encode numbers: find each one's bin among the column's inner edges and interpolate with the bin's start and slope.
 * Returns 0 for sizes out of range. */
int embed(struct bins *b)
{
    if (b->rows < 0 || b->columns < 1 || b->bins < 1 || b->width < 1)
        return 0;
    run(&b->team, bins_of_rows, b, b->rows, block_of(b->columns * (1 + b->width) * (int64_t)sizeof(float)));
    return 1;
}

/* Add the gradients of `table` and `itself`, from those of `out`. Returns 0 for sizes out of range. */
int embed_backward(struct bins *b)
{
    if (b->rows < 0 || b->columns < 1 || b->bins < 1 || b->width < 1)
        return 0;
    run(&b->team, bins_of_columns, b, b->columns, 1);
    return 1;
}
