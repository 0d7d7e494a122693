// One field of a line of JSON, and a document's digest, by the answers of Python's json.loads and hashlib.
#include "formats/json_field.h"  // under test
#include "formats/text_digest.h" // under test
#include "test/testing.h"        // cmocka

// Finds the field in a copy of the line of exactly its bytes, into room of as many: the sanitizers see any byte beyond.
static bool find(const char *line, size_t bytes, const char *field, char *out) {
    unsigned char *const copy = (unsigned char *)malloc(bytes ? bytes : 1), *const text = (unsigned char *)malloc(
                                                                                bytes ? bytes : 1);
    size_t text_bytes;
    memcpy(copy, line, bytes);
    const bool found = json_field_find(text, &text_bytes, copy, bytes, field);
    if (found) {
        assert_true(text_bytes < bytes);
        memcpy(out, text, text_bytes);
        out[text_bytes] = 0;
    }
    free(copy);
    free(text);
    return found;
}

static void fields_are_found(void **state) {
    static const struct {
        const char *line, *field, *text; // NULL: a parser must look
    } cases[] = {
        {"{\"text\": \"a\"}", "text", "a"},
        {" {\"id\":[1,{\"text\":\"no\"},-0.5e-3,true],\"text\":\"long enough for words\",\"z\":null} \r\n", "text",
         "long enough for words"},
        {"{\"text\": \"\\u00e9 \\ud83c\\udf89 \\\\ \\/ \\n\"}", "text", "\xc3\xa9 \xf0\x9f\x8e\x89 \\ / \n"},
        {"{\"a\": {\"b\": {\"c\": \"deep\"}, \"c\": \"x\"}}", "a.b.c", "deep"},
        {"{\"a.b\": \"name with a dot\"}", "a.b", "name with a dot"},
        {"{\"a\": {\"b\": \"x\"}, \"a\": null}", "a.b", NULL},
        {"{\"a\": {\"b\": \"x\"}, \"a.b\": \"y\"}", "a.b", NULL},
        {"{\"a\": null, \"a\": {\"b\": \"last\"}}", "a.b", "last"},
        {"{\"text\": \"a\", \"text\": \"b\"}", "text", NULL},
        {"{\"te\\u0078t\": \"a\"}", "text", NULL},
        {"{\"text\": \"\\ud83c\"}", "text", NULL},
        {"{\"text\": \"\\udf89\"}", "text", NULL},
        {"{\"text\": \"\xff\"}", "text", NULL},
        {"{\"text\": \"a\tb\"}", "text", NULL},
        {"{\"text\": 3}", "text", NULL},
        {"{\"text\": \"a\"", "text", NULL},
        {"{\"text\": \"a\",}", "text", NULL},
        {"{\"text\": \"a\"} {", "text", NULL},
        {"{\"text\": \"a\", \"n\": 01}", "text", NULL},
        {"{\"text\": \"a\", \"n\": NaN}", "text", NULL},
        {"{\"text\": \"a\", \"n\": -}", "text", NULL},
        {"[\"text\", \"a\"]", "text", NULL},
        {"", "text", NULL},
    };
    char out[200];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const bool found = find(cases[i].line, strlen(cases[i].line), cases[i].field, out);
        if (found != (cases[i].text != NULL) || (found && strcmp(out, cases[i].text) != 0))
            fail_msg("%s: %s", cases[i].line, found ? out : "not found");
    }
}

static void no_beginning_of_a_line_does_harm(void **state) {
    static const char line[] =
        "{\"a\":[1.5e+3,{\"x\":[]},\"\\ud83c\\udf89\"],\"text\":\"0123456789\xe2\x82\xac\\u20ac\"}";
    char out[200];
    for (size_t bytes = 0; bytes < sizeof line - 1; bytes++)
        assert_false(find(line, bytes, "text", out));
    assert_true(find(line, sizeof line - 1, "text", out));
    char nested[2000];
    memset(nested, '[', sizeof nested);
    memcpy(nested, "{\"a\":", 5);
    assert_false(find(nested, sizeof nested, "text", out));
}

// Checks against hashlib.blake2b(bytes(i % 251 for i in range(n)), digest_size=8), as a little-endian number.
static void digests_are_those_of_python(void **state) {
    static const struct {
        size_t bytes;
        uint64_t digest;
    } cases[] = {{0, 0xb4b2797457a0a6e4u},   {1, 0x4882ead1cdd9f694u},   {127, 0x1ec401c351560068u},
                 {128, 0x827e61b6f13dd1c2u}, {129, 0xa650536d7ae467f6u}, {256, 0x3c7a9d538d771a51u},
                 {1000, 0x7f5738a836a89c66u}};
    unsigned char text[1000];
    for (size_t i = 0; i < sizeof text; i++)
        text[i] = (unsigned char)(i % 251);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(text_digest(text, cases[i].bytes), cases[i].digest);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fields_are_found),
        cmocka_unit_test(no_beginning_of_a_line_does_harm),
        cmocka_unit_test(digests_are_those_of_python),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
