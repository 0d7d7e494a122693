// The control connections between forked processes: exchanges, the start, and every way in which a job can end.
#include "runtime/machine/error.h"     // fail
#include "runtime/net/control.c"       // under test
#include "runtime/net/control_start.c" // under test
#include "runtime/net/sockets.c"       // under test
#include "test/fails.h"                // assert_error
#include "test/testing.h"              // cmocka
#include <fcntl.h>                     // fcntl
#include <sys/mman.h>                  // mmap

enum { MOST_RANKS = 4 };

// ---- a job of processes ----

typedef int job_rank(struct control *c, void *context); // a rank's exit status

struct job {
    int ranks;
    pid_t pids[MOST_RANKS]; // 0: has ended
    int statuses[MOST_RANKS];
    int said; // what they print on stderr
    char text[8192];
    int listener;                   // rank 0's
    struct control_address address; // as MPI tells it to the others
};

// Starts one rank; what control_open says is printed, as main does.
static void job_start_rank(struct job *job, int rank, double timeout_s, int err, job_rank *run, void *context) {
    struct launch launch;
    struct error_text error;
    fflush(stdout);
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid > 0) {
        job->pids[rank] = pid;
        return;
    }
    on_exit(end_child, NULL);
    alarm(30); // one that hangs is a failure
    dup2(err, STDERR_FILENO);
    close(err);
    close(job->said);
    if (rank != 0)
        close(job->listener);
    memset(&launch, 0, sizeof launch);
    launch.kind = LAUNCH_MPI;
    launch.rank = rank;
    launch.ranks = job->ranks;
    struct control *control;
    const char *const problem =
        control_open_within(&control, &launch, &job->address, job->listener, timeout_s, 5, &error);
    if (problem) {
        fprintf(stderr, "%s\n", problem);
        _exit(3);
    }
    const int status = run(control, context);
    control_close(control);
    _exit(status);
}

static struct job *job_start(int ranks, double timeout_s, job_rank *run, void *context) {
    struct job *const job = (struct job *)calloc(1, sizeof *job);
    struct error_text error;
    int ends[2];
    assert_non_null(job);
    assert_int_equal(pipe(ends), 0);
    job->said = ends[0];
    job->ranks = ranks;
    assert_null(control_listen(&job->address, &job->listener, &error));
    for (int r = 0; r < ranks; r++)
        job_start_rank(job, r, timeout_s, ends[1], run, context);
    close(ends[1]);
    close(job->listener);
    return job;
}

static int exit_status(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status); }

static void job_wait_rank(struct job *job, int rank) {
    int status = 0;
    assert_int_equal(waitpid(job->pids[rank], &status, 0), job->pids[rank]);
    job->statuses[rank] = exit_status(status);
    job->pids[rank] = 0;
}

// Waits for all but `but` (-1: for all), and reads what they said.
static void job_wait(struct job *job, int but) {
    size_t length = 0;
    for (int r = 0; r < job->ranks; r++)
        if (r != but && job->pids[r])
            job_wait_rank(job, r);
    assert_int_equal(fcntl(job->said, F_SETFL, O_NONBLOCK), 0); // a rank that is stopped holds the other end
    for (ssize_t got = 1; got > 0 && length + 1 < sizeof job->text; length += got > 0 ? (size_t)got : 0)
        got = read(job->said, job->text + length, sizeof job->text - 1 - length);
    job->text[length] = '\0';
}

static void job_free(struct job *job) {
    close(job->said);
    free(job);
}

static int lines(const char *text) {
    int n = 0;
    for (; *text; text++)
        n += *text == '\n';
    return n;
}

// All end with status 1 but the one that was killed or stopped, and one line was printed, that holds `words`.
static void job_expect_end(struct job *job, int lost, const char *words, double since_s, double most_s) {
    char wanted[1024], *rest = NULL;
    const double took_s = deadline_clock_s() - since_s;
    bool good = lines(job->text) == 1 && took_s <= most_s;
    for (int r = 0; r < job->ranks; r++)
        good = good && (r == lost || job->statuses[r] == EXIT_FAILURE);
    snprintf(wanted, sizeof wanted, "%s", words);
    for (char *word = strtok_r(wanted, "|", &rest); word; word = strtok_r(NULL, "|", &rest))
        good = good && strstr(job->text, word);
    if (!good)
        fail_msg("expected statuses 1 1 1 1 but of rank %d, within %g s, and one line with: %s\ngot %d %d %d %d, in %g "
                 "s: %s",
                 lost, most_s, words, job->statuses[0], job->statuses[1], job->statuses[2], job->statuses[3], took_s,
                 job->text);
    job_free(job);
}

