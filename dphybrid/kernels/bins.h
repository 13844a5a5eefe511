/* Piecewise-linear encoding of numbers, included by rows.c. */

/* For each number: its squashed value, then `width` outputs of its bin, in torch's order of operations. */
INLINE void bin_rows(const struct bins *b, int64_t first, int64_t last, int64_t width)
{
    const int64_t edges = b->bins - 1;
    for (int64_t at = first * b->columns, n = 0; at < last * b->columns; at++, n = n + 1 < b->columns ? n + 1 : 0) {
        const float value = b->dense[at], squashed = b->squashed[at], *inner = b->inner + n * edges;
        int32_t bin = 0;
        for (int32_t e = 0; e < (int32_t)edges; e++)
            bin += !(inner[e] > value); /* counts edges without a branch; NaN passes all of them: the last bin */
        const int64_t place = n * b->bins + bin;
        const float ratio = (value - b->left[place]) / b->wide[place];
        const float share = ratio < 0 ? 0 : ratio > 1 ? 1 : ratio;
        const float *start = b->table + 2 * width * place, *slope = start + width, *itself = b->itself + width * n;
        float *out = b->out + (1 + width) * at;
        out[0] = squashed;
        for (int64_t d = 0; d < width; d++) {
            const float sum = start[d] + share * slope[d] + squashed * itself[d];
            out[1 + d] = sum < 0 ? 0 : sum;
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

/* Encode numbers: find each one's bin among the column's inner edges and interpolate with the bin's start and slope.
 * Returns 0 for sizes out of range. */
int embed(struct bins *b)
{
    if (b->rows < 0 || b->columns < 1 || b->bins < 1 || b->width < 1)
        return 0;
    run(&b->team, bins_of_rows, b, b->rows, block_of(b->columns * (1 + b->width) * (int64_t)sizeof(float)));
    return 1;
}
