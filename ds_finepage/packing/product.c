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

/* A scale or a minimum, in float32 or in bfloat16. */
static inline float number_at(const void *from, long at, int is_wide)
{
    float found;
    if (is_wide)
        return ((const float *)from)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    memcpy(&found, &bits, sizeof found);
    return found;
}

static inline float result(const uint8_t *numbers, const void *scales, const void *minima,
                           int is_wide, const float *rows, const float *sums, long groups,
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
        float scale = number_at(scales, g, is_wide);
        total += part * scale;
        rest += tail * scale + number_at(minima, g, is_wide) * sums[g];
    }
    for (int i = 0; i < LANES; i++)
        rest += total[i];
    return rest;
}

#define PRODUCTS(BITS, IS_WIDE)                                                                   \
    result(numbers + r * groups * (group * BITS / 8), (const char *)scales + r * groups * size,   \
           (const char *)minima + r * groups * size, IS_WIDE, rows + n * groups * group,          \
           sums + n * groups, groups, BITS, group)

void products(const uint8_t *numbers, const void *scales, const void *minima, const float *rows,
              const float *sums, float *results, long num_out, long num_rows, long groups,
              long group, int bits, int is_wide, int threads)
{
    long size = is_wide ? 4 : 2;
#pragma omp parallel for num_threads(threads)
    for (long r = 0; r < num_out; r++)
        for (long n = 0; n < num_rows; n++) {
            float *found = results + n * num_out + r;
            if (bits == 8)
                *found = is_wide ? PRODUCTS(8, 1) : PRODUCTS(8, 0);
            else
                *found = is_wide ? PRODUCTS(4, 1) : PRODUCTS(4, 0);
        }
}
