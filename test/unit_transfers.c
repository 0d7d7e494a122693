// kernels/transfers.cuh: what transfers carry, in which order, in graphs, and how long a bus takes; and which faults of
// their users show in which order of copies. A missing wait for a copy shows where the copy runs as late as it may. A
// buffer that is refilled too early shows where the copy runs as early as it may. A missing wait between the two
// directions shows where one direction is early and the other late. On the emulator these are orders of its streams; on
// the cpu target the usual order is early.
//
//   unit_transfers           every test          unit_transfers NAME [well]    one misuse, to see its message
#include "kernels/transfers.cuh" // under test
#include "test/apart.h"          // run_with_and_without
#include "test/testing.h"        // cmocka

static struct device device;

// Orders of copies: a bit for each direction that is late.
enum { LATE_TO_HOST = 1 << TRANSFER_TO_HOST, LATE_TO_DEVICE = 1 << TRANSFER_TO_DEVICE, ORDERS = 4 };
static void open_transfers(struct transfers *t, int order) {
    static const char *const streams[ORDERS] = {"eager", "2", "1",
                                                "late"}; // 1: the stream to the host, which transfers_open makes first
    setenv("EMU_STREAMS", streams[order], 1);
    transfers_open(t, 0, &device);
    if (order & LATE_TO_HOST)
        transfers_postpone_copies(t, TRANSFER_TO_HOST);
    if (order & LATE_TO_DEVICE)
        transfers_postpone_copies(t, TRANSFER_TO_DEVICE);
}
static void close_transfers(struct transfers *t) {
    transfers_close(t, &device);
    device_synchronize(&device);
    unsetenv("EMU_STREAMS");
}

// ---- pieces that pass through slots on the device ----

enum fault { NO_FAULT, NO_WAIT_FOR_ARRIVAL, NO_WAIT_FOR_DEPARTURE, REFILLED_TOO_EARLY, FAULTS };
enum { PIECES = 11, SLOTS = 3, HALF = 300, PIECE = 2 * HALF, MIDDLE = PIECES / 2 };

struct pipeline {
    struct transfers transfers;
    unsigned char *host;                  // (PIECES, PIECE) what arrives; what leaves takes its place
    unsigned char *slots, *other, *taken; // on the device: (SLOTS, PIECE), (HALF), (PIECES, PIECE)
    uint64_t arrivals[PIECES], departures[PIECES];
};
static unsigned char value_at(int round, int piece, int i) {
    return (unsigned char)(17 * piece + 5 * i + 31 * round + i / 7);
}
static void fill(struct pipeline *p, int round) {
    for (int i = 0; i < PIECES * PIECE; i++)
        p->host[i] = value_at(round, i / PIECE, i % PIECE);
}
static void open_pipeline(struct pipeline *p, int order) {
    memset(p, 0, sizeof *p);
    open_transfers(&p->transfers, order);
    p->host = (unsigned char *)host_reserve(PIECES * PIECE);
    p->slots = (unsigned char *)device_allocate(SLOTS * PIECE);
    p->other = (unsigned char *)device_allocate(HALF);
    p->taken = (unsigned char *)device_allocate(PIECES * PIECE);
}
static void close_pipeline(struct pipeline *p) {
    close_transfers(&p->transfers);
    host_release(p->host, PIECES * PIECE);
    device_free(p->slots, SLOTS * PIECE);
    device_free(p->other, HALF);
    device_free(p->taken, PIECES * PIECE);
}
static unsigned char *slot_of(struct pipeline *p, int piece) { return p->slots + piece % SLOTS * PIECE; }
static void begin_arrival(struct pipeline *p, int piece) {
    p->arrivals[piece] =
        transfer_begin(&p->transfers, TRANSFER_TO_DEVICE, slot_of(p, piece), p->host + piece * PIECE, PIECE, &device);
}
static void wait_for_arrival(struct pipeline *p, int piece, enum fault fault) {
    if (fault != NO_WAIT_FOR_ARRIVAL || piece != MIDDLE)
        transfer_wait(&p->transfers, p->arrivals[piece], &device);
}

