// JSON that always parses; log.jsonl, also on a full disk; the progress line in a pipe and in a terminal.
#include "runtime/text/log.c" // under test
#include "test/fails.h"       // assert_fails, run_in_child
#include "test/json_read.h"   // json_is_valid
#include "test/testing.h"     // cmocka, test_random
#include <signal.h>           // SIGXFSZ
#include <sys/resource.h>     // setrlimit

// ---- json.h ----

static char *json_text; // what the latest json_of has written
static size_t json_bytes;
static struct json json_of_begin(bool pretty) {
    free(json_text);
    FILE *const memory = open_memstream(&json_text, &json_bytes);
    assert_non_null(memory);
    return json_writer(memory, pretty);
}
static void json_of_end(struct json *json) { fclose(json->out); }

static void json_nests_and_separates(void **state) {
    struct json json = json_of_begin(false);
    json_object_begin(&json, NULL);
    json_int(&json, "least", INT64_MIN);
    json_uint(&json, "most", UINT64_MAX);
    json_array_begin(&json, "list");
    json_bool(&json, NULL, true);
    json_str(&json, NULL, "x");
    json_array_end(&json);
    json_object_begin(&json, "empty");
    json_object_end(&json);
    json_object_end(&json);
    json_of_end(&json);
    assert_string_equal(json_text, "{\"least\": -9223372036854775808, \"most\": 18446744073709551615, "
                                   "\"list\": [true, \"x\"], \"empty\": {}}\n");
    json = json_of_begin(true);
    json_object_begin(&json, NULL);
    json_array_begin(&json, "list");
    json_int(&json, NULL, 1);
    json_int(&json, NULL, 2);
    json_array_end(&json);
    json_array_begin(&json, "empty");
    json_array_end(&json);
    json_object_end(&json);
    json_of_end(&json);
    assert_string_equal(json_text, "{\n  \"list\": [\n    1,\n    2\n  ],\n  \"empty\": []\n}\n");
}

static void check_string(const char *value, const char *expected) {
    struct json json = json_of_begin(false);
    json_str(&json, NULL, value);
    json_of_end(&json);
    assert_string_equal(json_text, expected);
    assert_true(json_is_valid(json_text));
}
static void json_escapes_what_json_must_not_hold(void **state) {
    check_string("", "\"\"");
    check_string("a\"b\\c/d", "\"a\\\"b\\\\c/d\"");
    check_string("\n\t\r\x01\x1f\x7f", "\"\\n\\t\\u000d\\u0001\\u001f\\u007f\"");
    check_string("h\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", "\"h\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80\"");
    check_string("\xff"
                 "a\xc3",
                 "\"\\ufffda\\ufffd\"");                                  // no lead byte; cut off
    check_string("\xc0\x80", "\"\\ufffd\\ufffd\"");                       // overlong
    check_string("\xed\xa0\x80", "\"\\ufffd\\ufffd\\ufffd\"");            // a surrogate
    check_string("\xf4\x90\x80\x80", "\"\\ufffd\\ufffd\\ufffd\\ufffd\""); // above U+10FFFF
    uint64_t random = 7;
    for (int trial = 0; trial < 20000; trial++) { // any bytes give JSON
        char value[16];
        const int length = (int)(test_random(&random) % sizeof value);
        for (int i = 0; i < length; i++)
            value[i] = (char)(1 + test_random(&random) % 255);
        value[length] = 0;
        struct json json = json_of_begin(false);
        json_object_begin(&json, NULL);
        json_str(&json, value, value);
        json_object_end(&json);
        json_of_end(&json);
        assert_true(json_is_valid(json_text));
    }
}

static void check_double(double value, const char *expected) {
    struct json json = json_of_begin(false);
    json_double(&json, NULL, value);
    json_of_end(&json);
    assert_string_equal(json_text, expected);
}
static void json_numbers_are_short_and_read_back_as_they_were(void **state) {
    check_double(0.1, "0.1");
    check_double(6e-4, "0.0006");
    check_double(1.0 / 3, "0.3333333333333333");
    check_double(5, "5");
    check_double(-0.0, "-0");
    check_double(1e300, "1e+300");
    check_double(5e-324, "4.94065645841247e-324");
    check_double(NAN, "null");
    check_double(INFINITY, "null");
    check_double(-INFINITY, "null");
    uint64_t random = 8;
    for (int trial = 0; trial < 20000; trial++) {
        const uint64_t bits = test_random(&random);
        double value;
        float small;
        memcpy(&value, &bits, sizeof value);
        memcpy(&small, &bits, sizeof small);
        struct json json = json_of_begin(false);
        json_double(&json, NULL, value);
        json_of_end(&json);
        assert_true(json_is_valid(json_text));
        assert_true(isfinite(value) ? strtod(json_text, NULL) == value : strcmp(json_text, "null") == 0);
        json = json_of_begin(false);
        json_float(&json, NULL, small);
        json_of_end(&json);
        assert_true(json_is_valid(json_text));
        assert_true(isfinite(small) ? strtof(json_text, NULL) == small : strcmp(json_text, "null") == 0);
    }
    free(json_text);
    json_text = NULL;
}

