#include "runtime/machine/deadline.h"
#include <math.h> // INFINITY
#include <time.h> // clock_gettime

double deadline_clock_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

struct deadline deadline_after_minutes(double start_s, double minutes) {
    const struct deadline deadline = {minutes > 0 ? start_s + 60 * minutes : (double)INFINITY};
    return deadline;
}

double deadline_left_s(struct deadline deadline) { return deadline.at_s - deadline_clock_s(); }

bool deadline_allows(struct deadline deadline, double seconds) { return deadline_left_s(deadline) >= seconds; }
