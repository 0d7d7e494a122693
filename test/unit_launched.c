// The names of what was enqueued last.
#include "runtime/machine/launched.h" // under test
#include "test/testing.h"             // cmocka

static void the_newest_is_first_and_the_oldest_are_left_out(void **state) {
    char text[256];
    static const char *const names[] = {"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m"};
    assert_string_equal(launched_last(text, sizeof text), "");
    launched_record("first");
    assert_string_equal(launched_last(text, sizeof text), "first");
    launched_record("second");
    assert_string_equal(launched_last(text, sizeof text), "second, first");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        launched_record(names[i]);
    assert_string_equal(launched_last(text, sizeof text), "m, l, k, j, i, h, g, f, e, d, c, b");
}
static void what_repeats_is_named_once(void **state) {
    char text[256];
    launched_record("norm");
    for (int i = 0; i < 9; i++)
        launched_record("a graph");
    launched_record("norm");
    assert_string_equal(launched_last(text, sizeof text), "norm, a graph, norm, m");
}
static void a_name_is_found_in_an_expression(void **state) {
    char text[256];
    launched_record("(amax ? norm_kernel<t, 1, true> : norm_kernel<t, 1, false>)");
    launched_record("rope_kernels");
    launched_record("a_kernel_of ? plain : x_kernel");
    launched_record("_kernel");
    for (int i = 0; i < 8; i++)
        launched_record("adamw_kernel<true>");
    assert_string_equal(launched_last(text, sizeof text), "adamw_kernel, _kernel, x_kernel, rope_kernels, norm_kernel");
}
static void what_does_not_fit_is_cut(void **state) {
    char text[8] = "1234567";
    assert_string_equal(launched_last(text, 7), "adamw_");
    assert_string_equal(launched_last(text, 1), "");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_newest_is_first_and_the_oldest_are_left_out),
        cmocka_unit_test(what_repeats_is_named_once),
        cmocka_unit_test(a_name_is_found_in_an_expression),
        cmocka_unit_test(what_does_not_fit_is_cut),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
