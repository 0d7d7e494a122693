// config/config_file.h: a run's config.json reads back as what the run was given, and a user's file as what it says.
#include "config/resolve.h"   // config_read, config_resolve
#include "test/fails.h"       // assert_fails
#include "test/json_read.h"   // json_is_valid
#include "test/testing.h"     // cmocka
#include "runtime/text/log.h" // log_bytes

// Reads a command line, split at blanks, whose words point into `text`, which must stay.
static struct config read_words(char text[1024], const char *words) {
    static char program[] = "train_gpt";
    char *argv[64] = {program}, *rest = NULL;
    int argc = 1;
    snprintf(text, 1024, "%s", words);
    for (char *word = strtok_r(text, " ", &rest); word && argc < 63; word = strtok_r(NULL, " ", &rest))
        argv[argc++] = word;
    argv[argc] = NULL;
    return config_read(argc, argv, NULL);
}
// path = a new file with a text.
static void write_file(char path[TEST_PATH], const char *text) {
    const int fd = mkstemp(test_template(path, "unit_config_file"));
    assert_true(fd >= 0);
    FILE *const file = fdopen(fd, "w");
    fputs(text, file);
    fclose(file);
}
// path = a new file with the config.json of a run with these words.
static void write_run(char path[TEST_PATH], const char *words) {
    static char text[1024];
    write_file(path, "");
    struct config config = read_words(text, words);
    const struct config asked = config;
    config_resolve(&config);
    config.asked = &asked;
    config_write_json(&config, path);
}
// Returns the options of a command line with "--config PATH" before the words; text: as of read_words.
static struct config read_with(char text[1024], const char *path, const char *words) {
    char all[1024];
    snprintf(all, sizeof all, "--config %s %s", path, words);
    return read_words(text, all);
}
// Checks that two configurations have the same resolved options, but for those of one run.
static void assert_same(struct config a, struct config b) {
    char text_a[OPTION_TEXT], text_b[OPTION_TEXT];
    config_resolve(&a);
    config_resolve(&b);
    for (int row = 0; row < CONFIG_ROWS; row++) {
        if (config_rows[row].kind == OPTION_GROUP || row == CONFIG_ROW(data.config))
            continue;
        const char *const in_a = option_text(text_a, &config_rows[row], &a), *const in_b = option_text(
                                                                                 text_b, &config_rows[row], &b);
        if (strcmp(in_a, in_b) != 0)
            fail_msg("%s: '%s' and '%s'", config_rows[row].name, in_a, in_b);
        if (a.given[row] != b.given[row])
            fail_msg("%s: given %d and %d", config_rows[row].name, a.given[row], b.given[row]);
    }
}

