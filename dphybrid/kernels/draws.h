/* Random decisions about samples, included by rows.c. */

/* For each of `num` numbers of each sample, whether SplitMix64 (see `Draws.uniform`) draws one below `limit` / 2^53. Returns 0
 * for sizes out of range. */
int draw_chances(struct draws *d)
{
    const uint64_t step = 0x9E3779B97F4A7C15u, limit = d->limit;
    if (d->samples < 0 || d->num < 0)
        return 0;
    for (int64_t sample = 0; sample < d->samples; sample++) {
        const uint64_t first = d->start + (uint64_t)d->index[sample] * (uint64_t)d->num * step;
        uint8_t *out = d->out + sample * d->num;
        for (int64_t n = 0; n < d->num; n++) {
            uint64_t x = first + (uint64_t)n * step;
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
            x = (x ^ x >> 27) * 0x94D049BB133111EBu;
            out[n] = (x ^ x >> 31) >> 11 < limit;
        }
    }
    return 1;
}