// ---- texts ----

static void numbers_have_units_and_separators(void **state) {
    char text[LOG_NUMBER];
    assert_string_equal(log_bytes(text, 0), "0 B");
    assert_string_equal(log_bytes(text, 1023), "1023 B");
    assert_string_equal(log_bytes(text, 1024), "1.00 KiB");
    assert_string_equal(log_bytes(text, (1 << 20) - 1), "1.00 MiB"); // not 1024.00 KiB
    assert_string_equal(log_bytes(text, (int64_t)13 << 28), "3.25 GiB");
    assert_string_equal(log_bytes(text, INT64_MAX), "8.00 EiB");
    assert_string_equal(log_digits(text, 0.53214), "0.5321");
    assert_string_equal(log_digits(text, 388.06), "388.1");
    assert_string_equal(log_digits(text, 10549.7), "10550"); // %g with four digits would give 1.055e+04
    assert_string_equal(log_count(text, 0), "0");
    assert_string_equal(log_count(text, 999), "999");
    assert_string_equal(log_count(text, 1000), "1,000");
    assert_string_equal(log_count(text, 124439808), "124,439,808");
    assert_string_equal(log_count(text, -1234), "-1,234");
    assert_string_equal(log_count(text, INT64_MIN), "-9,223,372,036,854,775,808");
    assert_string_equal(log_duration(text, 0), "00:00:00");
    assert_string_equal(log_duration(text, 59.6), "00:01:00");
    assert_string_equal(log_duration(text, 3723), "01:02:03");
    assert_string_equal(log_duration(text, 360000), "100:00:00");
    assert_string_equal(log_duration(text, NAN), "--:--:--");
}

static void the_eta_does_not_count_the_first_step(void **state) {
    struct log log;
    memset(&log, 0, sizeof log);
    log.total_steps = 11;
    log.timed_from = -1;
    bool rough;
    assert_true(log_eta_s(&log, 1, 7, 100, &rough) == 70); // the first step's own time, and marked so
    assert_true(rough);
    assert_true(log_eta_s(&log, 2, 2, 102, &rough) == 18);
    assert_false(rough);
    assert_true(log_eta_s(&log, 3, 6, 108, &rough) == 32); // 4 s a step so far
    assert_true(log_eta_s(&log, 11, 2, 140, &rough) == 0);
    log.timed_from = -1;
    assert_true(isnan(log_eta_s(&log, 1, NAN, 100, &rough)));
}

// ---- a run ----

static struct log_step step_of(int64_t step) {
    struct log_step s;
    memset(&s, 0, sizeof s);
    s.step = step;
    s.tokens = step * 4096;
    s.loss = 10.5 / (double)step;
    s.lr = 6e-4;
    s.grad_norm = 1.25;
    s.step_ms = 3150.5;
    s.tokens_per_second = 1300.5;
    s.mfu = 0.4125;
    s.mfu_palm = 0.5;
    s.peak_bytes = (int64_t)13 << 28;
    return s;
}

struct run {
    char folder[PATH_MAX + 8];
    int steps, every, validate_at;
    bool plain;
    void (*prepare)(void); // runs in the child, before the steps
};
static void run_steps(void *argument) {
    const struct run *run = (const struct run *)argument;
    struct log log;
    log_open(&log, run->folder, run->steps, run->every, 0, true, run->plain);
    if (run->prepare)
        run->prepare();
    for (int i = 1; i <= run->steps; i++) {
        struct log_step s = step_of(i);
        s.has_val_loss = i == run->validate_at;
        s.val_loss = 1.5;
        log_step(&log, &s);
        if (s.has_val_loss)
            log_event(&log, "validation: %.1f", s.val_loss);
    }
    log_close(&log);
}
static void run_into_pipe(void *argument) {
    dup2(STDERR_FILENO, STDOUT_FILENO); // the parent's pipe, too
    run_steps(argument);
}