static void job_expect_good(struct job *job) {
    job_wait(job, -1);
    for (int r = 0; r < job->ranks; r++)
        if (job->statuses[r] != 0)
            fail_msg("rank %d of %d ended with %d: %s", r, job->ranks, job->statuses[r], job->text);
    assert_string_equal(job->text, "");
    job_free(job);
}

#define check(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "rank %d: line %d: %s\n", c->rank, __LINE__, #condition);                                  \
            _exit(4);                                                                                                  \
        }                                                                                                              \
    } while (0)

// ---- exchanges ----

static unsigned char pattern(int rank, size_t i) { return (unsigned char)(31 * rank + 7 * i + i / 251 + 1); }

static void exchange_size(struct control *c, size_t bytes, bool in_place) {
    unsigned char *const all = (unsigned char *)malloc(bytes * (size_t)c->ranks + 1);
    unsigned char *const apart = (unsigned char *)malloc(bytes + 1);
    unsigned char *const mine = in_place ? all + (size_t)c->rank * bytes : apart;
    check(all && apart);
    memset(all, 0, bytes * (size_t)c->ranks + 1);
    for (size_t i = 0; i < bytes; i++)
        mine[i] = pattern(c->rank, i);
    control_all_gather(c, all, mine, bytes, "test data", false);
    for (int r = 0; r < c->ranks; r++)
        for (size_t i = 0; i < bytes; i++)
            check(all[(size_t)r * bytes + i] == pattern(r, i));
    check(all[bytes * (size_t)c->ranks] == 0);
    apart[bytes] = 77;
    for (size_t i = 0; i < bytes; i++)
        apart[i] = c->rank == 0 ? pattern(9, i) : 0;
    control_broadcast(c, apart, bytes, "test data of rank 0", true);
    for (size_t i = 0; i < bytes; i++)
        check(apart[i] == pattern(9, i));
    check(apart[bytes] == 77);
    free(all);
    free(apart);
}
static int run_sizes(struct control *c, void *unused) {
    const size_t sizes[] = {0, 1, 7, 4097, 65536, 3 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        exchange_size(c, sizes[i], false);
        exchange_size(c, sizes[i], true);
    }
    for (size_t i = 0; i < 300; i++)
        exchange_size(c, i % 5 == 0 ? 30000 + i : i % 7, i % 2);
    control_barrier(c, "the end", false);
    return 0;
}
static void exchanges_of_all_sizes(void **state) {
    for (int ranks = 2; ranks <= MOST_RANKS; ranks++)
        job_expect_good(job_start(ranks, 10, run_sizes, NULL));
}

// Nobody leaves a barrier that somebody has not reached.
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

// ---- the start ----

static int run_nothing(struct control *c, void *unused) { return 0; }

