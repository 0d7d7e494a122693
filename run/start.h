// The options that a run starts with: the command line's and, added before config_resolve, those in a checkpoint
// (--resume) or a model (--init-from). In the end they are compared with the checkpoint's and the other ranks'.
#pragma once
#include "config/config.h"             // struct config
#include "config/config_file.h"        // config_auto_chooses
#include "config/fp8.h"                // config_drop_unused_fp8
#include "dataloader.h"                // mixture_find_file
#include "formats/huggingface.h"       // huggingface_parse_config
#include "formats/llmc.h"              // llmc_parse
#include "formats/peft_config.h"       // peft_config_read
#include "formats/checkpoint.h"        // checkpoint_newest, checkpoint_resolve
#include "formats/checkpoint_folder.h" // checkpoint_list
#include "run/environment.h"           // environment_check_ranks
#include "run/run_folder.h"            // take_newest_of_run
#include "run/same_data.h"             // data_refusal
#include "runtime/machine/error.h"     // fail
#include "runtime/machine/say.h"       // say
#include "runtime/files/file_read.h"   // read_whole
#include "runtime/machine/text_add.h"  // text_copy
#include "runtime/net/parallel.h"      // parallel_open, parallel_check_same
#include "formats/trainer_state.h"     // trainer_state_read, trainer_state_option
#include "runtime/text/json_parse.h"   // json_show
#include <fcntl.h>                     // open
#include <limits.h>                    // PATH_MAX
#include <math.h>                      // ceil
#include <sys/stat.h>                  // stat
#include <unistd.h>                    // close

enum { START_MAX_JSON = 64 << 20 }; // bytes of a config.json

// ---- the ranks ----

// Finds this rank and the number of ranks, and connects them in *parallel, unless in a plan. config->parallel is NULL
// for one rank or a plan. Silences stdout of ranks other than 0. Ends the program where it can't.
static void start_ranks(struct config *config, struct parallel *parallel) {
    struct error_text error;
    const char *problem =
        config->memory.plan ? launch_find(&parallel->launch, config->processes.rendezvous, &error)
                            : parallel_open(parallel, config->processes.rendezvous, config->processes.rendezvous_secret,
                                            config->processes.collective_timeout, &error);
    if (problem)
        fail("%s", problem);
    config->rank = parallel->launch.rank;
    config->ranks = parallel->launch.ranks;
    config->parallel = config->ranks > 1 && !config->memory.plan ? parallel : NULL;
    if (config->rank > 0 && !freopen("/dev/null", "w", stdout))
        fail("/dev/null: %s", strerror(errno));
}

// Ends the job where ranks differ in the program's version, in options other than those that may differ by rank
// (CONFIG_PER_RANK), or in a variable of the environment (run/environment.h). Every rank calls this.
static void start_check_ranks(const struct config *config) {
    char *text = NULL, value[OPTION_TEXT];
    size_t bytes = 0;
    if (!config->parallel)
        return;
    FILE *out = open_memstream(&text, &bytes);
    if (!out)
        fail("out of memory");
    fprintf(out, "%s\n", config_options.version);
    for (int i = 0; i < CONFIG_ROWS; i++)
        if (config_rows[i].kind != OPTION_GROUP && !(config_rows[i].flags & CONFIG_PER_RANK))
            fprintf(out, "%s %s\n", config_rows[i].name, option_text(value, &config_rows[i], config));
    if (fclose(out) != 0)
        fail("out of memory");
    parallel_check_same(config->parallel, text, "options");
    free(text);
    environment_check_ranks(config->parallel);
}

// Sets an option as if the user had given it. Copies the text; the copy of a string option is never freed.
static void start_set(struct config *config, int row, const char *text) {
    const bool keeps = config_rows[row].kind == OPTION_STRING;
    option_set(&config_rows[row], config, keeps ? text_copy(text) : text);
    config->given[row] = true;
}

// ---- from a checkpoint ----