// Runs in a new folder, after which the folder and what is in it are removed.
static struct run run_in_new_folder(int steps, int every) {
    struct run run;
    memset(&run, 0, sizeof run);
    assert_non_null(mkdtemp(test_template(run.folder, "unit_log")));
    run.steps = steps;
    run.every = every;
    return run;
}
static const char *inside(const struct run *run, const char *name) {
    static char path[256];
    snprintf(path, sizeof path, "%.191s/%s", run->folder, name);
    return path;
}
static void remove_folder(const struct run *run) {
    unlink(inside(run, "log.jsonl"));
    unlink(inside(run, "log.jsonl.old")); // of a test with two runs
    assert_int_equal(rmdir(run->folder), 0);
}
static int count(const char *text, const char *part) {
    int n = 0;
    for (; (text = strstr(text, part)); text++)
        n++;
    return n;
}
// Checks that each line is an object; returns the number of lines.
static int count_objects(char *text) {
    int lines = 0;
    char *rest = NULL;
    const size_t length = strlen(text);
    assert_true(length == 0 || text[length - 1] == '\n');
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest), lines++)
        assert_true(json_is_valid(line));
    return lines;
}

static void log_jsonl_has_an_object_for_each_step(void **state) {
    struct run run = run_in_new_folder(12, 5);
    char output[8192], value[256];
    run.validate_at = 7;
    assert_int_equal(run_in_child(run_into_pipe, &run, output, sizeof output), 0);
    char *const text = read_text(inside(&run, "log.jsonl"));
    assert_non_null(text);
    int lines = 0;
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        static const char *const keys[] = {
            "step", "tokens",   "loss",      "lr", "grad_norm", "step_ms", "tokens_per_second",
            "mfu",  "mfu_palm", "peak_bytes"};
        lines++;
        assert_true(json_is_valid(line));
        for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
            assert_int_equal(json_member(line, keys[i], value), 1);
        assert_int_equal(json_member(line, "val_loss", value), lines == 7);
        json_member(line, "step", value);
        assert_int_equal(atoi(value), lines);
        json_member(line, "mfu_palm", value);
        assert_true(atof(value) == 0.5);
        json_member(line, "peak_bytes", value);
        assert_string_equal(value, "3489660928");
    }
    assert_int_equal(lines, 12);
    free(text);
    remove_folder(&run);
}

// Checks that shares are logged for the same steps as a pipe's progress lines: the first, the last and every so many.
// What had no elements has no share.
static void shares_of_fp8_are_in_the_steps_with_a_line(void **state) {
    static const struct log_fp8 shares[2] = {{"qkv", {0, 0.5, 0.25}, {1, 0, 0.125}}, {"fc", {0, 0, NAN}, {0, 0, 0}}};
    struct run run = run_in_new_folder(12, 5);
    struct log log;
    char value[512];
    int lines = 0;
    log_open(&log, run.folder, 12, 5, 0, true, true);
    for (int i = 1; i <= 12; i++) {
        struct log_step s = step_of(i);
        s.fp8 = shares;
        s.num_fp8 = i == 10 ? 0 : 2;
        s.has_val_loss = i == 5;
        log_write_step(&log, &s);
    }
    char *const text = read_text(inside(&run, "log.jsonl"));
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        lines++;
        assert_true(json_is_valid(line));
        const bool has = lines == 1 || lines == 5 || lines == 12;
        assert_int_equal(json_member(line, "fp8", value), has);
        if (has)
            assert_string_equal(value,
                                "{\"qkv\": {\"input\": [0, 1], \"weight\": [0.5, 0], \"gradient\": [0.25, 0.125]}, "
                                "\"fc\": {\"input\": [0, 0], \"weight\": [0, 0], \"gradient\": [null, 0]}}");
    }
    assert_int_equal(lines, 12);
    free(text);
    log_close(&log);
    remove_folder(&run);
}