static bool is_closed(int socket, double within_s) {
    char byte;
    return socket_ready(socket, POLLIN, deadline_clock_s() + within_s) && recv(socket, &byte, 1, 0) <= 0;
}
// What does not say hello, or only half of it, or of another job, counts for nothing.
static void strangers_are_dropped(void **state) {
    struct error_text error;
    struct control_hello hello;
    int sockets[8], ends[2], n = 0;
    struct job *const job = (struct job *)calloc(1, sizeof *job);
    assert_int_equal(pipe(ends), 0);
    job->said = ends[0];
    job->ranks = 3;
    assert_null(control_listen(&job->address, &job->listener, &error));
    for (; n < 6; n++) {
        sockets[n] = socket_connect_once("127.0.0.1", job->address.at.port, deadline_clock_s() + 5, &error);
        assert_true(sockets[n] >= 0);
    }
    memset(&hello, 0, sizeof hello);
    memcpy(hello.magic, CONTROL_MAGIC, sizeof hello.magic);
    hello.version = CONTROL_VERSION;
    hello.rank = 1;
    hello.ranks = 3;
    hello.token = job->address.token + 1;
    const char *const other =
        "GET / HTTP/1.1\r\nHost: here and more of it, until it is as long as a hello would be, if not "
        "longer than that, which it should be by now\r\n\r\n";
    assert_true(socket_send_all(sockets[0], other, strlen(other), 0));
    assert_true(socket_send_all(sockets[1], "t", 1, 0));
    assert_true(socket_send_all(sockets[2], &hello, sizeof hello / 2, 0));
    assert_true(socket_send_all(sockets[3], &hello, sizeof hello, 0)); // of another job
    close(sockets[4]);
    job_start_rank(job, 0, 10, ends[1], run_sizes, NULL);
    for (int i = 0; i < 6; i++) // those that have said something wrong are closed, and those that may yet speak are not
        if (i != 4)
            assert_int_equal(is_closed(sockets[i], i == 0 || i == 3 ? 2 : 0.05), i == 0 || i == 3);
    close(sockets[2]);
    job_start_rank(job, 1, 10, ends[1], run_sizes, NULL);
    socket_sleep_s(0.1);
    job_start_rank(job, 2, 10, ends[1], run_sizes, NULL); // late
    close(ends[1]);
    job_expect_good(job);
    for (int i = 0; i < n; i++)
        if (i != 2 && i != 4)
            close(sockets[i]);
}

// A job by --rendezvous, in which every rank gets what the others don't: its launch.
struct meeting {
    int rank, ranks, port;
    double start_s;
};
static int free_port(void) {
    const int listener = socket_listen("127.0.0.1", 0);
    const int port = socket_port(listener);
    close(listener);
    return port;
}
static pid_t start_meeting(struct meeting meeting, int err) {
    struct control *c;
    struct launch launch;
    struct error_text error;
    fflush(stdout);
    const pid_t pid = fork();
    if (pid != 0)
        return pid;
    alarm(30);
    dup2(err, STDERR_FILENO);
    memset(&launch, 0, sizeof launch);
    launch.kind = LAUNCH_RENDEZVOUS;
    launch.rank = meeting.rank;
    launch.ranks = meeting.ranks;
    launch.port = meeting.port;
    snprintf(launch.host, sizeof launch.host, "127.0.0.1");
    const char *const problem = control_open_within(&c, &launch, NULL, -1, 10, meeting.start_s, &error);
    if (problem) {
        fprintf(stderr, "%s\n", problem);
        _exit(3);
    }
    run_sizes(c, NULL);
    control_close(c);
    _exit(0);
}
// Runs them, each so long after the one before, and gives what they said and how they ended, as digits.
static void meet(const struct meeting *meetings, int n, double apart_s, char statuses[MOST_RANKS + 1], char *text,
                 size_t text_bytes) {
    int ends[2], status = 0;
    pid_t pids[MOST_RANKS];
    size_t length = 0;
    assert_int_equal(pipe(ends), 0);
    for (int i = 0; i < n; i++) {
        pids[i] = start_meeting(meetings[i], ends[1]);
        socket_sleep_s(apart_s);
    }
    close(ends[1]);
    for (ssize_t got = 1; got > 0 && length + 1 < text_bytes; length += got > 0 ? (size_t)got : 0)
        got = read(ends[0], text + length, text_bytes - 1 - length);
    text[length] = '\0';
    close(ends[0]);
    for (int i = 0; i < n; i++) {
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        statuses[i] = (char)('0' + exit_status(status));
    }
    statuses[n] = '\0';
}
static void expect_meeting(const struct meeting *meetings, int n, const char *statuses, const char *words) {
    char got[MOST_RANKS + 1], text[4096];
    meet(meetings, n, 0.1, got, text, sizeof text);
    if (strcmp(got, statuses) != 0 || !strstr(text, words))
        fail_msg("expected %s, '%s', got %s, '%s'", statuses, words, got, text);
}
static void a_rendezvous(void **state) {
    const int port = free_port();
    const struct meeting late_0[] = {{2, 3, port, 5}, {1, 3, port, 5}, {0, 3, port, 5}};
    expect_meeting(late_0, 3, "000", "");
    const struct meeting missing[] = {{0, 4, port, 0.5}, {2, 4, port, 5}};
    expect_meeting(missing, 2, "31", "ranks 1, 3 of 4 did not connect");
    const struct meeting no_0[] = {{1, 2, port, 0.3}};
    expect_meeting(no_0, 1, "3", "refused");
    const struct meeting twice[] = {{0, 3, port, 5}, {1, 3, port, 5}, {1, 3, port, 5}};
    expect_meeting(twice, 3, "313", "two processes say that they are rank 1: host ");
    const struct meeting sizes[] = {{0, 3, port, 5}, {2, 3, port, 5}, {1, 2, port, 5}};
    expect_meeting(sizes, 3, "313", "says that it is rank 1 of 2, but this is rank 0 of 3");
}
static void a_port_that_is_taken(void **state) {
    const int listener = socket_listen("127.0.0.1", 0);
    const struct meeting taken[] = {{0, 2, socket_port(listener), 1}};
    expect_meeting(taken, 1, "3", "cannot listen at port");
    close(listener);
}

