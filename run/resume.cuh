// Loading and saving a run's state: what the run starts from, and the checkpoints that it writes.
#pragma once
#include "run/folder_check.h"      // folder_check_begin, folder_check_end
#include "run/load.cuh"            // parameters from a model's folder or a checkpoint
#include "run/save.cuh"            // a checkpoint's folder
#include "run/carried_files.h"     // files beside a model that its checkpoints have too
#include "run/out_lock.h"          // OUT_LOCK_NAME
#include "run/run.cuh"             // struct run
#include "run/same_data.h"         // data_refusal, resume_same_data
#include "formats/trainer_state.h" // trainer_state.json
#include "runtime/files/links.h"   // path_is_below, file_stays_in_folder
#include "runtime/machine/say.h"   // say_warning
#include "run/text_files.cuh"      // find_text_file
#include "run/watch_device.cuh"    // watch_loading

// ---- starting ----

// Moves r->train to the state's position. Other data than the checkpoint's end the program. With --new-data they
// replace the checkpoint's from this position on, as in resume_new_data, and no loss counts as the best so far.
static void resume_data(struct run *r, const struct trainer_state *state) {
    struct error_text error;
    const char *problem = data_refusal(r->train, state, r->config->checkpoint, &error);
    if (problem && !r->config->data.new_data)
        fail("%s", problem);
    if (!problem) {
        resume_same_data(r->train, state);
        return;
    }
    resume_new_data(r->train, state);
    r->data_is_new = true;
    r->best_val_loss = NAN;
    r->best_val_step = (int)state->step;
}

// Whether the checkpoint's FP8 scales still hold: all options by which a scale follows from its history are unchanged.
static bool fp8_scales_hold(const struct config *c, const struct trainer_state *state) {
    const int rows[] = {CONFIG_ROW(fp8.fp8_format),
                        CONFIG_ROW(fp8.fp8_margin),
                        CONFIG_ROW(fp8.fp8_amax_compute_algo),
                        CONFIG_ROW(fp8.first_last_layers_bf16),
                        CONFIG_ROW(fp8.num_layers_at_start_in_bf16),
                        CONFIG_ROW(fp8.num_layers_at_end_in_bf16)};
    char now[OPTION_TEXT], then[OPTION_TEXT];
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strcmp(option_text(now, &config_rows[rows[i]], c), checkpoint_resolved_option(then, state, rows[i])) != 0)
            return false;
    return true;
}

