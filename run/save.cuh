// Saves the model into a checkpoint's folder: model.safetensors (several files where it is large) and config.json as
// Hugging Face has them, optimizer.safetensors, trainer_state.json, and the tokenizer's files.
//
// Files are written from fp32 values: the master weights, which bf16 parameters are rounded from, or fp32 parameters.
// They are read from a copy in the host's memory, while the training goes on, or straight from the model.
#pragma once
#include "run/model.cuh"                   // struct gpt
#include "config_layers.h"                 // config_rotary_dims
#include "formats/huggingface.h"           // architecture_of, huggingface_write_config
#include "run/load.cuh"                    // optimizer_file_name, state_is_in_file
#include "formats/checkpoint.h"            // checkpoint_prune
#include "formats/checkpoint_thread.h"     // writes while the training goes on
#include "formats/checkpoint_write.h"      // checkpoint_begin, checkpoint_file_write, checkpoint_commit
#include "runtime/machine/float_convert.h" // float_to_bf16_bits
#include "formats/safetensors.h"           // safetensors_lay_out
#include "run/tensor_names.cuh"            // which tensor holds which parameters

enum { SAVE_TOKENIZER_FILES = 8 };
static const int64_t SAVE_CHUNK = 1 << 18; // elements

// The inputs of a save. None changes while the training goes on, if `state` is a copy.
struct save_job {
    const struct parameters *table;
    struct huggingface_tensors tensors; // of model.safetensors
    bool bf16;                          // model.safetensors is bf16, and optimizer.safetensors has the master weights
    uint64_t most_shard_bytes;
    const float *state[STATE_COUNT]; // host memory; NULL: fetched from `m`, a tensor at a time
    float *fp8;                      // delayed scales and their histories (fp8_state_download); NULL: none
    struct gpt *m;
    float *fetched;      // room for the largest tensor
    char root[PATH_MAX]; // OUT/checkpoints
    int64_t step;
    int keep; // checkpoints; 0: all
    char *config_json, *state_json;
    size_t config_bytes, state_bytes;
    char tokenizer_files[SAVE_TOKENIZER_FILES][PATH_MAX]; // paths of files to copy under tokenizer_names; "" ends them
    char tokenizer_names[SAVE_TOKENIZER_FILES][64];
    // while the save runs
    struct checkpoint_writer writer;
    float *values; // the rows of one chunk
    uint16_t *bf16_values;
};

// A tensor's values in host memory, valid until the next call.
static const float *save_tensor(struct save_job *job, enum optimizer_state id, const struct tensor *t) {
    if (job->state[id])
        return job->state[id] + t->offset;
    optimizer_values(&job->m->optimizer, id, t->offset, t->count, job->fetched);
    return job->fetched;
}

// ---- model.safetensors ----

// Writes n values in the file's type.
static const char *save_values(struct save_job *job, const float *values, int64_t n, bool bf16) {
    if (!bf16)
        return checkpoint_file_write(&job->writer, values, (uint64_t)n * sizeof *values);
    const char *problem = NULL;
    for (int64_t first = 0; first < n && !problem; first += SAVE_CHUNK) {
        const int64_t count = n - first < SAVE_CHUNK ? n - first : SAVE_CHUNK;
        for (int64_t i = 0; i < count; i++)
            job->bf16_values[i] = float_to_bf16_bits(values[first + i]);
        problem = checkpoint_file_write(&job->writer, job->bf16_values, (uint64_t)count * sizeof *job->bf16_values);
    }
    return problem;
}

