// Cases that each run in a process of their own, this program again with the case's name, since what goes wrong there (a
// finding of the emulator, an error of the GPU's) ends a process.
#pragma once
#include "test/testing.h" // cmocka
#include <stdio.h>        // popen
#include <string.h>       // memset
#include <sys/wait.h>     // WIFEXITED
#include <unistd.h>       // readlink

// The child's output goes to `message`; returns its status, as of wait.
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
// For faults that must be found. Without its fault ("well" behind the name) a case ends well; with it, `message` and the
// returned status say what was found.
static int run_with_and_without(const char *name, char *message, size_t size) {
    const int well = run_apart(name, "well", message, size);
    if (well != 0)
        fail_msg("%s: without the fault: status %d: %s", name, well, message);
    return run_apart(name, "", message, size);
}
// A test of each row of a table, whose rows have a name.
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
