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

/* Types of published tables, which are only looked up. MANTISSA: its bits; BIAS: what is added to the exponent. */
#define IS_SMALL_FLOAT
#define TYPE float16
#define STORED uint16_t
#define MANTISSA 10
#define BIAS 112
#include "rows_of.h"
#undef TYPE
#undef STORED
#undef MANTISSA
#undef BIAS

#define TYPE float8
#define STORED uint8_t
#define MANTISSA 3
#define BIAS 120
#include "rows_of.h"
#undef TYPE
#undef STORED
#undef MANTISSA
#undef BIAS
#undef IS_SMALL_FLOAT
#undef REAL

#define TYPE float64
#define STORED double
#define REAL double
#include "rows_of.h"
#undef TYPE
#undef STORED
#undef REAL