static void what_is_not_finite_is_null(void **state) {
    struct run run = run_in_new_folder(1, 1);
    struct log log;
    struct log_step s = step_of(1);
    char value[256];
    log_open(&log, run.folder, 1, 1, 0, true, false);
    s.loss = NAN;
    s.grad_norm = INFINITY;
    s.mfu = NAN;
    log_write_step(&log, &s);
    // Each line is on the disk as soon as it is written.
    char *const text = read_text(inside(&run, "log.jsonl"));
    assert_true(json_is_valid(text));
    static const char *const keys[] = {"loss", "grad_norm", "mfu"};
    for (int i = 0; i < 3; i++) {
        json_member(text, keys[i], value);
        assert_string_equal(value, "null");
    }
    free(text);
    log_close(&log);
    remove_folder(&run);
}

static void a_pipe_gets_a_plain_line_every_so_many_steps(void **state) {
    struct run run = run_in_new_folder(12, 5);
    char output[8192];
    run.validate_at = 7;
    assert_int_equal(run_in_child(run_into_pipe, &run, output, sizeof output), 0);
    assert_null(strpbrk(output, "\r\033"));
    assert_int_equal(count(output, "\n"), 5); // steps 1, 5, 10, 12 and the validation
    assert_non_null(strstr(output, "step  1/12  loss 10.5000  norm 1.250  lr 6.00e-04  1300 tok/s  ETA ~00:00:35"
                                   "  MFU 41.2%  3.25 GiB\n"));
    assert_non_null(strstr(output, "\nstep 12/12  loss 0.8750  "));
    assert_non_null(strstr(output, "  ETA 00:00:00  "));
    assert_non_null(strstr(output, "\nvalidation: 1.5\nstep 10/12"));
    remove_folder(&run);
}

static void rates_that_are_not_known_are_left_out(void **state) {
    char text[LOG_LINE];
    struct log_step s = step_of(3);
    s.tokens_per_second = NAN;
    s.mfu = NAN;
    s.loss = NAN;
    log_progress_text(text, &s, 1000, 60, false);
    assert_string_equal(text, "step    3/1000  loss nan  norm 1.250  lr 6.00e-04  ETA 00:01:00  3.25 GiB");
    s.loss = -1e300; // the longest possible text: it is cut, not overrun
    s.step = INT64_MAX;
    log_progress_text(text, &s, INT64_MAX, 1e11, true);
    assert_int_equal(strlen(text), LOG_LINE - 1);
}

// ---- a terminal ----

// Runs in a pseudo-terminal of the given width. Puts what the terminal is sent into output (output_bytes).
static void run_in_terminal(struct run *run, int width, const char *kind, char *output, size_t output_bytes) {
    const int master = posix_openpt(O_RDWR | O_NOCTTY);
    assert_true(master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0);
    struct winsize size;
    memset(&size, 0, sizeof size);
    size.ws_col = (unsigned short)width;
    size.ws_row = 24;
    const int terminal = open(ptsname(master), O_RDWR | O_NOCTTY);
    assert_true(terminal >= 0 && ioctl(terminal, TIOCSWINSZ, &size) == 0);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        dup2(terminal, STDOUT_FILENO);
        setenv("TERM", kind, 1);
        run_steps(run);
        fflush(stdout);
        _exit(0);
    }
    close(terminal);
    size_t length = 0;
    for (ssize_t n; length + 1 < output_bytes && (n = read(master, output + length, output_bytes - 1 - length)) > 0;)
        length += (size_t)n; // it ends with EIO when the child has closed the terminal
    output[length] = 0;
    close(master);
    int status = 0;
    waitpid(child, &status, 0);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void a_terminal_has_one_line_drawn_in_place(void **state) {
    struct run run = run_in_new_folder(12, 5);
    char output[8192];
    run.validate_at = 7;
    run_in_terminal(&run, 40, "xterm", output, sizeof output);
    assert_int_equal(count(output, "\rstep "), 12); // every step, whatever --log-every says
    // The lines of step 7, of the validation and of the last step stay. The terminal turns each
    //  into \r
    // .
    assert_int_equal(count(output, "\n"), 3);
    const char *const event = strstr(output, "\r\nvalidation: 1.5\r\n\rstep  8/12");
    assert_non_null(event);
    assert_memory_equal(event - 3, "\033[K", 3);
    int drawn = 0;
    for (const char *line = output; (line = strstr(line, "\rstep ")); drawn++) { // 39 of 40 columns
        line++;
        assert_int_equal(strcspn(line, "\033"), 39);
    }
    assert_int_equal(drawn, 12);
    run_in_terminal(&run, 200, "xterm", output, sizeof output);
    assert_int_equal(count(output, "  3.25 GiB\033[K"), 12); // the whole line, where there is room
    run_in_terminal(&run, 200, "dumb", output, sizeof output);
    assert_null(strchr(output, '\033'));
    assert_int_equal(count(output, "step "), 4);
    run.plain = true;
    run_in_terminal(&run, 40, "xterm", output, sizeof output);
    assert_null(strchr(output, '\033'));
    assert_int_equal(count(output, "\r"), count(output, "\r\n")); // the terminal's own
    assert_int_equal(count(output, "  3.25 GiB\r\n"), 4);
    remove_folder(&run);
}