// Streams pieces as an update streams offloaded states: a piece arrives in one slot, another slot's is worked on, a
// third slot's leaves. The work exchanges the halves of a piece.
static void stream_pieces(struct pipeline *p, enum fault fault) {
    begin_arrival(p, 0);
    for (int i = 0; i < PIECES; i++) {
        unsigned char *slot = slot_of(p, i);
        if (i + 1 >= SLOTS && i + 1 < PIECES && (fault != NO_WAIT_FOR_DEPARTURE || i != MIDDLE))
            transfer_wait(&p->transfers, p->departures[i + 1 - SLOTS], &device);
        if (i + 1 < PIECES)
            begin_arrival(p, i + 1);
        wait_for_arrival(p, i, fault);
        device_copy(p->other, slot, HALF, &device);
        device_copy(slot, slot + HALF, HALF, &device);
        device_copy(slot + HALF, p->other, HALF, &device);
        p->departures[i] = transfer_begin(&p->transfers, TRANSFER_TO_HOST, p->host + i * PIECE, slot, PIECE, &device);
    }
    for (int i = PIECES - SLOTS; i < PIECES; i++)
        transfer_wait(&p->transfers, p->departures[i], &device);
}
static bool is_streamed(const struct pipeline *p, int round) {
    for (int i = 0; i < PIECES * PIECE; i++)
        if (p->host[i] != value_at(round, i / PIECE, (i % PIECE + HALF) % PIECE))
            return false;
    return true;
}
// Uses pieces as a pass reads offloaded weights: pieces arrive while earlier ones are used.
static void use_pieces(struct pipeline *p, enum fault fault) {
    for (int i = 0; i < SLOTS; i++)
        begin_arrival(p, i);
    for (int i = 0; i < PIECES; i++) {
        const bool early = fault == REFILLED_TOO_EARLY && i == MIDDLE;
        wait_for_arrival(p, i, fault);
        if (early)
            begin_arrival(p, i + SLOTS);
        device_copy(p->taken + i * PIECE, slot_of(p, i), PIECE, &device);
        if (!early && i + SLOTS < PIECES)
            begin_arrival(p, i + SLOTS);
    }
}
static bool is_used(struct pipeline *p, int round) {
    unsigned char *got = (unsigned char *)host_allocate(PIECES * PIECE, &device);
    bool right = true;
    device_download(got, p->taken, PIECES * PIECE, &device);
    for (int i = 0; i < PIECES * PIECE; i++)
        right = right && got[i] == value_at(round, i / PIECE, i % PIECE);
    host_free(got);
    return right;
}

// Whether two passes through the slots give the right results.
static bool passes(enum fault fault, int order, bool streamed) {
    struct pipeline p;
    bool right = true;
    open_pipeline(&p, order);
    for (int round = 0; round < 2 && right; round++) {
        fill(&p, round);
        if (streamed)
            stream_pieces(&p, fault);
        else
            use_pieces(&p, fault);
        device_synchronize(&device);
        right = streamed ? is_streamed(&p, round) : is_used(&p, round);
    }
    close_pipeline(&p);
    return right;
}
static void every_order_of_copies_gives_the_same(void **state) {
    for (int order = 0; order < ORDERS; order++)
        assert_true(passes(NO_FAULT, order, true) && passes(NO_FAULT, order, false));
}
static void each_fault_shows_in_an_order(void **state) {
    for (int order = 0; order < ORDERS; order++) {
        const bool arrivals_late = order & LATE_TO_DEVICE, departures_late = order & LATE_TO_HOST;
        assert_true(passes(NO_WAIT_FOR_ARRIVAL, order, true) == !arrivals_late);
        assert_true(passes(NO_WAIT_FOR_ARRIVAL, order, false) == !arrivals_late);
        assert_true(passes(REFILLED_TOO_EARLY, order, false) == arrivals_late);
        assert_true(passes(NO_WAIT_FOR_DEPARTURE, order, true) == !(departures_late && !arrivals_late));
    }
}