// Sets r->base_folder and r->base_digest to the base model that --init-from names, for a run with adapters. Ends the
// program if the base is of another architecture, or not the one that `checkpoint` (or NULL) was trained on.
static void find_base(struct run *r, const struct trainer_state *checkpoint) {
    const struct config *c = r->config;
    struct error_text error;
    enum architecture a = ARCHITECTURE_OURS;
    struct stat status;
    if (stat(c->checkpoints.init_from, &status) == 0 && !S_ISDIR(status.st_mode))
        fail("--init-from %s: the base model of adapters must be a folder of Hugging Face, not a file",
             c->checkpoints.init_from);
    const char *problem = model_folder_architecture(&a, c->checkpoints.init_from, &error);
    if (!problem)
        problem = model_folder_digest(r->base_digest, c->checkpoints.init_from, &error);
    if (problem)
        fail("--init-from %s", problem);
    if (a != architecture_of(c))
        fail("--init-from %s is a %s, but by the options the model is a %s, whose modules have other names; leave out "
             "options that change the model",
             c->checkpoints.init_from, architecture_class(a), architecture_class(architecture_of(c)));
    if (checkpoint && !checkpoint->base_digest)
        fail("%s: trainer_state.json names no base model; the checkpoint is not one of adapters", c->checkpoint);
    if (checkpoint && strcmp(checkpoint->base_digest, r->base_digest) != 0)
        fail("--init-from %s: has other tensors than the base model of the adapters in %s, which was %s",
             c->checkpoints.init_from, c->checkpoint, json_show(checkpoint->base_folder).text);
    if (!realpath(c->checkpoints.init_from, r->base_folder))
        fail("--init-from %s: %s", c->checkpoints.init_from, strerror(errno));
}
// Loads --init-from: llm.c's file, or a folder and, if given, its averages or --lora-adapter. Returns NULL or an error.
static const char *load_named_parameters(struct run *r, struct error_text *error) {
    const struct config *c = r->config;
    struct stat status;
    bool exact;
    if (stat(c->checkpoints.init_from, &status) != 0 || !S_ISDIR(status.st_mode))
        return model_load_llmc(r->model, c->checkpoints.init_from, error);
    RETURN_PROBLEM(model_load_folder(r->model, c->checkpoints.init_from, &exact, error));
    if (c->checkpoints.init_from_ema)
        RETURN_PROBLEM(model_load_averages(r->model, c->checkpoints.init_from, error));
    return *c->finetuning.lora_adapter ? adapters_load(r->model, c->finetuning.lora_adapter, &exact, error) : NULL;
}
// Loads what --init-from names, if it is given; with LoRA, calls find_base first. Returns NULL, or an error.
static const char *load_parameters(struct run *r, struct error_text *error) {
    const struct config *c = r->config;
    const bool checks = c->checkpoints.check_weights && (!r->parallel || r->parallel->launch.local_rank == 0);
    struct folder_check base, adapters;
    if (!*c->checkpoints.init_from)
        return NULL;
    if (c->finetuning.lora_rank > 0)
        find_base(r, NULL);
    folder_check_begin(&base, checks ? c->checkpoints.init_from : NULL, c->checkpoints.init_from_ema);
    folder_check_begin(&adapters, checks ? c->finetuning.lora_adapter : NULL, false);
    const char *problem = load_named_parameters(r, error);
    problem = folder_check_end(&adapters, problem, error);
    return folder_check_end(&base, problem, error);
}
// Loads config->checkpoint, with optimizer and FP8's state; for adapters, the base, too. Returns NULL, or an error.
static const char *load_checkpoint(struct run *r, const struct trainer_state *state, struct error_text *error) {
    const struct config *c = r->config;
    bool exact;
    if (c->finetuning.lora_rank == 0)
        return model_load_checkpoint(r->model, c->checkpoint, error);
    find_base(r, state);
    RETURN_PROBLEM(model_load_folder(r->model, c->checkpoints.init_from, &exact, error));
    RETURN_PROBLEM(adapters_load(r->model, c->checkpoint, &exact, error));
    return model_load_optimizer(r->model, c->checkpoint, exact, error);
}

// Loads all state from a checkpoint, with steps and the position in the data, or only the parameters from a model.
// Without either, parameters stay random. Ends the program where something can't be loaded.
static void load_model(struct run *r) {
    const struct config *c = r->config;
    struct error_text error;
    const char *problem;
    r->best_val_loss = NAN;
    watch_loading(r->device_watch);
    if (*c->checkpoint) {
        struct trainer_state state = trainer_state_read(c->checkpoint);
        problem = load_checkpoint(r, &state, &error);
        if (problem)
            fail("%s", problem);
        if (!fp8_scales_hold(c, &state))
            fp8_forget_scales(&r->model->fp8, &r->dev);
        if (state.step > INT_MAX)
            fail("%s: step %lld is beyond what can be counted", c->checkpoint, (long long)state.step);
        r->first_step = r->enqueued = r->finished = (int)state.step;
        r->skipped = (int)state.skipped;
        r->empty = (int)state.empty;
        r->model->steps.micro_step = state.micro_steps;
        r->best_val_loss = state.best_val_loss;
        r->best_val_step = (int)state.best_val_step;
        r->validation_due = state.validation_due;
        resume_data(r, &state);
        trainer_state_free(&state);
    } else {
        problem = load_parameters(r, &error);
        if (problem)
            fail("%s", problem);
    }
    long_wait_end(r->device_watch);
}

// ---- checkpoints ----

