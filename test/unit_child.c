// runtime/machine/child.h: how a child's end is reported, and what it said.
//
//   unit_child          every test          unit_child child KIND [PARENT]    the child of one test
#include "runtime/machine/child.h"    // under test
#include "runtime/machine/deadline.h" // deadline_clock_s
#include "test/testing.h"             // cmocka
#include <signal.h>                   // raise, kill
#include <stdio.h>                    // printf
#include <string.h>                   // strcmp
#include <unistd.h>                   // fork, pause

static const char *anew; // the argument of child_run with that name
static struct child_result start(char *output, size_t size, const char *kind, double seconds) {
    char program[] = "unit_child", first[] = "child", name[32], parent[16];
    if (test_slowness() > 1) // an emulator of a CPU can't start a program for that CPU as a child
        skip();
    char *const arguments[] = {program, first, name, parent, NULL};
    snprintf(name, sizeof name, "%s", kind);
    snprintf(parent, sizeof parent, "%d", (int)getpid());
    return child_run(output, size, arguments, seconds, anew);
}
// Leaves behind a process that holds the child's output and outlives it.
static void leave_a_process_behind(void) {
    if (fork() == 0) {
        sleep(20);
        _exit(0);
    }
}
static int run_child(const char *kind, int parent) {
    if (strcmp(kind, "stranger") == 0)
        child_follow_parent(1);
    child_follow_parent(parent);
    printf("first line\n");
    if (strcmp(kind, "much") == 0)
        for (int i = 0; i < 100000; i++)
            printf("%d\n", i);
    fflush(stdout);
    if (strcmp(kind, "behind") == 0)
        leave_a_process_behind();
    if (strcmp(kind, "killed") == 0)
        raise(SIGKILL);
    if (strcmp(kind, "late") == 0)
        pause();
    if (strcmp(kind, "closes") == 0) {
        close(STDOUT_FILENO);
        close(STDERR_FILENO);
        usleep(300000);
        return 6;
    }
    if (strcmp(kind, "slow") == 0)
        usleep((useconds_t)(600e3 * test_slowness()));
    fprintf(stderr, "last line\n");
    if (strcmp(kind, "slow") == 0)
        usleep((useconds_t)(600e3 * test_slowness()));
    return strcmp(kind, "behind") == 0 ? 7 : 5;
}

static void its_status_and_both_outputs_are_told(void **state) {
    char output[64];
    const struct child_result result = start(output, sizeof output, "exits", 30);
    assert_int_equal(result.end, CHILD_EXITED);
    assert_int_equal(result.status, 5);
    assert_string_equal(output, "first line\nlast line\n");
}
static void the_middle_of_what_does_not_fit_is_dropped(void **state) {
    for (size_t size = 24; size <= 27; size++) {
        char output[27];
        const struct child_result result = start(output, size, "much", 30);
        const size_t length = strlen(output);
        assert_int_equal(result.end, CHILD_EXITED);
        assert_int_equal(result.status, 5);
        assert_in_range(length, size - 1 - size / 4, size - 1);
        assert_memory_equal(output, "first line\n", 11);
        assert_string_equal(output + length - 6, " line\n");
    }
}
// Checks that a child's end is reported where a launcher ignores SIGCHLD, which its programs inherit.
static void a_parent_that_ignores_its_children_is_told(void **state) {
    char output[64];
    signal(SIGCHLD, SIG_IGN);
    const struct child_result result = start(output, sizeof output, "exits", 30);
    void (*const after)(int) = signal(SIGCHLD, SIG_DFL);
    assert_int_equal(result.end, CHILD_EXITED);
    assert_int_equal(result.status, 5);
    assert_true(after == SIG_IGN);
}
// Checks a child's time limit: it begins anew with the text that the child prints after 0.6 of its seconds.
static void its_time_begins_anew(void **state) {
    char output[64];
    const double seconds = test_slowness();
    anew = "last";
    struct child_result result = start(output, sizeof output, "slow", seconds);
    assert_int_equal(result.end, CHILD_EXITED);
    anew = "never";
    result = start(output, sizeof output, "slow", seconds);
    assert_int_equal(result.end, CHILD_LATE);
    assert_int_equal(result.left, 0);
    anew = NULL;
}
static void its_signal_is_told(void **state) {
    char output[64];
    const struct child_result result = start(output, sizeof output, "killed", 30);
    assert_int_equal(result.end, CHILD_KILLED);
    assert_int_equal(result.status, SIGKILL);
}
static void one_that_hangs_is_killed(void **state) {
    char output[64];
    const double since_s = deadline_clock_s();
    const struct child_result result = start(output, sizeof output, "late", 0.3);
    assert_int_equal(result.end, CHILD_LATE);
    assert_true(deadline_clock_s() - since_s < 5 * test_slowness());
}
// Checks that neither a process that holds a child's output, nor an output that is closed early, hides the child's end.
static void its_end_is_its_own(void **state) {
    char output[64];
    const double since_s = deadline_clock_s();
    struct child_result result = start(output, sizeof output, "behind", 15 * test_slowness());
    assert_int_equal(result.end, CHILD_EXITED);
    assert_int_equal(result.status, 7);
    assert_string_equal(output, "first line\nlast line\n");
    assert_true(deadline_clock_s() - since_s < 10 * test_slowness());
    result = start(output, sizeof output, "closes", 15);
    assert_int_equal(result.end, CHILD_EXITED);
    assert_int_equal(result.status, 6);
}
static void one_whose_parent_is_gone_ends(void **state) {
    char output[64];
    const struct child_result result = start(output, sizeof output, "stranger", 30);
    assert_int_equal(result.end, CHILD_EXITED);
    assert_int_equal(result.status, EXIT_FAILURE);
    assert_string_equal(output, "");
}

int main(int argc, char **argv) {
    if (argc == 4)
        return run_child(argv[2], atoi(argv[3]));
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(its_status_and_both_outputs_are_told),
        cmocka_unit_test(the_middle_of_what_does_not_fit_is_dropped),
        cmocka_unit_test(a_parent_that_ignores_its_children_is_told),
        cmocka_unit_test(its_time_begins_anew),
        cmocka_unit_test(its_signal_is_told),
        cmocka_unit_test(one_that_hangs_is_killed),
        cmocka_unit_test(its_end_is_its_own),
        cmocka_unit_test(one_whose_parent_is_gone_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
