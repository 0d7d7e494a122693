// Sums in rank order bit for bit, and gathers and exchanges of any size, between 2, 3 and 4 processes: over sockets,
// and over MPI, for which this program starts itself under mpirun. And the messages about a peer that is lost or out of
// step.
#include "runtime/net/control.h"          // control_open
#include "runtime/net/exchange_mpi.c"     // under test
#include "runtime/net/exchange_sockets.c" // under test
#include "runtime/net/host_collectives.h" // under test
#include "runtime/net/sockets.c"          // socket_connect_once
#include "test/free_port.h"               // test_free_port
#include "test/heard.h"                   // hear_stderr
#include "test/testing.h"                 // cmocka
#include <sys/resource.h>                 // getrlimit
#include <sys/wait.h>                     // waitpid
#include <unistd.h>                       // fork, pipe, alarm

// Ends a rank's process with status 1 unless a condition holds.
#define check(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "rank %d: %s:%d: not so: %s\n", x->rank, __FILE__, __LINE__, #condition);                  \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

// Returns what rank r has at i: numbers of many sizes, so that another order of a sum gives other bits.
static float element(int r, int64_t i) {
    uint64_t state = (uint64_t)r * 0x100000001b3u + (uint64_t)i;
    const double uniform = test_uniform(&state);
    return (float)uniform * (1.0f / 4096) * (float)(1 << state % 24);
}
// Rounds to bf16, ties to even, without the bit operations of the code under test.
static float rounded(float value) {
    int exponent = 0;
    frexp(value, &exponent);
    return (float)ldexp(rint(ldexp(value, 8 - exponent)), exponent - 8);
}
static float sum_of_ranks(int ranks, int64_t i, bool bf16) {
    float sum = bf16 ? rounded(element(0, i)) : element(0, i);
    for (int r = 1; r < ranks; r++)
        sum += bf16 ? rounded(element(r, i)) : element(r, i);
    return bf16 ? rounded(sum) : sum;
}
static int64_t count_different(const float *x, const float *y, int64_t n) {
    int64_t different = 0;
    for (int64_t i = 0; i < n; i++)
        different += memcmp(&x[i], &y[i], sizeof *x) != 0;
    return different;
}

static int reduce_scatter(struct exchange *x, int64_t part, bool bf16, bool in_place) {
    const int64_t n = part * x->ranks, own = part * x->rank;
    float *const buffer = (float *)test_alloc((size_t)n * sizeof *buffer);
    float *const elsewhere = (float *)test_alloc((size_t)(part + 1) * sizeof *elsewhere);
    float *const expected = (float *)test_alloc((size_t)n * sizeof *expected);
    const size_t scratch_bytes = host_reduce_scatter_scratch_bytes(part, x->ranks, bf16);
    unsigned char *const scratch = (unsigned char *)test_alloc(scratch_bytes + 1);
    for (int64_t i = 0; i < n; i++)
        buffer[i] = element(x->rank, i);
    float *const out = in_place ? buffer + own : elsewhere;
    elsewhere[part] = 7;
    scratch[scratch_bytes] = 7;
    const uint64_t sent_before = x->sent_bytes;
    host_reduce_scatter(out, buffer, part, bf16, scratch, x);
    check(x->sent_bytes - sent_before == (uint64_t)(x->ranks - 1) * (uint64_t)part * (bf16 ? 2 : 4));
    check(elsewhere[part] == 7 && scratch[scratch_bytes] == 7);
    for (int64_t i = 0; i < n; i++) // the other ranks' parts have not changed
        expected[i] = i >= own && i < own + part ? sum_of_ranks(x->ranks, i, bf16) : element(x->rank, i);
    check(count_different(out, expected + own, part) == 0);
    check(count_different(buffer, expected, own) == 0);
    check(count_different(buffer + own + part, expected + own + part, n - own - part) == 0);
    free(scratch);
    free(expected);
    free(elsewhere);
    free(buffer);
    return 0;
}

