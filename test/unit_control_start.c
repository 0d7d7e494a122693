// How the ranks of a job find each other: by a listener's address or a rendezvous; late, twice, again; and among
// connections from outside the job.
#include "runtime/net/control_start.c" // under test
#include "runtime/net/handshake.c"     // under test
#include "runtime/net/sockets.c"       // under test
#include "test/control_job.h"          // job_start_rank
#include "test/fails.h"                // assert_error
#include "test/free_port.h"            // test_free_port
#include "test/testing.h"              // cmocka
#include <sys/resource.h>              // setrlimit

static const char SECRET[] = "of this test's ranks";

// Whether the other end closes the connection within within_s seconds, whatever it says before.
static bool is_closed(int socket, double within_s) {
    const double until_s = deadline_clock_s() + within_s;
    char said[4096];
    ssize_t received = 1;
    while (received > 0 && socket_wait_ready(socket, POLLIN, until_s))
        received = recv(socket, said, sizeof said, 0);
    return received == 0 || (received < 0 && errno != EAGAIN);
}
// Checks that strangers count for nothing: connections that do not reply, or with half a reply, or with another key.
static void strangers_are_dropped(void **state) {
    struct error_text error;
    struct handshake_talk talk;
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
    memset(&talk, 0, sizeof talk);
    memcpy(talk.reply.magic, HANDSHAKE_MAGIC, sizeof talk.reply.magic);
    talk.reply.version = HANDSHAKE_VERSION;
    const char *const other =
        "GET / HTTP/1.1\r\nHost: here and more of it, until it is as long as a reply would be, if not longer than that, "
        "which it should be by now, or nearly so, if it goes on for long enough, which it does\r\n\r\n";
    assert_true(socket_send_all(sockets[0], other, strlen(other), 0));
    assert_true(socket_send_all(sockets[1], "t", 1, 0));
    assert_true(socket_send_all(sockets[2], &talk.reply, sizeof talk.reply / 2, 0));
    assert_true(socket_send_all(sockets[3], &talk.reply, sizeof talk.reply, 0)); // for another job
    close(sockets[4]);
    job_start_rank(job, 0, 10, ends[1], run_sizes, NULL);
    for (int i = 0; i < 6; i++) // wrong answers are closed; connections that may still speak are not
        if (i != 4)
            assert_int_equal(is_closed(sockets[i], i == 0 || i == 3 ? 2 : 0.05), i == 0 || i == 3);
    job_start_rank(job, 1, 10, ends[1], run_sizes, NULL);
    socket_sleep_s(0.1);
    job_start_rank(job, 2, 10, ends[1], run_sizes, NULL); // late
    close(ends[1]);
    job_wait(job, -1);
    for (int r = 0; r < job->ranks; r++)
        assert_int_equal(job->statuses[r], 0);
    if (lines(job->text) != 3)
        fail_msg("expected three lines, got: %s", job->text);
    const char *const words[] = {"rank 0 turns away a connection from 127.0.0.1, port ", "is not of this program",
                                 "is of another job", "has ended without the reply"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        assert_error(job->text, words[i]);
    job_free(job);
    for (int i = 0; i < n; i++)
        if (i != 4)
            close(sockets[i]);
}

// What one rank of a job by --rendezvous is started with.
struct meeting {
    int rank, ranks, port;
    double start_s;
    const char *secret; // NULL: none
    bool ends_first;    // it ends before the next process starts
};
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
    if (meeting.secret)
        sha256(launch.secret, meeting.secret, strlen(meeting.secret));
    const char *const problem = control_open_within(&c, &launch, NULL, -1, 10, meeting.start_s, &error);
    if (problem) {
        fprintf(stderr, "%s\n", problem);
        _exit(3);
    }
    run_sizes(c, NULL);
    control_close(c);
    _exit(0);
}
// Waits until a process ends, and returns its exit status as a digit.
static char wait_for(pid_t pid) {
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return (char)('0' + exit_status(status));
}
// Runs n ranks, each apart_s seconds after the start of the previous one, or after its end where it ends first. Puts
// their exit statuses into `statuses`, as digits, and what they said into text (text_bytes).
static void meet(const struct meeting *meetings, int n, double apart_s, char statuses[MAX_RANKS + 1], char *text,
                 size_t text_bytes) {
    int ends[2];
    pid_t pids[MAX_RANKS];
    size_t length = 0;
    assert_int_equal(pipe(ends), 0);
    for (int i = 0; i < n; i++) {
        pids[i] = start_meeting(meetings[i], ends[1]);
        if (meetings[i].ends_first)
            statuses[i] = wait_for(pids[i]);
        else
            socket_sleep_s(apart_s);
    }
    close(ends[1]);
    for (ssize_t got = 1; got > 0 && length + 1 < text_bytes; length += got > 0 ? (size_t)got : 0)
        got = read(ends[0], text + length, text_bytes - 1 - length);
    text[length] = '\0';
    close(ends[0]);
    for (int i = 0; i < n; i++)
        if (!meetings[i].ends_first)
            statuses[i] = wait_for(pids[i]);
    statuses[n] = '\0';
}
// Checks the exit statuses of n ranks, and that they say `words`. An x stands for 2 or 3: on a busy machine ranks reach
// rank 0 in another order than they start in, and who comes after the launch has ended is not told why.
static void expect_meeting(const struct meeting *meetings, int n, const char *statuses, const char *words) {
    char got[MAX_RANKS + 1], text[4096];
    meet(meetings, n, 0.1, got, text, sizeof text);
    bool as_expected = true;
    for (int i = 0; i < n; i++)
        as_expected = as_expected && (statuses[i] == 'x' ? got[i] == '2' || got[i] == '3' : got[i] == statuses[i]);
    if (!as_expected || !strstr(text, words))
        fail_msg("expected %s, '%s', got %s, '%s'", statuses, words, got, text);
}
static void a_rendezvous(void **state) {
    const int port = test_free_port();
    const struct meeting late_0[] = {{2, 3, port, 5}, {1, 3, port, 5}, {0, 3, port, 5}};
    expect_meeting(late_0, 3, "000", "");
    const struct meeting missing[] = {{0, 4, port, 0.5}, {2, 4, port, 5}};
    expect_meeting(missing, 2, "32", "ranks 1, 3 of 4 did not connect");
    const struct meeting no_0[] = {{1, 2, port, 0.3}};
    expect_meeting(no_0, 1, "3", "refused");
    const struct meeting twice[] = {{0, 3, port, 5}, {1, 3, port, 5}, {1, 3, port, 5}};
    expect_meeting(twice, 3, "3xx", "two processes say that they are rank 1: host ");
    const struct meeting sizes[] = {{0, 3, port, 5}, {2, 3, port, 5}, {1, 2, port, 5}};
    expect_meeting(sizes, 3, "3x3", "says that it is rank 1 of 2, but this is rank 0 of 3");
}
static void a_port_that_is_taken(void **state) {
    const int listener = socket_listen("127.0.0.1", 0);
    const struct meeting taken[] = {{0, 2, socket_port(listener), 1}};
    expect_meeting(taken, 1, "3", "cannot listen at port");
    close(listener);
}