// Returns the value that an option had in the checkpoint's run, in `text` or *state. An option newer than that run has
// its default, but biases of projections have the value of --add-bias-linear, which used to set them.
static const char *checkpoint_resolved_option(char text[OPTION_TEXT], const struct trainer_state *state, int row) {
    const bool bias = row == CONFIG_ROW(model.add_attention_proj_bias) || row == CONFIG_ROW(model.add_mlp_bias);
    const char *then = trainer_state_option(state, "resolved", config_rows[row].name);
    struct config defaults;
    if (!then && bias)
        then = trainer_state_option(state, "resolved", config_rows[CONFIG_ROW(model.add_bias_linear)].name);
    if (then)
        return then;
    memset(&defaults, 0, sizeof defaults);
    option_set(&config_rows[row], &defaults, config_rows[row].default_text);
    return option_text(text, &config_rows[row], &defaults);
}

// Sets, as if given, what --recompute-granularity auto chose in the checkpoint's run, except options in by_user. Does
// nothing if by_user has the granularity, or it isn't auto.
static void start_take_choice(struct config *config, const struct trainer_state *state,
                              const bool by_user[CONFIG_ROWS_MAX]) {
    char text[OPTION_TEXT];
    if (config->recompute.recompute_granularity != RECOMPUTE_AUTO ||
        by_user[CONFIG_ROW(recompute.recompute_granularity)])
        return;
    for (int row = 0; row < CONFIG_ROWS; row++)
        if (config_rows[row].kind != OPTION_GROUP && config_auto_chooses(row) && !by_user[row])
            start_set(config, row, checkpoint_resolved_option(text, state, row));
}

// Takes over the number of tokens in a chunk of logits, which the checkpoint's run may have chosen by its free memory,
// so that sums keep their bits. Does nothing where the user gives that number or changes the micro-batch size.
static void start_take_loss_chunk(struct config *config, const struct trainer_state *state,
                                  const bool by_user[CONFIG_ROWS_MAX]) {
    const int row = CONFIG_ROW(memory.loss_chunk_tokens), size = CONFIG_ROW(training.micro_batch_size);
    char text[OPTION_TEXT], now[OPTION_TEXT];
    const bool same = !by_user[size] || strcmp(option_text(now, &config_rows[size], config),
                                               checkpoint_resolved_option(text, state, size)) == 0;
    if (!by_user[row] && same)
        start_set(config, row, checkpoint_resolved_option(text, state, row));
}

// Takes over the options that name the run's first weights, unless any of them is given here. They don't count as
// given. Adapters keep the base model that the run had, unless --init-from names another. Texts are never freed.
static void start_take_beginning(struct config *config, const struct trainer_state *state) {
    char text[OPTION_TEXT];
    bool named = false;
    for (int row = 0; row < CONFIG_ROWS; row++)
        named = named || (config_names_first_weights(row) && config->given[row]);
    for (int row = 0; row < CONFIG_ROWS && !named; row++)
        if (config_names_first_weights(row))
            option_set(&config_rows[row], config, text_copy(checkpoint_resolved_option(text, state, row)));
    if (state->base_folder && (!named || !*config->checkpoints.init_from ||
                               is_checkpoint_of_run(state->base_folder, config->checkpoints.init_from)))
        config->checkpoints.init_from = text_copy(state->base_folder);
}

