// Saves the model into a checkpoint's folder: model.safetensors and config.json, or LoRA's two files;
// optimizer.safetensors, trainer_state.json, and the tokenizer's files. Each rank that holds a part of the state has a
// saver: a thread writes that part from a copy in host memory or, without a copy, the training waits for the write.
#pragma once
#include "run/model.cuh"               // struct gpt
#include "config/layers.h"             // config_rotary_dims
#include "formats/checkpoint.h"        // checkpoint_prune
#include "formats/checkpoint_best.h"   // checkpoint_replace_best
#include "formats/checkpoint_part.h"   // checkpoint_part_begin
#include "formats/checkpoint_thread.h" // writes while the training goes on
#include "formats/checkpoint_write.h"  // checkpoint_begin, checkpoint_commit
#include "formats/matmul_algorithms.h" // MATMUL_ALGORITHMS_NAME
#include "formats/huggingface.h"       // architecture_of, huggingface_write_config
#include "run/adapters.cuh"            // adapters_tensors_of
#include "run/carried_files.h"         // CARRIED_FILES
#include "run/save_tensors.cuh"        // the files of the model and the optimizer
#include "runtime/files/file_read.h"   // read_whole
#include "runtime/machine/say.h"       // say_warning

enum { SAVE_TOKENIZER_FILES = CARRIED_FILES };

// The inputs of a save. None changes while the training goes on, if there is a copy of the state.
struct save_job {
    struct save_tensors tensors;
    int rank, ranks;     // this rank, and the number of ranks that write
    char root[PATH_MAX]; // OUT/checkpoints
    int64_t step;
    int keep;  // checkpoints; 0: all
    int every; // steps between checkpoints that are saved anyway; 0: none are
    bool best; // the step has the lowest validation loss so far, and --save-best is on
    // Of rank 0:
    const char *base;               // folder of the base model, where the checkpoints are of adapters
    char *config_json, *state_json; // texts of config.json or adapter_config.json, and of trainer_state.json
    size_t config_bytes, state_bytes;
    char *algorithms; // text of matmul_algorithms.txt; NULL: there is none
    size_t algorithms_bytes;
    char tokenizer_files[SAVE_TOKENIZER_FILES][PATH_MAX]; // paths of files to copy under tokenizer_names; "" ends them
    char tokenizer_names[SAVE_TOKENIZER_FILES][64];
};

// ---- the folder ----

// Copies tokenizer file i of the job, which must exist, into the checkpoint. Returns NULL, or an error.
static const char *save_tokenizer_file(struct save_job *job, int i) {
    enum { MAX_BYTES = 1 << 30 };
    struct checkpoint_writer *writer = &job->tensors.writer;
    unsigned char *data;
    uint64_t bytes;
    const char *problem =
        read_whole(&data, &bytes, MAX_BYTES, job->tokenizer_files[i], "a tokenizer's file", &writer->error);
    if (!problem)
        problem = checkpoint_write_file(writer, job->tokenizer_names[i], data, bytes);
    free(data);
    return problem;
}
static const char *save_small_files(struct save_job *job) {
    struct checkpoint_writer *writer = &job->tensors.writer;
    const char *problem = checkpoint_write_file(writer, job->tensors.adapters ? PEFT_CONFIG_NAME : "config.json",
                                                job->config_json, job->config_bytes);
    if (!problem)
        problem = checkpoint_write_file(writer, "trainer_state.json", job->state_json, job->state_bytes);
    if (!problem && job->algorithms)
        problem = checkpoint_write_file(writer, MATMUL_ALGORITHMS_NAME, job->algorithms, job->algorithms_bytes);
    for (int i = 0; i < SAVE_TOKENIZER_FILES && *job->tokenizer_files[i] && !problem; i++)
        problem = save_tokenizer_file(job, i);
    return problem;
}

// Begins a checkpoint of several ranks, on rank 0, and lays out the files, or abandons it. Returns NULL, or an error.
static const char *save_lay_out(struct save_job *job) {
    struct checkpoint_writer *writer = &job->tensors.writer;
    const char *problem = checkpoint_begin(writer, job->root, job->step);
    if (!problem)
        problem = save_tensors_pass(&job->tensors, SAVE_LAY_OUT);
    if (!problem)
        problem = checkpoint_expect_parts(writer, job->ranks - 1);
    if (problem && !writer->failed)
        checkpoint_abandon(writer);
    return problem;
}
// Writes this rank's ranges in a begun checkpoint's files and tells rank 0 so (maybe itself). Returns NULL or an error.
static const char *save_part(struct save_job *job) {
    const char *problem = save_tensors_pass(&job->tensors, SAVE_PART);
    return problem ? problem : checkpoint_part_end(&job->tensors.part);
}
// Begins and writes a checkpoint that only rank 0 writes; the caller commits it. Returns NULL, or an error.
static const char *save_by_one(struct save_job *job) {
    const char *problem = checkpoint_begin(&job->tensors.writer, job->root, job->step);
    if (!problem)
        problem = save_small_files(job);
    return problem ? problem : save_tensors_pass(&job->tensors, SAVE_BY_ONE);
}
// Writes rank 0's files and part of a checkpoint that has begun, and waits for other parts. Returns NULL, or an error.
static const char *save_with_others(struct save_job *job) {
    const char *problem = save_small_files(job);
    if (!problem)
        problem = save_part(job);
    return problem ? problem : checkpoint_wait_for_parts(&job->tensors.writer);
}

