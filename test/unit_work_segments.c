// kernels/work_segments.cuh: work between transfers is recorded once and enqueued again with the same results; code
// that does not enqueue the same work again is stopped.
//
//   unit_work_segments       every test          unit_work_segments NAME [well]    one misuse, to see its message
#include "kernels/device_memory.cuh" // device_copy
#include "kernels/transfers.cuh"     // transfer_begin
#include "kernels/work_segments.cuh" // under test
#include "test/apart.h"              // run_with_and_without
#include "test/testing.h"            // cmocka

static struct device device;

// A value passes through the slots: slot 0 gets what came from the host, and the next pass begins with slot 4.
enum { SLOTS = 5, ROUNDS = 6, OPS = 4, PASS_SEGMENTS = 3 };
struct pass {
    struct transfers transfers;
    struct work_segments segments;
    int *slots; // (SLOTS) on the device
    int *host;  // (2): what comes, what goes
    int ran;    // ops that ran so far
};
static void pass_open(struct pass *p) {
    memset(p, 0, sizeof *p);
    transfers_open(&p->transfers, 0, &device);
    p->slots = (int *)device_allocate(SLOTS * sizeof *p->slots);
    p->host = (int *)host_reserve(2 * sizeof *p->host);
    device_zero(p->slots, SLOTS * sizeof *p->slots, &device);
}
static void pass_close(struct pass *p) {
    segments_free(&p->segments);
    transfers_close(&p->transfers, &device);
    host_release(p->host, 2 * sizeof *p->host);
    device_free(p->slots, SLOTS * sizeof *p->slots);
}
static void copy_slot(struct pass *p, int to, int from) {
    p->ran++;
    device_copy(&p->slots[to], &p->slots[from], sizeof *p->slots, &device);
}
#define OP(op)                                                                                                         \
    do {                                                                                                               \
        if (segments_op_begin(&device)) {                                                                              \
            op;                                                                                                        \
            segments_op_end(&device);                                                                                  \
        }                                                                                                              \
    } while (0)
// Enqueues what the host does in each round: three segments, of two ops, of one, and of one op within another.
static void pass_enqueue(struct pass *p) {
    OP(copy_slot(p, 1, 4));
    OP(copy_slot(p, 2, 1));
    const uint64_t out =
        transfer_begin(&p->transfers, TRANSFER_TO_HOST, &p->host[1], &p->slots[2], sizeof *p->host, &device);
    const uint64_t in =
        transfer_begin(&p->transfers, TRANSFER_TO_DEVICE, &p->slots[0], &p->host[0], sizeof *p->host, &device);
    OP(copy_slot(p, 3, 2));
    transfer_wait(&p->transfers, out, &device);
    transfer_wait(&p->transfers, in, &device);
    OP(OP(copy_slot(p, 4, 0)));
}
// Runs one round: the host's `value` arrives, and what leaves is the former round's value, `before`.
static void pass_round(struct pass *p, int before, int value) {
    p->host[0] = value;
    segments_begin(&p->segments, &device);
    pass_enqueue(p);
    segments_end(&device);
    device_synchronize(&device);
    assert_int_equal(p->host[1], before);
}

static void work_is_recorded_once(void **state) {
    static const char *const streams[] = {"late", "eager", "1", "2"};
    for (int order = 0; order < 4; order++) {
        struct pass p;
        setenv("EMU_STREAMS", streams[order], 1);
        pass_open(&p);
        for (int round = 1; round <= ROUNDS; round++) {
            pass_round(&p, round == 1 ? 0 : 7 * (round - 1), 7 * round);
            assert_int_equal(p.ran, DEVICE_HAS_GRAPHS ? OPS : OPS * round);
        }
#ifdef TARGET_CUDA
        assert_int_equal(p.segments.count, PASS_SEGMENTS);
#endif
        pass_close(&p);
    }
    unsetenv("EMU_STREAMS");
}
// Checks that ops run and cuts do nothing where nothing is recorded.
static void without_segments_all_runs(void **state) {
    struct pass p;
    pass_open(&p);
    for (int round = 1; round <= 2; round++) {
        p.host[0] = round;
        pass_enqueue(&p);
        segments_cut(&device);
        device_synchronize(&device);
        assert_int_equal(p.host[1], round - 1);
        assert_int_equal(p.ran, OPS * round);
    }
    pass_close(&p);
}
// Checks that freed segments record again, other work too.
static void freed_segments_record_again(void **state) {
    struct pass p;
    pass_open(&p);
    pass_round(&p, 0, 3);
    segments_free(&p.segments);
    for (int round = 0; round < 2; round++) {
        segments_begin(&p.segments, &device);
        OP(copy_slot(&p, 1, 4));
        segments_end(&device);
    }
    assert_int_equal(p.ran, OPS + (DEVICE_HAS_GRAPHS ? 1 : 2));
    pass_close(&p);
}