// ---- disks ----

static void folders_are_made_with_those_above(void **state) {
    const struct run top = run_in_new_folder(1, 1);
    struct log log;
    char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%s", inside(&top, "a/b//c/"));
    for (int again = 0; again < 2; again++) {
        log_open(&log, folder, 1, 1, 0, true, false);
        log_close(&log);
    }
    assert_int_equal(unlink(inside(&top, "a/b/c/log.jsonl")), 0);
    assert_int_equal(rmdir(inside(&top, "a/b/c")), 0);
    assert_int_equal(rmdir(inside(&top, "a/b")), 0);
    assert_int_equal(rmdir(inside(&top, "a")), 0);
    remove_folder(&top);
}

static void folders_that_cannot_be_made_are_errors(void **state) {
    struct run run = run_in_new_folder(1, 1);
    const struct run top = run;
    FILE *const file = fopen(inside(&top, "log.jsonl"), "w"); // any file will do
    assert_non_null(file);
    fclose(file);
    snprintf(run.folder, sizeof run.folder, "%s", inside(&top, "log.jsonl"));
    assert_fails(run_steps, &run, "--out |a file of that name exists|name another folder");
    snprintf(run.folder, sizeof run.folder, "%s", inside(&top, "log.jsonl/below"));
    assert_fails(run_steps, &run, "--out |a file of that name exists");
    snprintf(run.folder, sizeof run.folder, "/proc/none");
    assert_fails(run_steps, &run, "--out /proc/none: the folder /proc/none cannot be made: ");
    memset(run.folder, 'x', PATH_MAX);
    run.folder[PATH_MAX] = 0;
    assert_fails(run_steps, &run, "--out: a folder's name must have 1 to 4095 bytes");
    run.folder[300] = 0;
    assert_fails(run_steps, &run, "--out |cannot be made: File name too long");
    run.folder[0] = 0;
    assert_fails(run_steps, &run, "--out: a folder's name must have 1 to 4095 bytes");
    unlink(inside(&top, "log.jsonl"));
    assert_int_equal(mkdir(inside(&top, "log.jsonl"), 0777), 0); // a folder where the log should be
    run = top;
    assert_fails(run_steps, &run, "log.jsonl: cannot be written: Is a directory; name another folder by --out");
    assert_int_equal(rmdir(inside(&top, "log.jsonl")), 0);
    remove_folder(&top);
}

static void a_full_disk_is_reported_once_and_training_goes_on(void **state) {
    struct run run = run_in_new_folder(12, 5);
    char output[8192];
    assert_int_equal(symlink("/dev/full", inside(&run, "log.jsonl")), 0);
    assert_int_equal(run_in_child(run_into_pipe, &run, output, sizeof output), 0);
    assert_int_equal(count(output, "train_gpt: "), 1);
    assert_int_equal(count(output, "log.jsonl: cannot be written: No space left on device; the run goes on"), 1);
    assert_int_equal(count(output, "\nstep "), 4); // every progress line was printed
    remove_folder(&run);
}

static void allow_500_bytes(void) {
    const struct rlimit limit = {500, 500}; // in the middle of the third line
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
}
static void half_a_line_is_taken_back(void **state) {
    struct run run = run_in_new_folder(12, 5);
    char output[8192];
    run.prepare = allow_500_bytes;
    assert_int_equal(run_in_child(run_into_pipe, &run, output, sizeof output), 0);
    assert_int_equal(count(output, "log.jsonl: cannot be written: File too large"), 1);
    char *const text = read_text(inside(&run, "log.jsonl"));
    assert_non_null(text);
    assert_true(strlen(text) < 500);
    assert_in_range(count_objects(text), 1, 4);
    free(text);
    remove_folder(&run);
}

