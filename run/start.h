// Where a run begins: from nothing, from a model's folder (--init-from), or from a checkpoint (--resume). Looks before
// the options are resolved, since a model and a checkpoint bring options with them.
#pragma once
#include "config.h"                  // struct config
#include "formats/huggingface.h"     // huggingface_parse_config, llmc_parse
#include "formats/checkpoint.h"      // checkpoint_newest, checkpoint_resolve
#include "runtime/machine/error.h"   // fail
#include "runtime/files/file_read.h" // read_whole
#include "runtime/net/parallel.h"    // parallel_open, parallel_check_same
#include "formats/trainer_state.h"   // trainer_state_parse
#include <limits.h>                  // PATH_MAX

enum { START_MOST_JSON = 64 << 20 }; // bytes of a config.json

// Options that a run can't change when it goes on: another model, another order of the data, other random numbers.
static const char *const start_fixed_options[] = {"preset",
                                                  "num_layers",
                                                  "hidden_size",
                                                  "num_attention_heads",
                                                  "num_query_groups",
                                                  "kv_channels",
                                                  "ffn_hidden_size",
                                                  "seq_length",
                                                  "max_position_embeddings",
                                                  "vocab_size",
                                                  "normalization",
                                                  "norm_epsilon",
                                                  "position_embedding_type",
                                                  "rotary_base",
                                                  "activation",
                                                  "add_bias_linear",
                                                  "add_qkv_bias",
                                                  "untie_embeddings_and_output_weights",
                                                  "seed",
                                                  NULL};
// Options of this start alone, which a checkpoint doesn't bring along.
static const char *const start_own_options[] = {"device",     "threads",     "plan",      "plan_json",   "plan_picture",
                                                "resume",     "out",         "init_from", "generate",    "eval_only",
                                                "exit_after", "cuda_graphs", "precision", "collectives", "rendezvous",
                                                "world_size", NULL};

static bool start_is_among(const char *name, const char *const *names) {
    for (; *names; names++)
        if (strcmp(*names, name) == 0)
            return true;
    return false;
}

// ---- the ranks ----

// Who this is among the ranks of the job. Only rank 0 speaks; errors are every rank's own.
static void start_ranks(struct config *config, struct parallel *parallel) {
    struct error_text error;
    const char *problem = config->plan
                              ? launch_find(&parallel->launch, config->rendezvous, &error)
                              : parallel_open(parallel, config->rendezvous, config->collective_timeout, &error);
    if (problem)
        fail("%s", problem);
    config->rank = parallel->launch.rank;
    config->ranks = parallel->launch.ranks;
    config->parallel = config->ranks > 1 && !config->plan ? parallel : NULL;
    if (config->rank > 0 && !freopen("/dev/null", "w", stdout))
        fail("/dev/null: %s", strerror(errno));
}

// Options that may differ between the ranks.
static const char *const start_rank_options[] = {"threads", NULL};

// After the options are resolved: whether all ranks have the same.
static void start_check_ranks(const struct config *config) {
    char *text = NULL, value[OPTION_TEXT];
    size_t bytes = 0;
    FILE *out = config->parallel ? open_memstream(&text, &bytes) : NULL;
    if (!out)
        return;
    fprintf(out, "%s\n", config_options.version);
    for (int i = 0; i < CONFIG_ROWS; i++)
        if (config_rows[i].kind != OPTION_GROUP && !start_is_among(config_rows[i].name, start_rank_options))
            fprintf(out, "%s %s\n", config_rows[i].name, option_text(value, &config_rows[i], config));
    fclose(out);
    parallel_check_same(config->parallel, text, "options");
    free(text);
}

// Sets an option. One that is a text keeps it, as long as the program runs.
static void start_set(struct config *config, int row, const char *text) {
    const bool keeps = config_rows[row].kind == OPTION_STRING || config_rows[row].kind == OPTION_LIST;
    char *const copy = keeps ? strdup(text) : NULL;
    if (keeps && !copy)
        fail("out of memory");
    option_set(&config_rows[row], config, keeps ? copy : text);
    config->given[row] = true;
}