// One that ended before all had come may come again.
static void a_rank_that_comes_again(void **state) {
    const int port = free_port();
    int ends[2], status = 0;
    assert_int_equal(pipe(ends), 0);
    const struct meeting all[] = {{0, 3, port, 5}, {1, 3, port, 5}, {2, 3, port, 5}};
    pid_t pids[3];
    pids[0] = start_meeting(all[0], ends[1]);
    pids[1] = start_meeting(all[1], ends[1]);
    socket_sleep_s(0.3);
    kill(pids[1], SIGKILL);
    waitpid(pids[1], &status, 0);
    pids[1] = start_meeting(all[1], ends[1]);
    pids[2] = start_meeting(all[2], ends[1]);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(waitpid(pids[r], &status, 0), pids[r]);
        assert_int_equal(exit_status(status), 0);
    }
    close(ends[0]);
    close(ends[1]);
}

// Half a hello is nobody's, even where there is no token that it lacks.
static void half_a_hello(void **state) {
    struct error_text error;
    struct control_hello hello;
    int ends[2], status = 0;
    pid_t pids[2];
    const int port = free_port();
    const struct meeting both[] = {{0, 2, port, 5}, {1, 2, port, 5}};
    const struct socket_address address = {"127.0.0.1", {""}, port};
    assert_int_equal(pipe(ends), 0);
    pids[0] = start_meeting(both[0], ends[1]);
    const int half = socket_connect(&address, deadline_clock_s() + 5, NULL, NULL, &error);
    assert_true(half >= 0);
    memset(&hello, 0, sizeof hello);
    memcpy(hello.magic, CONTROL_MAGIC, sizeof hello.magic);
    hello.version = CONTROL_VERSION;
    hello.rank = 1;
    hello.ranks = 2;
    assert_true(socket_send_all(half, &hello, sizeof hello - 1, 0));
    assert_false(is_closed(half, 0.1));
    pids[1] = start_meeting(both[1], ends[1]);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(waitpid(pids[r], &status, 0), pids[r]);
        assert_int_equal(exit_status(status), 0);
    }
    close(half);
    close(ends[0]);
    close(ends[1]);
}

// The way by the loopback is there where the host's name means nothing; and the interfaces' addresses for other hosts.
static void an_unknown_host_name(void **state) {
    struct socket_address address;
    struct error_text error;
    const int listener = socket_listen(NULL, 0);
    socket_address_own(&address, listener);
    assert_string_equal(socket_candidate(&address, 0), "127.0.0.1");
    assert_string_equal(socket_candidate(&address, 1), address.host);
    snprintf(address.host, sizeof address.host, "no-such-host.invalid");
    memset(address.interfaces, 0, sizeof address.interfaces);
    snprintf(address.interfaces[0], sizeof address.interfaces[0], "127.0.0.1");
    int connected = socket_connect(&address, deadline_clock_s() + 30, NULL, NULL, &error);
    assert_true(connected >= 0);
    close(connected);
    address.interfaces[0][0] = '\0';
    connected = socket_connect(&address, deadline_clock_s() + 0.1, NULL, NULL, &error);
    assert_int_equal(connected, -1);
    assert_error(error.text, "no-such-host.invalid");
    close(listener);
}

