/* Dropout, included by rows.c. */

/* Hash of a row's noise and a place in the row: the finalizer of MurmurHash3. Half of the noise's bits go in before it,
 * half in its middle. */
INLINE uint32_t scrambled(uint64_t noise, uint32_t place)
{
    uint32_t h = place * 0x9E3779B1u + (uint32_t)noise;
    h = (h ^ h >> 16) * 0x85EBCA6Bu;
    h += (uint32_t)(noise >> 32);
    h = (h ^ h >> 13) * 0xC2B2AE35u;
    return h ^ h >> 16;
}

#define DROP(TYPE)                                                                                                               \
    for (int64_t row = first; row < last; row++) {                                                                               \
        const uint64_t noise = mixed(d->seed ^ (uint64_t)(d->first + row));                                                      \
        const TYPE *values = (const TYPE *)d->values + row * d->width, scale = (TYPE)d->scale;                                   \
        TYPE *out = (TYPE *)d->out + row * d->width;                                                                             \
        for (int64_t n = 0; n < d->width; n++)                                                                                   \
            out[n] = scrambled(noise, (uint32_t)n) < d->dropped ? 0 : values[n] * scale;                                         \
    }

static void drops(void *pointer, int64_t first, int64_t last)
{
    const struct dropout *d = pointer;
    if (d->stored == FLOAT64) {
        DROP(double)
    } else {
        DROP(float)
    }
}

/* Write 0 or the value times `scale`. Which of the two depends only on (seed, row, place in the row): not on the split
 * of the batch, nor on threads. Returns 0 for sizes or types out of range. */
int drop_out(struct dropout *d)
{
    if ((d->stored != FLOAT32 && d->stored != FLOAT64) || d->rows < 0 || d->width < 1)
        return 0;
    run(&d->team, drops, d, d->rows, block_of(d->width * STORED_BYTES[d->stored]));
    return 1;
}
