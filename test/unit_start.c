// The options that a run starts with, where several places name them: the command line, a preset, a checkpoint.
#include "config/resolve.h" // config_read, config_resolve
#include "run/start.h"      // start_take_options, start_check
#include "test/fails.h"     // assert_fails
#include "test/testing.h"   // cmocka

// A checkpoint's folder that has only trainer_state.json.
struct old_run {
    char path[TEST_PATH];
    struct trainer_state state;
};

// The options that are newer than the first checkpoints.
static const char *const younger[] = {
    "rotary_percent",
    "rotary_base_local",
    "rope_scaling_type",
    "rope_scaling_factor",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_original_max_position_embeddings",
    "yarn_beta_fast",
    "window_size",
    "window_attn_skip_freq",
    "qk_layernorm",
    "norm_placement",
    "parallel_residual",
    "add_attention_proj_bias",
    "add_mlp_bias",
    "embedding_multiplier",
    "logit_multiplier",
    "separate_documents",
    "reset_attention_mask",
    "reset_position_ids",
    "eod_mask_loss",
    "document_delimiter",
    "eod_token",
};

static struct config read_command(const char *const *words) {
    char *argv[32] = {(char *)"train_gpt"};
    int argc = 1;
    for (; words[argc - 1]; argc++)
        argv[argc] = (char *)words[argc - 1];
    argv[argc] = NULL;
    return config_read(argc, argv, NULL);
}

// Writes a run's checkpoint. The run was given the options `asked`, and an old program, without the newer options,
// resolved them as this program resolves `then`. precision: bf16 or fp32.
static struct old_run write_run(const char *precision, const char *const *asked, const char *const *then) {
    struct old_run run;
    struct config was_asked = read_command(asked), resolved = read_command(then);
    struct trainer_file file = {"shard.bin", 1000};
    struct data_change change = {0, 1, 0, 0};
    struct trainer_part part = {"", 1, 0, 1, &change, 1};
    struct error_text error;
    char *text = NULL, path[TEST_PATH + 32];
    size_t bytes = 0;
    config_resolve(&resolved);
    memset(&run.state, 0, sizeof run.state);
    run.state.precision = precision;
    run.state.files = &file;
    run.state.parts = &part;
    run.state.num_files = run.state.num_parts = 1;
    FILE *out = open_memstream(&text, &bytes);
    trainer_state_write(out, &run.state, &config_options, &was_asked, was_asked.given, &resolved);
    fclose(out);
    assert_null(trainer_state_parse(&run.state, (const unsigned char *)text, bytes, "state", &error));
    free(text);
    for (size_t i = 0; i < sizeof younger / sizeof *younger; i++)
        assert_int_equal(json_object_del(json_object_get(run.state.root, "resolved"), younger[i]), 0);
    assert_non_null(mkdtemp(test_template(run.path, "unit_start")));
    snprintf(path, sizeof path, "%s/trainer_state.json", run.path);
    assert_int_equal(json_dump_file(run.state.root, path, 0), 0);
    return run;
}
static struct old_run write_old(const char *const *asked, const char *const *then) {
    return write_run("fp32", asked, then);
}
static void remove_old(struct old_run *run) {
    char path[TEST_PATH + 32];
    snprintf(path, sizeof path, "%s/trainer_state.json", run->path);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(run->path), 0);
    trainer_state_free(&run->state);
}
// A run that resumes an old one, with more options.
struct resumed {
    const struct old_run *run;
    const char *const *words;
    struct config config;
};
static void resume(void *argument) {
    struct resumed *resumed = (struct resumed *)argument;
    resumed->config = read_command(resumed->words);
    resumed->config.checkpoint = resumed->run->path;
    start_take_options(&resumed->config, &resumed->run->state);
    config_resolve(&resumed->config);
    start_check(&resumed->config);
}

// ---- a checkpoint ----

