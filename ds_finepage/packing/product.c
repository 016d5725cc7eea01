/* Products of a packed matrix with rows of activations, unpacked in registers.
 *
 * native.py compiles this file and describes the arguments; form.py has the note on how numbers
 * lie. Each result is made by itself, in one order, however many threads and rows there are.
 */
#include <stdint.h>
#include <string.h>

#define LANES 8

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

static floats activations(const float *from)
{
    floats found;
    memcpy(&found, from, sizeof found);
    return found;
}

static ints numbers_at(const uint8_t *from)
{
    ints found;
    for (int i = 0; i < LANES; i++)
        found[i] = from[i];
    return found;
}

static floats whole(ints numbers)
{
    return __builtin_convertvector(numbers, floats);
}

/* A finite scale or minimum, in float32, bfloat16 or float16. */
enum { FLOAT32, BFLOAT16, FLOAT16 };

static inline float number_at(const void *from, long at, int dtype)
{
    float found;
    if (dtype == FLOAT32)
        return ((const float *)from)[at];
    uint32_t narrow = ((const uint16_t *)from)[at];
    uint32_t bits = dtype == BFLOAT16 ? narrow << 16 : (narrow & 0x7fff) << 13;
    memcpy(&found, &bits, sizeof found);
    if (dtype == BFLOAT16)
        return found;
    found *= 0x1p112f; /* the exponents begin at -126 there, and at -14 here */
    return narrow & 0x8000 ? -found : found;
}

static inline float result(const uint8_t *numbers, const void *scales, const void *minima,
                           int dtype, const float *rows, const float *sums, long groups,
                           int bits, long group)
{
    long run = group * bits / 8; /* bytes of a group */
    floats total = {0};
    float rest = 0;
    for (long g = 0; g < groups; g++, numbers += run, rows += group) {
        floats part = {0};
        long at = 0;
        float tail = 0;
        for (; at + LANES <= run; at += LANES) {
            ints found = numbers_at(numbers + at);
            if (bits == 8) {
                part += whole(found) * activations(rows + at);
            } else {
                part += whole(found & 15) * activations(rows + at);
                part += whole(found >> 4) * activations(rows + run + at);
            }
        }
        for (; at < run; at++) {
            if (bits == 8)
                tail += numbers[at] * rows[at];
            else
                tail += (numbers[at] & 15) * rows[at] + (numbers[at] >> 4) * rows[run + at];
        }
        float scale = number_at(scales, g, dtype);
        total += part * scale;
        rest += tail * scale + number_at(minima, g, dtype) * sums[g];
    }
    for (int i = 0; i < LANES; i++)
        rest += total[i];
    return rest;
}

#define PRODUCT(BITS, DTYPE)                                                                      \
    result(numbers + r * groups * (group * BITS / 8), (const char *)scales + r * groups * size,   \
           (const char *)minima + r * groups * size, DTYPE, rows + n * groups * group,            \
           sums + n * groups, groups, BITS, group)

void products(const uint8_t *numbers, const void *scales, const void *minima, const float *rows,
              const float *sums, float *results, long num_out, long num_rows, long groups,
              long group, int bits, int dtype, int threads)
{
    long size = dtype == FLOAT32 ? 4 : 2;
#pragma omp parallel for num_threads(threads)
    for (long r = 0; r < num_out; r++)
        for (long n = 0; n < num_rows; n++) {
            float *found = results + n * num_out + r;
            if (dtype == BFLOAT16)
                *found = bits == 8 ? PRODUCT(8, BFLOAT16) : PRODUCT(4, BFLOAT16);
            else
                *found = bits == 8 ? PRODUCT(8, dtype) : PRODUCT(4, dtype);
        }
}