static unsigned char byte_of(int r, size_t i, int salt) {
    return (unsigned char)(37 * (unsigned)r + 11 * i + i / 251 + 101 * (unsigned)salt);
}
static int all_gather(struct exchange *x, size_t bytes, bool in_place, int salt) {
    const size_t all_bytes = bytes * (size_t)x->ranks;
    unsigned char *const buffer = (unsigned char *)test_alloc(all_bytes + 1);
    unsigned char *const elsewhere = (unsigned char *)test_alloc(bytes + 1);
    unsigned char *const own = in_place ? buffer + bytes * (size_t)x->rank : elsewhere;
    memset(buffer, 0, all_bytes + 1);
    for (size_t i = 0; i < bytes; i++)
        own[i] = byte_of(x->rank, i, salt);
    const uint64_t sent_before = x->sent_bytes;
    host_all_gather(buffer, own, bytes, x);
    check(x->sent_bytes - sent_before == (uint64_t)(x->ranks - 1) * bytes);
    size_t different = 0;
    for (int r = 0; r < x->ranks; r++)
        for (size_t i = 0; i < bytes; i++)
            different += buffer[(size_t)r * bytes + i] != byte_of(r, i, salt);
    check(different == 0 && buffer[all_bytes] == 0);
    free(elsewhere);
    free(buffer);
    return 0;
}

// Returns a length that differs for each pair of ranks, for some 0.
static size_t uneven_bytes(int from, int to) {
    return from == to ? 0 : (size_t)(from * 5 + to) % 3 * 1777 + (size_t)to;
}
// Lists of messages: several a peer, of different lengths, 0 and messages to the rank itself among them. The n-th one
// to a rank has (from * 3 + to + n) % 4 * 777 bytes.
enum { MESSAGES = 3 };
static size_t message_bytes(int from, int to, int n) { return (size_t)((from * 3 + to + n) % 4) * 777; }
static int message_exchange(struct exchange *x) {
    struct exchange_message sends[8 * MESSAGES], receives[8 * MESSAGES];
    const int count = x->ranks * MESSAGES;
    size_t scratch_bytes = 0, sent = 0;
    for (int i = 0; i < count; i++) { // the lists are in another order
        const int to = i % x->ranks, n = i / x->ranks, from = i / MESSAGES, m = i % MESSAGES;
        const struct exchange_message out = {to, NULL, message_bytes(x->rank, to, n)},
                                      in = {from, NULL, message_bytes(from, x->rank, m)};
        sends[i] = out;
        receives[i] = in;
        sends[i].data = test_alloc(out.bytes + 1);
        receives[i].data = test_alloc(in.bytes + 1);
        memset(receives[i].data, 0, in.bytes + 1);
        for (size_t k = 0; k < out.bytes; k++)
            ((unsigned char *)sends[i].data)[k] = byte_of(x->rank, k, 10 * to + n);
        scratch_bytes += out.bytes + in.bytes;
        sent += to == x->rank ? 0 : out.bytes;
    }
    unsigned char *const scratch = (unsigned char *)test_alloc(scratch_bytes + 1);
    const uint64_t before = x->sent_bytes;
    scratch[scratch_bytes] = 7;
    host_exchange(sends, count, receives, count, scratch, x);
    check(x->sent_bytes - before == sent && scratch[scratch_bytes] == 7);
    for (int i = 0; i < count; i++) {
        const unsigned char *const got = (const unsigned char *)receives[i].data;
        for (size_t k = 0; k < receives[i].bytes; k++)
            check(got[k] == byte_of(receives[i].rank, k, 10 * x->rank + i % MESSAGES));
        check(got[receives[i].bytes] == 0);
        free(sends[i].data);
        free(receives[i].data);
    }
    free(scratch);
    return 0;
}
static int uneven_exchange(struct exchange *x) {
    for (int r = 0; r < x->ranks; r++) {
        x->send[r].bytes = uneven_bytes(x->rank, r);
        x->receive[r].bytes = uneven_bytes(r, x->rank);
        x->send[r].data = test_alloc(x->send[r].bytes);
        x->receive[r].data = test_alloc(x->receive[r].bytes);
        for (size_t i = 0; i < x->send[r].bytes; i++)
            ((unsigned char *)x->send[r].data)[i] = byte_of(x->rank, i, r);
    }
    exchange_all_to_all(x, x->send, x->receive);
    for (int r = 0; r < x->ranks; r++) {
        for (size_t i = 0; r != x->rank && i < x->receive[r].bytes; i++)
            check(((unsigned char *)x->receive[r].data)[i] == byte_of(r, i, x->rank));
        free(x->send[r].data);
        free(x->receive[r].data);
    }
    return 0;
}