// ---- ends ----

// Collectives, of which the tenth does not end.
static int run_collectives(struct control *c, void *stops) {
    for (int i = 0; i < 10; i++) {
        char name[32];
        snprintf(name, sizeof name, "piece %d", i + 1);
        control_collective_begun(c, name);
        control_barrier(c, "the data's own way", true); // a collective is done when all are in it
        if (i == 9)
            socket_sleep_s(20);
        control_collective_done(c);
    }
    return 0;
}
static void a_rank_that_is_killed(void **state) {
    uint64_t random = (uint64_t)getpid();
    struct job *jobs[4]; // at the same time, as wherever a test has several: all they do is wait
    char words[4][256];
    for (int lost = 0; lost < 4; lost++) {
        struct job *const job = jobs[lost] = job_start(4, 1, run_collectives, NULL);
        snprintf(words[lost], sizeof words[lost],
                 "train_gpt: rank %d (host %.64s, pid %d) ended during 'piece 10' "
                 "(collective 10); the job ends",
                 lost, job->address.at.host, (int)job->pids[lost]);
    }
    // Long enough for all to be in the tenth and to have said so, and then at any moment.
    socket_sleep_s(0.5 + 0.1 * fabs(test_uniform(&random)));
    const double killed_s = deadline_clock_s();
    for (int lost = 0; lost < 4; lost++)
        kill(jobs[lost]->pids[lost], SIGKILL);
    for (int lost = 0; lost < 4; lost++) {
        job_wait(jobs[lost], -1);
        assert_int_equal(jobs[lost]->statuses[lost], 256 + SIGKILL);
        job_expect_end(jobs[lost], lost, words[lost], killed_s, 2);
    }
}

// Where it is lost: in the first collective that another is in, and outside of any after the last that there was.
static int run_uneven(struct control *c, void *all_done) {
    control_barrier(c, "the start", false);
    control_collective_begun(c, "first");
    if (c->rank == 1 || *(int *)all_done) {
        control_collective_done(c);
        control_collective_begun(c, "second");
    }
    if (*(int *)all_done)
        control_collective_done(c);
    socket_sleep_s(20);
    return 0;
}
static void where_a_rank_is_lost(void **state) {
    static const char *const words[] = {"rank 2 (host | ended during 'first' (collective 1);",
                                        "rank 2 (host | ended after 'second' (collective 2);"};
    struct job *jobs[2];
    for (int all_done = 0; all_done < 2; all_done++)
        jobs[all_done] = job_start(3, 1, run_uneven, &all_done);
    socket_sleep_s(0.5);
    for (int i = 0; i < 2; i++) {
        const double killed_s = deadline_clock_s();
        kill(jobs[i]->pids[2], SIGKILL);
        job_wait(jobs[i], -1);
        job_expect_end(jobs[i], 2, words[i], killed_s, 2);
    }
}

// At any moment of a busy job, from its first exchange on: all end, and one line is printed.
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
    const int *const behind = (const int *)context; // the rank, and whether in an exchange
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
    int behind[5][2] = {{0, 0}, {2, 0}, {0, 1}, {2, 1}, {-1, 0}}; // at last: all are in it, and it does not end
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

// What is patient waits for longer than the timeout, and a collective that follows another is not late for that one.
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