static const char *save_huggingface_tensor(struct save_job *job, const struct huggingface_tensor *t) {
    const float *ours = t->ours ? save_tensor(job, STATE_MASTER, t->ours) : NULL;
    if (ours && !huggingface_moves(t))
        return save_values(job, ours + (int64_t)t->first_row * t->ours->cols, huggingface_count(t), job->bf16);
    const int cols = t->cols ? t->cols : 1, chunk_rows = (int)(SAVE_CHUNK / cols > 0 ? SAVE_CHUNK / cols : 1);
    const char *problem = NULL;
    for (int row = 0; row < t->rows && !problem; row += chunk_rows) {
        const int rows = t->rows - row < chunk_rows ? t->rows - row : chunk_rows;
        huggingface_gather(job->values, t, ours, row, rows);
        problem = save_values(job, job->values, (int64_t)rows * cols, job->bf16);
    }
    return problem;
}

// Begins a file of the tensors `entries`, which are sorted into the file's order, and writes the file's header.
static const char *save_header(struct save_job *job, const char *name, const struct safetensors_pair *metadata,
                               int pairs, struct safetensors_tensor *entries, int count) {
    struct safetensors_layout layout;
    const char *problem = safetensors_lay_out(&layout, entries, count, metadata, pairs, name, &job->writer.error);
    if (problem)
        return problem;
    problem = checkpoint_file_begin(&job->writer, name);
    if (!problem)
        problem = checkpoint_file_write(&job->writer, layout.header, layout.header_bytes);
    free(layout.header);
    return problem;
}
// One file of the model: tensors `entries`, which it sorts as the file has them.
static const char *save_shard(struct save_job *job, const char *name, const struct huggingface_tensors *tensors,
                              struct safetensors_tensor *entries, int count) {
    static const struct safetensors_pair metadata[] = {{"format", "pt"}};
    const char *problem = save_header(job, name, metadata, 1, entries, count);
    for (int i = 0; i < count && !problem; i++)
        problem = save_huggingface_tensor(job, &tensors->list[entries[i].id]);
    return problem ? problem : checkpoint_file_end(&job->writer);
}

static uint64_t save_bytes(const struct save_job *job, const struct huggingface_tensor *t) {
    return (uint64_t)huggingface_count(t) * (job->bf16 ? 2 : 4);
}
// Divides the tensors, in order, into shards up to the limit of bytes: first[s] = the first tensor of shard s. Returns
// the number of shards; first[shards] is the number of tensors.
static int save_divide(const struct save_job *job, const struct huggingface_tensors *tensors, int *first) {
    int shards = 0;
    uint64_t bytes = 0;
    for (int i = 0; i < tensors->count; i++) {
        const uint64_t more = save_bytes(job, &tensors->list[i]);
        if (i == 0 || bytes + more > job->most_shard_bytes) {
            first[shards++] = i;
            bytes = 0;
        }
        bytes += more;
    }
    first[shards] = tensors->count;
    return shards;
}

static const char *save_index(struct save_job *job, const struct huggingface_tensors *tensors, const int *first,
                              int shards, char (*names)[48]) {
    struct safetensors_index_entry *entries =
        (struct safetensors_index_entry *)calloc((size_t)tensors->count, sizeof *entries);
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = entries ? open_memstream(&text, &bytes) : NULL;
    uint64_t total = 0;
    for (int s = 0; s < shards && out; s++)
        for (int i = first[s]; i < first[s + 1]; i++) {
            entries[i].tensor = tensors->list[i].name;
            entries[i].file = names[s];
            total += save_bytes(job, &tensors->list[i]);
        }
    if (out)
        safetensors_index_write(out, entries, tensors->count, total);
    const bool written = out && fclose(out) == 0;
    const char *problem = written
                              ? checkpoint_file(&job->writer, "model.safetensors.index.json", text, bytes)
                              : error_format(&job->writer.error, "out of memory for the index of model.safetensors");
    free(text);
    free(entries);
    return problem;
}

