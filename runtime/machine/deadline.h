// --exit-after MINUTES: a run that must end before its job's limit ends it.
#pragma once
#include <math.h>    // INFINITY
#include <stdbool.h> // bool
#include <time.h>    // clock_gettime

struct deadline {
    double at_s; // of the monotonic clock; infinite: none
};

static double deadline_clock_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// So many minutes after `start_s` of deadline_clock_s(); 0 or less: no deadline.
static inline struct deadline deadline_after_minutes(double start_s, double minutes) {
    const struct deadline deadline = {minutes > 0 ? start_s + 60 * minutes : (double)INFINITY};
    return deadline;
}

// Negative once it has passed.
static inline double deadline_left_s(struct deadline deadline) { return deadline.at_s - deadline_clock_s(); }

// Whether what takes so long (the next step, and the save that ends the run) would still end before the deadline.
static inline bool deadline_allows(struct deadline deadline, double seconds) {
    return deadline_left_s(deadline) >= seconds;
}
