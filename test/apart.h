// Runs each case in a process of its own: this program again, with the case's name. What goes wrong there (a finding of
// the emulator, an error of the GPU) ends a process.
#pragma once
#include "test/testing.h" // cmocka
#include <stdio.h>        // popen
#include <string.h>       // memset
#include <sys/wait.h>     // WIFEXITED
#include <unistd.h>       // readlink

// Runs this program with the arguments `name` and `how`. Puts the child's stdout and stderr into message (size bytes);
// returns its status as wait() gives it.
static int run_apart(const char *name, const char *how, char *message, size_t size) {
    char program[512], command[1024];
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    assert_true(length > 0);
    program[length] = 0;
    snprintf(command, sizeof command, "'%s' %s %s 2>&1", program, name, how);
    FILE *child = popen(command, "r");
    assert_non_null(child);
    message[fread(message, 1, size - 1, child)] = 0;
    return pclose(child);
}
// Runs a case whose fault must be found. Without the fault ("well" after the name) the case must succeed. With it,
// message (size bytes) and the returned status, as wait() gives it, say what was found.
static int run_with_and_without(const char *name, char *message, size_t size) {
    const int well = run_apart(name, "well", message, size);
    if (well != 0)
        fail_msg("%s: without the fault: status %d: %s", name, well, message);
    return run_apart(name, "", message, size);
}
// Runs a test for each row of a table whose rows have a name; the row is the test's *state.
#define RUN_EACH(rows, count, test)                                                                                    \
    do {                                                                                                               \
        struct CMUnitTest tests_[count];                                                                               \
        memset(tests_, 0, sizeof tests_);                                                                              \
        for (int i_ = 0; i_ < (count); i_++) {                                                                         \
            tests_[i_].name = rows[i_].name;                                                                           \
            tests_[i_].test_func = test;                                                                               \
            tests_[i_].initial_state = (void *)&rows[i_];                                                              \
        }                                                                                                              \
        return cmocka_run_group_tests(tests_, NULL, NULL);                                                             \
    } while (0)
