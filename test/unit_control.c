// The control connections between forked processes: exchanges, and every way in which a job can end.
// test/unit_control_start.c tests the start of a job.
#include "runtime/machine/error.h" // fail
#include "test/control_job.h"      // under test: runtime/net/control.c
#include <math.h>                  // fabs
#include <sys/mman.h>              // mmap

// ---- exchanges ----

static void exchanges_of_all_sizes(void **state) {
    for (int ranks = 2; ranks <= MAX_RANKS; ranks++)
        job_expect_good(job_start(ranks, 10, run_sizes, NULL));
}

// Checks that nobody leaves a barrier that somebody has not reached.
static int run_late(struct control *c, void *shared) {
    int64_t *const arrived = (int64_t *)shared;
    for (int i = 0; i < 8; i++) {
        if (c->rank == i % c->ranks)
            socket_sleep_s(0.02);
        __atomic_add_fetch(arrived, 1, __ATOMIC_SEQ_CST);
        control_barrier(c, "the gate", true);
        check(__atomic_load_n(arrived, __ATOMIC_SEQ_CST) >= (int64_t)(i + 1) * c->ranks);
    }
    return 0;
}
static void *shared_memory(void) {
    void *const memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    return memory;
}
static void a_barrier_holds_all(void **state) {
    void *const shared = shared_memory();
    job_expect_good(job_start(3, 10, run_late, shared));
    munmap(shared, 4096);
}

static void one_rank_needs_nobody(void **state) {
    struct control *c;
    struct launch launch;
    struct error_text error;
    int mine = 7, all = 0;
    memset(&launch, 0, sizeof launch);
    launch.ranks = 1;
    assert_null(control_open(&c, &launch, NULL, -1, 30, &error));
    control_all_gather(c, &all, &mine, sizeof mine, "alone", false);
    assert_int_equal(all, 7);
    control_broadcast(c, &all, sizeof all, "alone", false);
    control_barrier(c, "alone", false);
    control_collective_begun(c, "alone");
    control_collective_done(c);
    control_set_poll(c, NULL, NULL);
    control_close(c);
}

// ---- ends ----

// Runs ten collectives, of which the last one does not end; *inside: one more rank is in it.
static int run_collectives(struct control *c, void *inside) {
    for (int i = 0; i < 10; i++) {
        char name[32];
        snprintf(name, sizeof name, "piece %d", i + 1);
        control_collective_begun(c, name);
        // stands for the data: a collective is done when all ranks are in it
        control_barrier(c, "the data's own way", true);
        if (i == 9) {
            __atomic_add_fetch((int *)inside, 1, __ATOMIC_SEQ_CST);
            socket_sleep_s(20);
        }
        control_collective_done(c);
    }
    return 0;
}
// Waits until `ranks` of all jobs have said that they are there, and then until rank 0 of each knows from a heartbeat.
static void wait_for_ranks(const int *there, int ranks) {
    while (__atomic_load_n(there, __ATOMIC_SEQ_CST) < ranks)
        socket_sleep_s(0.001);
    socket_sleep_s(0.4 * test_slowness());
}
static void a_rank_that_is_killed(void **state) {
    uint64_t random = (uint64_t)getpid();
    struct job *jobs[4]; // at the same time, as in other tests with several jobs: they only wait
    char words[4][256];
    int *const inside = (int *)shared_memory();
    for (int lost = 0; lost < 4; lost++) {
        struct job *const job = jobs[lost] = job_start(4, test_slowness(), run_collectives, inside);
        snprintf(words[lost], sizeof words[lost],
                 "train_gpt: rank %d (host %.64s, pid %d) ended during 'piece 10' "
                 "(collective 10); the job ends",
                 lost, job->address.at.host, (int)job->pids[lost]);
    }
    wait_for_ranks(inside, 4 * 4);
    socket_sleep_s(0.1 * fabs(test_uniform(&random)));
    const double killed_s = deadline_clock_s();
    for (int lost = 0; lost < 4; lost++)
        kill(jobs[lost]->pids[lost], SIGKILL);
    for (int lost = 0; lost < 4; lost++) {
        job_wait(jobs[lost], -1);
        assert_int_equal(jobs[lost]->statuses[lost], 256 + SIGKILL);
        job_expect_end(jobs[lost], lost, words[lost], killed_s, 2);
    }
}