// A rank that is stopped is found by its silence, in a patient exchange too. It ends when it goes on.
static int run_in_vain(struct control *c, void *never) {
    control_barrier(c, "the start", false);
    if (c->rank == *(int *)never)
        socket_sleep_s(20);
    control_barrier(c, "the long way", true);
    return 0;
}
static void a_rank_that_is_stopped(void **state) {
    struct job *jobs[3];
    char words[3][256], others[sizeof jobs[0]->text];
    int pids[3];
    for (int lost = 0; lost < 3; lost++) {
        int never = lost == 1 ? 2 : 1;
        jobs[lost] = job_start(3, 0.4, run_in_vain, &never);
        pids[lost] = (int)jobs[lost]->pids[lost];
        snprintf(words[lost], sizeof words[lost],
                 "rank %d (host |pid %d, silent for 0.|is stopped or cut off during 'the long "
                 "way' (exchange 2)",
                 lost, pids[lost]);
    }
    socket_sleep_s(0.3);
    const double stopped_s = deadline_clock_s();
    for (int lost = 0; lost < 3; lost++)
        kill(pids[lost], SIGSTOP);
    for (int lost = 0; lost < 3; lost++) {
        job_wait(jobs[lost], lost);
        assert_true(deadline_clock_s() - stopped_s > 0.25);
        memcpy(others, jobs[lost]->text, sizeof others);
        kill(pids[lost], SIGCONT);
        job_wait(jobs[lost], -1);
        assert_int_equal(jobs[lost]->statuses[lost], EXIT_FAILURE);
        if (lost == 0) // whom nobody could tell that the job has ended
            assert_non_null(strstr(jobs[lost]->text, "was stopped for "));
        else
            assert_string_equal(jobs[lost]->text, "");
        memcpy(jobs[lost]->text, others, sizeof others);
        job_expect_end(jobs[lost], -1, words[lost], stopped_s, 3);
    }
}

// ---- disagreements and mistakes ----

static int run_other_exchange(struct control *c, void *which) {
    char data[MOST_RANKS * 16] = "";
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
    int whose = -1; // everybody's, and said once
    struct job *job = job_start(3, 10, run_mistake, &whose);
    job_wait(job, -1);
    assert_string_equal(job->text, "train_gpt: rank 0: --data none: no such file\n");
    assert_int_equal(job->statuses[0], EXIT_USAGE);
    assert_int_equal(job->statuses[1], EXIT_FAILURE);
    assert_int_equal(job->statuses[2], EXIT_FAILURE);
    job_free(job);
    whose = 1;
    job = job_start(3, 10, run_mistake, &whose);
    job_wait(job, -1);
    const char *const first = "train_gpt: rank 1: --data none: no such file\ntrain_gpt: rank 1 (host ";
    assert_memory_equal(job->text, first, strlen(first));
    assert_non_null(strstr(job->text, " ended during 'the data' (exchange 2); the job ends\n"));
    assert_int_equal(lines(job->text), 2);
    assert_int_equal(job->statuses[1], EXIT_USAGE);
    assert_int_equal(job->statuses[0], EXIT_FAILURE);
    assert_int_equal(job->statuses[2], EXIT_FAILURE);
    job_free(job);
}

// ---- the watch of a device ----

// The poll finds what is done, as the CUDA target's does with events.
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
    int slow[3] = {0, 0, 18}; // longer than the timeout: who has said goodbye is not late
    job_expect_good(job_start(3, 0.6, run_close, slow));
    for (int i = 0; i < 10; i++)
        job_expect_good(job_start(4, 10, run_nothing, NULL));
}

// A rank that is lost while others wait for its goodbye.
static void a_death_while_others_close(void **state) {
    int order[3] = {0, 0, 400};
    struct job *const job = job_start(3, 10, run_close, order);
    socket_sleep_s(0.4);
    const double killed_s = deadline_clock_s();
    kill(job->pids[2], SIGKILL);
    job_wait(job, -1);
    job_expect_end(job, 2, "rank 2 (host | ended after 'the start' (exchange 1); the job ends", killed_s, 2);
    // One that has said goodbye may be killed: nobody needs it.
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
        cmocka_unit_test(strangers_are_dropped),
        cmocka_unit_test(a_rendezvous),
        cmocka_unit_test(a_port_that_is_taken),
        cmocka_unit_test(a_rank_that_comes_again),
        cmocka_unit_test(half_a_hello),
        cmocka_unit_test(an_unknown_host_name),
        cmocka_unit_test(a_rank_that_is_killed),
        cmocka_unit_test(where_a_rank_is_lost),
        cmocka_unit_test(a_kill_at_any_moment),
        cmocka_unit_test(a_rank_that_never_comes),
        cmocka_unit_test(patience),
        cmocka_unit_test(a_rank_that_is_stopped),
        cmocka_unit_test(ranks_in_different_exchanges),
        cmocka_unit_test(mistakes_end_all),
        cmocka_unit_test(a_poll),
        cmocka_unit_test(closing_in_any_order),
        cmocka_unit_test(a_death_while_others_close),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
