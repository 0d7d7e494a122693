// Loading and saving a run's state: the model or checkpoint that the run starts from, and the checkpoints that it
// writes.
#pragma once
#include "run/load.cuh"            // parameters from a model's folder or a checkpoint
#include "run/save.cuh"            // a checkpoint's folder
#include "run/run.cuh"             // struct run
#include "formats/trainer_state.h" // trainer_state.json
#include "run/text_files.cuh"      // find_text_file

// ---- starting ----

// Fails unless the checkpoint's shards are the first ones of --train-data.
static void check_data(const struct run *r, const struct trainer_state *state) {
    const int now = dataloader_num_files(r->train);
    for (int i = 0; i < state->num_files; i++) {
        const char *name = i < now ? dataloader_name(r->train, i) : "none";
        if (i >= now || strcmp(name, state->files[i].name) != 0 || r->train->files[i].tokens != state->files[i].tokens)
            fail("--train-data: file %d is %s with %llu tokens, but it was %s with %llu in %s; the data may only grow, "
                 "by files whose names sort last",
                 i + 1, name, (unsigned long long)(i < now ? r->train->files[i].tokens : 0),
                 json_show(state->files[i].name).text, (unsigned long long)state->files[i].tokens,
                 r->config->checkpoint);
    }
}

// Sets the training data to the checkpoint's position. Shards that were added since then count from the next epoch on.
static void resume_data(struct run *r, const struct trainer_state *state) {
    struct data_change *changes = (struct data_change *)calloc((size_t)state->num_changes, sizeof *changes);
    if (!changes)
        fail("out of memory");
    check_data(r, state);
    for (int i = 0; i < state->num_changes; i++) {
        changes[i].first_epoch = state->changes[i].first_epoch;
        changes[i].files = state->changes[i].files;
    }
    dataloader_resume(r->train, changes, state->num_changes, state->samples);
    free(changes);
}

// Whether this run's options of FP8 make the same scales of a history as those of the checkpoint's run.
static bool fp8_scales_hold(const struct config *c, const struct trainer_state *state) {
    const int rows[] = {CONFIG_ROW(fp8_format),
                        CONFIG_ROW(fp8_margin),
                        CONFIG_ROW(fp8_amax_compute_algo),
                        CONFIG_ROW(first_last_layers_bf16),
                        CONFIG_ROW(num_layers_at_start_in_bf16),
                        CONFIG_ROW(num_layers_at_end_in_bf16)};
    char now[OPTION_TEXT], then[OPTION_TEXT];
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strcmp(option_text(now, &config_rows[rows[i]], c), start_resolved(then, state, rows[i])) != 0)
            return false;
    return true;
}

// Loads all state from a checkpoint, or the parameters from a model; without either the model keeps its random initial
// parameters.
static void load_model(struct run *r) {
    const struct config *c = r->config;
    struct error_text error;
    struct stat status;
    const char *problem = NULL;
    bool exact;
    r->best_val_loss = NAN;
    if (*c->checkpoint) {
        struct trainer_state state = trainer_state_open(c->checkpoint);
        problem = model_load_checkpoint(r->model, c->checkpoint, &error);
        if (!problem && !fp8_scales_hold(c, &state))
            fp8_forget_scales(&r->model->fp8, &r->dev);
        resume_data(r, &state);
        if (state.step > INT_MAX)
            fail("%s: step %lld is beyond what can be counted", c->checkpoint, (long long)state.step);
        r->first_step = r->enqueued = r->finished = (int)state.step;
        r->skipped = (int)state.skipped;
        r->samples_before = state.samples;
        r->model->micro_step = state.micro_steps;
        r->best_val_loss = state.best_val_loss;
        r->best_val_step = (int)state.best_val_step;
        r->validation_due = state.validation_due;
        trainer_state_free(&state);
    } else if (*c->init_from && stat(c->init_from, &status) == 0 && S_ISDIR(status.st_mode))
        problem = model_load_folder(r->model, c->init_from, &exact, &error);
    else if (*c->init_from)
        problem = model_load_llmc(r->model, c->init_from, &error);
    if (problem)
        fail("%s", problem);
}

// ---- checkpoints ----

// The text of trainer_state.json, which the caller frees. No step may be in flight.
static char *state_json(const struct run *r, size_t *bytes) {
    const struct config *c = r->config;
    struct trainer_state state;
    memset(&state, 0, sizeof state);
    state.step = r->finished;
    state.skipped = r->skipped;
    state.samples = dataloader_position(r->train);
    state.micro_steps = r->model->micro_step;
    state.best_val_loss = r->best_val_loss;
    state.best_val_step = r->best_val_step;
    state.validation_due = r->validation_due;
    state.precision = sizeof(floatX) == 2 ? "bf16" : "fp32";
    state.num_files = dataloader_num_files(r->train);
    state.num_changes = r->train->num_changes;
    state.files = (struct trainer_file *)calloc((size_t)state.num_files, sizeof *state.files);
    state.changes = (struct trainer_data_change *)calloc((size_t)state.num_changes, sizeof *state.changes);
    char *text = NULL;
    FILE *out = open_memstream(&text, bytes);
    if (!state.files || !state.changes || !out)
        fail("out of memory for a checkpoint");
    for (int i = 0; i < state.num_files; i++) {
        state.files[i].name = dataloader_name(r->train, i);
        state.files[i].tokens = r->train->files[i].tokens;
    }
    for (int i = 0; i < state.num_changes; i++) {
        state.changes[i].first_epoch = r->train->changes[i].first_epoch;
        state.changes[i].files = r->train->changes[i].files;
    }
    trainer_state_write(out, &state, &config_options, c->asked, c->asked->given, c);
    if (fclose(out) != 0)
        fail("out of memory for a checkpoint");
    free(state.files);
    free(state.changes);
    return text;
}

// Waits for the save in progress, if any, and prints how it ended. A failed save does not end the run.
static void report_save(struct run *r) {
    struct saver *saver = &r->saver;
    if (!saver->running)
        return;
    const double seconds = seconds_now() - saver->begun_s;
    const char *problem = saver_wait(saver);
    r->save_failed = problem != NULL;
    log_end_line(&r->log);
    if (problem)
        fprintf(stderr, "train_gpt: %s\n", problem);
    else
        log_event(&r->log, "step %lld: checkpoint written, %.1f s", (long long)saver->last_step, seconds);
}

// Opens the saver of rank 0, which writes for all ranks, with the tokenizer's files that go into each checkpoint.
static void open_saver(struct run *r) {
    if (r->config->rank > 0)
        return;
    static const char *const names[] = {"tokenizer.json", "tokenizer_config.json",   "vocab.json",
                                        "merges.txt",     "special_tokens_map.json", "vocabulary.bin"};
    char path[PATH_MAX];
    saver_open(&r->saver, r->model, r->vocabulary.end_of_text);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (find_text_file(r, names[i], path, sizeof path))
            saver_add_file(&r->saver, path, names[i]);
}

// Begins a checkpoint of the last finished step, after the save before has ended. Every rank calls this.
static void save(struct run *r) {
    report_save(r);
    parallel_barrier(r->parallel, "the checkpoint before");
    if (r->config->rank > 0)
        gpt_copy_state(r->model);
    else {
        size_t bytes = 0;
        char *state = state_json(r, &bytes);
        saver_save(&r->saver, r->finished, state, bytes);
        if (!r->model->copy.keeps)
            report_save(r);
    }
    parallel_barrier(r->parallel, "the checkpoint");
}