// Returns the option that says the same in another unit, epochs for steps, or `row`. Giving either replaces both.
static int start_other_unit_of(int row) {
    const int steps = CONFIG_ROW(training.train_steps), epochs = CONFIG_ROW(training.train_epochs);
    return row == steps ? epochs : row == epochs ? steps : row;
}
// Takes over options from the checkpoint, but none that is given here. They are what its user gave, except
// CONFIG_THIS_START's; what its run chose; and what a resumed run can't change. An unknown option ends the program.
static void start_take_options(struct config *config, const struct trainer_state *state) {
    json_t *given = json_object_get(state->root, "given"), *value;
    const char *name;
    char text[OPTION_TEXT];
    bool by_user[CONFIG_ROWS_MAX];
    memcpy(by_user, config->given, sizeof by_user);
    json_object_foreach (given, name, value) {
        const int row = option_find(&config_options, name, false);
        if (row < 0 || strcmp(config_rows[row].name, name) != 0)
            fail("%s/trainer_state.json: has the option '%s', which this program does not know", config->checkpoint,
                 json_show(name).text);
        if (!config->given[row] && !(config_rows[row].flags & CONFIG_THIS_START) && !by_user[start_other_unit_of(row)])
            start_set(config, row, json_string_value(value));
    }
    start_take_choice(config, state, by_user);
    start_take_loss_chunk(config, state, by_user);
    for (int row = 0; row < CONFIG_ROWS; row++) {
        if (!(config_rows[row].flags & CONFIG_FIXED_ON_RESUME))
            continue;
        if (!config->given[row])
            start_set(config, row, checkpoint_resolved_option(text, state, row));
    }
    if (!config_given(config, device.precision))
        start_set(config, CONFIG_ROW(device.precision), state->precision);
    // A global batch size that was derived from the number of ranks is kept, though that number may have changed.
    const int batch = CONFIG_ROW(training.global_batch_size);
    const char *batch_then = trainer_state_option(state, "resolved", config_rows[batch].name);
    if (!config->given[batch] && batch_then)
        start_set(config, batch, batch_then);
    start_take_beginning(config, state);
    config_drop_unused_fp8(config, by_user);
}

static bool start_had_delayed_scales(const struct trainer_state *state) {
    char format[OPTION_TEXT], recipe[OPTION_TEXT];
    return strcmp(checkpoint_resolved_option(format, state, CONFIG_ROW(fp8.fp8_format)), "none") != 0 &&
           strcmp(checkpoint_resolved_option(recipe, state, CONFIG_ROW(fp8.fp8_recipe)), "delayed") == 0;
}
// Ends the program if this run and the checkpoint both have delayed FP8 scales, but histories of different lengths.
static void start_check_histories(const struct config *config, const struct trainer_state *state) {
    const int row = CONFIG_ROW(fp8.fp8_amax_history_len);
    char then_text[OPTION_TEXT], now_text[OPTION_TEXT];
    const char *then = checkpoint_resolved_option(then_text, state, row);
    const char *now = option_text(now_text, &config_rows[row], config);
    if (config->fp8.fp8_format != FP8_FORMAT_NONE && config->fp8.fp8_recipe == FP8_RECIPE_DELAYED &&
        start_had_delayed_scales(state) && strcmp(now, then) != 0)
        fail("--fp8-amax-history-len is %s, but the histories in %s are of %s steps; leave the option out", now,
             config->checkpoint, json_show(then).text);
}

// Ends the program where precision, fixed options or FP8's histories are not the checkpoint's, if the run has one.
static void start_check(const struct config *config) {
    char then_text[OPTION_TEXT], now_text[OPTION_TEXT], name[OPTION_NAME];
    if (!*config->checkpoint)
        return;
    struct trainer_state state = trainer_state_read(config->checkpoint);
    for (int i = 0; i < CONFIG_ROWS; i++) {
        const struct option_row *row = &config_rows[i];
        if (!(row->flags & CONFIG_FIXED_ON_RESUME))
            continue;
        const char *then = checkpoint_resolved_option(then_text, &state, i), *now = option_text(now_text, row, config);
        if (strcmp(now, then) != 0)
            fail("--%s is %s, but it is %s in %s, and a run can't change it; leave the option out, or begin a new run "
                 "from that model by --init-from and another --out",
                 option_display(name, row->name), *now ? now : "empty", *then ? json_show(then).text : "empty",
                 config->checkpoint);
    }
    const bool fp32 = strcmp(state.precision, "fp32") == 0;
    if (config->device.precision != (fp32 ? WITH_FP32 : WITH_BF16))
        fail("--precision is not %s as in %s, and a run can't change it; leave the option out", state.precision,
             config->checkpoint);
    start_check_histories(config, &state);
    trainer_state_free(&state);
}