struct uneven {
    bool all_done;
    int *there; // shared_memory: the ranks of all jobs that have come to their last place
};
// Leaves a rank to be lost in the first collective, which another rank has left, or, with all_done, after the second
// one, outside of any.
static int run_uneven(struct control *c, void *context) {
    struct uneven *const uneven = (struct uneven *)context;
    control_barrier(c, "the start", false);
    control_collective_begun(c, "first");
    if (c->rank == 1 || uneven->all_done) {
        control_collective_done(c);
        control_collective_begun(c, "second");
    }
    if (uneven->all_done)
        control_collective_done(c);
    __atomic_add_fetch(uneven->there, 1, __ATOMIC_SEQ_CST);
    socket_sleep_s(20);
    return 0;
}
static void where_a_rank_is_lost(void **state) {
    static const char *const words[] = {"rank 2 (host | ended during 'first' (collective 1);",
                                        "rank 2 (host | ended after 'second' (collective 2);"};
    struct job *jobs[2];
    int *const there = (int *)shared_memory();
    for (int i = 0; i < 2; i++) {
        struct uneven uneven = {i > 0, there};
        jobs[i] = job_start(3, test_slowness(), run_uneven, &uneven);
    }
    wait_for_ranks(there, 2 * 3);
    for (int i = 0; i < 2; i++) {
        const double killed_s = deadline_clock_s();
        kill(jobs[i]->pids[2], SIGKILL);
        job_wait(jobs[i], -1);
        job_expect_end(jobs[i], 2, words[i], killed_s, 2);
    }
}

// Runs a busy job, of which a rank is killed at any moment from its first exchange on: all end, and one line is
// printed.
static int run_busy(struct control *c, void *connected) {
    __atomic_add_fetch((int *)connected, 1, __ATOMIC_SEQ_CST);
    while (c->ranks > 1)
        exchange_size(c, 20000, true);
    return 0;
}
static void a_kill_at_any_moment(void **state) {
    uint64_t random = (uint64_t)getpid();
    int *const connected = (int *)shared_memory();
    for (int i = 0; i < 6; i++) {
        const int lost = i % 3;
        *connected = 0;
        struct job *const job = job_start(3, 10, run_busy, connected);
        while (__atomic_load_n(connected, __ATOMIC_SEQ_CST) < 3)
            socket_sleep_s(0.001);
        socket_sleep_s(0.05 * fabs(test_uniform(&random)));
        const double killed_s = deadline_clock_s();
        kill(job->pids[lost], SIGKILL);
        job_wait(job, -1);
        job_expect_end(job, lost, " ended ", killed_s, 2);
    }
    munmap(connected, 4096);
}

static int run_one_stays_behind(struct control *c, void *context) {
    const int *const behind = (const int *)context; // the rank, and whether it is late in an exchange
    control_collective_begun(c, "first");
    control_collective_done(c);
    control_barrier(c, "the start", false);
    if (c->rank == behind[0])
        socket_sleep_s(20);
    if (behind[1])
        control_barrier(c, "the second gate", false);
    control_collective_begun(c, "second");
    socket_sleep_s(20);
    return 0;
}
static void a_rank_that_never_comes(void **state) {
    // the last case: all ranks are in the collective, and it does not end
    int behind[5][2] = {{0, 0}, {2, 0}, {0, 1}, {2, 1}, {-1, 0}};
    struct job *jobs[5];
    char words[5][256];
    const double start_s = deadline_clock_s();
    for (int i = 0; i < 5; i++) {
        jobs[i] = job_start(3, 0.5, run_one_stays_behind, behind[i]);
        snprintf(words[i], sizeof words[i],
                 "rank %d (host |pid %d|) has not reached %s, in which the other ranks have waited "
                 "for 0.",
                 behind[i][0], behind[i][0] < 0 ? 0 : (int)jobs[i]->pids[behind[i][0]],
                 behind[i][1] ? "'the second gate' (exchange 2)" : "'second' (collective 2)");
    }
    snprintf(words[4], sizeof words[4], "'second' (collective 2) was begun by all ranks|unfinished on ranks 0 (");
    for (int i = 0; i < 5; i++) {
        job_wait(jobs[i], -1);
        assert_true(deadline_clock_s() - start_s >= 0.5);
        job_expect_end(jobs[i], -1, words[i], start_s, 2.5);
    }
}

