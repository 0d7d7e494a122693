// What is said on a terminal: bytes that would act on it are shown as numbers, text in any script stays.
#include "runtime/machine/say.h" // under test
#include "test/testing.h"        // cmocka

static void bytes_that_act_on_a_terminal_are_shown(void **state) {
    static const char *const cases[][2] = {
        {"a name.bin", "a name.bin"},
        {"\x1b[31mred", "\\x1b[31mred"},
        {"\a\b\t\r\x7f", "\\x07\\x08\\x09\\x0d\\x7f"},
        {"Zug\u00e4nge \u4f60\u597d \U0001f600", "Zug\u00e4nge \u4f60\u597d \U0001f600"},
        {"\xc2\x9b"
         "31m",
         "\\xc2\\x9b31m"}, // CSI in one character
        {"\x9b"
         "31m \xff",
         "\\x9b31m \\xff"},                           // CSI in one byte
        {"\xe4\xbd", "\\xe4\\xbd"},                   // a character that is cut short
        {"\xe0\x80\x9b", "\\xe0\\x80\\x9b"},          // ESC, overlong
        {"\xf0\x80\x80\x9b", "\\xf0\\x80\\x80\\x9b"}, // longer
        {"\xed\xa0\x80", "\\xed\\xa0\\x80"},          // a surrogate
        {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"}, // U+110000
        {"\u00a0\u0800\ud7ff\U00010000\U0010ffff", "\u00a0\u0800\ud7ff\U00010000\U0010ffff"},
        {"x\ntrain_gpt: y", "x\\x0atrain_gpt: y"},                      // would look like a line of its own
        {"would help:\n  this\n  that", "would help:\n  this\n  that"}, // a list may have lines of its own
        {"the end\n", "the end\n"},
        {"", ""},
    };
    char shown[256];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        say_escape(shown, sizeof shown, cases[i][0]);
        assert_string_equal(shown, cases[i][1]);
    }
}

static void a_text_is_cut_between_its_characters(void **state) {
    char shown[8];
    say_escape(shown, sizeof shown, "abc\x1b[0m");
    assert_string_equal(shown, "abc\\x1b");
    say_escape(shown, sizeof shown, "abcd\x1b[0m");
    assert_string_equal(shown, "abcd");
    say_escape(shown, sizeof shown, "abcdef\u00e4");
    assert_string_equal(shown, "abcdef");
    say_escape(shown, 1, "a");
    assert_string_equal(shown, "");
}

// Checks texts that need more memory than the stack's buffer: they are said whole.
static void long_texts_are_said_whole(void **state) {
    char *text = NULL, *longest = (char *)malloc(5001);
    size_t bytes;
    assert_non_null(longest);
    memset(longest, '\x1b', 5000);
    longest[5000] = '\0';
    FILE *const file = open_memstream(&text, &bytes);
    say(file, "%s|%d\n", longest, 7);
    fclose(file);
    assert_int_equal(bytes, 4 * 5000 + 3);
    assert_int_equal(strncmp(text, "\\x1b\\x1b", 8), 0);
    assert_string_equal(text + 4 * 5000, "|7\n");
    free(longest);
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_that_act_on_a_terminal_are_shown),
        cmocka_unit_test(a_text_is_cut_between_its_characters),
        cmocka_unit_test(long_texts_are_said_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
