// Watches waits that should be short: a thread says where one takes long.
#pragma once
#include "runtime/machine/signals.h" // signals_start_thread
#include <math.h>                    // floor
#include <pthread.h>                 // pthread_cond_timedwait
#include <stdbool.h>                 // bool
#include <stdlib.h>                  // calloc
#include <time.h>                    // clock_gettime

// say_it(seconds, context) is called in a wait of more than `seconds`.
struct long_wait_limit {
    double seconds;
    void (*say_it)(double seconds, const void *context);
    const void *context;
};
struct long_wait {
    pthread_t thread;
    pthread_mutex_t mutex; // of all that follow
    pthread_cond_t changed;
    bool waits, ends;
    struct timespec until;             // of the wait at hand, by the monotonic clock
    struct long_wait_limit limit, now; // of waits that have none of their own, of the wait at hand
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
        watch->now.say_it(watch->now.seconds, watch->now.context);
    }
    pthread_mutex_unlock(&watch->mutex);
    return NULL;
}
// Returns a new watch, for long_wait_close. Its thread calls the limit's say_it once in each wait that is too long;
// say_it may call none of these functions. NULL: no memory or thread; all functions take NULL, and watch nothing.
static struct long_wait *long_wait_open(struct long_wait_limit limit) {
    struct long_wait *const watch = (struct long_wait *)calloc(1, sizeof *watch);
    pthread_condattr_t clock;
    if (!watch)
        return NULL;
    watch->limit = limit;
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
// Begins a wait within the limit (NULL: the watch's own), or ends one.
static void long_wait_begin_or_end(struct long_wait *watch, bool waits, const struct long_wait_limit *limit) {
    if (!watch)
        return;
    pthread_mutex_lock(&watch->mutex);
    watch->waits = waits;
    if (waits) {
        watch->now = limit ? *limit : watch->limit;
        const double whole = floor(watch->now.seconds);
        clock_gettime(CLOCK_MONOTONIC, &watch->until);
        watch->until.tv_sec += (time_t)whole;
        watch->until.tv_nsec += (long)(1e9 * (watch->now.seconds - whole));
        if (watch->until.tv_nsec >= 1000000000L) {
            watch->until.tv_nsec -= 1000000000L;
            watch->until.tv_sec++;
        }
    }
    pthread_cond_signal(&watch->changed);
    pthread_mutex_unlock(&watch->mutex);
}
// Begins a wait, which long_wait_end ends, in the place of any other. One thread begins and ends all waits.
static void long_wait_begin(struct long_wait *watch) { long_wait_begin_or_end(watch, true, NULL); }
// Begins a wait as long_wait_begin does, by another limit unless that is NULL.
static void long_wait_begin_within(struct long_wait *watch, const struct long_wait_limit *limit) {
    long_wait_begin_or_end(watch, true, limit);
}
static void long_wait_end(struct long_wait *watch) { long_wait_begin_or_end(watch, false, NULL); }