// ---- from a checkpoint ----

// What was given then holds now, unless something else is given now; the model is what it was.
static void start_take_options(struct config *config, const struct trainer_state *state) {
    json_t *given = json_object_get(state->root, "given"), *value;
    const char *name;
    json_object_foreach (given, name, value) {
        const int row = option_find(&config_options, name, false);
        if (row < 0 || strcmp(config_rows[row].name, name) != 0)
            fail("%s/trainer_state.json: has the option '%s', which this program does not know", config->checkpoint,
                 json_show(name).text);
        if (!config->given[row] && !start_is_among(name, start_own_options))
            start_set(config, row, json_string_value(value));
    }
    for (const char *const *fixed = start_fixed_options; *fixed; fixed++) {
        const int row = option_find(&config_options, *fixed, false);
        const char *text = trainer_state_option(state, "resolved", *fixed);
        if (!text)
            fail("%s/trainer_state.json: lacks the option '%s'", config->checkpoint, *fixed);
        if (!config->given[row])
            start_set(config, row, text);
    }
    const int precision = option_find(&config_options, "precision", false);
    if (!config->given[precision])
        start_set(config, precision, state->precision);
    // Where it followed from the number of ranks, that may be another now; the step stays what it was.
    const int batch = option_find(&config_options, "global_batch_size", false);
    const char *batch_then = trainer_state_option(state, "resolved", "global_batch_size");
    if (!config->given[batch] && batch_then)
        start_set(config, batch, batch_then);
}

// After the options are resolved: whether the model, the seed and the precision are those of the checkpoint.
static void start_check(const struct config *config) {
    char text[OPTION_TEXT], name[OPTION_NAME];
    if (!*config->checkpoint)
        return;
    struct trainer_state state = trainer_state_open(config->checkpoint);
    for (const char *const *fixed = start_fixed_options; *fixed; fixed++) {
        const struct option_row *row = &config_rows[option_find(&config_options, *fixed, false)];
        const char *then = trainer_state_option(&state, "resolved", *fixed);
        if (strcmp(option_text(text, row, config), then) != 0)
            fail("--%s is %s, but it is %s in %s, and a run can't change it; leave the option out, or begin a new run "
                 "from that model by --init-from and another --out",
                 option_display(name, *fixed), text, json_show(then).text, config->checkpoint);
    }
    const bool fp32 = strcmp(state.precision, "fp32") == 0;
    if (config->precision != (fp32 ? WITH_FP32 : WITH_BF16))
        fail("--precision is not %s as in %s, and a run can't change it; leave the option out", state.precision,
             config->checkpoint);
    trainer_state_free(&state);
}

static void start_say(void *context, const char *text) { printf("passed over: %s\n", text); }

static void start_resume(struct config *config) {
    char root[PATH_MAX], path[PATH_MAX];
    struct manifest manifest;
    struct error_text error;
    const struct checkpoint_listener listener = {start_say, NULL};
    const bool automatic = strcmp(config->resume, "auto") == 0;
    memset(path, 0, sizeof path);
    if ((size_t)snprintf(root, sizeof root, "%s/checkpoints", config->out) >= sizeof root)
        fail("--out %s: the name is too long", config->out);
    if (config->rank == 0) { // verifies for all: it reads every byte
        const char *problem = automatic ? checkpoint_newest(path, &manifest, root, &listener, &error)
                                        : checkpoint_resolve(path, &manifest, config->resume, &listener, &error);
        if (problem)
            fail("--resume %s: %s", config->resume, problem);
        manifest_free(&manifest);
    }
    if (config->parallel)
        control_broadcast(config->parallel->control, path, sizeof path, "the checkpoint to go on from", true);
    if (!*path)
        return;
    config->checkpoint = strdup(path);
    struct trainer_state state = trainer_state_open(path);
    start_take_options(config, &state);
    trainer_state_free(&state);
}