// Returns the text (*bytes) of trainer_state.json, which the caller frees. No step may be in flight.
static char *state_json(const struct run *r, size_t *bytes) {
    const struct config *c = r->config;
    struct trainer_state state;
    memset(&state, 0, sizeof state);
    state.step = r->finished;
    state.skipped = r->skipped;
    state.empty = r->empty;
    state.samples = dataloader_position(r->train);
    state.micro_steps = r->model->steps.micro_step;
    state.best_val_loss = r->best_val_loss;
    state.best_val_step = r->best_val_step;
    state.validation_due = r->validation_due;
    state.precision = sizeof(floatX) == 2 ? "bf16" : "fp32";
    state.base_folder = *r->base_folder ? r->base_folder : NULL;
    state.base_digest = r->base_digest;
    data_state(&state, r->train);
    char *text = NULL;
    FILE *out = open_memstream(&text, bytes);
    if (!out)
        fail("out of memory for a checkpoint");
    trainer_state_write(out, &state, &config_options, c->asked, c->asked->given, c);
    if (fclose(out) != 0)
        fail("out of memory for a checkpoint");
    data_state_free(&state);
    return text;
}

// Prints how a save of `seconds` ended, and sets r->save_failed; the run goes on. problem: NULL if the save succeeded.
static void report_save_result(struct run *r, const char *problem, double seconds) {
    r->save_failed = problem != NULL;
    log_end_line(&r->log);
    if (problem && r->config->rank > 0)
        say_warning("rank %d: %s", r->config->rank, problem);
    else if (problem)
        say_warning("%s", problem);
    else
        log_event(&r->log, "step %lld: checkpoint written, %.1f s", (long long)r->saver.last_step, seconds);
}
// Waits for the save in progress on this rank, if there is one, prints how it ended, and sets r->save_failed. Only rank
// 0 prints success, for all; a rank that failed after rank 0 gave up is silent. Ends the job if rank 0 can't be told.
static void finish_save(struct run *r) {
    struct saver *saver = &r->saver;
    if (!saver->running)
        return;
    const double seconds = seconds_now() - saver->begun_s;
    const char *problem = saver_wait(saver);
    const struct checkpoint_part *part = &saver->job.tensors.part;
    if (problem && part->unheard)
        fail("%s; rank 0 can't be told so", problem);
    if (r->config->rank > 0 && (!problem || part->given_up))
        r->save_failed = problem != NULL;
    else
        report_save_result(r, problem, seconds);
}

// Returns the first rank without `done`, or config->ranks. what, patient: control_all_gather's. Every rank calls this.
static int first_rank_without(const struct run *r, bool done, const char *what, bool patient) {
    const int ranks = r->config->ranks;
    bool *all = (bool *)calloc((size_t)ranks, sizeof *all);
    if (!all)
        fail("out of memory for a byte of each rank");
    control_all_gather(r->parallel->control, all, &done, sizeof done, what, patient);
    int rank = 0;
    while (rank < ranks && all[rank])
        rank++;
    free(all);
    return rank;
}
// Ends the job if a rank that writes checkpoints has another --out than rank 0, by the lock file. All ranks call this.
static void check_ranks_share_out(struct run *r) {
    const struct config *c = r->config;
    char path[PATH_MAX], wanted[FILE_LOCK_TEXT] = "", found[FILE_LOCK_TEXT];
    if (r->saver.job.ranks <= 1)
        return;
    snprintf(path, sizeof path, "%s/" OUT_LOCK_NAME, c->data.out);
    if (c->rank == 0) {
        fsync(c->out_lock); // an NFS client may keep the text until then
        file_lock_read(wanted, path);
    }
    control_broadcast(r->parallel->control, wanted, sizeof wanted, "check of --out", false);
    const bool seen = file_lock_read(found, path) && strcmp(found, wanted) == 0;
    const int rank = first_rank_without(r, seen, "check of --out", false);
    if (rank == c->ranks)
        return;
    if (c->rank == 0)
        say_warning("rank %d does not %s --out %s%s: each rank writes its part of a checkpoint there, so it "
                    "must be a folder that all hosts share; --zero-stage 0 lets only rank 0 write",
                    rank, rank == 0 ? "write to" : "see the folder", c->data.out, rank == 0 ? "" : " of rank 0");
    parallel_close(r->parallel); // no rank takes the end of another for a failure
    exit(EXIT_USAGE);
}

