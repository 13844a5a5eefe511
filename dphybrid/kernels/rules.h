/* The rules by which an update changes a row, included by rows_of.h for each type of values and width of vectors. A new
 * rule is a function here, its name in EACH_RULE, and an entry of the same name in `dphybrid/util/row_rules.py`.
 *
 * A rule gets the row, its states and `grad`, the sum of its gradients, which it may overwrite. `u` has the options. A
 * formula for a VEC must hold for a vector and for a single value: no conditions, only operators and roots(). */
#ifndef EACH_RULE
#define EACH_RULE(X) X(sgd) X(adagrad) X(lazy_adagrad) X(adam) X(lazy_adam) X(adamw)
#else

/* w -= lr * g */
INLINE void OF(sgd)(const struct update *u, const struct OF(row) *r, int64_t dim)
{
    OF(add_decay)(u, r, dim);
    EACH_VECTOR(d) OF(set)(r, d, OF(weight)(r, d) - (REAL)u->lr * OF(load)(r->grad + d));
}

/* One sum of mean squares a row. */
INLINE void OF(adagrad)(const struct update *u, const struct OF(row) *r, int64_t dim)
{
    OF(add_decay)(u, r, dim);
    *r->square += OF(mean_square)(r, dim);
    const REAL step = (REAL)u->lr / (OF(root)(*r->square) + (REAL)u->eps);
    EACH_VECTOR(d) OF(set)(r, d, OF(weight)(r, d) - step * OF(load)(r->grad + d));
}

/* One sum of squares a weight. */
INLINE void OF(lazy_adagrad)(const struct update *u, const struct OF(row) *r, int64_t dim)
{
    OF(add_decay)(u, r, dim);
    EACH_VECTOR(d)
    {
        VEC g = OF(load)(r->grad + d), square = OF(load)(r->square + d) + g * g;
        OF(store)(r->square + d, square);
        OF(set)(r, d, OF(weight)(r, d) - (REAL)u->lr * g / (OF(roots)(square) + (REAL)u->eps));
    }
}

/* One second moment a row. */
INLINE void OF(adam)(const struct update *u, const struct OF(row) *r, int64_t dim)
{
    OF(add_decay)(u, r, dim);
    const int64_t steps = ++*r->steps, fix = MIN(steps, u->last_fix);
    *r->square = *r->square * (REAL)u->beta2 + (REAL)(1.0 - u->beta2) * OF(mean_square)(r, dim);
    const REAL size = OF(root)(*r->square) * (REAL)u->fix2[fix] + (REAL)u->eps;
    const REAL step = (REAL)u->lr * (REAL)u->fix1[fix] / size;
    EACH_VECTOR(d)
    {
        VEC mean = OF(load)(r->mean + d);
        mean += (OF(load)(r->grad + d) - mean) * (REAL)(1.0 - u->beta1);
        OF(store)(r->mean + d, mean);
        OF(set)(r, d, OF(weight)(r, d) - step * mean);
    }
}

/* One second moment a weight. */
INLINE void OF(lazy_adam)(const struct update *u, const struct OF(row) *r, int64_t dim)
{
    OF(add_decay)(u, r, dim);
    const int64_t steps = ++*r->steps, fix = MIN(steps, u->last_fix);
    const REAL step = (REAL)u->lr * (REAL)u->fix1[fix], scale = (REAL)u->fix2[fix];
    EACH_VECTOR(d)
    {
        VEC g = OF(load)(r->grad + d), mean = OF(load)(r->mean + d), square = OF(load)(r->square + d);
        mean += (g - mean) * (REAL)(1.0 - u->beta1);
        square += (g * g - square) * (REAL)(1.0 - u->beta2);
        OF(store)(r->mean + d, mean), OF(store)(r->square + d, square);
        OF(set)(r, d, OF(weight)(r, d) - step * mean / (OF(roots)(square) * scale + (REAL)u->eps));
    }
}

/* Without first moment; catches up on the decays of all updates of the table since the row was last touched. */
INLINE void OF(adamw)(const struct update *u, const struct OF(row) *r, int64_t dim)
{
    const int64_t waited = r->updates - *r->steps;
    *r->steps = (int32_t)r->updates;
    const REAL kept = (REAL)OF(power)(1.0 - u->lr * u->decay, waited), lr = (REAL)u->lr;
    const REAL square_kept = (REAL)OF(power)(u->beta2, waited), scale = (REAL)u->fix2[MIN(r->updates, u->last_fix)];
    EACH_VECTOR(d)
    {
        VEC g = OF(load)(r->grad + d), square = OF(load)(r->square + d) * square_kept + g * g * (REAL)(1.0 - u->beta2);
        OF(store)(r->square + d, square);
        OF(set)(r, d, OF(weight)(r, d) * kept - lr * g / (OF(roots)(square) * scale + (REAL)u->eps));
    }
}

#endif