// A new run would write its checkpoints among those of an older one.
static void start_check_new(const struct config *config) {
    char root[PATH_MAX];
    struct checkpoint_entries entries;
    if ((size_t)snprintf(root, sizeof root, "%s/checkpoints", config->out) >= sizeof root)
        fail("--out %s: the name is too long", config->out);
    const int root_fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root_fd < 0)
        return;
    const int failed = checkpoint_list(&entries, root_fd);
    close(root_fd);
    for (int i = 0; i < entries.count && !failed; i++)
        if (entries.all[i].kind == CHECKPOINT_STEP)
            fail("%s holds checkpoints of another run, the newest of step %lld: go on from it by --resume auto, name "
                 "another --out, or remove them",
                 root, (long long)entries.all[i].step);
    free(entries.all);
}

// ---- from a model ----

static const char *start_read_model(struct huggingface_config *model, const char *path, struct error_text *error) {
    struct stat status;
    char config_path[PATH_MAX];
    unsigned char *data = NULL, header_bytes[LLMC_MODEL_HEADER];
    uint64_t bytes;
    struct llmc_header header;
    int fd;
    if (stat(path, &status) != 0)
        return error_format(error, "%s: %s", path, strerror(errno));
    if (S_ISDIR(status.st_mode)) {
        if ((size_t)snprintf(config_path, sizeof config_path, "%s/config.json", path) >= sizeof config_path)
            return error_format(error, "%.500s: the name is too long", path);
        const char *problem = read_whole(&data, &bytes, START_MOST_JSON, config_path, "a model's config.json", error);
        if (!problem)
            problem = huggingface_parse_config(model, data, bytes, config_path, error);
        free(data);
        return problem;
    }
    const char *problem = open_regular(&fd, &bytes, path, "a folder with config.json, or an llm.c checkpoint", error);
    if (problem)
        return problem;
    const uint64_t available = bytes < sizeof header_bytes ? bytes : sizeof header_bytes;
    problem = read_exactly(fd, header_bytes, available, 0, path, error);
    if (!problem)
        problem = llmc_parse(&header, header_bytes, available, bytes, path, error);
    close(fd);
    if (!problem)
        llmc_settings(model, &header);
    return problem;
}

// The model's options; those that the user gave too must say the same.
static void start_take_model(struct config *config, const struct huggingface_config *model) {
    char given[OPTION_TEXT], found[OPTION_TEXT], name[OPTION_NAME];
    for (int i = 0; i < model->num_settings; i++) {
        const char *const equals = strchr(model->settings[i], '=');
        snprintf(name, sizeof name, "%.*s", (int)(equals - model->settings[i]), model->settings[i]);
        const int row = option_find(&config_options, name, false);
        const bool was_given = config->given[row];
        option_text(given, &config_rows[row], config);
        start_set(config, row, equals + 1);
        option_text(found, &config_rows[row], config);
        if (was_given && strcmp(given, found) != 0)
            fail("--%s is %s, but %s in %s; leave the option out", option_display(name, name), given, found,
                 config->init_from);
    }
}

static void start_from_model(struct config *config) {
    struct huggingface_config model;
    struct error_text error;
    if (config->preset > 0)
        fail("--preset and --init-from both name a model; leave --preset out");
    const char *problem = start_read_model(&model, config->init_from, &error);
    if (problem)
        fail("--init-from %s", problem);
    start_take_model(config, &model);
    if (!config_given(config, "seq_length")) {
        const int usual = model.architecture == ARCHITECTURE_GPT2 ? 1024 : 4096; // as the presets
        config->seq_length = config->max_position_embeddings > 0 && config->max_position_embeddings < usual
                                 ? config->max_position_embeddings
                                 : usual;
        config->given[option_find(&config_options, "seq_length", false)] = true;
    }
}

// Finds what the run begins from, and sets the options that come with it.
static void start_find(struct config *config) {
    const bool resumes = strcmp(config->resume, "none") != 0;
    if (resumes && !config_trains(config))
        fail("--resume goes on with training; --eval-only and --generate take a checkpoint by --init-from");
    if (resumes)
        start_resume(config);
    if (!*config->checkpoint && *config->init_from)
        start_from_model(config);
    if (!resumes && config_trains(config) && !config->plan && config->rank == 0)
        start_check_new(config);
}
