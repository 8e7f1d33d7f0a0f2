/* CompensatedLayerNorm on CPUs: the forward of fused.py, which has the algebra, in one pass over memory.

   Some rows at a time stay in the cache while their means, then their variances, then their outputs are computed: rows
   do not wait for each other, so that a processor works on several at once. Threads are those of OpenMP, and so of
   torch, which has loaded the library already. bfloat16 is computed in float, and rounded once. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>

#define AT_ONCE 8       /* rows */
#define ENTRIES 8192    /* of these rows, 32 KB; a single row may be longer */
#define BLOCK 512       /* entries that are summed up in float before they go into a double */
#define FEW 32768       /* entries that are not worth a second thread, as torch has it */

#if defined(__x86_64__) && defined(__gnu_linux__) && __GNUC__ >= 12 && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((noinline, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif

const int native_version = 4;  /* of what is below; native.py asks for it */

typedef uint16_t half;  /* bfloat16, the upper half of a float */

typedef struct {        /* inputs.Removed */
    float mean, share, cross, base, inverse;
} numbers;

typedef struct {
    numbers removed;
    const void *weight, *bias;      /* either may be missing */
    int64_t width;
} norm;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

FOR_EACH_CPU static void norm_some(const norm *of, const float *x, float *y, int64_t rows) {
    const float *weight = of->weight, *bias = of->bias;
    numbers gone = of->removed;
    int64_t width = of->width;
    float mean[AT_ONCE], scale[AT_ONCE];
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * width;
        double total = 0;
        for (int64_t start = 0; start < width; start += BLOCK) {
            float part = 0;
#pragma omp simd reduction(+ : part)
            for (int64_t i = start; i < smaller(start + BLOCK, width); i++) part += from[i];
            total += part;
        }
        mean[row] = (float)(total / (double)width);
    }
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * width;
        float kept = mean[row], shift = gone.mean - kept;
        double total = 0;
        for (int64_t start = 0; start < width; start += BLOCK) {
            float part = 0;
#pragma omp simd reduction(+ : part)
            for (int64_t i = start; i < smaller(start + BLOCK, width); i++) part += (from[i] - kept) * (from[i] - kept);
            total += part;
        }
        scale[row] = 1 / sqrtf((float)total * gone.inverse + (gone.cross * shift * shift + gone.base));
        mean[row] = kept + gone.share * shift;
    }
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * width;
        float *to = y + row * width, centre = mean[row], factor = scale[row];
        if (weight && bias)
#pragma omp simd
            for (int64_t i = 0; i < width; i++) to[i] = (from[i] - centre) * factor * weight[i] + bias[i];
        else if (weight)
#pragma omp simd
            for (int64_t i = 0; i < width; i++) to[i] = (from[i] - centre) * factor * weight[i];
        else
#pragma omp simd
            for (int64_t i = 0; i < width; i++) to[i] = (from[i] - centre) * factor;
    }
}

typedef union {
    float value;
    uint32_t bits;
} word;

FOR_EACH_CPU static void widen(const half *from, float *to, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) to[i] = (word){.bits = (uint32_t)from[i] << 16}.value;
}

/* To the nearest, and of two to the even one; what is not a number stays none. */
FOR_EACH_CPU static void narrow(const float *from, half *to, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = (word){.value = from[i]}.bits;
        half rounded = (half)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
        to[i] = from[i] == from[i] ? rounded : (half)0x7fc0;
    }
}

/* From here on: 1 if there was no memory. */

static int float_rows(const norm *of, const void *x, void *y, int64_t rows) {
    int64_t width = of->width, step = smaller(AT_ONCE, 1 + ENTRIES / width);
    for (int64_t row = 0; row < rows; row += step)
        norm_some(of, (const float *)x + row * width, (float *)y + row * width, smaller(step, rows - row));
    return 0;
}

static int half_rows(const norm *of, const void *x, void *y, int64_t rows) {
    int64_t width = of->width, step = smaller(AT_ONCE, 1 + ENTRIES / width);
    float *wide = malloc(sizeof(float) * (size_t)(step * width));
    if (wide == NULL) return 1;
    for (int64_t row = 0; row < rows; row += step) {
        int64_t count = smaller(step, rows - row) * width;
        widen((const half *)x + row * width, wide, count);
        norm_some(of, wide, wide, count / width);
        narrow(wide, (half *)y + row * width, count);
    }
    free(wide);
    return 0;
}

/* On all threads, each with rows of its own. */
static int shared_out(int (*work)(const norm *, const void *, void *, int64_t), const norm *of, const char *x, char *y,
                      int64_t rows, int64_t bytes) {
    int failed = 0;
    if (rows * of->width < FEW) return work(of, x, y, rows);
#pragma omp parallel reduction(| : failed)
    {
        int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        int64_t first = rows * thread / threads, last = rows * (thread + 1) / threads, place = first * of->width * bytes;
        failed |= work(of, x + place, y + place, last - first);
    }
    return failed;
}

int norm_float(const numbers *removed, const float *x, const float *weight, const float *bias, float *y, int64_t rows,
               int64_t width) {
    norm all = {*removed, weight, bias, width};
    return shared_out(float_rows, &all, (const char *)x, (char *)y, rows, sizeof(float));
}

/* x and y in bfloat16. */
int norm_mixed(const numbers *removed, const half *x, const float *weight, const float *bias, half *y, int64_t rows,
               int64_t width) {
    norm all = {*removed, weight, bias, width};
    return shared_out(half_rows, &all, (const char *)x, (char *)y, rows, sizeof(half));
}

/* weight and bias in bfloat16 too. */
int norm_half(const numbers *removed, const half *x, const half *weight, const half *bias, half *y, int64_t rows,
              int64_t width) {
    float *wide = malloc(sizeof(float) * (size_t)(2 * width));
    if (wide == NULL) return 1;
    if (weight) widen(weight, wide, width);
    if (bias) widen(bias, wide + width, width);
    int failed = norm_mixed(removed, x, weight ? wide : NULL, bias ? wide + width : NULL, y, rows, width);
    free(wide);
    return failed;
}