// Waits longer than the timeout, which a patient exchange may. A collective after such an exchange is not late because
// of it.
static int run_patient(struct control *c, void *unused) {
    if (c->rank == 1)
        socket_sleep_s(0.9);
    control_barrier(c, "rank 1's work", true);
    for (int i = 0; i < 6; i++)
        control_collective_begun(c, "one of six");
    for (int i = 0; i < 6; i++) {
        socket_sleep_s(0.15);
        control_collective_done(c);
    }
    return 0;
}
static void patience(void **state) {
    struct job *const limited = job_start(2, 0.6, run_patient, NULL), *const unlimited =
                                                                          job_start(2, 0, run_patient, NULL);
    job_expect_good(limited);
    job_expect_good(unlimited);
}

struct vain {
    int never;  // the rank that never comes to the second exchange
    int *there; // shared_memory: the ranks of all jobs that have left the first exchange
};
// Waits for a rank that is stopped, which the others notice by its silence, in a patient exchange too. The stopped rank
// ends when it goes on.
static int run_in_vain(struct control *c, void *context) {
    struct vain *const vain = (struct vain *)context;
    control_barrier(c, "the start", false);
    __atomic_add_fetch(vain->there, 1, __ATOMIC_SEQ_CST);
    if (c->rank == vain->never)
        socket_sleep_s(20);
    control_barrier(c, "the long way", true);
    return 0;
}
static void a_rank_that_is_stopped(void **state) {
    struct job *jobs[3];
    char words[3][256], others[sizeof jobs[0]->text];
    int pids[3], *const there = (int *)shared_memory();
    for (int lost = 0; lost < 3; lost++) {
        struct vain vain = {lost == 1 ? 2 : 1, there};
        jobs[lost] = job_start(3, 0.4 * test_slowness(), run_in_vain, &vain);
        pids[lost] = (int)jobs[lost]->pids[lost];
        snprintf(words[lost], sizeof words[lost],
                 "rank %d (host |pid %d, silent for |is stopped or cut off during 'the long "
                 "way' (exchange 2)",
                 lost, pids[lost]);
    }
    wait_for_ranks(there, 3 * 3);
    const double stopped_s = deadline_clock_s();
    for (int lost = 0; lost < 3; lost++)
        kill(pids[lost], SIGSTOP);
    for (int lost = 0; lost < 3; lost++) {
        job_wait(jobs[lost], lost);
        assert_true(deadline_clock_s() - stopped_s > 0.25 * test_slowness());
        memcpy(others, jobs[lost]->text, sizeof others);
        kill(pids[lost], SIGCONT);
        job_wait(jobs[lost], -1);
        assert_int_equal(jobs[lost]->statuses[lost], EXIT_FAILURE);
        if (lost == 0) // nobody could tell it that the job has ended
            assert_non_null(strstr(jobs[lost]->text, "was stopped for "));
        else
            assert_string_equal(jobs[lost]->text, "");
        memcpy(jobs[lost]->text, others, sizeof others);
        job_expect_end(jobs[lost], -1, words[lost], stopped_s, 3);
    }
}

// Stops this process in the middle of a heartbeat, after the heartbeat's time was taken: then too it blames nobody when
// it goes on.
static void stop_this_process(void *stopped) {
    if (!*(bool *)stopped) {
        *(bool *)stopped = true;
        kill(getpid(), SIGSTOP);
    }
}
static int run_stopped_in_heartbeat(struct control *c, void *unused) {
    bool stopped = false;
    control_barrier(c, "the start", false);
    if (c->rank == 1)
        control_set_poll(c, stop_this_process, &stopped);
    else if (c->rank == 2)
        socket_sleep_s(20);
    control_barrier(c, "the long way", true);
    return 0;
}
static void a_rank_that_is_stopped_in_a_heartbeat(void **state) {
    struct job *const job = job_start(3, 0.4, run_stopped_in_heartbeat, NULL);
    job_wait(job, 1);
    kill(job->pids[1], SIGCONT);
    job_wait(job, -1);
    assert_int_equal(job->statuses[1], EXIT_FAILURE);
    assert_string_equal(job->text, "");
    job_free(job);
}

// ---- disagreements and mistakes ----

static int run_other_exchange(struct control *c, void *which) {
    char data[MAX_RANKS * 16] = "";
    control_barrier(c, "the start", false);
    if (c->rank != 2)
        control_all_gather(c, data, data, 8, "settings", false);
    else if (*(int *)which == 0)
        control_all_gather(c, data, data, 8, "hashes", false);
    else if (*(int *)which == 1)
        control_all_gather(c, data, data, 16, "settings", false);
    else
        control_broadcast(c, data, 8, "settings", false);
    return 0;
}
static void ranks_in_different_exchanges(void **state) {
    for (int which = 0; which < 3; which++) {
        struct job *const job = job_start(3, 10, run_other_exchange, &which);
        job_wait(job, -1);
        job_expect_end(
            job, -1,
            which == 0 ? "rank 2 (host |'hashes' (exchange 2, 8 bytes) while rank 0 is in the all-gather of 'settings'"
            : which == 1 ? "rank 2 (host |the all-gather of 'settings' (exchange 2, 16 bytes)|2, 8 bytes)"
                         : "rank 2 (host |the broadcast of 'settings'",
            deadline_clock_s(), 1);
    }
}