// Checks a rank with another secret than rank 0, and one that has a secret only by itself, or none only by itself: it
// is told so, and does not end the launch.
static void a_rank_with_another_secret(void **state) {
    static const char *const secrets[][2] = {{"one", "other"}, {"one", NULL}, {NULL, "one"}};
    for (int i = 0; i < 3; i++) {
        const int port = test_free_port();
        const struct meeting all[] = {{0, 2, port, 5, secrets[i][0], false},
                                      {1, 2, port, 5, secrets[i][1], true},
                                      {1, 2, port, 5, secrets[i][0], false}};
        char statuses[MAX_RANKS + 1], text[4096];
        meet(all, 3, 0.1, statuses, text, sizeof text);
        assert_string_equal(statuses, "030");
        assert_int_equal(lines(text), 2); // a line on each side, each naming the option
        assert_error(text, "rank 0 turns away a connection from 127.0.0.1, port ");
        assert_error(text, "rank 0 is not to be reached at 127.0.0.1");
        const char *const first = strstr(text, "--rendezvous-secret");
        assert_non_null(first);
        assert_error(first + 1, "--rendezvous-secret");
    }
}

// Checks that a rank that ended before all had come may come again.
static void a_rank_that_comes_again(void **state) {
    const int port = test_free_port();
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
    for (int r = 0; r < 3; r++)
        assert_int_equal(wait_for(pids[r]), '0');
    close(ends[0]);
    close(ends[1]);
}