// Finds --resume's checkpoint, which rank 0 verifies, and takes over its options. Ends the program if all are damaged
// or, but for `auto`, there is none; `auto` then changes nothing. --resume is not none. Every rank calls this.
static void start_resume(struct config *config) {
    char root[PATH_MAX], path[PATH_MAX];
    struct manifest manifest;
    struct error_text error;
    const struct checkpoint_listener listener = {say_passed_over, NULL};
    const bool automatic = strcmp(config->checkpoints.resume, "auto") == 0;
    memset(path, 0, sizeof path);
    if ((size_t)snprintf(root, sizeof root, "%s/checkpoints", config->data.out) >= sizeof root)
        fail("--out %s: the name is too long", config->data.out);
    if (config->rank == 0) {
        const char *problem = automatic
                                  ? checkpoint_newest(path, &manifest, root, &listener, &error)
                                  : checkpoint_resolve(path, &manifest, config->checkpoints.resume, &listener, &error);
        if (problem)
            fail("--resume %s: %s", config->checkpoints.resume, problem);
        manifest_free(&manifest);
    }
    if (config->parallel)
        control_broadcast(config->parallel->control, path, sizeof path, "the checkpoint to go on from", true);
    if (!*path)
        return;
    config->checkpoint = text_copy(path);
    struct trainer_state state = trainer_state_read(path);
    start_take_options(config, &state);
    trainer_state_free(&state);
    memcpy(config->typed, config->given, sizeof config->typed);
}

// Ends the program if --out holds a step's checkpoint, since a new run must not write beside another run's.
static void start_check_new(const struct config *config) {
    char root[PATH_MAX];
    struct checkpoint_entries entries;
    if ((size_t)snprintf(root, sizeof root, "%s/checkpoints", config->data.out) >= sizeof root)
        fail("--out %s: the name is too long", config->data.out);
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

static bool start_ends_with(const char *path, const char *ending) {
    const size_t length = strlen(path), n = strlen(ending);
    return length >= n && strcmp(path + length - n, ending) == 0;
}

// Reads the options of the model at `path` into *model: from a folder's config.json, or from the header of an llm.c
// file. Returns NULL, or what is wrong, in *error. After success the caller frees the model by huggingface_free.
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
        const char *problem = read_whole(&data, &bytes, START_MAX_JSON, config_path, "a model's config.json", error);
        if (!problem)
            problem = huggingface_parse_config(model, data, bytes, config_path, error);
        free(data);
        return problem;
    }
    if (start_ends_with(path, ".safetensors") || start_ends_with(path, ".json"))
        return error_format(error, "%.500s: is one file of a model; name the folder that it lies in", path);
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

// Sets a model's options, and marks them as given by the user. If the user gave another value, ends the program or, for
// an option with CONFIG_EXTENDS, keeps the user's.
static void start_take_model(struct config *config, const struct huggingface_config *model) {
    char given_text[OPTION_TEXT], found_text[OPTION_TEXT], name[OPTION_NAME];
    for (int i = 0; i < model->num_settings; i++) {
        const char *const equals = strchr(model->settings[i], '=');
        snprintf(name, sizeof name, "%.*s", (int)(equals - model->settings[i]), model->settings[i]);
        const int row = option_find(&config_options, name, false);
        const bool was_given = config->given[row];
        if (was_given && config_rows[row].flags & CONFIG_EXTENDS)
            continue;
        const char *given = option_text(given_text, &config_rows[row], config);
        start_set(config, row, equals + 1);
        const char *found = option_text(found_text, &config_rows[row], config);
        if (was_given && strcmp(given, found) != 0)
            fail("--%s is %s, but %s in %s; leave the option out", option_display(name, name), given, found,
                 config->checkpoints.init_from);
    }
}

