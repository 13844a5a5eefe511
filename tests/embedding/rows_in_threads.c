/* Every kernel of rows.c with four POSIX threads, for ThreadSanitizer, which does not know OpenMP's barriers, and
 * for processors that have no torch at hand. Prints a digest of all results, the same for any number of threads.
 *
 *     rows_in_threads THREADS [twice]     twice: two threads are given the same rows, which is to be noticed
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "rows.c"

enum { ROWS = 3000, WIDEST = 64, IDS = 20000, THREADS = 16 };

struct work {
    task *task;
    void *args;
};

static void *begin(void *pointer)
{
    struct work *work = pointer;
    work->task(work->args);
    return NULL;
}

static void parallel(task *task, void *args, unsigned threads, unsigned flags)
{
    pthread_t team[THREADS];
    struct work work = {task, args};
    (void)flags;
    for (unsigned n = 0; n < threads; n++)
        if (pthread_create(team + n, NULL, begin, &work))
            abort();
    for (unsigned n = 0; n < threads; n++)
        pthread_join(team[n], NULL);
}

static uint64_t digest = 14695981039346656037u;

static void add(const void *memory, size_t bytes)
{
    for (size_t n = 0; n < bytes; n++)
        digest = (digest ^ ((const unsigned char *)memory)[n]) * 1099511628211u;
}

static void train(struct team team, int64_t stored, int64_t rule, int64_t width, int twice)
{
    static _Alignas(64) double rows[ROWS * WIDEST], grads[IDS * WIDEST], mean[ROWS * WIDEST], square[ROWS * WIDEST];
    static int64_t ids[IDS], flat[IDS], keys[IDS], places[IDS];
    static uint64_t words[2 * IDS];
    static int32_t bounds[2 * IDS], inverse[IDS], steps[ROWS];
    static double fix[2] = {1, 1};
    memset(mean, 0, sizeof mean), memset(square, 0, sizeof square), memset(steps, 0, sizeof steps);
    for (int64_t n = 0; n < IDS; n++)
        ids[n] = (int64_t)(mixed((uint64_t)n) % ROWS * (mixed((uint64_t)n) % 7) / 7);
    struct lookup lookup = {.team = team, .ids = ids, .count = IDS, .rows = rows, .num_rows = ROWS, .dim = width,
                            .stored = stored, .out = grads, .flat = flat};
    struct segment segment = {flat, IDS, (const char *)grads, width * REAL_BYTES[stored]};
    struct arrange arranged = {.segments = &segment, .num_segments = 1, .count = IDS, .num_rows = ROWS, .words = words,
                               .keys = keys, .bounds = bounds, .places = places, .inverse = inverse};
    const int one = rule == RULE_adagrad || rule == RULE_adam; /* a number a row */
    if (!look_up(&lookup) || !arrange(&arranged))
        abort();
    static double sums[ROWS * WIDEST], squares[ROWS];
    struct sums sum = {team, &arranged, width, stored == BFLOAT16 ? FLOAT32 : stored, sums, width, squares};
    struct update update = {team, &arranged, rule, 0.1, 0.01, 1e-8, 0.9, 0.99, stored, width, fix, fix, 1, ROWS,
                            1, 7, rows, mean, square, steps, width, one ? 1 : width};
    if (!sum_rows(&sum))
        abort();
    int64_t count = arranged.num_unique, block = block_of(width * STORED_BYTES[stored]);
    if (twice) { /* the first block's rows again, as the second block's */
        memcpy(keys + block, keys, (size_t)MIN(block, count - block) * sizeof *keys);
        run(&team, BY_TYPE(updates, stored, width), &update, count, block);
    } else if (!update_rows(&update))
        abort();
    add(grads, (size_t)(IDS * width * REAL_BYTES[stored]));
    add(squares, (size_t)count * sizeof *squares);
    add(rows, (size_t)(ROWS * width * STORED_BYTES[stored]));
    add(square, sizeof square);
}

/* Two columns of numbers and a flag, with outputs of a vector and a single value. */
static void encode(struct team team)
{
    enum { COLUMNS = 2, BINS = 5, OUTPUTS = 9, EDGES = COLUMNS * (BINS + 1) };
    static float dense[IDS * 3], out[IDS * (COLUMNS * (1 + OUTPUTS) + 1)], table[COLUMNS * BINS * 2 * OUTPUTS];
    static float weight[EDGES * OUTPUTS], weight_grad[EDGES * OUTPUTS], bias[COLUMNS * OUTPUTS], bias_grad[COLUMNS * OUTPUTS];
    static const float edges[EDGES] = {-2, -1, -1, 0, 1, 3, 0, 1, 2, 3, 4, 4};
    static const int64_t places[] = {0, 2, 1};
    for (int64_t n = 0; n < IDS * 3; n++)
        dense[n] = (float)(mixed((uint64_t)n) % 8000) / 1000 - 3;
    for (int64_t n = 0; n < EDGES * OUTPUTS; n++)
        weight[n] = (float)(mixed((uint64_t)n) % 2000) / 1000 - 1;
    struct bins bins = {team, dense, places, edges, weight, bias, table, out, out, weight_grad, bias_grad,
                        IDS, COLUMNS, 1, BINS, OUTPUTS};
    if (!bin_table(&bins) || !embed(&bins) || !embed_backward(&bins))
        abort();
    add(out, sizeof out), add(weight_grad, sizeof weight_grad), add(bias_grad, sizeof bias_grad);
}

/* Pairs of 19 rows and a first vector, of 21 values. */
static void multiply(struct team team)
{
    enum { SAMPLES = 500, VECTORS = 20, DIM = 21, PAIRS = VECTORS * (VECTORS - 1) / 2 };
    static float first[SAMPLES * DIM], rows[SAMPLES * (VECTORS - 1) * DIM], out[SAMPLES * (DIM + PAIRS)];
    static float first_grad[SAMPLES * DIM], rows_grad[SAMPLES * (VECTORS - 1) * DIM];
    for (int64_t n = 0; n < SAMPLES * (VECTORS - 1) * DIM; n++)
        rows[n] = (float)(mixed((uint64_t)n) % 2000) / 1000 - 1;
    memcpy(first, rows + DIM, sizeof first);
    struct pairs pairs = {team, first, rows, out, out, first_grad, rows_grad, SAMPLES, VECTORS, DIM};
    if (!multiply_pairs(&pairs) || !multiply_pairs_backward(&pairs))
        abort();
    add(out, sizeof out), add(first_grad, sizeof first_grad), add(rows_grad, sizeof rows_grad);
}

int main(int count, char **words)
{
    struct team team = {parallel, count > 1 ? atoi(words[1]) : 1};
    /* single values; vectors, in a loop of any length and in one of 64 */
    const int64_t widths[] = {5, 48, WIDEST};
    for (int64_t stored = 0; stored < STORED_TYPES; stored++)
        for (int64_t rule = 0; rule < RULES; rule++)
            for (int k = count > 2; k < 3; k++) /* all rows of 5 are one block, which two threads cannot share */
                train(team, stored, rule, widths[k], count > 2);
    encode(team);
    multiply(team);
    printf("%016llx\n", (unsigned long long)digest);
    return 0;
}