// ---- an attack ----

enum { KINDS = 5, HELD = 300, DESCRIPTORS = 100 };
// Makes one bad connection, of one of several kinds. Returns its socket, to be held for a while; -1: it is closed.
static int attack_once(int port, int kind, uint64_t *random) {
    struct error_text error;
    struct handshake_talk talk;
    struct control_hello claim;
    char bytes[200];
    const int socket = socket_connect_once("127.0.0.1", port, deadline_clock_s() + 1, &error);
    if (socket < 0)
        return -1;
    memset(&claim, 0, sizeof claim);
    claim.rank = 1;
    claim.ranks = 3;
    memset(&talk, 0, sizeof talk);
    memcpy(talk.reply.magic, HANDSHAKE_MAGIC, sizeof talk.reply.magic);
    memcpy(talk.reply.hello, &claim, sizeof claim);
    talk.reply.version = HANDSHAKE_VERSION;
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (char)test_random(random);
    switch (kind) {
    case 0: return socket; // it says nothing
    case 1: socket_send_all(socket, bytes, sizeof bytes, 0); break;
    case 2: socket_send_all(socket, &claim, sizeof claim, 0); break;
    case 3: // a proof without the key, for the right challenge
        if (socket_receive_all(socket, &talk.challenge, sizeof talk.challenge, deadline_clock_s() + 0.05)) {
            const struct handshake_key none = {{0}, {0}};
            handshake_prove_reply(talk.reply.proof, &none, &talk);
        }
        socket_send_all(socket, &talk.reply, sizeof talk.reply, 0);
        break;
    // half a reply, and then nothing
    default: socket_send_all(socket, &talk.reply, sizeof talk.reply / 2, 0); return socket;
    }
    close(socket);
    return -1;
}
// Starts a process that attacks until it is killed; it writes a byte to `made` when `count` connections have been made.
static pid_t start_attack(int port, int count, int made) {
    fflush(stdout);
    const pid_t pid = fork();
    if (pid != 0)
        return pid;
    int held[HELD];
    uint64_t random = 5;
    alarm(60);
    for (int i = 0; i < HELD; i++)
        held[i] = -1;
    for (int i = 0;; i++) {
        if (held[i % HELD] >= 0)
            close(held[i % HELD]);
        held[i % HELD] = attack_once(port, i % KINDS, &random);
        if (i == count && write(made, "", 1) != 1)
            _exit(1);
    }
}
// Checks that ranks join, and their job runs, after thousands of strangers and while more come, though the strangers
// that say nothing are more than rank 0 has descriptors for. Ten strangers are printed, and their number.
static void an_attack(void **state) {
    enum { MAX_S = 6 }; // a start takes 0.1 s, or 3 s on busy cores; a start that waits for silent strangers takes 20 s
    const int port = test_free_port(), count = in_long_run() ? 10000 : 2000;
    const struct meeting all[] = {{0, 3, port, 20, SECRET}, {1, 3, port, 20, SECRET}, {2, 3, port, 20, SECRET}};
    struct rlimit before, few;
    struct error_text error;
    int ends[2], made[2], status = 0, more = 0;
    pid_t pids[3];
    char text[8192];
    size_t length = 0;
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(pipe(made), 0);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = before;
    few.rlim_cur = DESCRIPTORS;
    setrlimit(RLIMIT_NOFILE, &few);
    pids[0] = start_meeting(all[0], ends[1]);
    setrlimit(RLIMIT_NOFILE, &before);
    const struct socket_address address = {"127.0.0.1", {""}, port};
    close(socket_connect(&address, deadline_clock_s() + 5, NULL, NULL, &error)); // so that rank 0 listens by now
    const pid_t attack = start_attack(port, count, made[1]);
    close(made[1]);
    assert_true(socket_wait_ready(made[0], POLLIN, deadline_clock_s() + 15) && read(made[0], text, 1) == 1);
    const double since_s = deadline_clock_s();
    for (int r = 1; r < 3; r++)
        pids[r] = start_meeting(all[r], ends[1]);
    close(ends[1]);
    bool good = true;
    for (int r = 0; r < 3; r++)
        good = waitpid(pids[r], &status, 0) == pids[r] && exit_status(status) == 0 && good;
    const double took_s = deadline_clock_s() - since_s;
    kill(attack, SIGKILL);
    waitpid(attack, &status, 0);
    for (ssize_t got = 1; got > 0 && length + 1 < sizeof text; length += got > 0 ? (size_t)got : 0)
        got = read(ends[0], text + length, sizeof text - 1 - length);
    text[length] = '\0';
    close(ends[0]);
    close(made[0]);
    const char *const rest = strstr(text, "train_gpt: rank 0 turned away ");
    if (!good || took_s > MAX_S * test_slowness() || lines(text) != 11 || !rest ||
        sscanf(rest, "train_gpt: rank 0 turned away %d", &more) != 1 || more < count - 2 * DESCRIPTORS)
        fail_msg("expected three ranks that end well within %d s, and eleven lines of %d strangers; %s after %g s, %d "
                 "lines, the last of %d, the text ends with: %s",
                 MAX_S, count, good ? "well" : "not well", took_s, lines(text), more,
                 length > 500 ? text + length - 500 : text);
}

