// What a user sees of a memory plan: the printed rows add up to the peak; JSON and picture have every buffer; a file
// that can't be written is an error that leaves the old file.
#include "run/plan_page.cuh"           // under test
#include "run/plan_report.cuh"         // under test
#include "test/fails.h"                // assert_fails
#include "test/json_read.h"            // json_is_valid, json_member, read_text
#include "test/testing.h"              // cmocka
#include "test/transformer_schedule.h" // struct schedule
#include <signal.h>                    // SIGXFSZ
#include <sys/resource.h>              // setrlimit

static const size_t transfer_bytes[TRANSFER_DIRECTIONS] = {(size_t)3 << 30, (size_t)5 << 30};
static const char hostile_name[] = "a \"quoted\" \\ <b> & \t name";

static void example_plan(struct plan *plan) {
    struct schedule s;
    schedule_begin(&s, plan, 3);
    set_sizes(&s, 4096, 1024, 768, 12, 12, 3072, false, true, 50304, 8);
    s.dropout = true;
    s.size[STATS1] += 4; // so that alignment takes something
    s.generated_tokens = 2;
    set_policy(&s, POLICY_NORM_ACTIVATION, 1);
    plan_add(plan, ARENA_PARAMETERS, "parameters", hostile_name, 2, 12345);
    plan_add(plan, ARENA_OPTIMIZER, "optimizer moments", "m", -1, 54321);
    plan_add(plan, ARENA_ACTIVATIONS, "never there", "untouched", -1, 777);
    plan_phase(plan, 0, -1, hostile_name);
    plan_touch(plan, plan_add(plan, ARENA_ACTIVATIONS, hostile_name, hostile_name, -1, 777));
    plan_add(plan, ARENA_HOST_OPTIMIZER, "optimizer moments", "v", -1, 65432);
    plan_add(plan, ARENA_HOST_STAGING, "staging", "batches", -1, 1000);
    plan_touch(plan, plan_add(plan, ARENA_HOST_ACTIVATIONS, "offloaded", hostile_name, 1, 888));
    plan_add_transfer(plan, TRANSFER_TO_HOST, hostile_name, 888);
    plan_add_transfer(plan, TRANSFER_TO_DEVICE, "v", 65432);
    training_step(&s);
    evaluation(&s);
    generation(&s);
    plan_place(plan);
    free(s.kept);
    free(s.group_first);
    free(s.id);
}

// Reads the third column of a row, where a unit, such as "GiB", follows the first number. Returns whether the line is
// this row.
static bool row_bytes(const char *line, const char *name, size_t *bytes) {
    char begin[64];
    const int n = snprintf(begin, sizeof begin, "  %-36s ", name);
    if (strncmp(line, begin, (size_t)n) != 0)
        return false;
    char unit[8], exact[32];
    double human;
    assert_int_equal(sscanf(line + n, "%lf %7s %31s", &human, unit, exact), 3);
    *bytes = 0;
    for (const char *c = exact; *c; c++)
        if (*c != ',')
            *bytes = *bytes * 10 + (size_t)(*c - '0');
    return true;
}

static size_t category_bytes_at_peak(const struct plan *plan, int category) {
    size_t sum = 0;
    for (int i = 0; i < plan->count; i++) {
        const struct plan_buffer *b = &plan->buffers[i];
        if (b->category == category && plan_arena_memory(b->arena) == MEMORY_DEVICE &&
            (b->arena != ARENA_ACTIVATIONS ||
             (b->first_phase >= 0 && b->first_phase <= plan->peak_phase && plan->peak_phase <= b->last_phase)))
            sum += b->bytes;
    }
    return sum;
}

static void the_printed_rows_sum_up_to_the_peak(void **state) {
    struct plan plan;
    example_plan(&plan);
    FILE *out = test_file();
    plan_print(&plan, transfer_bytes, true, out);
    rewind(out);
    char line[256];
    size_t sum = 0, bytes, peak = 0, host = 0, arenas[MEMORY_COUNT] = {0};
    bool in_arenas = false, saves_nothing = false, copies = false;
    int rows = 0;
    while (fgets(line, sizeof line, out)) {
        assert_true(strlen(line) <= 120);
        in_arenas = in_arenas || strncmp(line, "arenas", 6) == 0;
        for (int c = 0; c < plan.category_count && !in_arenas; c++)
            if (row_bytes(line, plan.categories[c], &bytes)) {
                assert_true(bytes == category_bytes_at_peak(&plan, c));
                sum += bytes;
                rows++;
            }
        if (row_bytes(line, "alignment and gaps", &bytes)) {
            assert_true(bytes > 0);
            sum += bytes;
        }
        if (row_bytes(line, "peak", &bytes))
            peak = bytes;
        for (int a = 0; a < ARENA_COUNT && in_arenas; a++)
            if (row_bytes(line, plan_arena_name((enum plan_arena)a), &bytes))
                arenas[plan_arena_memory((enum plan_arena)a)] += bytes;
        if (row_bytes(line, "sum", &bytes))
            host = bytes;
        copies = copies || strcmp(line, "  a step copies 3.00 GiB to the host and 5.00 GiB to the device\n") == 0;
        saves_nothing = saves_nothing || strstr(line, "what is offloaded saves nothing");
        assert_false(strstr(line, "never there"));
    }
    fclose(out);
    assert_int_equal(rows, plan.category_count - 3); // without "never there" and the categories that only the host has
    assert_true(peak == plan.peak_bytes && sum == peak && arenas[MEMORY_DEVICE] == peak);
    assert_true(host == plan.host_peak_bytes && arenas[MEMORY_HOST] == host && host > 65432 + 1000 + 888);
    assert_true(copies && saves_nothing);
    plan_free(&plan);
}

