// Event files of TensorBoard, byte by byte; on a full disk; and the name of a second file.
#include "runtime/text/event_file.c" // under test
#include "test/fails.h"              // assert_fails, run_in_child
#include "test/testing.h"            // cmocka
#include <signal.h>                  // SIGXFSZ
#include <sys/resource.h>            // setrlimit

static void crcs_are_those_of_records(void **state) {
    // CRC-32C of RFC 3720, appendix B.4, and of "123456789", masked.
    const struct {
        uint32_t crc;
        const char *text;
        size_t bytes;
    } known[] = {{0xe3069283, "123456789", 9},
                 {0x8a9136aa, "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 32},
                 {0, "", 0}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const uint32_t crc = known[i].crc;
        assert_int_equal(masked_crc(known[i].text, known[i].bytes), (uint32_t)((crc >> 15 | crc << 17) + 0xa282ead8));
    }
}

static char folder[TEST_PATH];
static int make_folder(void **state) { return mkdtemp(test_template(folder, "unit_event_file")) ? 0 : -1; }
static int remove_folder(void **state) { return rmdir(folder); }

// Reads the file and removes it; *bytes: its length. The caller frees what is returned.
static unsigned char *take(const char *path, size_t *bytes) {
    enum { ROOM = 1 << 16 };
    unsigned char *data = (unsigned char *)malloc(ROOM);
    FILE *const file = fopen(path, "r");
    assert_non_null(file);
    *bytes = fread(data, 1, ROOM, file);
    fclose(file);
    unlink(path);
    return data;
}
// Checks the record at *at, whose event begins with a wall time and the step, and that the rest of the event is
// `expected` (n bytes). Moves *at behind the record.
static void check_record(const unsigned char **at, int step, const char *expected, size_t n) {
    uint64_t length;
    uint32_t crc;
    double seconds;
    memcpy(&length, *at, sizeof length);
    assert_int_equal(length, 1 + 8 + 2 + n);
    memcpy(&crc, *at + 8, sizeof crc);
    assert_int_equal(crc, masked_crc(*at, 8));
    const unsigned char *const event = *at + 12;
    memcpy(&crc, event + length, sizeof crc);
    assert_int_equal(crc, masked_crc(event, length));
    assert_int_equal(event[0], 0x09);
    memcpy(&seconds, event + 1, sizeof seconds);
    assert_true(seconds > 1.7e9 && seconds < 1e11);
    assert_int_equal(event[9], 0x10);
    assert_int_equal(event[10], step);
    assert_memory_equal(event + 11, expected, n);
    *at = event + length + 4;
}

// What stands behind wall time and step, written down from the messages' definitions, not from what the code does.
static void the_bytes_of_an_event_file(void **state) {
    static const char line[] =
        "{\"step\": 7, \"time\": \"2026-11-28T12:00:00.000Z\", \"loss\": 1.5, \"mfu\": null, \"fp8\": "
        "{\"qkv\": {\"input\": [0.25, 0]}}, \"samples\": {\"1\": \"a\\nb\"}}\n",
                      nothing[] = "{\"step\": 8, \"time\": \"2026-11-28T12:00:00.000Z\"}\n",
                      lost[] = "{\"step\": 9, \"loss\": null}\n";
    struct event_file *const events = event_file_open(folder, 6);
    char path[PATH_MAX];
    size_t bytes;
    snprintf(path, sizeof path, "%s", events->path);
    event_file_add(events, line, sizeof line - 1);
    event_file_add(events, nothing, sizeof nothing - 1); // no event
    event_file_add(events, lost, sizeof lost - 1);
    event_file_add(events, "no JSON", 7);
    event_file_close(events);
    unsigned char *const data = take(path, &bytes);
    const unsigned char *at = data;
    static const char version[] = "\x1a\x0d"
                                  "brain.Event:2",
                      start[] = "\x3a\x02\x08\x01";
    static const char summary[] =
        "\x2a\x7c" // 124 bytes: a value of 17 with its tag and length, one of 30, of 28, of 41
        "\x0a\x11\x0a\x0aloss/train\x15\x00\x00\xc0\x3f"
        "\x0a\x1e\x0a\x17"
        "fp8/qkv/input/saturated\x15\x00\x00\x80\x3e"
        "\x0a\x1c\x0a\x15"
        "fp8/qkv/input/flushed\x15\x00\x00\x00\x00"
        "\x0a\x29\x0a\x09samples/1\x42\x12\x08\x07\x12\x00\x42\x0c    a\n    b\n\x4a\x08\x0a\x06\x0a\x04text",
                      nan[] = "\x2a\x13\x0a\x11\x0a\x0aloss/train\x15\x00\x00\xc0\x7f";
    check_record(&at, 0, version, sizeof version - 1);
    check_record(&at, 7, start, sizeof start - 1); // what was there of steps from 7 on is written again
    check_record(&at, 7, summary, sizeof summary - 1);
    check_record(&at, 9, nan, sizeof nan - 1);
    assert_ptr_equal(at, data + bytes);
    free(data);
}

// TensorBoard reads the files of a folder in the order of their names.
static void a_second_file_has_a_later_name(void **state) {
    char paths[3][PATH_MAX];
    for (int i = 0; i < 3; i++) {
        struct event_file *const events = event_file_open(folder, 0);
        snprintf(paths[i], sizeof paths[i], "%s", events->path);
        assert_true(i == 0 || strcmp(paths[i], paths[i - 1]) > 0);
        event_file_close(events);
    }
    for (int i = 0; i < 3; i++)
        assert_int_equal(unlink(paths[i]), 0);
    event_file_close(NULL);
}

// Writes records where no file may grow beyond 200 bytes.
static void write_on_a_full_disk(void *unused) {
    const struct rlimit limit = {200, 200};
    static const char line[] =
        "{\"step\": 1, \"loss\": 1, \"lr\": 2, \"tasks\": {\"a long name of a task\": {\"acc\": 0.5}}}\n";
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    struct event_file *const events = event_file_open(folder, 0);
    for (int i = 0; i < 3; i++)
        event_file_add(events, line, sizeof line - 1);
    fprintf(stderr, "%s", events->path);
    event_file_close(events);
}
static void a_full_disk_is_said_once_and_no_record_is_cut(void **state) {
    char said[4096], path[PATH_MAX];
    size_t bytes;
    assert_int_equal(run_in_child(write_on_a_full_disk, NULL, said, sizeof said), 0);
    const char *const first = strstr(said, "cannot be written: File too large; the run goes on");
    assert_non_null(first);
    assert_null(strstr(first + 1, "cannot be written"));
    snprintf(path, sizeof path, "%s", strchr(said, '\n') + 1);
    free(take(path, &bytes));
    // The two records of a new file, and the line's once: what is written behind half a record would be lost.
    assert_int_equal(bytes, (16 + 11 + 15) + (16 + 11 + 4) + (16 + 11 + 2 + 19 + 21 + 40));
}

static void open_in(void *path) { event_file_close(event_file_open((const char *)path, 0)); }
static void a_folder_that_cannot_be_written(void **state) {
    char missing[TEST_PATH + 16];
    snprintf(missing, sizeof missing, "%s/none", folder);
    assert_fails(open_in, missing, "--tensorboard-dir |/none: no file can be made there: No such file or directory");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(crcs_are_those_of_records),
        cmocka_unit_test(the_bytes_of_an_event_file),
        cmocka_unit_test(a_second_file_has_a_later_name),
        cmocka_unit_test(a_full_disk_is_said_once_and_no_record_is_cut),
        cmocka_unit_test(a_folder_that_cannot_be_written),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
