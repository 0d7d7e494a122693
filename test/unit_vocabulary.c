// The table of tokens' text: malformed files are rejected, and no sample can steer a terminal.
#include "formats/vocabulary.h" // under test
#include "test/fails.h"         // assert_fails
#include "test/testing.h"       // cmocka, test_random

// Writes a file of the tokens "", "a", "\xc3", "\xa9" (two halves of one character), "\x1b[2J", "int main", with end of
// text 5; returns its bytes.
static size_t file_bytes(unsigned char *out) {
    static const char *const tokens[] = {"", "a", "\xc3", "\xa9", "\x1b[2J", "int main"};
    const uint32_t header[] = {1, 6, 5, 0};
    uint32_t offset = 0;
    memcpy(out, "GPTVOCAB", 8);
    memcpy(out + 8, header, 16);
    for (int i = 0; i < 6; i++) {
        memcpy(out + 24 + 4 * i, &offset, 4);
        memcpy(out + 52 + offset, tokens[i], strlen(tokens[i]));
        offset += (uint32_t)strlen(tokens[i]);
    }
    memcpy(out + 48, &offset, 4);
    return 52 + offset;
}
static const char *parse(const unsigned char *data, size_t bytes, struct error_text *error) {
    struct vocabulary vocabulary;
    unsigned char *copy =
        // exactly these bytes, so that the sanitizer sees a read beyond them
        (unsigned char *)malloc(bytes ? bytes : 1);
    memcpy(copy, data, bytes);
    const char *problem = vocabulary_parse(&vocabulary, copy, bytes, "tiny", error);
    for (int token = 0; !problem && token < vocabulary.size; token++) { // every accepted token can be decoded
        int length;
        const unsigned char *text = vocabulary_decode(&vocabulary, token, &length);
        assert_true(text >= copy && length >= 0 && text + length <= copy + bytes);
    }
    free(copy);
    return problem;
}

static void test_malformed(void **state) {
    static const unsigned char values[] = {0, 1, 2, 0x7f, 0x80, 0xff};
    struct error_text error;
    unsigned char data[256];
    const size_t bytes = file_bytes(data);
    assert_null(parse(data, bytes, &error));
    for (size_t count = 0; count < bytes; count++)
        assert_non_null(parse(data, count, &error));
    data[bytes] = 0;
    assert_non_null(parse(data, bytes + 1, &error));
    for (size_t place = 0; place < bytes; place++)
        for (size_t v = 0; v < sizeof values; v++) {
            const unsigned char before = data[place];
            data[place] = values[v];
            parse(data, bytes, &error);
            data[place] = before;
        }
    const struct {
        int place;
        uint32_t value;
        const char *words;
    } changes[] = {{0, 0, "not a vocabulary"},
                   {8, 2, "version 2; expected 1"},
                   {12, 0, "promises 0"},
                   {12, 7, "offset"},
                   {12, 0xffffffff, "promises 4294967295"},
                   {16, 6, "names token 6"},
                   {24, 1, "offset 0 is 1"},
                   {28, 9, "offset 2 is 1"},
                   {32, 1000, "offset 2 is 1000"}};
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        unsigned char damaged[256];
        memcpy(damaged, data, sizeof damaged);
        memcpy(damaged + changes[i].place, &changes[i].value, 4);
        const char *problem = parse(damaged, bytes, &error);
        if (!problem || !strstr(problem, changes[i].words))
            fail_msg("expected '%s', got: %s", changes[i].words, problem);
    }
}

static void assert_prints(const struct vocabulary *vocabulary, const int32_t *tokens, int count, const char *expected) {
    char *printed = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&printed, &length);
    vocabulary_print(out, vocabulary, tokens, count);
    fclose(out);
    assert_string_equal(printed, expected);
    free(printed);
}
static void assert_bytes_print(const char *bytes, const char *expected) {
    struct vocabulary vocabulary = vocabulary_open(NULL, 257);
    int32_t tokens[64];
    const int count = (int)strlen(bytes);
    for (int i = 0; i < count; i++)
        tokens[i] = (unsigned char)bytes[i];
    assert_prints(&vocabulary, tokens, count, expected);
    vocabulary_close(&vocabulary);
}

static void test_print(void **state) {
    char path[TEST_PATH];
    unsigned char data[256];
    const size_t bytes = file_bytes(data);
    const int fd = mkstemp(test_template(path, "unit_vocabulary"));
    assert_int_equal(write(fd, data, bytes), bytes);
    close(fd);
    struct vocabulary vocabulary = vocabulary_open(path, 1000);
    unlink(path);
    assert_int_equal(vocabulary.size, 6);
    assert_int_equal(vocabulary.end_of_text, 5);
    const int32_t tokens[] = {5, 0, 1, 2, 3, 4, 6, -1, 2};
    assert_prints(&vocabulary, tokens, 9, "int maina\xc3\xa9\\x1b[2J[6][-1]\\xc3");
    vocabulary_close(&vocabulary);
}

