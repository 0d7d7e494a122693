// The deadline of checks and measurements in the run's own process: work of a GPU that hangs can't be stopped, so the
// run ends, and says what hung and what avoids it. With --self-check off such work is watched as any other.
#pragma once
#include "run/self_check.cuh"   // self_check_limit, self_check_asks
#include "run/watch_device.cuh" // long_wait_begin_within

struct timed_check {
    char what[96];       // the work that is checked, for a message
    const char *instead; // how to start without it
};

#ifdef TARGET_CUDA

static const double DEADLINE_LEAST_SECONDS = 1; // a late check ends the run, where a late child only costs speed

// Ends the process: *check, a struct timed_check, is late. exit() could wait for the GPU in CUDA's handlers.
static void end_late_check(double seconds, const void *check) {
    const struct timed_check *const late = (const struct timed_check *)check;
    char names[512];
    fflush(stdout);
    say_warning("self-check: %s did not end on this GPU within %.3g s: %s. Enqueued last, the newest first: %s",
                late->what, seconds, late->instead, launched_last(names, sizeof names));
    _exit(EXIT_USAGE);
}
// Gives the work up to deadline_end, or to the watch's end, a child's seconds and `more`, unless --self-check is off.
// *check must stay until then.
static void deadline_begin(struct run *r, const struct timed_check *check, double more) {
    const struct long_wait_limit limit = {fmax(self_check_limit(), DEADLINE_LEAST_SECONDS) + more, end_late_check,
                                          check};
    long_wait_begin_within(r->device_watch, self_check_asks(r->config, true) ? &limit : NULL);
}
// Ends a deadline. What follows is watched as any other work.
static void deadline_end(struct run *r) { long_wait_begin(r->device_watch); }

#else

static void deadline_begin(struct run *r, const struct timed_check *check, double more) {}

#endif