// Makes a save (argument: a struct save_job) as a checkpoint_job. Rank 0 writes the checkpoint, then removes a former
// best one and the oldest beyond `keep`. Other ranks write their part. Returns NULL, or an error, also in removing.
static const char *save_run(void *argument, struct error_text *error) {
    struct save_job *job = (struct save_job *)argument;
    struct checkpoint_writer *writer = &job->tensors.writer;
    if (job->rank > 0) {
        const char *problem = save_part(job);
        return problem ? error_format(error, "%s", problem) : NULL;
    }
    const char *problem = job->ranks > 1 ? save_with_others(job) : save_by_one(job);
    problem = problem ? problem : checkpoint_commit(writer);
    if (problem && !writer->failed)
        checkpoint_abandon(writer);
    if (problem)
        return error_format(error, "%s", problem);
    if (job->best)
        RETURN_PROBLEM(checkpoint_replace_best(job->root, job->step, job->every, error));
    return job->keep > 0 ? checkpoint_prune(job->root, job->keep, job->step, error) : NULL;
}

// ---- saving during a run ----

struct saver {
    struct gpt *m; // NULL: this rank writes nothing
    struct save_job job;
    struct checkpoint_thread thread;
    int end_of_text;   // token, -1: none
    int64_t last_step; // whose save was begun last, -1: none
    bool running;      // the last save's result was not taken yet
    double begun_s;    // when, by seconds_now()
};

// Makes each save copy the file `path` as `name`, unless it can't be read or `name` was added. Copies both texts.
static void saver_add_file(struct saver *saver, const char *path, const char *name) {
    struct save_job *job = &saver->job;
    int i = 0;
    for (; i < SAVE_TOKENIZER_FILES && *job->tokenizer_files[i]; i++)
        if (strcmp(job->tokenizer_names[i], name) == 0)
            return;
    if (i == SAVE_TOKENIZER_FILES || access(path, R_OK) != 0)
        return;
    snprintf(job->tokenizer_files[i], sizeof job->tokenizer_files[i], "%s", path);
    snprintf(job->tokenizer_names[i], sizeof job->tokenizer_names[i], "%s", name);
}

// Makes `step`'s checkpoint the best, if it exists and the best isn't later. Warns on failure. Only rank 0 calls this.
static void saver_mend_best(const struct saver *saver, int64_t step) {
    struct error_text error;
    const char *problem = checkpoint_mend_best(saver->job.root, step, saver->job.every, &error);
    if (problem)
        say_warning("%s", problem);
}

// Sets the text of the algorithms' file, for all checkpoints, once after saver_open; saver_close frees the text.
static void saver_set_algorithms(struct saver *saver, char *text, size_t bytes) {
    saver->job.algorithms = text;
    saver->job.algorithms_bytes = bytes;
}

// Sets `adapters`, `bf16` and `model`, for huggingface_tensors_free, by the model and --checkpoint-dtype.
static void saver_list_tensors(struct save_tensors *tensors, const struct gpt *m) {
    const struct config *c = &m->config;
    const enum architecture a = architecture_of(c);
    tensors->adapters = m->shape.lora.rank > 0;
    tensors->model = tensors->adapters ? adapters_tensors_of(&m->table, &m->shape, a, config_rotary_dims(c))
                                       : huggingface_tensors_of(&m->table, &m->shape, a, config_rotary_dims(c));
    switch (c->checkpoints.checkpoint_dtype) {
    case CHECKPOINT_AUTO: tensors->bf16 = sizeof(floatX) == 2 && !tensors->adapters; break;
    case CHECKPOINT_BF16: tensors->bf16 = !tensors->adapters; break;
    case CHECKPOINT_FP32: tensors->bf16 = false; break;
    }
}