static const char *save_shards(struct save_job *job, const struct huggingface_tensors *tensors,
                               struct safetensors_tensor *entries, int *first, char (*names)[48]) {
    const int shards = save_divide(job, tensors, first);
    const char *problem = NULL;
    for (int s = 0; s < shards && !problem; s++) {
        snprintf(names[s], sizeof names[s], shards == 1 ? "model.safetensors" : "model-%05d-of-%05d.safetensors", s + 1,
                 shards);
        for (int i = first[s]; i < first[s + 1]; i++) {
            const struct huggingface_tensor *t = &tensors->list[i];
            entries[i].name = t->name;
            entries[i].dtype = job->bf16 ? SAFETENSORS_BF16 : SAFETENSORS_F32;
            entries[i].dims = t->cols ? 2 : 1;
            entries[i].shape[0] = (uint64_t)t->rows;
            entries[i].shape[1] = (uint64_t)t->cols;
            entries[i].id = i;
        }
        problem = save_shard(job, names[s], tensors, entries + first[s], first[s + 1] - first[s]);
    }
    return problem || shards == 1 ? problem : save_index(job, tensors, first, shards, names);
}
static const char *save_model(struct save_job *job) {
    const size_t count = (size_t)job->tensors.count + 1;
    struct safetensors_tensor *entries = (struct safetensors_tensor *)calloc(count, sizeof *entries);
    int *first = (int *)calloc(count, sizeof *first);
    char(*names)[48] = (char(*)[48])calloc(count, sizeof *names);
    const char *problem = entries && first && names
                              ? save_shards(job, &job->tensors, entries, first, names)
                              : error_format(&job->writer.error, "out of memory for a checkpoint");
    free(entries);
    free(first);
    free(names);
    return problem;
}

// ---- optimizer.safetensors ----

static const char *save_fp8(struct save_job *job, enum fp8_tensor t) {
    const struct fp8_state *f = &job->m->fp8;
    return save_values(job, job->fp8 + fp8_tensor_begin(f, t), fp8_tensor_count(f, t), false);
}
// The id of an entry is kind of state * tensors of the table + tensor; from STATE_COUNT * tensors on they are FP8's.
static const char *save_optimizer_data(struct save_job *job, const struct safetensors_tensor *entries, int count) {
    const char *problem = NULL;
    for (int i = 0; i < count && !problem; i++) {
        const enum optimizer_state id = (enum optimizer_state)(entries[i].id / job->table->num_tensors);
        if (id == STATE_COUNT) {
            problem = save_fp8(job, (enum fp8_tensor)(entries[i].id % job->table->num_tensors));
            continue;
        }
        const struct tensor *t = &job->table->tensors[entries[i].id % job->table->num_tensors];
        const float *values = save_tensor(job, id, t);
        problem = save_values(job, values, (int64_t)t->visible_rows * t->cols, false);
    }
    return problem;
}
static const char *save_optimizer_file(struct save_job *job, struct safetensors_tensor *entries, int count) {
    const char *problem = save_header(job, optimizer_file_name, NULL, 0, entries, count);
    if (!problem)
        problem = save_optimizer_data(job, entries, count);
    return problem ? problem : checkpoint_file_end(&job->writer);
}
static const char *save_optimizer(struct save_job *job) {
    enum { NAME = sizeof(((struct tensor *)0)->name) + 16 };
    const int tensors = job->table->num_tensors;
    const size_t most = (size_t)tensors * STATE_COUNT;
    struct safetensors_tensor *entries = (struct safetensors_tensor *)calloc(most + FP8_TENSORS, sizeof *entries);
    char(*names)[NAME] = (char(*)[NAME])calloc(most, sizeof *names);
    int count = 0;
    for (int i = 0; i < (int)most && entries && names; i++) {
        const struct tensor *t = &job->table->tensors[i % tensors];
        const enum optimizer_state id = (enum optimizer_state)(i / tensors);
        if (!state_is_in_file(id, !job->bf16))
            continue;
        snprintf(names[count], NAME, "%s.%s", optimizer_state_rows[id].file_name, t->name);
        entries[count].name = names[count];
        entries[count].dtype = SAFETENSORS_F32;
        entries[count].dims = t->cols > 1 ? 2 : 1;
        entries[count].shape[0] = (uint64_t)t->visible_rows;
        entries[count].shape[1] = (uint64_t)t->cols;
        entries[count++].id = i;
    }
    for (int t = 0; t < FP8_TENSORS && job->fp8 && entries; t++)
        entries[count++] = fp8_tensor_entry(&job->m->fp8, (enum fp8_tensor)t, (int)most + t);
    const char *problem = entries && names ? save_optimizer_file(job, entries, count)
                                           : error_format(&job->writer.error, "out of memory for a checkpoint");
    free(entries);
    free(names);
    return problem;
}