static void an_empty_plan_can_be_printed(void **state) {
    struct plan plan;
    plan_begin(&plan);
    plan_place(&plan);
    FILE *out = test_file();
    plan_print(&plan, transfer_bytes, true, out);
    assert_true(ftell(out) > 0);
    fclose(out);
    plan_free(&plan);
}

static char folder[TEST_PATH];
static int make_folder(void **state) { return mkdtemp(test_template(folder, "unit_memory")) ? 0 : -1; }
static int remove_folder(void **state) { return rmdir(folder); }
static const char *in_folder(char *out, size_t n, const char *name) {
    snprintf(out, n, "%s/%s", folder, name);
    return out;
}

static void json_holds_the_plan(void **state) {
    struct plan plan;
    example_plan(&plan);
    char path[256], value[256], wanted[256];
    in_folder(path, sizeof path, "plan.json");
    plan_write_json(&plan, path);
    plan_write_json(&plan, path); // over the first one
    char *text = read_text(path);
    assert_non_null(text);
    assert_true(json_is_valid(text));
    assert_int_equal(json_member(text, "peak_bytes", value), 1);
    snprintf(wanted, sizeof wanted, "%zu", plan.peak_bytes);
    assert_string_equal(value, wanted);
    assert_int_equal(json_member(text, "lower_bound_bytes", value), 1);
    // Each buffer has a line of its own, with its place in the whole, after the arenas before its own.
    const char *line = strchr(strstr(text, "\"buffers\""), '\n');
    int found = 0;
    for (int i = 0; i < plan.count; i++) {
        const struct plan_buffer *b = &plan.buffers[i];
        if (!plan_owns_bytes(b))
            continue;
        char object[1024];
        const char *end = strchr(++line, '\n');
        snprintf(object, sizeof object, "%.*s", (int)(end - line), line);
        line = end;
        size_t base = 0;
        for (int a = 0; a < (int)b->arena; a++)
            base += plan_arena_memory((enum plan_arena)a) == plan_arena_memory(b->arena) ? plan.arena_bytes[a] : 0;
        assert_int_equal(json_member(object, "memory", value), 1);
        assert_string_equal(value, plan_arena_memory(b->arena) == MEMORY_HOST ? "\"host\"" : "\"device\"");
        snprintf(wanted, sizeof wanted, "%zu", base + b->offset);
        assert_int_equal(json_member(object, "offset", value), 1);
        assert_string_equal(value, wanted);
        snprintf(wanted, sizeof wanted, "%zu", b->bytes);
        assert_int_equal(json_member(object, "bytes", value), 1);
        assert_string_equal(value, wanted);
        snprintf(wanted, sizeof wanted, "%d", plan_arena_is_packed(b->arena) ? b->last_phase : plan.phase_count - 1);
        assert_int_equal(json_member(object, "last_phase", value), 1);
        assert_string_equal(value, wanted);
        assert_int_equal(json_member(object, "category", value), 1);
        snprintf(wanted, sizeof wanted, "\"%s\"", plan.categories[b->category]);
        assert_true(strcmp(value, wanted) == 0 || strstr(value, "a \\\"quoted\\\" \\\\ <b> & \\t name"));
        found++;
    }
    assert_true(found > 50 && strncmp(line + 1, "  ]", 3) == 0);
    static const char *const directions[] = {"\"to host\"", "\"to device\""}, *const bytes[] = {"888", "65432"};
    line = strstr(text, "\"transfers\"");
    for (int i = 0; i < 2; i++) {
        char object[1024];
        const char *begin = strchr(line, '\n') + 1, *end = strchr(begin, '\n');
        snprintf(object, sizeof object, "%.*s", (int)(end - begin), begin);
        line = end;
        assert_int_equal(json_member(object, "direction", value), 1);
        assert_string_equal(value, directions[i]);
        assert_int_equal(json_member(object, "bytes", value), 1);
        assert_string_equal(value, bytes[i]);
        assert_int_equal(json_member(object, "phase", value), 1);
        assert_string_equal(value, "0");
    }
    snprintf(wanted, sizeof wanted, "\"host\": {\n    \"peak_bytes\": %zu,\n    \"lower_bound_bytes\": %zu,",
             plan.host_peak_bytes, plan.host_lower_bound_bytes);
    assert_non_null(strstr(text, wanted));
    free(text);
    unlink(path);
    plan_free(&plan);
}

