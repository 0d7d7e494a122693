// JSON that anyone may have written: limits, and what is said of each member that is not as it should be.
#include "runtime/text/json_parse.h" // under test
#include "test/fails.h"              // assert_error
#include "test/testing.h"            // cmocka

// Parses a copy of text (bytes) that ends where the text ends, so that the sanitizer sees a read beyond it.
static const char *parse_bytes(json_t **root, const char *text, size_t bytes, struct error_text *error) {
    unsigned char *copy = (unsigned char *)malloc(bytes ? bytes : 1);
    memcpy(copy, text, bytes);
    const char *problem = json_parse_object(root, copy, bytes, "x.json", error);
    free(copy);
    return problem;
}
static const char *parse(json_t **root, const char *text, struct error_text *error) {
    return parse_bytes(root, text, strlen(text), error);
}

static void test_not_json(void **state) {
    const struct {
        const char *text, *words;
    } bad[] = {{"", "x.json: is empty; expected JSON"},
               {"{\"a\": 1,\n \"b\": }", "x.json: line 2, column 7: is not valid JSON: unexpected token near '}'"},
               {"{\"a\": 1, \"a\": 2}", "line 1, column 12: is not valid JSON: duplicate object key near '\"a\"'"},
               {"{} {}", "end of file expected"},
               {"{\"a\": 1", "x.json: line 1, column 7: is not valid JSON"},
               {"[1]", "x.json: is an array; expected an object"},
               {"true", "x.json: is true; expected an object"},
               {"{\"a\": 9223372036854775808}", "too big integer"},
               {"{\"a\": 1e999}", "real number overflow"},
               {"{\"a\": NaN}", "is not valid JSON: invalid token near 'NaN'"},
               {"{\"a\": \"\xff\"}", "unable to decode byte 0xff"},
               {"{\"a\": \"\\ud800\"}", "is not valid JSON"},
               {"{\"a\\u0000b\": 1}", "NUL byte in object key"},
               {"{\"\x1b[2J", "is not valid JSON: control character 0x1b near '\"'"}};
    struct error_text error;
    json_t *root;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_error(parse(&root, bad[i].text, &error), bad[i].words);
        assert_null(root);
    }
    assert_error(parse(&root, "{\"a\": \x1b[2J}", &error), "invalid token near '\\x1b'");
    assert_null(strchr(error.text, '\x1b')); // no message may steer a terminal
}

static void test_truncated(void **state) {
    static const char text[] = "{\"a\": [1, 2.5e3, \"h\xc3\xa9\\u00e9\\n\", null, true], \"b\": {\"c\": {}}}";
    struct error_text error;
    json_t *root;
    for (size_t bytes = 0; bytes < sizeof text - 1; bytes++)
        assert_non_null(parse_bytes(&root, text, bytes, &error));
    assert_null(parse_bytes(&root, text, sizeof text - 1, &error));
    json_decref(root);
}

static const char *parse_repeated(const char *before, const char *unit, size_t count, const char *after,
                                  struct error_text *error) {
    const size_t length = strlen(unit), begin = strlen(before);
    char *text = (char *)malloc(begin + length * count + strlen(after) + 1);
    strcpy(text, before);
    for (size_t i = 0; i < count; i++)
        memcpy(text + begin + i * length, unit, length);
    strcpy(text + begin + count * length, after);
    json_t *root;
    const char *problem = parse(&root, text, error);
    json_decref(root);
    free(text);
    return problem;
}
static void test_limits(void **state) {
    struct error_text error;
    assert_error(parse_repeated("{\"a\":", "[", 64, "", &error), "byte 68: is nested too deep; expected at most 64");
    assert_error(parse_repeated("{\"a\":", "[", 63, "", &error), "is not valid JSON"); // not too deep, but not closed
    assert_error(parse_repeated("{\"a\":[", "[],", 3 << 20, "1]}", &error), "has too many values");
    assert_null(parse_repeated("{\"a\":[", "1,", 1 << 16, "1]}", &error));
    assert_null(parse_repeated("{\"a\":\"", "[\\\"{", 100, "\"}", &error)); // brackets in a string nest nothing
}