// Checks an old llama3.2-1b, which had no scaled frequencies: the preset's newer options do not change it.
static void a_preset_that_sets_younger_options_does_not_change_an_old_run(void **state) {
    static const char *const asked[] = {"--preset=llama3.2-1b", "--train-data=t", NULL};
    static const char *const then[] = {"--preset=llama3.2-1b",
                                       "--train-data=t",
                                       "--rope-scaling-type=none",
                                       "--rope-scaling-factor=1",
                                       "--rope-original-max-position-embeddings=0",
                                       "--max-position-embeddings=4096",
                                       NULL};
    struct old_run run = write_old(asked, then);
    struct resumed resumed = {&run, (const char *const[]){NULL}, read_command(asked)};
    resume(&resumed);
    const struct config *c = &resumed.config;
    assert_int_equal(c->model.num_layers, 16);
    assert_int_equal(c->model.rope_scaling_type, SCALING_NONE);
    assert_true(c->model.rope_scaling_factor == 1);
    assert_int_equal(c->model.rope_original_max_position_embeddings, 0);
    assert_int_equal(c->model.max_position_embeddings, 4096);
    assert_false(c->model.add_mlp_bias);
    resumed.words = (const char *const[]){"--window-size=8", NULL};
    assert_fails(resume, &resumed, "--window-size is 8|it is none");
    resumed.words = (const char *const[]){"--separate-documents", NULL};
    assert_fails(resume, &resumed, "--separate-documents is true|it is false");
    remove_old(&run);
}
static void biases_of_an_old_run_are_those_of_all_linear_layers(void **state) {
    static const char *const words[] = {"--preset=gpt2-124m", "--train-data=t", NULL};
    struct old_run run = write_old(words, words);
    struct resumed resumed = {&run, (const char *const[]){NULL}, read_command(words)};
    resume(&resumed);
    assert_true(resumed.config.model.add_qkv_bias && resumed.config.model.add_attention_proj_bias &&
                resumed.config.model.add_mlp_bias);
    remove_old(&run);
}

// ---- FP8 ----

static void goes_on_with(struct resumed *resumed, const char *first, const char *second) {
    static const char *words[3];
    words[0] = first;
    words[1] = second;
    resumed->words = words;
    resume(resumed);
}
static void is_refused_with(struct resumed *resumed, const char *first, const char *second, const char *message) {
    const char *const words[] = {first, second, NULL};
    resumed->words = words;
    assert_fails(resume, resumed, message);
}

// Checks that FP8's options may change where a run goes on, except for the histories. Options of the checkpoint that
// become useless are dropped; useless options of the command line are an error.
static void fp8_may_change_when_a_run_goes_on_but_for_the_histories(void **state) {
    static const char *const words[] = {"--fp8-format=hybrid",
                                        "--fp8-recipe=delayed",
                                        "--fp8-amax-history-len=32",
                                        "--fp8-margin=1",
                                        "--fp8-amax-compute-algo=max",
                                        "--train-data=t",
                                        NULL};
    struct old_run run = write_run("bf16", words, words);
    struct resumed resumed = {&run, NULL, read_command(words)};
    const struct config *c = &resumed.config;
    goes_on_with(&resumed, NULL, NULL);
    assert_true(c->fp8.fp8_format == FP8_FORMAT_HYBRID && c->fp8.fp8_recipe == FP8_RECIPE_DELAYED);
    assert_true(c->fp8.fp8_amax_history_len == 32 && c->fp8.fp8_margin == 1 && c->device.precision == WITH_BF16);
    goes_on_with(&resumed, "--fp8-margin=0", "--fp8-amax-compute-algo=most_recent");
    assert_true(c->fp8.fp8_margin == 0 && c->fp8.fp8_amax_compute_algo == FP8_AMAX_MOST_RECENT);
    goes_on_with(&resumed, "--fp8-format=e4m3", "--first-last-layers-bf16");
    assert_true(c->fp8.fp8_format == FP8_FORMAT_E4M3 && c->fp8.first_last_layers_bf16);
    goes_on_with(&resumed, "--fp8-format=none", NULL);
    assert_true(c->fp8.fp8_format == FP8_FORMAT_NONE && !config_given(c, fp8.fp8_amax_history_len));
    assert_int_equal(c->fp8.fp8_amax_history_len, 1);
    goes_on_with(&resumed, "--fp8-recipe=tensorwise", NULL);
    assert_true(c->fp8.fp8_format == FP8_FORMAT_HYBRID && c->fp8.fp8_recipe == FP8_RECIPE_TENSORWISE &&
                c->fp8.fp8_margin == 0);
    is_refused_with(&resumed, "--fp8-recipe=tensorwise", "--fp8-margin=2", "--fp8-margin 2 is of --fp8-recipe delayed");
    is_refused_with(&resumed, "--fp8-amax-history-len=16", NULL,
                    "--fp8-amax-history-len is 16|are of 32 steps; leave the option out");
    remove_old(&run);
}

static void a_run_without_histories_goes_on_with_those_of_any_length(void **state) {
    static const char *const before[][3] = {{"--train-data=t", NULL}, {"--train-data=t", "--fp8-format=e4m3", NULL}};
    for (int i = 0; i < 2; i++) {
        struct old_run run = write_run("bf16", before[i], before[i]);
        static const char *const words[] = {"--fp8-format=hybrid", "--fp8-recipe=delayed", "--fp8-amax-history-len=16",
                                            NULL};
        struct resumed resumed = {&run, words, read_command(words)};
        resume(&resumed);
        assert_int_equal(resumed.config.fp8.fp8_amax_history_len, 16);
        remove_old(&run);
    }
}