// Sets the options of --init-from's model and, unless given, a --seq-length within its positions, or ends the program.
static void start_from_model(struct config *config) {
    struct huggingface_config model;
    struct error_text error;
    if (config->model.preset != 0)
        fail("--preset and --init-from both name a model; leave --preset out");
    const char *problem = start_read_model(&model, config->checkpoints.init_from, &error);
    if (problem)
        fail("--init-from %s", problem);
    const bool gpt2 = model.architecture == ARCHITECTURE_GPT2;
    start_take_model(config, &model);
    if (!config_given(config, checkpoints.checkpoint_architecture))
        start_set(config, CONFIG_ROW(checkpoints.checkpoint_architecture), architecture_model_type(model.architecture));
    huggingface_free(&model);
    if (!config_given(config, model.seq_length)) {
        const int usual = gpt2 ? 1024 : 4096;
        config->model.seq_length =
            config->model.max_position_embeddings > 0 && config->model.max_position_embeddings < usual
                ? config->model.max_position_embeddings
                : usual;
        config_given(config, model.seq_length) = true;
    }
}

// Fits options that aren't given to finetuning data: --seq-length is the rows' length; examples don't see each other.
static void start_take_rows(struct config *config) {
    const char *const patterns = config_trains(config) ? config->data.train_data : config->data.val_data;
    char path[PATH_MAX];
    struct token_file file;
    struct error_text error;
    memset(&file, 0, sizeof file);
    const char *const option = config_trains(config) ? "--train-data" : "--val-data";
    if (config_generates(config) || !mixture_find_file(patterns, option, path, sizeof path))
        return;
    const bool opened = token_file_open(&file, path, &error) == NULL; // else the data loader says what is wrong
    const bool rows = opened && file.row_tokens > 0;
    if (rows && !config_given(config, model.seq_length)) {
        config->model.seq_length = file.row_tokens;
        config_given(config, model.seq_length) = true;
    }
    if (rows && !config_given(config, data.reset_attention_mask))
        start_set(config, CONFIG_ROW(data.reset_attention_mask), "true");
    if (rows && !config_given(config, data.reset_position_ids))
        start_set(config, CONFIG_ROW(data.reset_position_ids), "true");
    if (opened)
        token_file_close(&file);
}

// Returns the number of samples that the run has seen when --train-epochs epochs end. Epochs count from the sample at
// which the run began with its present data. Ends the program where the data can't be used.
static uint64_t start_samples_of_epochs(const struct config *c) {
    struct dataloader *loader = dataloader_open(c->data.train_data, c->model.seq_length, 0, false, c->model.vocab_size,
                                                0, 1, 1, 0, "--train-data");
    struct error_text unused;
    uint64_t begin = 0;
    double samples = (double)dataloader_samples_per_epoch(loader);
    if (*c->checkpoint) {
        struct trainer_state state = trainer_state_read(c->checkpoint);
        begin = data_refusal(loader, &state, c->checkpoint, &unused) ? state.samples : state.data_start;
        trainer_state_free(&state);
    }
    dataloader_close(loader);
    samples = ceil(samples * c->training.train_epochs * (1 - 1e-12)); // a product that rounds up is no further sample
    return begin + (samples < 0x1p59 ? (uint64_t)samples : (uint64_t)1 << 59);
}

// ---- from adapters ----