static int count_of(const char *text, const char *what) {
    int count = 0;
    for (const char *c = strstr(text, what); c; c = strstr(c + 1, what))
        count++;
    return count;
}

static const size_t no_budget[MEMORY_COUNT] = {SIZE_MAX, SIZE_MAX}, budget[MEMORY_COUNT] = {(size_t)4 << 30, SIZE_MAX};

static void the_picture_holds_every_buffer(void **state) {
    struct plan plan;
    example_plan(&plan);
    char path[256];
    in_folder(path, sizeof path, "plan.svg");
    plan_write_picture(&plan, budget, path);
    char *text = read_text(path);
    assert_non_null(text);
    int drawn = 0;
    for (int i = 0; i < plan.count; i++)
        drawn +=
            plan.buffers[i].arena == ARENA_ACTIVATIONS && plan.buffers[i].first_phase >= 0 && plan.buffers[i].bytes > 0;
    assert_int_equal(count_of(text, "<title>"), drawn + ARENA_COUNT);
    assert_int_equal(count_of(text, "</title>"), drawn + ARENA_COUNT);
    assert_int_equal(count_of(text, "<text"), count_of(text, "</text>"));
    assert_int_equal(count_of(text, "nan") + count_of(text, "inf"), 0);
    assert_non_null(strstr(text, "</svg>"));
    assert_int_equal(count_of(text, "class=\"budget\""), 1);
    assert_true(count_of(text, "&lt;b&gt; &amp;") >= 4 && count_of(text, "<b>") + count_of(text, "& ") == 0);
    free(text);
    unlink(path);
    plan_free(&plan);
    plan_begin(&plan);
    plan_place(&plan);
    plan_write_picture(&plan, no_budget, path); // of an empty plan
    text = read_text(path);
    assert_int_equal(count_of(text, "nan") + count_of(text, "inf"), 0);
    free(text);
    unlink(path);
}

static void write_json_to(void *path) {
    struct plan plan;
    plan_begin(&plan);
    plan_place(&plan);
    plan_write_json(&plan, (const char *)path);
}
static void write_svg_to(void *path) {
    struct plan plan;
    example_plan(&plan);
    plan_write_picture(&plan, no_budget, (const char *)path);
}
// Writes JSON on a full disk: no file may grow beyond 100 bytes. The old file must stay.
static void write_json_on_a_full_disk(void *path) {
    struct rlimit limit;
    limit.rlim_cur = limit.rlim_max = 100;
    signal(SIGXFSZ, SIG_IGN);
    if (setrlimit(RLIMIT_FSIZE, &limit) == 0)
        write_json_to(path);
}
// Checks that the file behind a link is replaced, and the link stays. Another process that writes or reads the file at
// the same time has the old one or the new one, whole.
static void the_file_of_a_link_is_replaced_and_the_link_stays(void **state) {
    char path[256], link[256];
    struct stat before, after;
    in_folder(path, sizeof path, "plan.json");
    in_folder(link, sizeof link, "link.json");
    assert_int_equal(symlink("plan.json", link), 0);
    write_json_to(path);
    const int file = open(path, O_RDONLY); // so that no other file gets its number
    assert_int_equal(fstat(file, &before), 0);
    write_json_to(link);
    assert_int_equal(lstat(link, &after), 0);
    assert_true(S_ISLNK(after.st_mode));
    assert_int_equal(stat(path, &after), 0);
    assert_int_not_equal(before.st_ino, after.st_ino);
    close(file);
    unlink(path);
    unlink(link);
}
static void a_report_that_cannot_be_written_is_an_error(void **state) {
    char path[256];
    in_folder(path, sizeof path, "no/such/folder.json");
    assert_fails(write_json_to, path, "--plan-json|no/such/folder.json|No such file or directory");
    assert_fails(write_svg_to, path, "--plan-picture|no/such/folder.json|No such file or directory");
    assert_fails(write_json_to, folder, "--plan-json|Is a directory");
    assert_fails(write_svg_to, (void *)"/dev/full", "--plan-picture|/dev/full|No space left");
    assert_fails(write_json_to, (void *)"", "--plan-json");
    in_folder(path, sizeof path, "plan.json");
    FILE *old = fopen(path, "w");
    assert_non_null(old);
    fputs("old", old);
    fclose(old);
    assert_fails(write_json_on_a_full_disk, path, "--plan-json|plan.json|File too large");
    char *text = read_text(path);
    assert_string_equal(text, "old");
    free(text);
    unlink(path);
    assert_int_equal(rmdir(folder), 0); // nothing was left in it
    assert_int_equal(mkdir(folder, 0700), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_printed_rows_sum_up_to_the_peak),
        cmocka_unit_test(an_empty_plan_can_be_printed),
        cmocka_unit_test(json_holds_the_plan),
        cmocka_unit_test(the_picture_holds_every_buffer),
        cmocka_unit_test(the_file_of_a_link_is_replaced_and_the_link_stays),
        cmocka_unit_test(a_report_that_cannot_be_written_is_an_error),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