// Bytes that rank `from` sends to rank `to`, and that are no frame that it may send. words: parts of the line that is
// printed.
static const struct wrong_frame {
    int from, to;
    uint32_t type, operation;
    uint64_t payload_bytes, bytes;
    const char *words;
} wrong_frames[] = {
    {1, 0, 99, 0, 0, 0, "rank 1 (host |sent a frame of type 99 with 0 bytes"},
    {1, 0, CONTROL_CONTRIBUTION, CONTROL_ALL_GATHER, 706110886536137446, 706110886536137446,
     "rank 1 (host |type 3 with 706110886536137446 bytes"},
    {1, 0, CONTROL_CONTRIBUTION, CONTROL_ALL_GATHER, 4096, 8, "rank 1 (host |type 3 with 4096 bytes"},
    {1, 0, CONTROL_CONTRIBUTION, CONTROL_BROADCAST, 8, 8, "rank 1 (host |type 3 with 8 bytes"},
    {1, 0, CONTROL_HEARTBEAT, 0, 1, 0, "rank 1 (host |type 1 with 1 bytes"},
    {1, 0, CONTROL_ABORT, 0, 0, 0, "rank 1 (host |type 6 with 0 bytes"},
    {0, 1, CONTROL_WELCOME, 0, 216, 0, "rank 0 (host |type 2 with 216 bytes"},
    {0, 1, CONTROL_RESULT, 0, 1u << 30, 0, "rank 0 (host |type 4 with 1073741824 bytes"},
};
static int run_wrong_frame(struct control *c, void *context) {
    const struct wrong_frame *const wrong = (const struct wrong_frame *)context;
    struct control_frame frame;
    control_barrier(c, "the start", false);
    memset(&frame, 0, sizeof frame);
    memset(&frame.report, 'x', sizeof frame.report); // also names without an end
    frame.type = wrong->type;
    frame.operation = wrong->operation;
    frame.payload_bytes = wrong->payload_bytes;
    frame.bytes = wrong->bytes;
    if (c->rank == wrong->from)
        check(socket_send_all(c->links[wrong->to].socket, &frame, sizeof frame, deadline_clock_s() + 1));
    socket_sleep_s(5); // the end comes meanwhile
    return 0;
}
static void frames_that_no_rank_sends(void **state) {
    for (size_t i = 0; i < sizeof wrong_frames / sizeof *wrong_frames; i++) {
        struct wrong_frame wrong = wrong_frames[i];
        const double since_s = deadline_clock_s();
        struct job *const job = job_start(3, 10, run_wrong_frame, &wrong);
        job_wait(job, -1);
        char *const end = strchr(job->text, '\n');
        if (wrong.from == 0 && end && end[1]) // rank 0 says in a second line that rank 1 has ended
            *end = ' ';
        job_expect_end(job, -1, wrong.words, since_s, 3);
    }
}

static int run_mistake(struct control *c, void *whose) {
    char rank[16];
    snprintf(rank, sizeof rank, "%d", c->rank);
    setenv("RANK", rank, 1);
    setenv("WORLD_SIZE", "3", 1);
    control_barrier(c, "the start", false);
    if (*(int *)whose < 0 || *(int *)whose == c->rank)
        fail("--data none: no such file");
    control_barrier(c, "the data", true);
    return 0;
}
static void mistakes_end_all(void **state) {
    int whose = -1; // everybody's, and so reported once
    struct job *job = job_start(3, 10, run_mistake, &whose);
    job_wait(job, -1);
    assert_string_equal(job->text, "train_gpt: rank 0: --data none: no such file\n");
    assert_int_equal(job->statuses[0], EXIT_USAGE);
    assert_int_equal(job->statuses[1], EXIT_USAGE);
    assert_int_equal(job->statuses[2], EXIT_USAGE);
    job_free(job);
    whose = 1;
    job = job_start(3, 10, run_mistake, &whose);
    job_wait(job, -1);
    const char *const first = "train_gpt: rank 1: --data none: no such file\ntrain_gpt: rank 1 (host ";
    assert_memory_equal(job->text, first, strlen(first));
    assert_non_null(strstr(job->text, " ended during 'the data' (exchange 2); the job ends\n"));
    assert_int_equal(lines(job->text), 2);
    assert_int_equal(job->statuses[1], EXIT_USAGE);
    assert_int_equal(job->statuses[0], EXIT_USAGE);
    assert_int_equal(job->statuses[2], EXIT_USAGE);
    job_free(job);
}