// Opens this rank's saver, for saver_close. If the rank writes nothing, saver->m stays NULL, and no save may begin.
// end_of_text: -1 if none is known. Ends the program without memory.
static void saver_open(struct saver *saver, struct gpt *m, int end_of_text) {
    const struct config *c = &m->config;
    struct save_job *job = &saver->job;
    struct save_tensors *tensors = &job->tensors;
    struct error_text error;
    memset(saver, 0, sizeof *saver);
    if (!rank_writes_checkpoint(&m->zero.shards))
        return;
    saver->m = m;
    saver->end_of_text = end_of_text;
    saver->last_step = -1;
    checkpoint_thread_init(&saver->thread);
    saver_list_tensors(tensors, m);
    job->base = "";
    tensors->most_shard_bytes = (uint64_t)((double)c->checkpoints.max_shard_gib * 0x1p30);
    tensors->first = m->zero.shards.rank == 0;
    job->rank = m->zero.shards.rank;
    job->ranks = checkpoint_ranks(&m->zero.shards);
    job->keep = c->checkpoints.keep_checkpoints;
    job->every = c->checkpoints.checkpoint_every;
    if ((size_t)snprintf(job->root, sizeof job->root, "%s/checkpoints", c->data.out) >= sizeof job->root)
        fail("--out %s: the name is too long", c->data.out);
    const char *problem = save_tensors_open(tensors, m, &error);
    if (problem)
        fail("%s", problem);
}

// Sets the base model's folder that checkpoints of adapters name, or "". The text must stay.
static void saver_set_base(struct saver *saver, const char *base) { saver->job.base = base; }

// Waits for the save in progress, if any. Returns NULL, or what went wrong, a text that stays until the next save.
static const char *saver_wait(struct saver *saver) {
    saver->running = false;
    return checkpoint_thread_wait(&saver->thread);
}

// Returns the text of config.json or adapter_config.json, which the caller frees, or NULL without memory.
static char *save_config_json(const struct saver *saver, size_t *bytes) {
    char *text = NULL;
    FILE *out = open_memstream(&text, bytes);
    if (!out)
        return NULL;
    if (saver->job.tensors.adapters)
        adapters_write_config(out, saver->m, saver->job.base);
    else
        huggingface_write_config(out, &saver->m->config, saver->end_of_text, saver->job.tensors.bf16);
    return fclose(out) == 0 ? text : NULL;
}

// Prepares the save of a step on rank 0; lays out the checkpoint's files if several ranks write. No save may be in
// progress. The saver frees state_json, trainer_state.json's text, also after an error. Returns an error or NULL. Then
// each of several ranks, rank 0 too, calls saver_begin_part. After that saver_save writes the checkpoint.
static const char *saver_begin(struct saver *saver, int64_t step, char *state_json, size_t state_bytes) {
    struct save_job *job = &saver->job;
    free(job->config_json);
    free(job->state_json);
    job->config_json = save_config_json(saver, &job->config_bytes);
    job->state_json = state_json;
    job->state_bytes = state_bytes;
    job->step = step;
    if (!job->config_json)
        fail("out of memory for a checkpoint");
    saver->last_step = step;
    return job->ranks > 1 ? save_lay_out(job) : NULL;
}
// Begins this rank's part, also on rank 0, of the checkpoint that rank 0 (process id: writer) began. Returns NULL, or
// what went wrong; the caller tells all ranks. If all have begun, each calls saver_save, else saver_give_up.
static const char *saver_begin_part(struct saver *saver, int64_t step, pid_t writer) {
    struct save_job *job = &saver->job;
    job->step = step;
    saver->last_step = step;
    return checkpoint_part_begin(&job->tensors.part, job->root, step, writer, job->rank);
}
// Gives up this rank's part, if it began, and on rank 0 the checkpoint. Each rank calls this instead of saver_save.
static void saver_give_up(struct saver *saver) {
    struct save_tensors *tensors = &saver->job.tensors;
    checkpoint_part_abandon(&tensors->part);
    if (saver->job.rank == 0)
        checkpoint_abandon(&tensors->writer);
}
// Writes what was begun. With a copy of the state, returns when the copy is made; without one, when all is written.
// saver_wait must follow, and has the result. Waits for the updates in flight.
static void saver_save(struct saver *saver) {
    struct save_job *job = &saver->job;
    saver->begun_s = seconds_now();
    saver->running = true;
    gpt_copy_state(saver->m);
    if (job->tensors.fp8)
        fp8_state_download(&saver->m->fp8, job->tensors.fp8, saver->m->dev);
    if (saver->m->copy.keeps)
        checkpoint_thread_start(&saver->thread, save_run, job);
    else
        checkpoint_thread_call(&saver->thread, save_run, job);
}

// Waits for the save in progress, whose result is lost, and frees the saver's memory. Does nothing if saver->m is NULL.
static void saver_close(struct saver *saver) {
    struct save_job *job = &saver->job;
    if (!saver->m)
        return;
    checkpoint_thread_destroy(&saver->thread);
    save_tensors_close(&job->tensors);
    free(job->config_json);
    free(job->state_json);
    free(job->algorithms);
}
