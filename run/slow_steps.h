// Finds steps that take far longer than earlier ones, as on a machine or a disk that others use too.
#pragma once
#include "runtime/sort.h" // compare_doubles
#include <stdlib.h>       // qsort
#include <string.h>       // memcpy

enum { SLOW_STEPS_KEPT = 31, SLOW_STEPS_LEAST = 15, SLOW_STEPS_PAUSE = 100 };
struct slow_steps {
    double ms[SLOW_STEPS_KEPT]; // of the newest steps of this batch size, in a ring
    int count;                  // of all steps of this batch size
    int batch;
    int silent_until; // the step before which nothing is said
};

// Records a step's time. Returns the median of the last 31 steps if the step took over three times that and at least
// 200 ms. Returns 0 else, within 100 steps of a report, or until 15 steps in a row had this `batch`. *s begins zeroed.
static inline double slow_steps_record(struct slow_steps *s, int step, int batch, double ms) {
    enum { LEAST_MS = 200 };
    double sorted[SLOW_STEPS_KEPT], median = 0;
    if (batch != s->batch)
        s->count = 0;
    s->batch = batch;
    const int kept = s->count < SLOW_STEPS_KEPT ? s->count : SLOW_STEPS_KEPT;
    memcpy(sorted, s->ms, sizeof sorted);
    if (kept >= SLOW_STEPS_LEAST && ms >= LEAST_MS && step >= s->silent_until) {
        qsort(sorted, (size_t)kept, sizeof *sorted, compare_doubles);
        median = ms > 3 * sorted[kept / 2] ? sorted[kept / 2] : 0;
    }
    if (median > 0)
        s->silent_until = step + SLOW_STEPS_PAUSE;
    s->ms[s->count++ % SLOW_STEPS_KEPT] = ms;
    return median;
}