// Whether a folder holds LoRA adapters but no model.
static bool start_is_adapters(const char *folder) {
    char path[PATH_MAX];
    bool has[2] = {false, false};
    static const char *const names[2] = {PEFT_CONFIG_NAME, "config.json"};
    for (int i = 0; i < 2; i++)
        has[i] =
            (size_t)snprintf(path, sizeof path, "%s/%s", folder, names[i]) < sizeof path && access(path, F_OK) == 0;
    return *folder && has[0] && !has[1];
}
// Sets an option to a value from the adapters' settings. Ends the program where the user gave another value.
static void start_take_adapter(struct config *config, int row, const char *text) {
    char given_text[OPTION_TEXT], found_text[OPTION_TEXT], name[OPTION_NAME];
    const bool was_given = config->given[row];
    char *given = text_copy(option_text(given_text, &config_rows[row], config));
    start_set(config, row, text);
    const char *found = option_text(found_text, &config_rows[row], config);
    if (was_given && strcmp(given, found) != 0)
        fail("--%s is %s, but %s in %s/" PEFT_CONFIG_NAME "; leave the option out",
             option_display(name, config_rows[row].name), given, found, config->finetuning.lora_adapter);
    free(given);
}
// Takes over the options of --lora-adapter and its base model, which --init-from or else the adapters' settings name.
// Without --lora-adapter, --init-from names the adapters. Ends the program where it can't.
static void start_from_adapters(struct config *config) {
    struct peft_config peft;
    struct error_text error;
    struct stat status;
    char text[OPTION_TEXT];
    if (!*config->finetuning.lora_adapter) {
        config->finetuning.lora_adapter = config->checkpoints.init_from;
        config->checkpoints.init_from = "";
    }
    const char *problem = peft_config_read(&peft, config->finetuning.lora_adapter, &error);
    if (problem)
        fail("%s", problem);
    if (!*config->checkpoints.init_from) {
        if (stat(peft.base, &status) != 0 || !S_ISDIR(status.st_mode))
            fail("%s/" PEFT_CONFIG_NAME
                 ": base_model_name_or_path is '%s', which is no folder here; name the base model "
                 "by --init-from",
                 config->finetuning.lora_adapter, json_show(peft.base).text);
        config->checkpoints.init_from = text_copy(peft.base);
    }
    start_from_model(config);
    if (peft.fan_in_fan_out && strcmp(config->checkpoints.checkpoint_architecture, "gpt2") != 0)
        fail("%s/" PEFT_CONFIG_NAME ": fan_in_fan_out is true, as only for GPT-2; expected false for the %s in %s",
             config->finetuning.lora_adapter, config->checkpoints.checkpoint_architecture,
             config->checkpoints.init_from);
    snprintf(text, sizeof text, "%d", peft.rank);
    start_take_adapter(config, CONFIG_ROW(finetuning.lora_rank), text);
    snprintf(text, sizeof text, "%.9g", (double)peft.alpha);
    start_take_adapter(config, CONFIG_ROW(finetuning.lora_alpha), text);
    start_take_adapter(config, CONFIG_ROW(finetuning.lora_use_rslora), peft.rslora ? "true" : "false");
    start_take_adapter(config, CONFIG_ROW(finetuning.lora_target_modules), peft.targets);
    snprintf(text, sizeof text, "%.9g", (double)peft.dropout);
    if (!config_given(config, finetuning.lora_dropout))
        start_set(config, CONFIG_ROW(finetuning.lora_dropout), text);
    peft_config_free(&peft);
}

// Sets the options that a checkpoint, a model or finetuning data asks for. Ends the program where the start can't be
// used, or a new run would write among an older run's checkpoints. Every rank calls this.
static void start_find(struct config *config) {
    enum architecture architecture;
    if (strcmp(config->checkpoints.checkpoint_architecture, "auto") != 0 &&
        !architecture_find(&architecture, config->checkpoints.checkpoint_architecture))
        fail("--checkpoint-architecture '%s' is not known; expected auto, or a model_type that docs/models.md lists",
             config->checkpoints.checkpoint_architecture);
    const bool resumes = strcmp(config->checkpoints.resume, "none") != 0;
    if (resumes && !config_trains(config))
        fail("--resume goes on with training; --%s takes a checkpoint by --init-from",
             config_option_against_training(config));
    if (resumes)
        start_resume(config);
    take_newest_of_run(config, &config->checkpoints.init_from, "init-from");
    take_newest_of_run(config, &config->finetuning.lora_adapter, "lora-adapter");
    start_take_rows(config);
    if (!*config->checkpoint && (*config->finetuning.lora_adapter || start_is_adapters(config->checkpoints.init_from)))
        start_from_adapters(config);
    else if (!*config->checkpoint && *config->checkpoints.init_from)
        start_from_model(config);
    if (config->finetuning.lora_rank > 0 && !*config->checkpoints.init_from && !config->memory.plan)
        fail("--lora-rank %d needs --init-from: name the folder of the base model", config->finetuning.lora_rank);
    if (!resumes && config_trains(config) && !config->memory.plan && config->rank == 0)
        start_check_new(config);
}