static int run_values(struct exchange *x) {
    const int64_t parts[] = {0, 1, 7, 4097, x->ranks == 2 ? 1 << 20 : 20011};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        check(reduce_scatter(x, parts[i], false, i % 2 == 0) == 0);
        check(reduce_scatter(x, parts[i], true, i % 2 == 1) == 0);
        check(all_gather(x, (size_t)parts[i] * 3, i % 2 == 0, 0) == 0);
        check(parts[i] > 5000 || reduce_scatter(x, parts[i], false, i % 2 == 1) == 0);
        check(parts[i] > 5000 || reduce_scatter(x, parts[i], true, i % 2 == 0) == 0);
        check(parts[i] > 5000 || all_gather(x, (size_t)parts[i], i % 2 == 1, 1) == 0);
    }
    for (int i = 0; i < 200; i++) // what a rank that is ahead sends early must not mix with this
        check(all_gather(x, i % 2 ? 3 : 100000, i % 3 == 0, i) == 0);
    check(uneven_exchange(x) == 0);
    check(message_exchange(x) == 0);
    return 0;
}
// Checks a part in many messages, as parts are sent whose bytes an int can't count.
static int run_short_messages(struct exchange *x) {
#ifdef HAVE_MPI
    x->mpi->message_bytes = 1000;
#endif
    check(uneven_exchange(x) == 0);
    check(all_gather(x, 1000, false, 0) == 0);
    check(all_gather(x, 4001, false, 0) == 0);
    return reduce_scatter(x, 4097, false, true);
}
// Ends the last rank before the second exchange.
static int run_lost_peer(struct exchange *x) {
    check(all_gather(x, 10, false, 0) == 0);
    if (x->rank == x->ranks - 1)
        _exit(0);
    return all_gather(x, 1 << 20, false, 0) + 100;
}
// Closes rank 1's sending direction, of two ranks; rank 1 stays until rank 0 has ended.
static int run_closed_by_peer(struct exchange *x) {
    char received[100];
    if (x->rank == 0)
        return all_gather(x, 10, false, 0) + 100;
    shutdown(x->sockets->sockets[0], SHUT_WR);
    while (socket_receive_all(x->sockets->sockets[0], received, 1, deadline_clock_s() + 20))
        ;
    return 0;
}
// Lets the last rank send less than expected, or more, or as much for another exchange; what it receives is right.
static int run_other_bytes(struct exchange *x, size_t bytes) {
    static char send[2000], receive[2000];
    const bool last = x->rank == x->ranks - 1;
    for (int r = 0; r < x->ranks; r++) {
        x->send[r].data = send;
        x->receive[r].data = receive;
        x->send[r].bytes = last ? bytes : 1000;
        x->receive[r].bytes = 1000;
    }
    exchange_all_to_all(x, x->send, x->receive);
    if (last && x->kind == EXCHANGE_MPI)
        sleep(30); // its end would end the others before they say why
    return !last;
}
static int run_less(struct exchange *x) { return run_other_bytes(x, 500); }
static int run_more(struct exchange *x) { return run_other_bytes(x, 1500); }
static int run_other_exchange(struct exchange *x) {
    x->sockets->exchanges += x->rank == x->ranks - 1;
    return run_other_bytes(x, 1000);
}

typedef int rank_function(struct exchange *x);
static const struct mpi_run {
    const char *name;
    rank_function *run;
} mpi_runs[] = {{"values", run_values}, {"short_messages", run_short_messages}, {"less", run_less}, {"more", run_more}};
static rank_function *rank_function_of(const char *name) {
    for (size_t i = 0; i < sizeof mpi_runs / sizeof *mpi_runs; i++)
        if (strcmp(mpi_runs[i].name, name) == 0)
            return mpi_runs[i].run;
    return NULL;
}

