/* Normal start values of tables, included by rows.c. Drawn by sums, products and square roots alone: the logarithms of C
 * libraries differ in the last bits, and a table must start with the same bits everywhere. */

/* Coefficients of polynomials, highest power first. LOGARITHM: Cephes. MIDDLE, TAIL: the inverse of the error function
 * near 0 and far from it (Giles, "Approximating the erfinv function", 2011). */

static const float LOGARITHM[] = {0.070376836292f, -0.1151461031f, 0.1167699874f, -0.12420140846f, 0.14249322787f,
                                  -0.16668057665f, 0.20000714765f, -0.24999993993f, 0.33333331174f};
static const float MIDDLE[] = {2.81022636e-08f, 3.43273939e-07f, -3.5233877e-06f, -4.39150654e-06f, 0.00021858087f,
                               -0.00125372503f, -0.00417768164f, 0.246640727f, 1.50140941f};
static const float TAIL[] = {-0.000200214257f, 0.000100950558f, 0.00134934322f, -0.00367342844f, 0.00573950773f,
                             -0.0076224613f, 0.00943887047f, 1.00167406f, 2.83297682f};

INLINE float polynomial(const float *factors, float x)
{
    float p = factors[0];
    for (int k = 1; k < 9; k++)
        p = p * x + factors[k];
    return p;
}

/* A value between -1 and 1, exclusive, from a hash of a group's 64-bit noise and a column: MurmurHash3's finalizer, twice. */
INLINE float uniform(uint64_t noise, uint32_t column)
{
    uint32_t h = column * 0x9E3779B1u + (uint32_t)noise;
    h = (h ^ h >> 16) * 0x85EBCA6Bu;
    h = (h ^ h >> 13) * 0xC2B2AE35u;
    h += (uint32_t)(noise >> 32);
    h = (h ^ h >> 16) * 0x85EBCA6Bu;
    h = (h ^ h >> 13) * 0xC2B2AE35u;
    h ^= h >> 16;
    return (float)((int32_t)(h >> 7 | 1) - (1 << 24)) * 0x1p-24f;
}

/* The natural logarithm of a normal float, as in Cephes. */
INLINE float logarithm(float y)
{
    uint32_t bits;
    memcpy(&bits, &y, 4);
    float powers = (float)((int32_t)(bits >> 23) - 127), t;
    bits = (bits & 0x7FFFFF) | 0x3F800000;
    memcpy(&t, &bits, 4);
    powers += 1.4142135f < t ? 1.0f : 0.0f;
    t = (1.4142135f < t ? t * 0.5f : t) - 1.0f;
    return powers * 0.6931471805599453f + (t - t * t * (0.5f - t * polynomial(LOGARITHM, t)));
}

static void store_drawn(void *values, int64_t n, float value, int64_t stored)
{
    uint32_t bits;
    if (stored == FLOAT32)
        ((float *)values)[n] = value;
    else if (stored == FLOAT64)
        ((double *)values)[n] = value;
    else {
        memcpy(&bits, &value, 4);
        ((uint16_t *)values)[n] = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
}

/* Draw groups of DRAWN normal values: std * sqrt(2) * erfinv(uniform). Each depends only on (seed, place in the table), so
 * a part of a table is drawn with the same values as the whole. */
static void draws(void *pointer, int64_t first, int64_t last)
{
    const struct draw *d = pointer;
    const float scale = (float)(d->std * 1.4142135623730951);
    for (int64_t group = first + d->first / DRAWN; group < last + d->first / DRAWN; group++) {
        uint64_t noise = mixed(d->seed ^ (uint64_t)group);
        float x[DRAWN], w[DRAWN], inverse[DRAWN];
        int far = 0;
        for (int k = 0; k < DRAWN; k++) {
            x[k] = uniform(noise, (uint32_t)k);
            w[k] = 0.0f - logarithm((1.0f - x[k]) * (1.0f + x[k]));
            inverse[k] = polynomial(MIDDLE, w[k] - 2.5f);
            far |= 5.0f < w[k];
        }
        /* Few values are that far out: kept out of the loop above. */
        for (int k = 0; far && k < DRAWN; k++)
            if (5.0f < w[k])
                inverse[k] = polynomial(TAIL, __builtin_sqrtf(w[k]) - 3.0f);
        for (int k = 0; k < DRAWN; k++) {
            int64_t n = group * DRAWN + k - d->first; /* the first and last group may be only partly within */
            if (n >= 0 && n < d->count)
                store_drawn(d->values, n, inverse[k] * x[k] * scale, d->stored);
        }
    }
}

int draw_normal(struct draw *d)
{
    if (d->stored < 0 || d->stored >= STORED_TYPES || d->first < 0)
        return 0;
    int64_t groups = (d->first + d->count + DRAWN - 1) / DRAWN - d->first / DRAWN;
    run(&d->team, draws, d, groups, block_of(DRAWN * STORED_BYTES[d->stored]));
    return 1;
}
