// A user's mistake ends the process (runtime/machine/error.h), so it is tested in a child: exit status 2, and one message on
// stderr that holds the given words.
#pragma once
#include "test/testing.h" // cmocka
#include <stdbool.h>      // bool
#include <string.h>       // strstr
#include <sys/wait.h>     // waitpid
#include <unistd.h>       // fork, pipe, dup2, alarm

// A child that failed leaves its memory behind on purpose, so it ends without the sanitizer's search for leaks.
static void end_child(int status, void *unused) { _exit(status); }

// The child's stderr goes to `message`; returns its exit status, or -1 if it did not exit.
static inline int run_in_child(void (*run)(void *), void *argument, char *message, size_t message_bytes) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(stdout);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        close(ends[0]);
        dup2(ends[1], STDERR_FILENO);
        on_exit(end_child, NULL);
        alarm(60); // one that hangs is a failure
        run(argument);
        _exit(0);
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

// `words`: what the message must hold, separated by '|'.
#define assert_fails(run, argument, words) assert_fails_at((run), (argument), (words), __FILE__, __LINE__)
static inline void assert_fails_at(void (*run)(void *), void *argument, const char *words, const char *file, int line) {
    char message[4096], wanted[1024];
    const int status = run_in_child(run, argument, message, sizeof message);
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

// What a parser says (runtime/machine/error_text.h): a text that holds `words`.
#define assert_error(problem, words)                                                                                   \
    do {                                                                                                               \
        const char *said_ = (problem);                                                                                 \
        if (!said_ || !strstr(said_, words))                                                                           \
            fail_msg("expected '%s', got: %s", words, said_ ? said_ : "no error");                                     \
    } while (0)
