// Watches waits that should be short: a thread says where one takes long.
#pragma once
#include "runtime/machine/signals.h" // signals_start_thread
#include <math.h>                    // floor
#include <pthread.h>                 // pthread_cond_timedwait
#include <stdbool.h>                 // bool
#include <stdlib.h>                  // calloc
#include <time.h>                    // clock_gettime

struct long_wait {
    pthread_t thread;
    pthread_mutex_t mutex; // of all that follow
    pthread_cond_t changed;
    bool waits, ends;
    struct timespec until; // of the wait at hand, by the monotonic clock
    double seconds;
    void (*say_it)(double seconds);
};

// Whether the present wait has passed its limit, watch->until. The caller holds watch->mutex, and watch->waits is true.
static bool long_wait_is_overdue(const struct long_wait *watch) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec != watch->until.tv_sec ? now.tv_sec > watch->until.tv_sec : now.tv_nsec >= watch->until.tv_nsec;
}
// Calls say_it once in each wait that lasts too long, until long_wait_close. This is the thread; argument: the watch.
static void *long_wait_main(void *argument) {
    struct long_wait *const watch = (struct long_wait *)argument;
    pthread_mutex_lock(&watch->mutex);
    while (!watch->ends) {
        if (!watch->waits) {
            pthread_cond_wait(&watch->changed, &watch->mutex);
            continue;
        }
        pthread_cond_timedwait(&watch->changed, &watch->mutex, &watch->until);
        if (!watch->waits || !long_wait_is_overdue(watch)) // the wait ended meanwhile, or it is another one
            continue;
        watch->waits = false; // it is said once
        watch->say_it(watch->seconds);
    }
    pthread_mutex_unlock(&watch->mutex);
    return NULL;
}
// Returns a new watch, for long_wait_close. Its thread calls say_it(seconds) once in each wait of more than `seconds`;
// say_it may call none of these functions. NULL: no memory or thread; all functions take NULL, and watch nothing.
static struct long_wait *long_wait_open(double seconds, void (*say_it)(double seconds)) {
    struct long_wait *const watch = (struct long_wait *)calloc(1, sizeof *watch);
    pthread_condattr_t clock;
    if (!watch)
        return NULL;
    watch->seconds = seconds;
    watch->say_it = say_it;
    pthread_mutex_init(&watch->mutex, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&watch->changed, &clock);
    pthread_condattr_destroy(&clock);
    const bool started = signals_start_thread(&watch->thread, long_wait_main, watch) == 0;
    if (started)
        return watch;
    pthread_cond_destroy(&watch->changed);
    pthread_mutex_destroy(&watch->mutex);
    free(watch);
    return NULL;
}
static void long_wait_close(struct long_wait *watch) {
    if (!watch)
        return;
    pthread_mutex_lock(&watch->mutex);
    watch->ends = true;
    pthread_cond_signal(&watch->changed);
    pthread_mutex_unlock(&watch->mutex);
    pthread_join(watch->thread, NULL);
    pthread_cond_destroy(&watch->changed);
    pthread_mutex_destroy(&watch->mutex);
    free(watch);
}
static void long_wait_begin_or_end(struct long_wait *watch, bool waits) {
    if (!watch)
        return;
    pthread_mutex_lock(&watch->mutex);
    watch->waits = waits;
    if (waits) {
        const double whole = floor(watch->seconds);
        clock_gettime(CLOCK_MONOTONIC, &watch->until);
        watch->until.tv_sec += (time_t)whole;
        watch->until.tv_nsec += (long)(1e9 * (watch->seconds - whole));
        if (watch->until.tv_nsec >= 1000000000L) {
            watch->until.tv_nsec -= 1000000000L;
            watch->until.tv_sec++;
        }
    }
    pthread_cond_signal(&watch->changed);
    pthread_mutex_unlock(&watch->mutex);
}
// Begins a wait, which long_wait_end ends, in the place of any other. One thread begins and ends all waits.
static void long_wait_begin(struct long_wait *watch) { long_wait_begin_or_end(watch, true); }
static void long_wait_end(struct long_wait *watch) { long_wait_begin_or_end(watch, false); }
