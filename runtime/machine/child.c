#include "runtime/machine/child.h"
#include "runtime/machine/deadline.h" // deadline_after_minutes
#include <errno.h>                    // errno, EINTR
#include <fcntl.h>                    // O_CLOEXEC
#include <poll.h>                     // poll
#include <signal.h>                   // kill
#include <spawn.h>                    // posix_spawn: a process that uses a GPU should not be copied by fork
#include <stdlib.h>                   // EXIT_FAILURE
#include <string.h>                   // memmove, strstr
#include <sys/prctl.h>                // prctl
#include <sys/wait.h>                 // waitpid
#include <unistd.h>                   // pipe2, read

extern char **environ;

// Starts this program as *child, with its stdout and stderr on the descriptor `out`. Returns 0 or an errno.
static int start(pid_t *child, char *const arguments[], int out) {
    posix_spawn_file_actions_t actions;
    int error = posix_spawn_file_actions_init(&actions);
    if (error)
        return error;
    error = posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
    if (!error)
        error = posix_spawn_file_actions_adddup2(&actions, out, STDERR_FILENO);
    if (!error)
        error = posix_spawn(child, "/proc/self/exe", &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    return error;
}
// Waits for bytes of the pipe `in` and appends some to `output` (size): a text of *length bytes and a 0. A full
// `output` loses the quarter after its middle, so that beginning and end stay. Returns whether the pipe is still open.
static int read_some(char *output, size_t size, size_t *length, int in) {
    char some[512];
    const size_t half = size / 2, quarter = size / 4;
    const ssize_t got = read(in, some, quarter < sizeof some ? quarter : sizeof some);
    if (got <= 0)
        return got < 0 && errno == EINTR;
    if (*length + (size_t)got >= size) {
        memmove(output + half, output + half + quarter, *length - half - quarter);
        *length -= quarter;
    }
    memcpy(output + *length, some, (size_t)got);
    *length += (size_t)got;
    output[*length] = '\0';
    return 1;
}
// Reads the child's output into `output`, "" before, until the child closes the pipe or ends: another process may keep
// the pipe open. Stops after `seconds` (0: never), counted anew once `anew` (NULL: nothing) is read. Returns whether
// the child closed the pipe or ended. If its end was seen, *ended, 0 before, becomes 1, and *status is waitpid's.
static int read_output(char *output, size_t size, int in, double seconds, const char *anew, pid_t child, int *ended,
                       int *status) {
    enum { SLICE_MS = 100 };
    struct deadline deadline = deadline_after_minutes(deadline_clock_s(), seconds / 60);
    size_t length = 0;
    int closed = 0, found = 1;
    while (!closed && (!*ended || found > 0)) {
        struct pollfd ready = {in, POLLIN, 0};
        const double left_ms = 1e3 * deadline_left_s(deadline);
        if (left_ms <= 0)
            break;
        found = poll(&ready, 1, *ended ? 0 : left_ms < SLICE_MS ? (int)left_ms + 1 : SLICE_MS);
        if (found < 0 && errno != EINTR)
            break;
        if (found == 0 && !*ended && waitpid(child, status, WNOHANG) == child)
            *ended = found = 1; // the pipe may hold what it wrote last
        else if (found > 0)
            closed = !read_some(output, size, &length, in);
        if (anew && strstr(output, anew)) {
            deadline = deadline_after_minutes(deadline_clock_s(), seconds / 60);
            anew = NULL;
        }
    }
    return closed || *ended;
}

// Waits up to 10 s for the end of a child that has closed its output or was killed: the driver of a hung GPU may hold a
// process for longer. Returns whether the child has ended; *status is then waitpid's.
static int wait_a_while(pid_t child, int *status) {
    enum { WAIT_MS = 10000, EVERY_MS = 5 };
    for (int waited = 0; waited < WAIT_MS; waited += EVERY_MS) {
        const pid_t ended = waitpid(child, status, WNOHANG);
        if (ended == child)
            return 1;
        if (ended < 0 && errno != EINTR)
            return 0;
        poll(NULL, 0, EVERY_MS);
    }
    return 0;
}

struct child_result child_run(char *output, size_t size, char *const arguments[], double seconds, const char *anew) {
    struct child_result result = {CHILD_NOT_STARTED, 0, 0};
    struct sigaction before;
    int ends[2], status = 0;
    pid_t child = 0;
    output[0] = '\0';
    if (pipe2(ends, O_CLOEXEC) != 0) {
        result.status = errno;
        return result;
    }
    sigaction(SIGCHLD, NULL, &before);
    if (before.sa_handler == SIG_IGN) // a launcher's: the system would keep no child's status
        signal(SIGCHLD, SIG_DFL);
    result.status = start(&child, arguments, ends[1]);
    close(ends[1]);
    if (result.status == 0) {
        int ended = 0;
        const int in_time = read_output(output, size, ends[0], seconds, anew, child, &ended, &status);
        if (!in_time)
            kill(child, SIGKILL);
        ended = ended || wait_a_while(child, &status);
        if (!ended)
            kill(child, SIGKILL);
        result.left = ended ? 0 : (int)child;
        result.end = !in_time || !ended ? CHILD_LATE : WIFEXITED(status) ? CHILD_EXITED : CHILD_KILLED;
        result.status = WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status);
    }
    close(ends[0]);
    if (before.sa_handler == SIG_IGN)
        signal(SIGCHLD, SIG_IGN);
    return result;
}

void child_follow_parent(int parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) // it died before
        _exit(EXIT_FAILURE);
}