// Checks that the chunk that was chosen by free memory stays, also where the command line is the first one with
// --resume.
static void chunks_of_logits_stay_while_the_micro_batch_does(void **state) {
    static const char *const asked[] = {"--train-data=t", "--micro-batch-size=8", NULL};
    static const char *const then[] = {"--train-data=t", "--micro-batch-size=8", "--loss-chunk-tokens=4096", NULL};
    struct old_run run = write_old(asked, then);
    struct resumed resumed = {&run, (const char *const[]){NULL}, read_command(asked)};
    resume(&resumed);
    assert_int_equal(resumed.config.memory.loss_chunk_tokens, 4096);
    resumed.words = (const char *const[]){"--micro-batch-size=8", "--seq-length=1024", NULL};
    resume(&resumed);
    assert_int_equal(resumed.config.memory.loss_chunk_tokens, 4096);
    resumed.words = (const char *const[]){"--micro-batch-size=8", "--loss-chunk-tokens=64", NULL};
    resume(&resumed);
    assert_int_equal(resumed.config.memory.loss_chunk_tokens, 64);
    resumed.words = (const char *const[]){"--micro-batch-size=4", NULL};
    resume(&resumed);
    assert_int_equal(resumed.config.memory.loss_chunk_tokens, 0);
    remove_old(&run);
}

static void a_run_in_fp32_does_not_go_on_in_fp8(void **state) {
    static const char *const words[] = {"--train-data=t", NULL};
    struct old_run run = write_old(words, words);
    struct resumed resumed = {&run, NULL, read_command(words)};
    is_refused_with(&resumed, "--fp8-format=hybrid", NULL, "not fp32 as in the checkpoint; leave --fp8-format out");
    remove_old(&run);
}

// ---- a preset ----

static struct config resolve(const char *const *words) {
    struct config config = read_command(words);
    config_resolve(&config);
    return config;
}
static void resolve_in_child(void *words) { resolve((const char *const *)words); }

static void what_a_preset_sets_beside_an_option_goes_with_it(void **state) {
    struct config c = resolve((const char *const[]){"--preset=gemma3-270m", "--window-size=none", "--plan", NULL});
    assert_int_equal(config_window(&c), 0);
    assert_false(config_layer_is_windowed(&c, 0));
    assert_true(c.model.rotary_base_local == 0);
    c = resolve((const char *const[]){"--preset=llama3.2-1b", "--rope-scaling-type=none", "--plan", NULL});
    assert_true(c.model.rope_scaling_factor == 1);
    const char *words[] = {"--window-size=none", "--rotary-base-local=100", "--position-embedding-type=rope", "--plan",
                           NULL};
    assert_fails(resolve_in_child, words, "--rotary-base-local 100|--window-size");
}

// ---- the command line ----

static void separate_documents_leaves_what_is_given_too(void **state) {
    struct config c = resolve((const char *const[]){"--separate-documents", "--plan", NULL});
    assert_true(c.data.reset_attention_mask && c.data.reset_position_ids && c.data.eod_mask_loss);
    c = resolve((const char *const[]){"--separate-documents", "--no-reset-position-ids", "--plan", NULL});
    assert_true(c.data.reset_attention_mask && c.data.eod_mask_loss);
    assert_false(c.data.reset_position_ids);
}
// Checks factors that the kernels can't take: they take the largest logit for the largest z.
static void factors_that_no_kernel_takes_are_refused(void **state) {
    const char *words[] = {"--logit-multiplier=-1", "--plan", NULL};
    assert_fails(resolve_in_child, words, "--logit-multiplier|-1|out of range");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_preset_that_sets_younger_options_does_not_change_an_old_run),
        cmocka_unit_test(biases_of_an_old_run_are_those_of_all_linear_layers),
        cmocka_unit_test(fp8_may_change_when_a_run_goes_on_but_for_the_histories),
        cmocka_unit_test(a_run_without_histories_goes_on_with_those_of_any_length),
        cmocka_unit_test(chunks_of_logits_stay_while_the_micro_batch_does),
        cmocka_unit_test(a_run_in_fp32_does_not_go_on_in_fp8),
        cmocka_unit_test(what_a_preset_sets_beside_an_option_goes_with_it),
        cmocka_unit_test(separate_documents_leaves_what_is_given_too),
        cmocka_unit_test(factors_that_no_kernel_takes_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
