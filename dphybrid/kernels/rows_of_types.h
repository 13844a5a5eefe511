/* Row kernels for each type of stored values, included by rows.c once for each width of vectors. */

#define TYPE float32
#define STORED float
#define REAL float
#include "rows_of.h"
#undef TYPE
#undef STORED

#define TYPE bfloat16
#define STORED bfloat16
#define IS_BFLOAT16
#include "rows_of.h"
#undef IS_BFLOAT16
#undef TYPE
#undef STORED
#undef REAL

#define TYPE float64
#define STORED double
#define REAL double
#include "rows_of.h"
#undef TYPE
#undef STORED
#undef REAL
