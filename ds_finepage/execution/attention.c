/* Attention of few queries to rows of a KV cache in host memory.
 *
 * host_attention.py compiles this file and describes the arguments. Rows lie as (tokens, batch,
 * heads, width). One thread attends to a span of tokens of a sequence; then the spans are joined.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 32  /* tokens whose rows are widened together: they stay in the first cache */
#define AT_ONCE 4 /* rows that are added together, so that a sum is seldom loaded */

enum { FLOAT32, BFLOAT16, FLOAT16 };

/* Keys or values: those of the cache, and the new ones. */
typedef struct {
    const char *old, *new;
    long num_old, width;
} Rows;

static void widen(const Rows *rows, long token, long part, long parts, int dtype, float *to)
{
    int is_old = token < rows->num_old;
    long at = ((is_old ? token : token - rows->num_old) * parts + part) * rows->width;
    const char *from = (is_old ? rows->old : rows->new) + at * (dtype == FLOAT32 ? 4 : 2);
    const uint16_t *narrow = (const uint16_t *)from;
    if (dtype == FLOAT32)
        memcpy(to, from, rows->width * sizeof *to);
    else
        for (long i = 0; i < rows->width; i++) { /* exponents of float16 begin at -14 */
            uint32_t bits = dtype == BFLOAT16 ? (uint32_t)narrow[i] << 16
                                              : (uint32_t)(narrow[i] & 0x7fff) << 13 |
                                                    (uint32_t)(narrow[i] & 0x8000) << 16;
            memcpy(to + i, &bits, sizeof bits);
            to[i] *= dtype == BFLOAT16 ? 1 : 0x1p112f;
        }
}

/* Score AT_ONCE tokens. */
static void score(const float *query, const float *keys, long width, float *scores)
{
    float a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
    for (long i = 0; i < width; i++) {
        a += query[i] * keys[i];
        b += query[i] * keys[width + i];
        c += query[i] * keys[2 * width + i];
        d += query[i] * keys[3 * width + i];
    }
    scores[0] = a, scores[1] = b, scores[2] = c, scores[3] = d;
}

/* Attend to some tokens; a result has its sum, the sum of its weights, and its largest score. */
static void block(const float *query, const float *keys, const float *values, const float *mask,
                  long num, long width, long value_width, float *result)
{
    float weights[BLOCK] = {0}, *total = result + value_width, *largest = total + 1, top = *largest;
    for (long t = 0; t < num; t += AT_ONCE)
        score(query, keys + t * width, width, weights + t);
    for (long t = 0; t < num; t++) {
        weights[t] += mask ? mask[t] : 0;
        top = fmaxf(top, weights[t]);
    }
    float shrink = expf(*largest - top), sum = 0;
    for (long t = 0; t < BLOCK; t++)
        sum += weights[t] = t < num ? expf(weights[t] - top) : 0;
    *largest = top;
    *total = *total * shrink + sum;
    for (long t = 0; t < num; t += AT_ONCE) {
        const float *v = values + t * value_width;
        for (long i = 0; i < value_width; i++, v++) {
            float found = result[i] * shrink;
            for (long k = 0; k < AT_ONCE; k++)
                found += weights[t + k] * v[k * value_width];
            result[i] = found;
        }
        shrink = 1;
    }
}

void attention(const char *keys, const char *new_keys, const char *values, const char *new_values,
               const float *queries, const float *mask, float *parts, float *results, long num_old,
               long num_new, long batch, long heads, long num_queries, long num_masks, long width,
               long value_width, int dtype, int spans, int threads)
{
    long tokens = num_old + num_new, each = (tokens + spans - 1) / spans, size = value_width + 2;
    Rows k = {keys, new_keys, num_old, width}, v = {values, new_values, num_old, value_width};
#pragma omp parallel for num_threads(threads)
    for (long span = 0; span < batch * spans; span++) {
        long b = span / spans, begin = span % spans * each;
        long end = begin + each < tokens ? begin + each : tokens;
        float *part = parts + span * heads * num_queries * size;
        float wide[BLOCK * width], wide_values[BLOCK * value_width];
        memset(part, 0, heads * num_queries * size * sizeof *part);
        memset(wide_values, 0, sizeof wide_values);
        for (long i = 1; i <= heads * num_queries; i++)
            part[i * size - 1] = -FLT_MAX;
        for (; begin < end; begin += BLOCK) {
            long num = begin + BLOCK < end ? BLOCK : end - begin;
            for (long h = 0; h < heads; h++) {
                for (long t = 0; t < num; t++) {
                    widen(&k, begin + t, b * heads + h, batch * heads, dtype, wide + t * width);
                    widen(&v, begin + t, b * heads + h, batch * heads, dtype,
                          wide_values + t * value_width);
                }
                for (long q = 0; q < num_queries; q++)
                    block(queries + ((b * heads + h) * num_queries + q) * width, wide, wide_values,
                          mask ? mask + (b * num_masks + q % num_masks) * tokens + begin : NULL,
                          num, width, value_width, part + (h * num_queries + q) * size);
            }
        }
    }
    for (long r = 0; r < batch * heads * num_queries; r++) {
        long b = r / (heads * num_queries), at = r % (heads * num_queries);
        const float *first = parts + (b * spans * heads * num_queries + at) * size;
        float top = -FLT_MAX, total = 0, *result = results + r * value_width;
        for (long s = 0; s < spans; s++)
            top = fmaxf(top, first[s * heads * num_queries * size + value_width + 1]);
        memset(result, 0, value_width * sizeof *result);
        for (long s = 0; s < spans; s++) {
            const float *part = first + s * heads * num_queries * size;
            float weight = expf(part[value_width + 1] - top);
            total += weight * part[value_width];
            for (long i = 0; i < value_width; i++)
                result[i] += weight * part[i];
        }
        for (long i = 0; i < value_width; i++)
            result[i] /= total;
    }
}
