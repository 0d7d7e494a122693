// The self-check of copies (run/check_copies.cuh): it passes where all is right, and finds a copy that is not waited
// for.
#include "kernels/transfers.cuh" // struct transfers
#include "test/testing.h"        // cmocka

// A transfer direction whose waits do nothing; -1: none.
static int waits_not_for = -1;
static void some_transfer_wait(struct transfers *t, uint64_t ticket, struct device *dev) {
    if ((int)transfer_direction_of(ticket) != waits_not_for)
        transfer_wait(t, ticket, dev);
}
#define transfer_wait some_transfer_wait
#include "run/check_copies.cuh" // under test
#undef transfer_wait

static bool is_right(int direction_without_wait) {
    const size_t bytes = 4096;
    struct device dev;
    struct transfers transfers;
    memset(&dev, 0, sizeof dev);
    device_open(&dev, 0, true);
    transfers_open(&transfers, 0, &dev);
    char *const memory = (char *)device_allocate(2 * COPIES * bytes);
    waits_not_for = direction_without_wait;
    const bool right = copies_are_right(&transfers, memory, bytes, &dev);
    transfers_close(&transfers, &dev);
    device_free(memory, 2 * COPIES * bytes);
    device_close(&dev);
    return right;
}
static void what_is_right_is_taken(void **state) { assert_true(is_right(-1)); }
static void a_wait_that_is_missing_is_found(void **state) {
    assert_false(is_right(TRANSFER_TO_HOST));
    assert_false(is_right(TRANSFER_TO_DEVICE));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_right_is_taken),
        cmocka_unit_test(a_wait_that_is_missing_is_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