// ---- the folder ----

static const char *save_tokenizer_file(struct save_job *job, int i) {
    enum { MOST_BYTES = 1 << 30 };
    unsigned char *data;
    uint64_t bytes;
    const char *problem =
        read_whole(&data, &bytes, MOST_BYTES, job->tokenizer_files[i], "a tokenizer's file", &job->writer.error);
    if (!problem)
        problem = checkpoint_file(&job->writer, job->tokenizer_names[i], data, bytes);
    free(data);
    return problem;
}

static const char *save_files(struct save_job *job) {
    const char *problem = checkpoint_file(&job->writer, "config.json", job->config_json, job->config_bytes);
    if (!problem)
        problem = checkpoint_file(&job->writer, "trainer_state.json", job->state_json, job->state_bytes);
    for (int i = 0; i < SAVE_TOKENIZER_FILES && *job->tokenizer_files[i] && !problem; i++)
        problem = save_tokenizer_file(job, i);
    if (!problem)
        problem = save_model(job);
    return problem ? problem : save_optimizer(job);
}

// A checkpoint_job: writes the checkpoint, then removes the oldest beyond `keep`. Returns what went wrong, or NULL.
static const char *save_run(void *argument, struct error_text *error) {
    struct save_job *job = (struct save_job *)argument;
    const char *problem = checkpoint_begin(&job->writer, job->root, job->step);
    if (!problem) {
        problem = save_files(job);
        problem = problem ? problem : checkpoint_commit(&job->writer);
        if (problem && !job->writer.failed)
            checkpoint_abandon(&job->writer);
    }
    if (problem)
        return error_format(error, "%s", problem);
    return job->keep > 0 ? checkpoint_prune(job->root, job->keep, job->step, error) : NULL;
}

// Allocates the buffers of a save: for a chunk, at least a row, and with `fetches` for the largest tensor.
static const char *save_job_reserve(struct save_job *job, bool fetches, struct error_text *error) {
    int64_t widest = SAVE_CHUNK, largest = 1;
    for (int i = 0; i < job->table->num_tensors; i++) {
        const struct tensor *t = &job->table->tensors[i];
        const int64_t row = t->rows > t->cols ? t->rows : t->cols; // transposed, its columns are rows
        widest = 4 * row > widest ? 4 * row : widest;              // repeated heads make rows wider
        largest = t->count > largest ? t->count : largest;
    }
    job->values = (float *)malloc((size_t)widest * sizeof *job->values);
    job->bf16_values = (uint16_t *)malloc((size_t)SAVE_CHUNK * sizeof *job->bf16_values);
    job->fetched = fetches ? (float *)malloc((size_t)largest * sizeof *job->fetched) : NULL;
    const int64_t fp8_floats = fp8_state_floats(&job->m->fp8);
    job->fp8 = fp8_floats > 0 ? (float *)malloc((size_t)fp8_floats * sizeof *job->fp8) : NULL;
    if (job->values && job->bf16_values && (job->fetched || !fetches) && (job->fp8 || fp8_floats == 0))
        return NULL;
    return error_format(error, "out of memory for a checkpoint");
}
static void save_job_release(struct save_job *job) {
    free(job->values);
    free(job->bf16_values);
    free(job->fetched);
    free(job->fp8);
    free(job->config_json);
    free(job->state_json);
    huggingface_tensors_free(&job->tensors);
    job->values = job->fetched = job->fp8 = NULL;
    job->bf16_values = NULL;
    job->config_json = job->state_json = NULL;
}