static void a_run_reads_back(void **state) {
    static const char *const runs[] = {
        "--train-data x",
        "--train-data x --preset llama3.2-1b --lr 0.0003 --adam-eps 1.7e-9 --micro-batch-size 2",
        "--train-data x,y --preset gpt2-124m --seq-length 1024 --seed 18446744073709551615 --no-cuda-graphs",
        "--preset llama3-8b --seq-length 1024 --train-data x --optimizer-cpu-offload --memory-budget 6.5GiB",
        "--train-data x --log-every 7 --num-layers 3 --hidden-size 64 --num-attention-heads 2 --train-steps 9",
        "--train-data x --eval-tasks a --eval-tasks b --separate-documents --optimizer muon --muon-momentum 0.9",
        "--train-data x --lr-decay-style constant --weight-decay 0 --clip-grad 1 --lora-rank 0",
        "--train-data x --recompute-granularity selective --recompute-modules norm,mlp --device cpu --precision bf16",
        "--train-data x --recompute-granularity partial --recompute-num-layers 2 --optimizer adamw --num-query-groups null",
    };
    // What follows from options that are overridden is derived again.
    static const char *const overrides[] = {"", " --num-layers 6", " --preset pythia-160m --vocab-size 999",
                                            " --train-steps 77 --global-batch-size 24 --val-data z"};
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++)
        for (size_t k = 0; k < sizeof overrides / sizeof *overrides; k++) {
            char path[TEST_PATH], words[1024], text[2][1024];
            write_run(path, runs[i]);
            snprintf(words, sizeof words, "%s%s", runs[i], overrides[k]);
            struct config again = read_with(text[0], path, overrides[k]), direct = read_words(text[1], words);
            again.given[CONFIG_ROW(data.config)] = false;
            assert_same(again, direct);
            json_decref((json_t *)again.file);
            unlink(path);
        }
}
// Checks that a folder of results and a checkpoint to go on from are not taken over.
static void what_is_of_one_run_is_left_out(void **state) {
    char path[TEST_PATH], text[1024];
    write_run(path, "--train-data x --out a/b --resume auto --new-data");
    struct config config = read_with(text, path, "");
    assert_false(config.data.new_data); // which would need --resume
    config_resolve(&config);
    assert_string_equal(config.data.out, "out");
    assert_string_equal(config.checkpoints.resume, "none");
    assert_string_equal(config.data.train_data, "x");
    unlink(path);
    json_decref((json_t *)config.file);
}
// Checks that what a run found by itself to begin with is kept: adapters in the folder of --init-from, or what the run
// that it goes on from began with.
static void a_beginning_is_kept(void **state) {
    char path[TEST_PATH], text[1024];
    write_file(path, "");
    struct config config = read_words(text, "--train-data x");
    config.checkpoints.init_from = "base";
    config.checkpoints.init_from_ema = true;
    config.finetuning.lora_adapter = "adapters";
    config_write_json(&config, path);
    const struct config again = read_with(text, path, "");
    assert_string_equal(again.checkpoints.init_from, "base");
    assert_string_equal(again.finetuning.lora_adapter, "adapters");
    assert_true(again.checkpoints.init_from_ema);
    unlink(path);
    json_decref((json_t *)again.file);
}
// Checks that what auto chose is kept, so that nothing is searched again.
static void a_choice_is_kept(void **state) {
    char path[TEST_PATH], text[1024];
    write_file(path, "");
    struct config config = read_words(text, "--train-data x --recompute-granularity auto --memory-budget 1GiB");
    const struct config asked = config;
    config_resolve(&config);
    config.asked = &asked;
    config.recompute.recompute_granularity = RECOMPUTE_SELECTIVE;
    config.recompute.recompute_layer_modules = "norm:0";
    config.states.optimizer_cpu_offload = true;
    config_write_json(&config, path);
    struct config again = read_with(text, path, "");
    assert_int_equal(again.recompute.recompute_granularity, RECOMPUTE_SELECTIVE);
    assert_string_equal(again.recompute.recompute_layer_modules, "norm:0");
    assert_true(again.states.optimizer_cpu_offload);
    assert_false(config_given(&again, states.offload_weights));
    unlink(path);
    json_decref((json_t *)again.file);
}