static void test_members(void **state) {
    struct error_text error;
    json_t *root, *value;
    int64_t integer = -1;
    double number = -1;
    bool flag = true;
    const char *text = NULL;
    assert_null(parse(&root,
                      "{\"i\": 7, \"r\": 2.5, \"f\": false, \"s\": \"x\", \"nul\": \"a\\u0000b\", \"n\": null, "
                      "\"o\": {\"k\": 1}, \"a\": [1]}",
                      &error));
    assert_null(json_get_int(root, "i", 7, 8, &integer, "x", &error));
    assert_int_equal(integer, 7);
    assert_null(json_get_number(root, "i", 7, 7, &number, "x", &error));
    assert_true(number == 7);
    assert_null(json_get_number(root, "r", 0, 3, &number, "x", &error));
    assert_true(number == 2.5);
    assert_null(json_get_bool(root, "f", &flag, "x", &error));
    assert_false(flag);
    assert_null(json_get_string(root, "s", &text, "x", &error));
    assert_string_equal(text, "x");
    assert_null(json_get_object(root, "o", &value, "x", &error));
    assert_null(json_get_int(value, "k", 0, 2, &integer, "x", &error));
    assert_null(json_get_array(root, "a", &value, "x", &error));

    assert_error(json_get_int(root, "i", 0, 7, &integer, "x", &error), "x: i is 7; expected 0 to 6");
    assert_error(json_get_int(root, "i", 8, 9, &integer, "x", &error), "x: i is 7; expected 8 to 8");
    assert_error(json_get_int(root, "r", 0, 9, &integer, "x", &error), "x: r is a number with a fraction");
    assert_error(json_get_int(root, "none", 0, 9, &integer, "x", &error), "x: none is absent; expected an integer");
    assert_error(json_get_int(root, "n", 0, 9, &integer, "x", &error), "x: n is null; expected an integer");
    assert_error(json_get_number(root, "r", 0, 2, &number, "x", &error), "x: r is 2.5; expected 0 to 2");
    assert_error(json_get_number(root, "r", 3, 4, &number, "x", &error), "x: r is 2.5; expected 3 to 4");
    assert_error(json_get_number(root, "s", 0, 2, &number, "x", &error), "x: s is a string; expected a number");
    assert_error(json_get_bool(root, "i", &flag, "x", &error), "x: i is an integer; expected true or false");
    assert_error(json_get_string(root, "o", &text, "x", &error), "x: o is an object; expected a string");
    assert_error(json_get_string(root, "nul", &text, "x", &error), "x: nul is a string with a NUL byte");
    assert_error(json_get_object(root, "a", &value, "x", &error), "x: a is an array; expected an object");
    assert_error(json_get_array(root, "f", &value, "x", &error), "x: f is false; expected an array");
    assert_error(json_get_array(root, "\x1b[2J", &value, "x", &error), "x: \\x1b[2J is absent");
    assert_int_equal(integer, 1); // a failed call leaves it
    json_decref(root);
}

static void test_optional_members(void **state) {
    struct error_text error;
    json_t *root, *value;
    int64_t integer;
    double number;
    bool flag;
    const char *text;
    assert_null(parse(&root, "{\"n\": null, \"i\": 7, \"b\": true, \"s\": \"x\", \"o\": {}, \"a\": []}", &error));
    const char *const absent[] = {"n", "none"};
    for (int i = 0; i < 2; i++) {
        assert_null(json_opt_int(root, absent[i], 0, 1, 42, &integer, "x", &error)); // the fallback has no bounds
        assert_int_equal(integer, 42);
        assert_null(json_opt_number(root, absent[i], 0, 1, 0.5, &number, "x", &error));
        assert_true(number == 0.5);
        assert_null(json_opt_bool(root, absent[i], true, &flag, "x", &error));
        assert_true(flag);
        assert_null(json_opt_string(root, absent[i], "fallback", &text, "x", &error));
        assert_string_equal(text, "fallback");
        assert_null(json_opt_object(root, absent[i], &value, "x", &error));
        assert_null(value);
        assert_null(json_opt_array(root, absent[i], &value, "x", &error));
        assert_null(value);
    }
    assert_null(json_opt_int(root, "i", 0, 8, 42, &integer, "x", &error));
    assert_int_equal(integer, 7);
    assert_null(json_opt_bool(root, "b", false, &flag, "x", &error));
    assert_true(flag);
    assert_null(json_opt_string(root, "s", NULL, &text, "x", &error));
    assert_string_equal(text, "x");
    assert_null(json_opt_object(root, "o", &value, "x", &error));
    assert_non_null(value);
    assert_null(json_opt_array(root, "a", &value, "x", &error));
    assert_non_null(value);
    assert_error(json_opt_int(root, "i", 0, 7, 42, &integer, "x", &error), "x: i is 7; expected 0 to 6");
    assert_error(json_opt_number(root, "s", 0, 7, 42, &number, "x", &error), "x: s is a string; expected a number");
    assert_error(json_opt_bool(root, "i", true, &flag, "x", &error), "expected true or false");
    assert_error(json_opt_string(root, "i", NULL, &text, "x", &error), "expected a string");
    assert_error(json_opt_object(root, "a", &value, "x", &error), "expected an object");
    assert_error(json_opt_array(root, "o", &value, "x", &error), "expected an array");
    json_decref(root);
}

static void test_shown_text_is_harmless(void **state) {
    assert_string_equal(json_show("a\x1b[2J\n\xc3\xa9").text, "a\\x1b[2J\\x0a\\xc3\\xa9");
    assert_string_equal(json_show_bytes("a\0b", 3).text, "a\\x00b");
    char text[400];
    // it is cut in time, however many bytes a character is shown with
    for (size_t length = 0; length < sizeof text; length++) {
        memset(text, length % 2 ? 'x' : '\n', length);
        const struct json_shown shown = json_show_bytes(text, length);
        assert_true(memchr(shown.text, 0, sizeof shown.text));
        assert_true(strlen(shown.text) == length * (length % 2 ? 1 : 4) || strstr(shown.text, "..."));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_not_json),         cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_limits),           cmocka_unit_test(test_members),
        cmocka_unit_test(test_optional_members), cmocka_unit_test(test_shown_text_is_harmless),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