// Checks that ranks meet by the loopback address where the host's name means nothing, and that other hosts get the
// interfaces' addresses.
static void an_unknown_host_name(void **state) {
    struct socket_address address;
    struct error_text error;
    const int listener = socket_listen(NULL, 0);
    socket_address_own(&address, listener);
    const struct socket_address own = address;
    assert_string_equal(socket_candidate(&address, &own, 0), "127.0.0.1");
    assert_string_equal(socket_candidate(&address, &own, 1), address.host);
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

// Checks which hosts of this host's name are this host: those whose interfaces are not told or are this host's.
static void another_host_of_this_name(void **state) {
    struct socket_address own = {"node", {"10.0.0.1", "10.0.0.2"}, 1}, other = own;
    assert_string_equal(socket_candidate(&other, &own, 0), "127.0.0.1");
    assert_string_equal(socket_candidate(&other, &own, 1), "node");
    assert_string_equal(socket_candidate(&other, &own, 3), "10.0.0.2");
    assert_null(socket_candidate(&other, &own, 4));
    memset(other.interfaces, 0, sizeof other.interfaces);
    assert_string_equal(socket_candidate(&other, &own, 0), "127.0.0.1");
    snprintf(other.interfaces[0], sizeof other.interfaces[0], "10.0.0.3");
    assert_string_equal(socket_candidate(&other, &own, 0), "10.0.0.3");
    assert_null(socket_candidate(&other, &own, 1));
    snprintf(other.host, sizeof other.host, "node2");
    assert_string_equal(socket_candidate(&other, &own, 0), "node2");
    assert_string_equal(socket_candidate(&other, &own, 1), "10.0.0.3");
    memset(own.interfaces, 0, sizeof own.interfaces);
    snprintf(own.host, sizeof own.host, "node2");
    assert_string_equal(socket_candidate(&other, &own, 0), "127.0.0.1");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strangers_are_dropped),      cmocka_unit_test(a_rendezvous),
        cmocka_unit_test(a_port_that_is_taken),       cmocka_unit_test(a_rank_that_comes_again),
        cmocka_unit_test(a_rank_with_another_secret), cmocka_unit_test(an_attack),
        cmocka_unit_test(an_unknown_host_name),       cmocka_unit_test(another_host_of_this_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