// Replaces `from`, which the text of a file has, by `to`.
static void edit(const char *path, const char *from, const char *to) {
    static char before[1 << 16], after[1 << 16];
    FILE *file = fopen(path, "r");
    before[fread(before, 1, sizeof before - 1, file)] = 0;
    fclose(file);
    const char *const at = strstr(before, from);
    assert_non_null(at);
    snprintf(after, sizeof after, "%.*s%s%s", (int)(at - before), before, to, at + strlen(from));
    file = fopen(path, "w");
    fputs(after, file);
    fclose(file);
}
static void edited_values_count(void **state) {
    char path[TEST_PATH], text[1024];
    write_run(path, "--train-data x --preset llama3-8b --lr 1e-3 --out a");
    edit(path, "\"lr\": 0.001,", "\"lr\": 2e-3,");                         // was given
    edit(path, "\"seq_length\": 4096,", "\"seq_length\": 1024,");          // the preset's; now the default's value
    edit(path, "\"weight_decay\": 0.1,", "\"weight_decay\": 0.2,");        // was the default
    edit(path, "\"global_batch_size\": 4,", "\"global_batch_size\": 32,"); // was derived
    edit(path, "\"out\": \"a\",", "\"out\": \"b\",");
    struct config config = read_with(text, path, "");
    assert_true(config.training.lr == 2e-3 && config.training.weight_decay == 0.2f);
    assert_string_equal(config.data.out, "b");
    assert_true(config_given(&config, model.seq_length) && !config_given(&config, model.num_layers));
    config_resolve(&config);
    assert_int_equal(config.model.seq_length, 1024);
    assert_int_equal(config.training.global_batch_size, 32);
    assert_int_equal(config.model.num_layers, 32);
    unlink(path);
    json_decref((json_t *)config.file);
}
static void a_users_file_gives_what_it_has(void **state) {
    char path[TEST_PATH], text[1024];
    write_file(path,
               "{\"preset\": \"gpt2-124m\", \"train-data\": \"x*.bin\", \"lr\": 3e-4, \"train_steps\": 20.0, \"plan\": "
               "\"full\", \"memory_budget\": \"6GiB\", \"eval_tasks\": [\"a,b\", \"c\"], \"generate\": \"one\", "
               "\"seq_length\": 1024, \"seed\": \"18446744073709551615\", \"out\": \"o\", \"cuda_graphs\": false, "
               "\"kv_channels\": null, \"num_query_groups\": \"None\", \"precision\": \"bfloat16\"}");
    const struct config config = read_with(text, path, "--lr 1e-4");
    assert_true(config.training.lr == 1e-4 && config.training.train_steps == 20 && config.memory.plan == PLAN_FULL);
    assert_int_equal(config.recompute.memory_budget, (int64_t)6 << 30);
    assert_string_equal(config.evaluation.eval_tasks, "a,b\x1e"
                                                      "c\x1e");
    assert_string_equal(config.evaluation.generate, "one\x1e");
    assert_true(config.training.seed == UINT64_MAX && !config.device.cuda_graphs &&
                config_given(&config, model.seq_length));
    assert_true(config_given(&config, model.kv_channels) && config.model.kv_channels == 0);
    assert_true(config.model.num_query_groups == 0 && config.device.precision == WITH_BF16);
    assert_string_equal(config.data.out, "o");
    assert_string_equal(config.data.train_data, "x*.bin");
    unlink(path);
    json_decref((json_t *)config.file);
}

static void read_in_child(void *path) {
    char text[1024];
    read_with(text, (const char *)path, "");
}
static void bad_files_are_refused(void **state) {
    static const struct {
        const char *text, *words;
    } bad[] = {
        {"", "--config |JSON"},
        {"[]", "--config |object"},
        {"{\"lr\": }", "--config "},
        {"{\"learning_rate\": 1}", "--config |'learning_rate' is no option; the option here is --lr"},
        {"{\"train_step\": 1}", "'train_step' is no option; the nearest is --train-steps"},
        {"{\"version\": 3}", "--config |'version' is no option; --version stands only on the command line"},
        {"{\"lr\": \"fast\"}", "lr is 'fast', which is not understood; expected a number"},
        {"{\"lr\": [1]}", "lr is an array; expected a number"},
        {"{\"lr\": null}", "lr is null"},
        {"{\"lr\": {}}", "lr is an object"},
        {"{\"train_steps\": 1.5}", "train_steps is '1.5', which is not understood; expected an integer"},
        {"{\"train_steps\": 0}", "train_steps is '0', which is out of range; expected an integer of at least 1"},
        {"{\"preset\": \"gpt5\"}", "preset is 'gpt5', which is not known"},
        {"{\"precision\": \"fp16\"}", "precision is 'fp16', which is not offered|loss scaling|auto, bf16 or fp32"},
        {"{\"eval_tasks\": [[\"a\"], {}]}", "eval_tasks is an object"},
        {"{\"config\": \"other.json\"}", "names another file"},
        {"{\"lr\": 1, \"lr\": 2}", "--config |lr"},
        {"{\"lr\": 1, \"given\": [\"no_such\"]}", "'no_such' is no option"},
        {"{\"lr\": 1, \"given\": 3}", "given"},
        {"{\"train_data\": \"a\\u0000b\"}", "train_data"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char path[TEST_PATH];
        write_file(path, bad[i].text);
        assert_fails(read_in_child, path, bad[i].words);
        unlink(path);
    }
    assert_fails(read_in_child, (void *)"/nowhere/c.json", "--config /nowhere/c.json|No such file");
    assert_fails(read_in_child, (void *)"/dev/null", "--config /dev/null");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_run_reads_back),      cmocka_unit_test(what_is_of_one_run_is_left_out),
        cmocka_unit_test(a_beginning_is_kept),   cmocka_unit_test(a_choice_is_kept),
        cmocka_unit_test(edited_values_count),   cmocka_unit_test(a_users_file_gives_what_it_has),
        cmocka_unit_test(bad_files_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
