// A long wait is reported, once; a short one is not.
#include "run/long_wait.h" // under test
#include "test/testing.h"  // cmocka
#include <time.h>          // nanosleep

static int said;
static void say_it(double seconds, const void *expected) {
    assert_true(seconds == *(const double *)expected);
    __atomic_add_fetch(&said, 1, __ATOMIC_SEQ_CST);
}
static void sleep_ms(int ms) {
    const struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&time, NULL);
}
// Sleeps until `times` messages have come, at most 10 s, and a little longer.
static void until_said(int times) {
    for (int i = 0; i < 1000 && __atomic_load_n(&said, __ATOMIC_SEQ_CST) < times; i++)
        sleep_ms(10);
    sleep_ms(100); // to see a message too many
    assert_int_equal(__atomic_load_n(&said, __ATOMIC_SEQ_CST), times);
}

static const double short_s = 0.05, shorter_s = 0.02;
static const struct long_wait_limit limit = {0.05, say_it, &short_s}, shorter = {0.02, say_it, &shorter_s};
static void a_long_wait_is_said_once(void **state) {
    said = 0;
    struct long_wait *const watch = long_wait_open(limit);
    assert_non_null(watch);
    for (int times = 1; times <= 2; times++) {
        long_wait_begin(watch);
        until_said(times);
        long_wait_end(watch);
    }
    long_wait_begin_within(watch, &shorter);
    until_said(3);
    long_wait_begin(watch);
    until_said(4);
    long_wait_close(watch);
}
static void what_has_ended_is_not_said(void **state) {
    said = 0;
    struct long_wait *const watch = long_wait_open(limit);
    long_wait_begin(watch);
    long_wait_end(watch);
    until_said(0);
    long_wait_begin(watch);
    long_wait_close(watch);
    assert_int_equal(said, 0);
}
static void nothing_is_watched_by_none(void **state) {
    long_wait_begin(NULL);
    long_wait_end(NULL);
    long_wait_close(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_long_wait_is_said_once),
        cmocka_unit_test(what_has_ended_is_not_said),
        cmocka_unit_test(nothing_is_watched_by_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