// ---- graphs ----

// Checks a pass within a graph: it is launched again, between transfers outside of graphs, on what the host's memory
// holds then. It is recorded once every event has been used.
static void graphs_begin_and_wait_for_their_own_transfers(void **state) {
    for (int order = 0; order < ORDERS; order++) {
        struct pipeline p;
        struct work_graph graph;
        memset(&graph, 0, sizeof graph);
        open_pipeline(&p, order);
        for (int round = 0; round < 10; round++) {
            fill(&p, round);
            if (DEVICE_HAS_GRAPHS && round % 2 && p.transfers.begun[TRANSFER_TO_DEVICE] >= TRANSFER_EVENTS) {
                if (!graph_recorded(&graph)) {
                    graph_begin(&device);
                    stream_pieces(&p, NO_FAULT);
                    graph_end(&graph, &device);
                }
                graph_launch(&graph, &device);
            } else {
                stream_pieces(&p, NO_FAULT);
            }
            device_synchronize(&device);
            assert_true(is_streamed(&p, round));
        }
        graph_free(&graph);
        close_pipeline(&p);
    }
}

// ---- tickets ----

static void more_transfers_than_events_are_in_flight(void **state) {
    enum { MANY = 2 * TRANSFER_EVENTS + 5 };
    for (int order = 0; order < ORDERS; order++) {
        struct transfers t;
        uint64_t up[MANY], down[MANY];
        int *host = (int *)host_reserve(2 * MANY * sizeof *host),
            *memory = (int *)device_allocate(MANY * sizeof *memory);
        open_transfers(&t, order);
        for (int i = 0; i < MANY; i++)
            host[i] = i + 1;
        for (int i = 0; i < MANY; i++) {
            up[i] = transfer_begin(&t, TRANSFER_TO_DEVICE, memory + i, host + i, sizeof *host, &device);
            assert_true(up[i] != 0 && transfer_direction_of(up[i]) == TRANSFER_TO_DEVICE);
        }
        for (int i = 0; i < MANY; i++)
            transfer_wait(&t, up[i], &device);
        for (int i = 0; i < MANY; i++) {
            down[i] = transfer_begin(&t, TRANSFER_TO_HOST, host + MANY + i, memory + i, sizeof *host, &device);
            assert_true(down[i] != 0 && transfer_direction_of(down[i]) == TRANSFER_TO_HOST);
        }
        for (int i = MANY - 1; i >= 0; i--)
            transfer_wait(&t, down[i], &device);
        transfer_wait(&t, down[0], &device); // a second time
        transfer_wait(&t, 0, &device);
        device_synchronize(&device);
        for (int i = 0; i < MANY; i++)
            assert_int_equal(host[MANY + i], i + 1);
        assert_true(transfers_waited_s(&t) >= 0);
        close_transfers(&t);
        host_release(host, 2 * MANY * sizeof *host);
        device_free(memory, MANY * sizeof *memory);
    }
}

// ---- the bus ----