static void allow_500_bytes_unheard(void) {
    allow_500_bytes();
    assert_non_null(freopen("/dev/null", "w", stderr));
}
static void a_warning_ends_the_progress_line_of_the_terminal(void **state) {
    struct run run = run_in_new_folder(12, 5);
    char output[8192];
    run.prepare = allow_500_bytes_unheard;
    run_in_terminal(&run, 40, "xterm", output, sizeof output);
    assert_int_equal(count(output, "\rstep "), 12);
    assert_int_equal(count(output, "\r\n"), 2); // before the warning, which goes elsewhere, and at the end
    remove_folder(&run);
}

// Checks that a resumed run keeps the rows of steps that are done, and that neither what the user wrote into log.jsonl
// nor damaged lines end what it keeps.
static void a_resumed_run_keeps_the_rows_of_steps_done(void **state) {
    static const char kept[] = "# lr was too high\n"
                               "{\"step\": 1, \"loss\": 5}\n"
                               "\n"
                               "{\"stxp\": 2, \"loss\": 5}\n"
                               "  {\"loss\":4,\"step\":3}\r\n"
                               "a note\n",
                      *const later[] = {"{\"step\": 4, \"loss\": 4}\n{\"step\": 2}\n", "{\"step\": 3, \"lo",
                                        "half a note", ""};
    struct run run = run_in_new_folder(1, 1);
    for (size_t i = 0; i < sizeof later / sizeof *later; i++) {
        FILE *const file = fopen(inside(&run, "log.jsonl"), "w");
        assert_non_null(file);
        fprintf(file, "%s%s", kept, later[i]);
        fclose(file);
        assert_int_equal(log_end_of_step(inside(&run, "log.jsonl"), 3), sizeof kept - 1);
    }
    remove_folder(&run);
}

// Checks that a run without a checkpoint to resume begins a log of its own, and keeps the earlier run's log.
static void the_log_of_an_earlier_run_is_kept(void **state) {
    struct run run = run_in_new_folder(3, 5);
    char output[8192];
    FILE *const file = fopen(inside(&run, "log.jsonl"), "w");
    assert_non_null(file);
    fputs("{\"step\": 1}\n", file);
    fclose(file);
    assert_int_equal(run_in_child(run_into_pipe, &run, output, sizeof output), 0);
    assert_int_equal(count(output, "note: the log of an earlier run that is there is now "), 1);
    char *const former = read_text(inside(&run, "log.jsonl.old")), *const text = read_text(inside(&run, "log.jsonl"));
    assert_string_equal(former, "{\"step\": 1}\n");
    assert_int_equal(count_objects(text), 3);
    assert_int_equal(unlink(inside(&run, "log.jsonl.old")), 0);
    assert_int_equal(mkdir(inside(&run, "log.jsonl.old"), 0700), 0); // which no file can replace
    assert_int_not_equal(run_in_child(run_into_pipe, &run, output, sizeof output), 0);
    char *const kept = read_text(inside(&run, "log.jsonl"));
    assert_int_equal(count_objects(kept), 3);
    assert_int_equal(rmdir(inside(&run, "log.jsonl.old")), 0);
    free(kept);
    free(former);
    free(text);
    remove_folder(&run);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(json_nests_and_separates),
        cmocka_unit_test(json_escapes_what_json_must_not_hold),
        cmocka_unit_test(json_numbers_are_short_and_read_back_as_they_were),
        cmocka_unit_test(numbers_have_units_and_separators),
        cmocka_unit_test(the_eta_does_not_count_the_first_step),
        cmocka_unit_test(log_jsonl_has_an_object_for_each_step),
        cmocka_unit_test(shares_of_fp8_are_in_the_steps_with_a_line),
        cmocka_unit_test(what_is_not_finite_is_null),
        cmocka_unit_test(a_pipe_gets_a_plain_line_every_so_many_steps),
        cmocka_unit_test(rates_that_are_not_known_are_left_out),
        cmocka_unit_test(a_terminal_has_one_line_drawn_in_place),
        cmocka_unit_test(folders_are_made_with_those_above),
        cmocka_unit_test(folders_that_cannot_be_made_are_errors),
        cmocka_unit_test(a_full_disk_is_reported_once_and_training_goes_on),
        cmocka_unit_test(half_a_line_is_taken_back),
        cmocka_unit_test(a_warning_ends_the_progress_line_of_the_terminal),
        cmocka_unit_test(the_log_of_an_earlier_run_is_kept),
        cmocka_unit_test(a_resumed_run_keeps_the_rows_of_steps_done),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
