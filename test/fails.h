// A user's mistake ends the process (runtime/machine/error.h), so a test makes it in a child. The child must end with
// exit status 2 and print one message on stderr that holds the given words. The child is a fork or, where a test uses a
// GPU, this program started again.
#pragma once
#include "test/testing.h" // cmocka
#include <stdbool.h>      // bool
#include <string.h>       // strstr
#include <sys/wait.h>     // waitpid
#include <unistd.h>       // fork, pipe, dup2, alarm, environ

// Ends a child without the sanitizer's search for leaks: a child that failed leaves its memory behind on purpose.
static void end_child(int status, void *unused) { _exit(status); }

// Runs what is tested, in the child. A child that hangs is a failure.
__attribute__((noreturn)) static inline void run_and_exit(void (*run)(void *), void *argument) {
    on_exit(end_child, NULL);
    alarm(60);
    run(argument);
    _exit(0);
}

// Runs a function in a fork, which can't use a GPU that this process has opened. Puts the child's stderr into message
// (message_bytes); returns its exit status, or -1 if it did not exit. `argument` goes to `run`; NULL where `run` uses
// none.
static inline int run_in_child(void (*run)(void *), void *argument, char *message, size_t message_bytes) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(stdout);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        close(ends[0]);
        dup2(ends[1], STDERR_FILENO);
        run_and_exit(run, argument);
    }
    close(ends[1]);
    size_t length = 0;
    for (ssize_t got = 1; got > 0 && length + 1 < message_bytes; length += got > 0 ? (size_t)got : 0)
        got = read(ends[0], message + length, message_bytes - 1 - length);
    message[length] = '\0';
    close(ends[0]);
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

#ifdef TARGET_CUDA
// CUDA does not work in a fork of a process that has initialized it. So this program is started again for the test that
// runs, with the arguments and the environment that it was started with. The new process comes to the same call of
// assert_fails, by the call's number, and makes it there.
static char **first_arguments, **first_environment; // copied, since setenv changes the environment itself
__attribute__((constructor)) static inline void keep_start(int count, char **arguments, char **environment) {
    size_t n = 0;
    while (environment[n])
        n++;
    first_arguments = arguments;
    first_environment = (char **)malloc((n + 1) * sizeof *environment);
    memcpy(first_environment, environment, (n + 1) * sizeof *environment);
}
// Starts this program again, in a fork, for the call with the number *(int *)call.
static void start_anew(void *call) {
    char number[16];
    snprintf(number, sizeof number, "%d", *(const int *)call);
    environ = first_environment;
    if (freopen("/dev/null", "w", stdout) && setenv("TEST_CHILD_CALL", number, 1) == 0 &&
        setenv("TEST_FILTER", test_name, 1) == 0)
        execv("/proc/self/exe", first_arguments);
    _exit(127);
}
// Does what run_in_child does, in a process that may use a GPU. Returns -2 in the new process at the calls before its
// own, which run nothing.
static inline int run_anew(void (*run)(void *), void *argument, char *message, size_t message_bytes) {
    static const char *counted; // the test whose calls `calls` counts
    static int calls;
    assert_non_null(test_name); // a test with a setup of its own has none
    calls = counted == test_name ? calls + 1 : 1;
    counted = test_name;
    const char *const child_call = getenv("TEST_CHILD_CALL");
    if (!child_call)
        return run_in_child(start_anew, &calls, message, message_bytes);
    if (atoi(child_call) == calls)
        run_and_exit(run, argument);
    return -2;
}
#else
#define run_anew run_in_child
#endif

// Checks that run(argument) ends its process as a user's mistake does. words: what the message must hold, separated by
// '|'.
#define assert_fails(run, argument, words) assert_fails_at((run), (argument), (words), __FILE__, __LINE__)
static inline void assert_fails_at(void (*run)(void *), void *argument, const char *words, const char *file, int line) {
    char message[4096], wanted[1024];
    const int status = run_anew(run, argument, message, sizeof message);
    if (status == -2)
        return;
    bool complete = status == 2;
    snprintf(wanted, sizeof wanted, "%s", words);
    char *rest = NULL;
    for (char *word = strtok_r(wanted, "|", &rest); word; word = strtok_r(NULL, "|", &rest))
        complete = complete && strstr(message, word);
    const char *end = strchr(message, '\n');
    if (!complete || !end || end[1] != '\0') { // one line, no more
        test_case_print();
        print_error("%s:%d: exit status %d, expected 2, one line with: %s\ngot: %s\n", file, line, status, words,
                    message);
        _fail(file, line);
    }
}

// Checks that a parser refused (runtime/machine/error_text.h): `problem` is not NULL and holds `words`.
#define assert_error(problem, words)                                                                                   \
    do {                                                                                                               \
        const char *said_ = (problem);                                                                                 \
        if (!said_ || !strstr(said_, words))                                                                           \
            fail_msg("expected '%s', got: %s", words, said_ ? said_ : "no error");                                     \
    } while (0)