// Checks when the bus is free again, not how long a wait takes, since a busy machine may suspend a process for any
// time.
static void a_bus_takes_as_long_as_its_rate_says(void **state) {
#ifdef TARGET_CUDA
    skip(); // only the cpu target's copies have this rate
#else
    enum { COPIES = 100 };
    const double gbps = 0.005;
    const size_t bytes = 1000; // 0.2 ms: less than a sleep is exact to, and much more than the copy takes
    const double expected_s = COPIES * (double)bytes / (1e9 * gbps), rounding_s = 1e-6;
    struct transfers t;
    char *host = (char *)host_reserve(2 * bytes), *memory = (char *)device_allocate(2 * bytes);
    uint64_t up = 0, down = 0;
    transfers_open(&t, gbps, &device);
    const double begin_s = deadline_clock_s();
    for (int i = 0; i < COPIES; i++) { // in each direction at once
        up = transfer_begin(&t, TRANSFER_TO_DEVICE, memory, host, bytes, &device);
        down = transfer_begin(&t, TRANSFER_TO_HOST, host + bytes, memory + bytes, bytes, &device);
    }
    const double begun_s = deadline_clock_s();
    transfer_wait(&t, up, &device);
    transfer_wait(&t, down, &device);
    const double end_s = deadline_clock_s();
    for (int d = 0; d < TRANSFER_DIRECTIONS; d++) {
        assert_true(t.free_s[d] >= begin_s + expected_s - rounding_s);
        assert_true(t.free_s[d] <= begun_s + expected_s + rounding_s);
        assert_true(end_s >= t.free_s[d]);
    }
    assert_true(transfers_waited_s(&t) > 0 && transfers_waited_s(&t) <= end_s - begun_s);
    transfers_close(&t, &device);
    // What is in flight while the host does something else takes no extra time.
    transfers_open(&t, gbps, &device);
    const uint64_t early = transfer_begin(&t, TRANSFER_TO_DEVICE, memory, host, bytes, &device);
    usleep((useconds_t)(2e6 * (double)bytes / (1e9 * gbps)));
    transfer_wait(&t, early, &device);
    assert_true(transfers_waited_s(&t) < 1e-4);
    transfers_close(&t, &device);
    host_release(host, 2 * bytes);
    device_free(memory, 2 * bytes);
#endif
}
static void both_directions_are_measured(void **state) {
    struct transfers t;
    double gbps[TRANSFER_DIRECTIONS];
    double most[TRANSFER_DIRECTIONS] = {0, 0};
    // a busy machine slows some attempts
    for (int attempt = 0; attempt < 100 && (most[0] <= 0.2 || most[1] <= 0.2); attempt++) {
        transfers_open(&t, DEVICE_MEMORY_IS_HOSTS ? 0.25 : 0, &device);
        transfers_measure(&t, &device, TRANSFER_MEASURED_BYTES, gbps);
        transfers_close(&t, &device);
        for (int d = 0; d < TRANSFER_DIRECTIONS; d++) {
            assert_true(gbps[d] > 0 && (!DEVICE_MEMORY_IS_HOSTS || gbps[d] <= 0.2501));
            most[d] = gbps[d] > most[d] ? gbps[d] : most[d];
        }
    }
    assert_true(!DEVICE_MEMORY_IS_HOSTS || (most[0] > 0.2 && most[1] > 0.2));
}

// ---- misuse, each in a process of its own ----
#ifdef CUDA_EMULATED