static void test_bytes(void **state) {
    assert_bytes_print("int x;\n\tif", "int x;\n\tif");
    assert_bytes_print("\x1b]0;title\a\r\b\x7f", "\\x1b]0;title\\x07\\x0d\\x08\\x7f");
    assert_bytes_print("\xc3\xa9\xe2\x82\xac\xf0\x9f\x8e\x89", "\xc3\xa9\xe2\x82\xac\xf0\x9f\x8e\x89"); // 2, 3, 4 bytes
    assert_bytes_print("\xc2\x9b"
                       "2J",
                       "\\xc2\\x9b2J"); // C1: an escape sequence in one character
    assert_bytes_print("\xe2\x80\xae"
                       "x",
                       "\\xe2\\x80\\xaex");                         // right-to-left override
    assert_bytes_print("\xd8\x9cx", "\\xd8\\x9cx");                 // Arabic letter mark
    assert_bytes_print("\xc3x\xe2\x82", "\\xc3x\\xe2\\x82");        // unfinished, in the middle and at the end
    assert_bytes_print("\xe2\x82\xc3\xa9", "\\xe2\\x82\xc3\xa9");   // unfinished, then a whole character
    assert_bytes_print("\xc0\x9b\x80\xff", "\\xc0\\x9b\\x80\\xff"); // overlong, lone, never valid
    assert_bytes_print("\xe0\x82\x9b\xed\xa0\x80", "\\xe0\\x82\\x9b\\xed\\xa0\\x80"); // overlong, surrogate
    assert_bytes_print("\xe0\x83\xa9", "\\xe0\\x83\\xa9");          // overlong, of a harmless character
    assert_bytes_print("\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"); // beyond Unicode
    struct vocabulary vocabulary = vocabulary_open(NULL, 257);
    const int32_t tokens[] = {256, 'a', 257, 0};
    assert_prints(&vocabulary, tokens, 4, "<|endoftext|>a[257]\\x00");
    assert_int_equal(vocabulary.end_of_text, 256);
    vocabulary_close(&vocabulary);
    vocabulary = vocabulary_open(NULL, 256);
    assert_prints(&vocabulary, tokens, 2, "[256]a");
    assert_int_equal(vocabulary.end_of_text, -1);
    vocabulary_close(&vocabulary);
    vocabulary = vocabulary_open(NULL, 50257); // without a table: ids
    assert_prints(&vocabulary, tokens, 2, "[256][97]");
    vocabulary_close(&vocabulary);
}

// Checks that whatever the bytes are, nothing that is printed has a control character other than newline and tab.
static void test_any_bytes_are_harmless(void **state) {
    uint64_t random = 5;
    struct vocabulary vocabulary = vocabulary_open(NULL, 256);
    for (int round = 0; round < 200; round++) {
        int32_t tokens[500];
        char *printed = NULL;
        size_t length = 0;
        for (int i = 0; i < 500; i++)
            tokens[i] = (int32_t)(round % 2 ? 0x80 + test_random(&random) % 0x80 : test_random(&random) % 0x100);
        FILE *out = open_memstream(&printed, &length);
        vocabulary_print(out, &vocabulary, tokens, 500);
        fclose(out);
        for (size_t i = 0; i < length; i++) {
            const unsigned char c = (unsigned char)printed[i], next = (unsigned char)printed[i + 1];
            assert_true(c >= 0x20 || c == '\n' || c == '\t');
            assert_true(c != 0x7f && !(c == 0xc2 && next < 0xa0));
        }
        free(printed);
    }
    vocabulary_close(&vocabulary);
}

static void test_find(void **state) {
    char folder[TEST_PATH], shard[256], path[256], expected[256];
    static const char *const names[] = {"vocabulary.bin", "c_vocabulary.bin", "c_train_vocabulary.bin"};
    assert_non_null(mkdtemp(test_template(folder, "unit_vocabulary")));
    snprintf(shard, sizeof shard, "%s/c_train_000.bin", folder);
    assert_false(vocabulary_find(shard, path, sizeof path));
    for (int i = 0; i < 3; i++) { // the most specific one wins
        snprintf(expected, sizeof expected, "%s/%s", folder, names[i]);
        fclose(fopen(expected, "wb"));
        assert_true(vocabulary_find(shard, path, sizeof path));
        assert_string_equal(path, expected);
        assert_false(vocabulary_find(shard, path, strlen(shard))); // there is no room
    }
    for (int i = 0; i < 3; i++) {
        snprintf(expected, sizeof expected, "%s/%s", folder, names[i]);
        unlink(expected);
    }
    rmdir(folder);
    assert_false(vocabulary_find("", path, sizeof path));
}

static void open_vocabulary(void *path) {
    struct vocabulary vocabulary = vocabulary_open((const char *)path, 257);
    vocabulary_close(&vocabulary);
}
static void test_mistakes(void **state) {
    char path[TEST_PATH], missing[] = "/nonexistent/vocabulary.bin", folder[] = "/tmp";
    const int fd = mkstemp(test_template(path, "unit_vocabulary"));
    assert_int_equal(write(fd, "GPTVOCAB is not all", 19), 19);
    close(fd);
    assert_fails(open_vocabulary, path, "unit_vocabulary.|not a vocabulary file|prepare_data.py");
    assert_fails(open_vocabulary, missing, "/nonexistent/vocabulary.bin: can't be opened");
    assert_fails(open_vocabulary, folder, "/tmp: ");
    unlink(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_malformed), cmocka_unit_test(test_print),
        cmocka_unit_test(test_bytes),     cmocka_unit_test(test_any_bytes_are_harmless),
        cmocka_unit_test(test_find),      cmocka_unit_test(test_mistakes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
