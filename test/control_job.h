// A job of processes that the control connections join, for the tests of those connections: it is started, waited for,
// and held to how it must end.
#pragma once
#include "runtime/net/control.c" // under test
#include "test/fails.h"          // end_child
#include "test/testing.h"        // cmocka
#include <fcntl.h>               // fcntl

enum { MAX_RANKS = 4 };

typedef int job_rank(struct control *c, void *context); // a rank's exit status

struct job {
    int ranks;
    pid_t pids[MAX_RANKS]; // 0: has ended
    int statuses[MAX_RANKS];
    int said; // the read end of the ranks' stderr
    char text[8192];
    int listener;                   // rank 0's; open until all ranks are started
    struct control_address address; // of rank 0, which MPI tells the other ranks
};

// Starts one rank, whose stderr is the descriptor `err`. It prints what control_open says, as main does, and ends with
// the status that `run` returns. `context` goes to `run`; NULL where `run` uses none.
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
    alarm(30); // a rank that hangs is a failure
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

// Waits for all ranks except `but` (-1: for all), and reads into job->text what they printed.
static void job_wait(struct job *job, int but) {
    size_t length = 0;
    for (int r = 0; r < job->ranks; r++)
        if (r != but && job->pids[r])
            job_wait_rank(job, r);
    assert_int_equal(fcntl(job->said, F_SETFL, O_NONBLOCK), 0); // a rank that is stopped still holds the write end
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

// Checks that all ranks except `lost` (which was killed or stopped) ended with status 1 within most_s seconds after
// since_s, and that one line was printed, which holds each of `words`, separated by '|'. Frees the job.
static void job_expect_end(struct job *job, int lost, const char *words, double since_s, double most_s) {
    char wanted[1024], *rest = NULL;
    const double took_s = deadline_clock_s() - since_s;
    bool good = lines(job->text) == 1 && took_s <= most_s * test_slowness();
    for (int r = 0; r < job->ranks; r++)
        good = good && (r == lost || job->statuses[r] == EXIT_FAILURE);
    snprintf(wanted, sizeof wanted, "%s", words);
    for (char *word = strtok_r(wanted, "|", &rest); word; word = strtok_r(NULL, "|", &rest))
        good = good && strstr(job->text, word);
    for (int r = 0; r < job->ranks; r++)
        if (!good && job->pids[r] > 0) // a stopped rank would hold this test's output forever
            kill(job->pids[r], SIGKILL);
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

// ---- a rank that exchanges data of many sizes ----

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