// ---- the processes ----

// The processes of a job: one for each rank, or only mpirun.
struct job {
    pid_t children[4];
    int count;
    int said[2]; // the pipe of all processes' stderr
};
struct outcome {
    int statuses[4];
    char said[8192];
};
// What runs in a process of its own; returns its exit status.
typedef int process_function(const void *arguments);
static void job_add(struct job *job, process_function *run, const void *arguments) {
    fflush(stdout);
    if (job->count == 0)
        assert_int_equal(pipe(job->said), 0);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(60); // a process that hangs is a failure
        dup2(job->said[1], STDERR_FILENO);
        close(job->said[0]);
        close(job->said[1]);
        _exit(run(arguments));
    }
    job->children[job->count++] = child;
}
static void job_wait(const struct job *job, struct outcome *outcome) {
    size_t length = 0;
    ssize_t more;
    close(job->said[1]);
    while ((more = read(job->said[0], outcome->said + length, sizeof outcome->said - 1 - length)) > 0)
        length += (size_t)more;
    outcome->said[length] = '\0';
    close(job->said[0]);
    for (int i = 0; i < job->count; i++)
        assert_int_equal(waitpid(job->children[i], &outcome->statuses[i], 0), job->children[i]);
}

struct sockets_rank {
    struct launch launch;
    rank_function *run;
};
static int report(int rank, const char *problem) {
    fprintf(stderr, "rank %d: %s\n", rank, problem);
    return 1;
}
// Closes the control connections before the run, so that only the exchange finds out who is lost.
static int run_sockets_rank(const void *arguments) {
    const struct sockets_rank *const rank = (const struct sockets_rank *)arguments;
    struct control *control;
    struct exchange exchange;
    struct error_text error;
    const char *problem = control_open(&control, &rank->launch, NULL, -1, 30, &error);
    if (problem)
        return report(rank->launch.rank, problem);
    problem = exchange_open(&exchange, EXCHANGE_SOCKETS, rank->launch.rank, rank->launch.ranks, control, &error);
    if (problem)
        return report(rank->launch.rank, problem);
    control_close(control);
    const int status = rank->run(&exchange);
    exchange_close(&exchange);
    return status;
}
static struct job start_over_sockets(rank_function *run, int ranks) {
    struct job job;
    struct sockets_rank rank;
    memset(&job, 0, sizeof job);
    memset(&rank, 0, sizeof rank);
    rank.run = run;
    rank.launch.kind = LAUNCH_RENDEZVOUS;
    rank.launch.ranks = rank.launch.local_ranks = ranks;
    snprintf(rank.launch.host, sizeof rank.launch.host, "127.0.0.1");
    rank.launch.port = test_free_port();
    for (int r = 0; r < ranks; r++) {
        rank.launch.rank = rank.launch.local_rank = r;
        job_add(&job, run_sockets_rank, &rank);
    }
    return job;
}

// Runs as one of mpirun's ranks.
static int run_mpi_rank(const char *name) {
    struct exchange exchange;
    struct error_text error;
    int rank = 0, ranks = 0;
    rank_function *const run = rank_function_of(name);
    alarm(60);
    const char *problem = run ? mpi_open(&rank, &ranks, &error) : "no such run";
    if (!problem)
        problem = exchange_open(&exchange, EXCHANGE_MPI, rank, ranks, NULL, &error);
    char from_0[] = "?";
    if (!problem)
        problem = mpi_broadcast(rank == 0 ? memcpy(from_0, "0", 1) : from_0, sizeof from_0, &error);
    if (problem || from_0[0] != '0')
        return report(rank, problem ? problem : "no broadcast");
    const int status = run(&exchange);
    if (status)
        _exit(status); // as a process ends by an error, at which mpirun ends the others
    exchange_close(&exchange);
    mpi_close();
    return 0;
}
struct mpirun {
    const char *name;
    int ranks;
};
static int run_mpirun(const void *arguments) {
    const struct mpirun *const mpirun = (const struct mpirun *)arguments;
    char program[4096] = "", ranks[16];
    test_own_session_folder();
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    setenv("OMPI_MCA_odls_base_sigkill_timeout", "0", 1); // a job that fails ends at once
    setenv("ASAN_OPTIONS", "detect_leaks=0", 1);          // MPI's own leaks
    snprintf(ranks, sizeof ranks, "%d", mpirun->ranks);
    if (readlink("/proc/self/exe", program, sizeof program - 1) > 0)
        execlp("mpirun", "mpirun", "--oversubscribe", "-np", ranks, program, mpirun->name, (char *)NULL);
    return 126;
}
static struct job start_over_mpi(const char *name, int ranks) {
#ifdef HAVE_MPI
    const bool here = system("command -v mpirun >/dev/null") == 0;
#else
    const bool here = false;
#endif
    if (!here) {
        print_message("MPI or its mpirun is not here\n");
        skip();
    }
    const struct mpirun mpirun = {name, ranks};
    struct job job;
    memset(&job, 0, sizeof job);
    job_add(&job, run_mpirun, &mpirun);
    return job;
}