// ---- misuse, each in a process of its own ----
#ifdef CUDA_EMULATED

// Runs two passes, of which the second one differs, unless `well`.
static void two_passes(bool well, void (*enqueue)(struct pass *p, bool differs)) {
    struct pass p;
    pass_open(&p);
    for (int i = 0; i < 2; i++) {
        segments_begin(&p.segments, &device);
        enqueue(&p, i == 1 && !well);
        segments_end(&device);
    }
    device_synchronize(&device);
    pass_close(&p);
}
static void transfer_to_host(struct pass *p) {
    transfer_wait(&p->transfers,
                  transfer_begin(&p->transfers, TRANSFER_TO_HOST, &p->host[1], &p->slots[2], sizeof *p->host, &device),
                  &device);
}
static void another_op(struct pass *p, bool differs) {
    OP(copy_slot(p, 1, 4));
    if (differs)
        OP(copy_slot(p, 2, 1));
    transfer_to_host(p);
}
static void one_more_segment(struct pass *p, bool differs) {
    OP(copy_slot(p, 1, 4));
    transfer_to_host(p);
    if (differs)
        OP(copy_slot(p, 2, 1));
}
static void one_segment_less(struct pass *p, bool differs) {
    OP(copy_slot(p, 1, 4));
    transfer_to_host(p);
    if (!differs)
        OP(copy_slot(p, 2, 1));
}
static void other_number_of_ops(bool well) { two_passes(well, another_op); }
static void more_segments(bool well) { two_passes(well, one_more_segment); }
static void fewer_segments(bool well) { two_passes(well, one_segment_less); }
static void transfer_within_an_op(bool well) {
    struct pass p;
    pass_open(&p);
    segments_begin(&p.segments, &device);
    OP(copy_slot(&p, 1, 4));
    if (well)
        transfer_to_host(&p);
    else
        OP(transfer_to_host(&p));
    segments_end(&device);
    device_synchronize(&device);
    pass_close(&p);
}

static const struct misuse {
    const char *name;
    void (*run)(bool well);
    const char *words; // a part of the message
} misuses[] = {
    {"other_number_of_ops", other_number_of_ops, "again with other ops"},
    {"more_segments", more_segments, "more segments than were recorded"},
    {"fewer_segments", fewer_segments, "fewer segments than were recorded"},
    {"transfer_within_an_op", transfer_within_an_op, "a transfer within an op"},
};
enum { MISUSES = sizeof misuses / sizeof *misuses };

static void misuse_is_found(void **state) {
    const struct misuse *misuse = (const struct misuse *)*state;
    char message[4096];
    const int status = run_with_and_without(misuse->name, message, sizeof message);
    if (status == 0 || !strstr(message, misuse->words))
        fail_msg("%s: status %d: %s", misuse->name, status, message);
}
static int run_misuses(void) { RUN_EACH(misuses, MISUSES, misuse_is_found); }
static bool run_misuse(const char *name, bool well) {
    for (int i = 0; i < MISUSES; i++)
        if (strcmp(name, misuses[i].name) == 0) {
            misuses[i].run(well);
            return true;
        }
    return false;
}

#else
static int run_misuses(void) { return 0; }
static bool run_misuse(const char *name, bool well) { return false; }
#endif

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(work_is_recorded_once),
        cmocka_unit_test(without_segments_all_runs),
        cmocka_unit_test(freed_segments_record_again),
    };
    device.threads = 1;
    device_open(&device, 0, false);
    if (argc > 1)
        return run_misuse(argv[1], argc > 2) ? 0 : 1;
    const int failed = cmocka_run_group_tests(tests, NULL, NULL) + run_misuses();
    device_close(&device);
    return failed;
}