// ---- the watch of a device ----

// A device whose poll finds what is done, as the CUDA target's finds it by events.
struct device {
    struct control *control;
    int64_t done;
};
static void look_at_device(void *context) {
    struct device *const device = (struct device *)context;
    control_collective_done(device->control);
    __atomic_add_fetch(&device->done, 1, __ATOMIC_SEQ_CST);
}
static int run_device(struct control *c, void *unused) {
    struct device device = {c, 0};
    for (int i = 0; i < 1000; i++)
        control_collective_begun(c, "enqueued");
    control_set_poll(c, look_at_device, &device);
    socket_sleep_s(0.5);
    control_set_poll(c, NULL, NULL);
    const int64_t done = __atomic_load_n(&device.done, __ATOMIC_SEQ_CST);
    check(done >= 2 && done < 20);
    socket_sleep_s(0.2);
    check(__atomic_load_n(&device.done, __ATOMIC_SEQ_CST) == done);
    while (__atomic_add_fetch(&device.done, 1, __ATOMIC_SEQ_CST) <= 1000)
        control_collective_done(c);
    return 0;
}
static void a_poll(void **state) { job_expect_good(job_start(2, 0.5, run_device, NULL)); }

// ---- closing ----

static int run_nothing(struct control *c, void *unused) { return 0; }
static int run_close(struct control *c, void *order) {
    control_barrier(c, "the start", false);
    socket_sleep_s(0.05 * ((const int *)order)[c->rank]);
    return 0;
}
static void closing_in_any_order(void **state) {
    int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    struct job *jobs[6];
    for (int i = 0; i < 6; i++)
        jobs[i] = job_start(3, 10, run_close, orders[i]);
    for (int i = 0; i < 6; i++)
        job_expect_good(jobs[i]);
    int slow[3] = {0, 0, 18}; // longer than the timeout: a rank that has said goodbye is not late
    job_expect_good(job_start(3, 0.6, run_close, slow));
    for (int i = 0; i < 10; i++)
        job_expect_good(job_start(4, 10, run_nothing, NULL));
}

// Checks a rank that is lost while others wait for its goodbye.
static void a_death_while_others_close(void **state) {
    int order[3] = {0, 0, 400};
    struct job *const job = job_start(3, 10, run_close, order);
    socket_sleep_s(0.4);
    const double killed_s = deadline_clock_s();
    kill(job->pids[2], SIGKILL);
    job_wait(job, -1);
    job_expect_end(job, 2, "rank 2 (host | ended after 'the start' (exchange 1); the job ends", killed_s, 2);
    // A rank that has said goodbye may be killed: nobody needs it.
    int early[3] = {10, 0, 10};
    struct job *const good = job_start(3, 10, run_close, early);
    socket_sleep_s(0.25);
    kill(good->pids[1], SIGKILL);
    job_wait(good, -1);
    assert_int_equal(good->statuses[0], 0);
    assert_int_equal(good->statuses[2], 0);
    assert_string_equal(good->text, "");
    job_free(good);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exchanges_of_all_sizes),
        cmocka_unit_test(a_barrier_holds_all),
        cmocka_unit_test(one_rank_needs_nobody),
        cmocka_unit_test(a_rank_that_is_killed),
        cmocka_unit_test(where_a_rank_is_lost),
        cmocka_unit_test(a_kill_at_any_moment),
        cmocka_unit_test(a_rank_that_never_comes),
        cmocka_unit_test(patience),
        cmocka_unit_test(a_rank_that_is_stopped),
        cmocka_unit_test(a_rank_that_is_stopped_in_a_heartbeat),
        cmocka_unit_test(ranks_in_different_exchanges),
        cmocka_unit_test(frames_that_no_rank_sends),
        cmocka_unit_test(mistakes_end_all),
        cmocka_unit_test(a_poll),
        cmocka_unit_test(closing_in_any_order),
        cmocka_unit_test(a_death_while_others_close),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