// ---- the tests ----

static void assert_all_well(const struct job *job) {
    struct outcome outcome;
    job_wait(job, &outcome);
    for (int i = 0; i < job->count; i++)
        if (!WIFEXITED(outcome.statuses[i]) || WEXITSTATUS(outcome.statuses[i]) != 0)
            fail_msg("process %d of %d: status %#x\n%s", i, job->count, (unsigned)outcome.statuses[i], outcome.said);
}
// Checks the first process, rank 0 or mpirun: it ends with EXIT_FAILURE, and `text` was printed.
static void assert_fails(const struct job *job, const char *text) {
    struct outcome outcome;
    job_wait(job, &outcome);
    if (!WIFEXITED(outcome.statuses[0]) || WEXITSTATUS(outcome.statuses[0]) != EXIT_FAILURE ||
        !strstr(outcome.said, text))
        fail_msg("status %#x; '%s' is not in:\n%s", (unsigned)outcome.statuses[0], text, outcome.said);
}

static void values_over_sockets(void **state) {
    for (int ranks = 1; ranks <= 4; ranks++) {
        const struct job job = start_over_sockets(run_values, ranks);
        assert_all_well(&job);
    }
}
static void values_over_mpi(void **state) {
    for (int ranks = 2; ranks <= 4; ranks++) {
        const struct job job = start_over_mpi("values", ranks);
        assert_all_well(&job);
    }
}
static void long_parts_in_several_mpi_messages(void **state) {
    const struct job job = start_over_mpi("short_messages", 3);
    assert_all_well(&job);
}

// Checks all cases at once, since each waits a second for a rank that may know more.
static void a_lost_peer_and_one_out_of_step_are_named(void **state) {
    const struct job lost = start_over_sockets(run_lost_peer, 3), less = start_over_sockets(run_less, 2),
                     more = start_over_sockets(run_more, 2), other = start_over_sockets(run_other_exchange, 2);
    const struct job closed = start_over_sockets(run_closed_by_peer, 2);
    assert_fails(&lost, "train_gpt: rank 0: the exchange with rank 2 failed: ");
    assert_fails(&closed, "train_gpt: rank 0: the exchange with rank 1 failed: it closed the connection");
    assert_fails(&less, "with rank 1 failed: it sent 500 bytes of exchange 1 where 1000 of exchange 1 were expected");
    assert_fails(&more, "with rank 1 failed: it sent 1500 bytes of exchange 1 where 1000 of exchange 1 were expected");
    assert_fails(&other, "with rank 1 failed: it sent 1000 bytes of exchange 2 where 1000 of exchange 1 were expected");
}
static void one_out_of_step_is_named_by_mpi(void **state) {
    const struct job less = start_over_mpi("less", 2), more = start_over_mpi("more", 2);
    assert_fails(&less,
                 "train_gpt: rank 0: the exchange with rank 1 failed: it sent 500 bytes where 1000 were expected");
    assert_fails(&more, "train_gpt: rank 0: the exchange with rank 1 failed: a receive: ");
}