// ---- saving during a run ----

// The writer of checkpoints, one at a time: in a thread from the copy where the model keeps one, else in the caller.
struct saver {
    struct gpt *m;
    struct save_job job;
    struct checkpoint_thread thread;
    int end_of_text;   // token, -1: none
    int64_t last_step; // whose save was begun last, -1: none
    bool running;      // the last save's result was not taken yet
    double begun_s;    // when, by seconds_now()
};

// Adds a file to copy into every checkpoint, if it exists and no file of that name was added before.
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

static void saver_open(struct saver *saver, struct gpt *m, int end_of_text) {
    const struct config *c = &m->config;
    const bool bf16 =
        c->checkpoint_dtype == CHECKPOINT_AUTO ? sizeof(floatX) == 2 : c->checkpoint_dtype == CHECKPOINT_BF16;
    struct save_job *job = &saver->job;
    struct error_text error;
    memset(saver, 0, sizeof *saver);
    saver->m = m;
    saver->end_of_text = end_of_text;
    saver->last_step = -1;
    checkpoint_thread_init(&saver->thread);
    job->table = &m->table;
    job->tensors = huggingface_tensors_of(job->table, &m->shape, architecture_of(c), config_rotary_dims(c));
    job->bf16 = bf16;
    job->most_shard_bytes = (uint64_t)((double)c->max_shard_gib * 0x1p30);
    job->m = m;
    job->keep = c->keep_checkpoints;
    if ((size_t)snprintf(job->root, sizeof job->root, "%s/checkpoints", c->out) >= sizeof job->root)
        fail("--out %s: the name is too long", c->out);
    for (int id = 0; id < STATE_COUNT; id++)
        job->state[id] = m->copy.keeps ? m->copy.values[id] : NULL;
    const char *problem = save_job_reserve(job, !job->state[STATE_MASTER], &error);
    if (problem)
        fail("%s", problem);
}

// Waits for the save in progress, if any. Returns what went wrong with it, or NULL.
static const char *saver_wait(struct saver *saver) {
    saver->running = false;
    return checkpoint_thread_wait(&saver->thread);
}

static char *save_config_json(const struct saver *saver, size_t *bytes) {
    char *text = NULL;
    FILE *out = open_memstream(&text, bytes);
    if (!out)
        return NULL;
    huggingface_write_config(out, &saver->m->config, saver->end_of_text, saver->job.bf16);
    return fclose(out) == 0 ? text : NULL;
}

// Begins the save of a step; no other may be in progress. state_json: the text of trainer_state.json, which is freed
// after the save.
static void saver_save(struct saver *saver, int64_t step, char *state_json, size_t state_bytes) {
    struct save_job *job = &saver->job;
    free(job->config_json);
    free(job->state_json);
    job->config_json = save_config_json(saver, &job->config_bytes);
    job->state_json = state_json;
    job->state_bytes = state_bytes;
    job->step = step;
    if (!job->config_json)
        fail("out of memory for a checkpoint");
    saver->begun_s = seconds_now();
    saver->last_step = step;
    saver->running = true;
    gpt_copy_state(saver->m);
    if (job->fp8)
        fp8_state_download(&saver->m->fp8, job->fp8, saver->m->dev);
    checkpoint_thread_start(&saver->thread, save_run, job);
    if (!saver->m->copy.keeps) { // the thread reads the model itself, which must not train meanwhile
        while (checkpoint_thread_busy(&saver->thread))
            usleep(1000);
    }
}

static void saver_close(struct saver *saver) {
    if (!saver->m)
        return;
    checkpoint_thread_destroy(&saver->thread);
    save_job_release(&saver->job);
}