// Ends the program if checkpoints are to be written, and their folder exists but is a file or read-only.
static void check_checkpoints_folder(const struct run *r) {
    const char *const folder = r->saver.job.root;
    struct stat status;
    if (r->config->checkpoints.checkpoint_every == 0 || stat(folder, &status) != 0)
        return;
    if (!S_ISDIR(status.st_mode))
        fail("%s: is a file, where the folder of the checkpoints is to be; remove it, or name another folder by --out",
             folder);
    if (access(folder, W_OK | X_OK) != 0)
        fail("%s: cannot be written: %s; name another folder by --out, or switch checkpoints off by "
             "--checkpoint-every 0",
             folder, strerror(errno));
}

// Opens the savers of ranks that write parts of checkpoints, and adds the tokenizer's files. Removes a killed run's
// leftovers. Ends the job if these ranks can't use one folder, or a file links out of --init-from. All ranks call this.
static void open_saver(struct run *r) {
    char path[PATH_MAX];
    struct error_text unused;
    saver_open(&r->saver, r->model, r->vocabulary.end_of_text);
    saver_set_base(&r->saver, r->base_folder);
    if (r->config->rank == 0)
        check_checkpoints_folder(r);
    check_ranks_share_out(r);
    if (r->config->rank == 0)
        checkpoint_prune(r->saver.job.root, 0, 0, &unused); // no folder, no leftovers
    for (size_t i = 0; i < CARRIED_FILES && r->config->rank == 0; i++)
        if (find_text_file(r, carried_files[i], path, sizeof path)) {
            // A model's folder may be a stranger's; the data's is the user's own.
            if (path_is_below(path, r->config->checkpoints.init_from) && !file_stays_in_folder(path))
                fail(
                    "%s: is a link to a file elsewhere, which each checkpoint would have a copy of; put the file itself "
                    "there, or remove the link",
                    path);
            saver_add_file(&r->saver, path, carried_files[i]);
        }
}

// Begins each rank's part of the checkpoint that rank 0 began. writer, read on rank 0: its process id, or 0 if it could
// not begin; then only returns false. Returns whether all parts began. If one failed, gives all up and sets
// r->save_failed; rank 0 and the first rank that failed get *problem. Every rank calls this.
static bool begin_parts(struct run *r, pid_t writer, const char **problem, struct error_text *error) {
    const struct config *c = r->config;
    const char *refused = NULL;
    control_broadcast(r->parallel->control, &writer, sizeof writer, "begin of the checkpoint", true);
    if (writer == 0)
        return false;
    refused = saver_begin_part(&r->saver, r->finished, writer);
    const int rank = first_rank_without(r, !refused, "parts of the checkpoint", true);
    if (rank == c->ranks)
        return true;
    saver_give_up(&r->saver);
    *problem = c->rank == rank ? refused
               : c->rank == 0  ? error_format(error, "step %d is not saved: rank %d could not open it and says why",
                                              r->finished, rank)
                               : NULL;
    r->save_failed = true;
    return false;
}

// Begins a checkpoint of the last finished step, once the previous save has ended; no later step may be enqueued.
// Without a copy of the state, returns when all is written. finish_save prints how it ended. Every rank calls this.
static void save(struct run *r) {
    const struct config *c = r->config;
    struct error_text error;
    const char *problem = NULL;
    finish_save(r);
    parallel_barrier(r->parallel, "the checkpoint before");
    if (c->rank == 0) {
        size_t bytes = 0;
        char *state = state_json(r, &bytes);
        r->saver.job.best = c->checkpoints.save_best && !isnan(r->best_val_loss) && r->best_val_step == r->finished;
        problem = saver_begin(&r->saver, r->finished, state, bytes);
    }
    bool begun = r->saver.m != NULL && !problem;
    if (r->saver.job.ranks > 1)
        begun = begin_parts(r, problem ? 0 : getpid(), &problem, &error);
    if (problem)
        report_save_result(r, problem, 0);
    else if (begun)
        saver_save(&r->saver);
    if (!r->model->copy.keeps)
        finish_save(r);
    parallel_barrier(r->parallel, "the checkpoint");
}
