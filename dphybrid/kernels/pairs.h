/* Dot products of all pairs of a sample's vectors and their gradient, included by rows.c. A product is one sum in the order
 * of the dimensions, so its bits do not depend on the width of the processor's vectors. */

enum { LANES_OF_PAIRS = 16, MOST_VECTORS = 128, MOST_DIMENSIONS = 128 };
typedef float lanes __attribute__((vector_size(64), aligned(4), may_alias));
#define LANES_AT(place) (*(lanes *)(place))
#define ROUNDED_UP(count) (((count) + LANES_OF_PAIRS - 1) / LANES_OF_PAIRS * LANES_OF_PAIRS)

/* Vector i of a sample: `first`, if there is one, and then the rows. */
INLINE int64_t vector_at(const struct pairs *p, int64_t sample, int64_t i)
{
    return (sample * (p->vectors - (p->first != NULL)) + i - (p->first != NULL)) * p->dim;
}

INLINE const float *vector_of(const struct pairs *p, int64_t sample, int64_t i)
{
    return p->first && !i ? p->first + sample * p->dim : p->rows + vector_at(p, sample, i);
}

INLINE int64_t out_step(const struct pairs *p)
{
    return (p->first ? p->dim : 0) + p->vectors * (p->vectors - 1) / 2;
}

/* Products of four vectors with all vectors before them, 16 at a time. */
static void pairs_of_samples(void *pointer, int64_t begin, int64_t end)
{
    const struct pairs *p = pointer;
    const int64_t vectors = p->vectors, dim = p->dim, step = ROUNDED_UP(vectors);
    float transposed[MOST_DIMENSIONS * MOST_VECTORS]; /* dim x vectors */
    memset(transposed, 0, dim * step * sizeof *transposed); /* products of what was there before could be slow denormals */
    for (int64_t b = begin; b < end; b++) {
        float *out = p->out + b * out_step(p);
        if (p->first) {
            memcpy(out, p->first + b * dim, dim * sizeof *out);
            out += dim;
        }
        for (int64_t i = 0; i < vectors; i++) {
            const float *vector = vector_of(p, b, i);
            for (int64_t d = 0; d < dim; d++)
                transposed[d * step + i] = vector[d];
        }
        for (int64_t i = 0; i < vectors; i += 4) {
            const float *of[4];
            for (int64_t n = 0; n < 4; n++)
                of[n] = vector_of(p, b, MIN(i + n, vectors - 1));
            for (int64_t k = 0; k < i + 3 && k < vectors; k += LANES_OF_PAIRS) {
                lanes sums[4] = {0};
                for (int64_t d = 0; d < dim; d++) {
                    const lanes values = LANES_AT(transposed + d * step + k);
                    for (int64_t n = 0; n < 4; n++)
                        sums[n] += values * of[n][d];
                }
                for (int64_t n = 0; n < 4 && i + n < vectors; n++) {
                    const int64_t row = i + n, count = MIN(row - k, LANES_OF_PAIRS);
                    if (count == LANES_OF_PAIRS)
                        LANES_AT(out + row * (row - 1) / 2 + k) = sums[n];
                    else if (count > 0)
                        memcpy(out + row * (row - 1) / 2 + k, &sums[n], count * sizeof *out);
                }
            }
        }
    }
}

/* A vector's gradient is the sum of all others, each times the gradient of their product. */
static void pairs_back(void *pointer, int64_t begin, int64_t end)
{
    const struct pairs *p = pointer;
    const int64_t vectors = p->vectors, dim = p->dim, step = ROUNDED_UP(dim);
    float grads[MOST_VECTORS * MOST_VECTORS], padded[MOST_VECTORS * MOST_DIMENSIONS];
    memset(padded, 0, vectors * step * sizeof *padded);
    for (int64_t b = begin; b < end; b++) {
        const float *grad = p->grad + b * out_step(p) + (p->first ? dim : 0);
        for (int64_t i = 0; i < vectors; i++) {
            memcpy(padded + i * step, vector_of(p, b, i), dim * sizeof *padded);
            grads[i * vectors + i] = 0;
            for (int64_t j = 0; j < i; j++)
                grads[i * vectors + j] = grads[j * vectors + i] = grad[i * (i - 1) / 2 + j];
        }
        for (int64_t i = 0; i < vectors; i += 4)
            for (int64_t d = 0; d < dim; d += LANES_OF_PAIRS) {
                const float *of[4];
                lanes sums[4] = {0};
                for (int64_t n = 0; n < 4; n++)
                    of[n] = grads + MIN(i + n, vectors - 1) * vectors;
                for (int64_t j = 0; j < vectors; j++) {
                    const lanes values = LANES_AT(padded + j * step + d);
                    for (int64_t n = 0; n < 4; n++)
                        sums[n] += values * of[n][j];
                }
                for (int64_t n = 0; n < 4 && i + n < vectors; n++) {
                    float *to = p->first && !(i + n) ? p->first_grad + b * dim : p->rows_grad + vector_at(p, b, i + n);
                    memcpy(to + d, &sums[n], MIN(dim - d, LANES_OF_PAIRS) * sizeof *to);
                }
            }
        if (p->first)
            for (int64_t d = 0; d < dim; d++)
                p->first_grad[b * dim + d] += grad[d - dim];
    }
}

static int run_pairs(struct pairs *p, part *part)
{
    if (p->samples < 0 || p->vectors < 1 || p->vectors > MOST_VECTORS || p->dim < 1 || p->dim > MOST_DIMENSIONS)
        return 0;
    run(&p->team, part, p, p->samples, block_of((p->vectors * p->dim + out_step(p)) * (int64_t)sizeof(float)));
    return 1;
}

/* Write `first`, then the products of all pairs. Returns 0 for sizes out of range. */
int multiply_pairs(struct pairs *p)
{
    return run_pairs(p, pairs_of_samples);
}

/* Write the gradients of `first` and rows. Returns 0 for sizes out of range. */
int multiply_pairs_backward(struct pairs *p)
{
    return run_pairs(p, pairs_back);
}