struct one {
    struct transfers transfers;
    char *host, *memory;
    struct work_graph graph;
};
static struct one one_transfer(void) {
    struct one o;
    memset(&o, 0, sizeof o);
    transfers_open(&o.transfers, 0, &device);
    o.host = (char *)host_reserve(4096);
    o.memory = (char *)device_allocate(4096);
    return o;
}
static uint64_t begin_one(struct one *o) {
    return transfer_begin(&o->transfers, TRANSFER_TO_DEVICE, o->memory, o->host, 4096, &device);
}
static void waited_for_within_a_recording(bool well) {
    struct one o = one_transfer();
    const uint64_t before = begin_one(&o);
    if (well)
        transfer_wait(&o.transfers, before, &device);
    graph_begin(&device);
    transfer_wait(&o.transfers, well ? begin_one(&o) : before, &device);
    graph_end(&o.graph, &device);
}
static void waited_for_after_the_recording(bool well) {
    struct one o = one_transfer();
    graph_begin(&device);
    const uint64_t within = begin_one(&o);
    transfer_wait(&o.transfers, within, &device);
    graph_end(&o.graph, &device);
    transfer_wait(&o.transfers, well ? begin_one(&o) : within, &device);
    device_synchronize(&device);
}
static void waited_for_in_another_recording(bool well) {
    struct one o = one_transfer();
    uint64_t ticket = 0;
    for (int i = 0; i < 2; i++) {
        graph_begin(&device);
        if (i == 0 || well)
            ticket = begin_one(&o);
        transfer_wait(&o.transfers, ticket, &device);
        graph_end(&o.graph, &device);
    }
}
static void not_waited_for_in_the_recording(bool well) {
    struct one o = one_transfer();
    graph_begin(&device);
    const uint64_t within = begin_one(&o);
    transfer_wait(&o.transfers, well ? within : 0, &device);
    graph_end(&o.graph, &device);
}
static void pageable_memory(bool well) {
    static char pageable[4096];
    struct one o = one_transfer();
    if (!well)
        o.host = pageable;
    transfer_wait(&o.transfers, begin_one(&o), &device);
    device_synchronize(&device);
}
static void refused_pinning(bool well) {
    setenv("EMU_PINNED_BYTES", "1000000", 1);
    char *first = (char *)host_reserve(500000);
    host_release(first, 500000); // and no longer counts
    char *second = (char *)host_reserve(well ? 999000 : 1200000);
    host_release(second, 999000);
}
static void untouched_when_pinned(bool well) {
    char *mapping = mapping_reserve(100000);
    mapping_touch(mapping, well ? 100000 : 50000, -1);
    cuda_check(cudaHostRegister(mapping, whole_pages_bytes(100000), cudaHostRegisterDefault));
}

static const struct misuse {
    const char *name;
    void (*run)(bool well);
    const char *words[4]; // parts of the message
    int status;           // 0: it aborts
} misuses[] = {
    {"waited_for_within_a_recording", waited_for_within_a_recording, {"began before the recording", "in another"}, 0},
    {"waited_for_after_the_recording", waited_for_after_the_recording, {"began in the recording", "after it"}, 0},
    {"waited_for_in_another_recording", waited_for_in_another_recording, {"began in the recording", "in another"}, 0},
    {"not_waited_for_in_the_recording", not_waited_for_in_the_recording, {"unjoined work"}, EXIT_USAGE},
    {"pageable_memory", pageable_memory, {"memory of the host that is not pinned"}, 3},
    {"refused_pinning",
     refused_pinning,
     {"cannot pin 0.00 GiB (1200000 bytes)", "out of memory; ", "ulimit -l", "--optimizer-offload-fraction"},
     EXIT_USAGE},
    {"untouched_when_pinned", untouched_when_pinned, {"was never touched"}, 3},
};
enum { MISUSES = sizeof misuses / sizeof *misuses };

static void misuse_is_found(void **state) {
    const struct misuse *misuse = (const struct misuse *)*state;
    char message[4096];
    const int status = run_with_and_without(misuse->name, message, sizeof message);
    bool found = misuse->status ? WIFEXITED(status) && WEXITSTATUS(status) == misuse->status : status != 0;
    for (int i = 0; i < 4 && misuse->words[i]; i++)
        found = found && strstr(message, misuse->words[i]);
    if (!found)
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
        cmocka_unit_test(every_order_of_copies_gives_the_same),
        cmocka_unit_test(each_fault_shows_in_an_order),
        cmocka_unit_test(graphs_begin_and_wait_for_their_own_transfers),
        cmocka_unit_test(more_transfers_than_events_are_in_flight),
        cmocka_unit_test(a_bus_takes_as_long_as_its_rate_says),
        cmocka_unit_test(both_directions_are_measured),
    };
    device.threads = 1;
    device_open(&device, 0, false);
    if (argc > 1)
        return run_misuse(argv[1], argc > 2) ? 0 : 1;
    const int failed = cmocka_run_group_tests(tests, NULL, NULL) + run_misuses();
    device_close(&device);
    return failed;
}