// What connects to rank 0's listener: some connections that say nothing, three that are not what they say, then rank 1.
enum { SILENT = 300 }; // more than can wait at a time
struct visitors {
    struct socket_address address;
    struct handshake_key key;
};
static int run_visitors(const void *arguments) {
    const struct visitors *const visitors = (const struct visitors *)arguments;
    const double until_s = deadline_clock_s() + 20;
    struct error_text error;
    struct handshake_key other;
    const struct handshake_key *const key = &visitors->key;
    handshake_derive(&other, key, "x", 1);
    for (int i = 0; i < SILENT; i++)
        if (socket_connect_once("127.0.0.1", visitors->address.port, until_s, &error) < 0)
            return 4;
    const struct exchange_greeting strangers[] = {{&other, {1, 0}}, {key, {1, 2}}, {key, {7, 0}}};
    for (size_t i = 0; i < sizeof strangers / sizeof *strangers; i++) {
        struct exchange_greeting stranger = strangers[i];
        const int socket = socket_connect_once("127.0.0.1", visitors->address.port, until_s, &error);
        if (socket < 0 || exchange_greet(socket, &stranger, until_s, &error) == SOCKET_FRIEND)
            return 1;
        close(socket);
    }
    const int half = socket_connect_once("127.0.0.1", visitors->address.port, until_s, &error);
    if (half < 0 || !socket_send_all(half, "GET", 3, until_s))
        return 2;
    close(half);
    struct exchange_greeting greeting = {key, {1, 0}};
    return socket_connect(&visitors->address, until_s, exchange_greet, &greeting, &error) < 0 ? 3 : 0;
}
static void who_is_not_of_the_job_is_turned_away(void **state) {
    struct exchange_sockets s;
    struct visitors visitors;
    struct error_text error;
    struct heard heard;
    char said[4096];
    struct job job;
    int sockets[2] = {-1, -1};
    const double since_s = deadline_clock_s();
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < 2 * SILENT)
        skip(); // neither end could hold so many connections
    memset(&job, 0, sizeof job);
    memset(&s, 0, sizeof s);
    s.ranks = 2;
    s.sockets = sockets;
    const int listener = socket_listen(NULL, 0);
    memset(&visitors, 0, sizeof visitors);
    memset(&visitors.key, 7, sizeof visitors.key);
    socket_address_own(&visitors.address, listener);
    job_add(&job, run_visitors, &visitors);
    hear_stderr(&heard);
    const char *const none = exchange_accept(&s, listener, &visitors.key, deadline_clock_s() + 20, &error);
    end_hearing(&heard, said, sizeof said);
    assert_null(none);
    assert_non_null(strstr(said, "it has not replied, and others wait"));
    assert_non_null(strstr(said, "rank 0 turned away "));
    assert_true(sockets[1] >= 0);
    assert_all_well(&job);
    assert_true(deadline_clock_s() - since_s < 3 * test_slowness()); // less than the wait for one silent connection
    close(sockets[1]);
    sockets[1] = -1;
    const char *const problem = exchange_accept(&s, listener, &visitors.key, deadline_clock_s() + 0.05, &error);
    assert_non_null(problem);
    assert_non_null(strstr(problem, "rank 1 has not connected to rank 0"));
    close(listener);
}

static void without_mpi_it_says_so(void **state) {
#ifdef HAVE_MPI
    skip();
#else
    struct exchange x;
    struct error_text error;
    int rank, ranks;
    assert_non_null(strstr(mpi_open(&rank, &ranks, &error), "this build has no MPI"));
    assert_non_null(strstr(exchange_open(&x, EXCHANGE_MPI, 0, 2, NULL, &error), "this build has no MPI"));
#endif
}

int main(int argc, char **argv) {
    if (argc == 2)
        return run_mpi_rank(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_over_sockets),
        cmocka_unit_test(values_over_mpi),
        cmocka_unit_test(long_parts_in_several_mpi_messages),
        cmocka_unit_test(a_lost_peer_and_one_out_of_step_are_named),
        cmocka_unit_test(one_out_of_step_is_named_by_mpi),
        cmocka_unit_test(who_is_not_of_the_job_is_turned_away),
        cmocka_unit_test(without_mpi_it_says_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
