// Writes the model's tensors into a checkpoint's files. A single rank writes from first byte to last; of several, rank
// 0 lays the files out, and each writes its ranges (formats/checkpoint_part.h). Values are fetched a chunk at a time;
// parameters whose elements have other places in the file are fetched whole, as far as this rank owns them.
#pragma once
#include "run/model.cuh"              // struct gpt
#include "formats/checkpoint_part.h"  // checkpoint_part_write
#include "formats/checkpoint_write.h" // checkpoint_file_write
#include "formats/peft_config.h"      // PEFT_MODEL_NAME
#include "formats/safetensors.h"      // safetensors_lay_out
#include "run/fp8_checkpoint.cuh"     // fp8_tensor_entry
#include "run/optimizer_file.cuh"     // state_tensor_entry
#include "run/tensor_names.cuh"       // which tensor holds which parameters

static const int64_t SAVE_CHUNK = 1 << 18; // elements, a multiple of STATE_BLOCK

enum save_pass {
    SAVE_BY_ONE,  // writes the files whole
    SAVE_LAY_OUT, // writes the headers, and gives the files their lengths
    SAVE_PART,    // writes what this rank owns
};

// The tensors of a save, and the memory that it takes. Nothing but the last part changes while the training goes on.
struct save_tensors {
    struct gpt *m;
    struct huggingface_tensors model; // of model.safetensors, or of adapter_model.safetensors
    bool adapters;                    // the model's file has only adapters
    bool bf16;                        // model.safetensors is bf16, and optimizer.safetensors has the master weights
    bool first;                       // this rank writes what no rank owns: zeros, and FP8's state
    uint64_t most_shard_bytes;
    float *fp8;                // delayed scales and their histories (fp8_state_download); NULL: none
    char *stored[STATE_PARTS]; // room for blocks of a chunk as they are stored
    float *values;             // room for a chunk, or the widest row
    char *bytes;               // room for a chunk as a file has it
    float *moved;              // room for the largest parameter whose elements have other places; NULL: none
    // while the save runs
    enum save_pass pass;
    struct checkpoint_writer writer;
    struct checkpoint_part part;
    uint64_t data_begin; // of the file's tensors
    struct {             // save_writes_element's last answer
        bool frozen;
        int64_t begin, end;
        bool owned;
    } range;
};

static const char *save_out_of_memory(struct save_tensors *s) {
    return error_format(&s->writer.error, "out of memory for a checkpoint");
}

// ---- values ----

// Finds the next range of [*at, end), in the frozen or the trained flat buffers, that this rank writes: *at = the first
// element, *place = its index in this rank's buffer. Returns the length, for the caller to add to *at, or 0.
static int64_t save_next(const struct save_tensors *s, bool frozen, int64_t *at, int64_t end, int64_t *place) {
    const struct shards *shards = &s->m->frozen.shards;
    return frozen ? shards_next(shards, shards_optimizer(shards), at, end, place)
                  : owned_range_next(&s->m->optimizer, at, end, place);
}
// Sets out (n) to parameters [at, at + n) in fp32, by the master weights if there are any. The range must be one that
// save_next found, or a part of it, and n at most SAVE_CHUNK - STATE_BLOCK.
static void save_exact(struct save_tensors *s, bool frozen, int64_t at, int64_t n, float *out) {
    struct gpt *m = s->m;
    struct optimizer *o = &m->optimizer;
    if (frozen) {
        floatX *const stored = (floatX *)s->stored[PART_PARAMETERS];
        parameters_download(&m->frozen, at, n, stored);
        for (int64_t i = 0; i < n; i++)
            out[i] = to_float(stored[i]);
        return;
    }
    const int64_t begin = at / STATE_BLOCK * STATE_BLOCK, blocks = state_blocks(at + n - begin);
    const floatX *rounded = (const floatX *)optimizer_copy_read(&m->copy, o, PART_PARAMETERS, begin,
                                                                blocks * STATE_BLOCK, s->stored[PART_PARAMETERS]) +
                            (at - begin);
    const uint16_t *low = NULL;
    if (optimizer_holds(o, STATE_MASTER))
        low = (const uint16_t *)optimizer_copy_read(&m->copy, o, STATE_MASTER, begin, blocks * STATE_BLOCK,
                                                    s->stored[STATE_MASTER]) +
              (at - begin);
    for (int64_t i = 0; i < n; i++)
        out[i] = low ? parameter_joined(rounded[i], low[i]) : to_float(rounded[i]);
}

// Writes `count` bytes at `offset` of the file; SAVE_BY_ONE appends and ignores `offset`. Returns NULL, or an error.
static const char *save_bytes(struct save_tensors *s, uint64_t offset, const void *bytes, uint64_t count) {
    return s->pass == SAVE_BY_ONE ? checkpoint_file_write(&s->writer, bytes, count)
                                  : checkpoint_part_write(&s->part, offset, bytes, count);
}
// Writes values (n) as F32 or BF16 elements of the entry from `first` on (SAVE_BY_ONE: next). Returns NULL or an error.
static const char *save_values(struct save_tensors *s, const struct safetensors_tensor *entry, int64_t first,
                               const float *values, int64_t n) {
    uint64_t offset = s->data_begin + entry->begin + (uint64_t)first * safetensors_dtype_bytes(entry->dtype);
    bf16 *const rounded = (bf16 *)s->bytes;
    const char *problem = NULL;
    if (entry->dtype == SAFETENSORS_F32)
        return save_bytes(s, offset, values, (uint64_t)n * sizeof *values);
    for (int64_t at = 0; at < n && !problem; at += SAVE_CHUNK) {
        const int64_t count = n - at < SAVE_CHUNK ? n - at : SAVE_CHUNK;
        for (int64_t i = 0; i < count; i++)
            rounded[i] = split_high(values[at + i]);
        problem = save_bytes(s, offset, rounded, (uint64_t)count * sizeof *rounded);
        offset += (uint64_t)count * sizeof *rounded;
    }
    return problem;
}

// Writes this rank's part of exact parameters [begin, end) as the tensor's elements. Returns NULL, or an error.
static const char *save_range(struct save_tensors *s, const struct safetensors_tensor *entry, bool frozen,
                              int64_t begin, int64_t end) {
    const char *problem = NULL;
    int64_t at = begin, place, n;
    for (; !problem && (n = save_next(s, frozen, &at, end, &place)) > 0; at += n) {
        n = n < SAVE_CHUNK - STATE_BLOCK ? n : SAVE_CHUNK - STATE_BLOCK; // what is fetched begins with a whole block
        save_exact(s, frozen, at, n, s->values);
        problem = save_values(s, entry, at - begin, s->values, n);
    }
    return problem;
}

// ---- tensors whose elements have other places ----

// Whether this rank writes element `at` of the flat buffers. end: the end of its parameter. s->range keeps the answer.
static bool save_writes_element(struct save_tensors *s, bool frozen, int64_t at, int64_t end) {
    if (frozen != s->range.frozen || at < s->range.begin || at >= s->range.end) {
        int64_t first = at, place;
        const int64_t n = save_next(s, frozen, &first, end, &place);
        s->range.frozen = frozen;
        s->range.owned = n > 0 && first == at;
        s->range.begin = at;
        s->range.end = s->range.owned ? at + n : n > 0 ? first : end;
    }
    return s->range.owned;
}
// Returns which element of the flat buffers is element (row, col) of a tensor. t->ours is not NULL.
static int64_t save_element(const struct huggingface_tensor *t, int row, int col) {
    const int64_t width = t->ours->cols;
    return t->ours->offset +
           (t->transposed ? huggingface_row(t, col) * width + row : huggingface_row(t, row) * width + col);
}
// Writes this rank's part of a tensor's row. values (cols): the row. Returns NULL, or what went wrong.
static const char *save_row(struct save_tensors *s, const struct safetensors_tensor *entry,
                            const struct huggingface_tensor *t, int row, const float *values) {
    const int cols = t->cols ? t->cols : 1;
    const int64_t end = t->ours->offset + t->ours->count;
    const char *problem = NULL;
    for (int col = 0; col < cols && !problem;) {
        int last = col;
        while (last < cols && save_writes_element(s, t->ours->frozen, save_element(t, row, last), end))
            last++;
        if (last > col)
            problem = save_values(s, entry, (int64_t)row * cols + col, values + col, last - col);
        col = last > col ? last : col + 1;
    }
    return problem;
}
// Fetches this rank's part of an exact parameter into s->moved. Returns whether there is any.
static bool save_fetch_moved(struct save_tensors *s, const struct tensor *ours) {
    int64_t at = ours->offset, place, n;
    bool any = false;
    for (; (n = save_next(s, ours->frozen, &at, ours->offset + ours->count, &place)) > 0; at += n) {
        n = n < SAVE_CHUNK - STATE_BLOCK ? n : SAVE_CHUNK - STATE_BLOCK;
        save_exact(s, ours->frozen, at, n, s->moved + (at - ours->offset));
        any = true;
    }
    return any;
}
// Writes this rank's part of a rearranged tensor, or zeros if t->ours is NULL. Returns NULL, or what went wrong.
static const char *save_moved(struct save_tensors *s, const struct safetensors_tensor *entry,
                              const struct huggingface_tensor *t) {
    const int cols = t->cols ? t->cols : 1, chunk_rows = (int)(SAVE_CHUNK / cols > 0 ? SAVE_CHUNK / cols : 1);
    const bool all = s->pass == SAVE_BY_ONE || !t->ours;
    const char *problem = NULL;
    if (t->ours ? !save_fetch_moved(s, t->ours) : !s->first)
        return NULL;
    for (int row = 0; row < t->rows && !problem; row += chunk_rows) {
        const int rows = t->rows - row < chunk_rows ? t->rows - row : chunk_rows;
        huggingface_gather(s->values, t, s->moved, row, rows);
        if (all)
            problem = save_values(s, entry, (int64_t)row * cols, s->values, (int64_t)rows * cols);
        for (int r = 0; r < rows && !all && !problem; r++)
            problem = save_row(s, entry, t, row + r, s->values + (int64_t)r * cols);
    }
    return problem;
}

// ---- files ----

typedef const char *save_entry(struct save_tensors *s, const struct safetensors_tensor *entry);

// Calls `write` for each of the entries (count) in order, up to the first that fails; returns its error, or NULL.
static const char *save_entries(struct save_tensors *s, save_entry *write, const struct safetensors_tensor *entries,
                                int count) {
    const char *problem = NULL;
    for (int i = 0; i < count && !problem; i++)
        problem = write(s, &entries[i]);
    return problem;
}
// Does s->pass over one file. Sorts the entries (count) and sets their places in it. `write` then writes each, except
// in SAVE_LAY_OUT, which calls it for none. metadata: (pairs). Returns NULL, or an error.
static const char *save_file(struct save_tensors *s, const char *name, const struct safetensors_pair *metadata,
                             int pairs, save_entry *write, struct safetensors_tensor *entries, int count) {
    struct safetensors_layout layout;
    const char *problem = safetensors_lay_out(&layout, entries, count, metadata, pairs, name, &s->writer.error);
    if (problem)
        return problem;
    s->data_begin = layout.header_bytes;
    switch (s->pass) {
    case SAVE_BY_ONE:
        problem = checkpoint_file_begin(&s->writer, name);
        if (!problem)
            problem = checkpoint_file_write(&s->writer, layout.header, layout.header_bytes);
        if (!problem)
            problem = save_entries(s, write, entries, count);
        if (!problem)
            problem = checkpoint_file_end(&s->writer);
        break;
    case SAVE_LAY_OUT:
        problem = checkpoint_shared_file(&s->writer, name, layout.header, layout.header_bytes,
                                         layout.header_bytes + layout.data_bytes);
        break;
    case SAVE_PART:
        problem = checkpoint_part_open(&s->part, name);
        if (!problem)
            problem = save_entries(s, write, entries, count);
        if (!problem)
            problem = checkpoint_part_close(&s->part);
        break;
    }
    free(layout.header);
    return problem;
}

// ---- model.safetensors ----

// Writes this rank's part of tensor s->model.list[entry->id] in the model's file. Returns NULL, or an error.
static const char *save_model_entry(struct save_tensors *s, const struct safetensors_tensor *entry) {
    const struct huggingface_tensor *t = &s->model.list[entry->id];
    if (!t->ours || huggingface_is_rearranged(t))
        return save_moved(s, entry, t);
    const int64_t begin = t->ours->offset + (int64_t)t->first_row * t->ours->cols;
    return save_range(s, entry, t->ours->frozen, begin, begin + huggingface_elements(t));
}

static uint64_t saved_tensor_bytes(const struct save_tensors *s, const struct huggingface_tensor *t) {
    return (uint64_t)huggingface_elements(t) * (s->bf16 ? 2 : 4);
}
// Divides the tensors, in order, into files up to s->most_shard_bytes. A larger tensor has its own file; all adapters
// are in one. first[i] (tensors + 1) = the first tensor of file i, then s->model.count. Returns the number of files.
static int save_divide(const struct save_tensors *s, int *first) {
    int shards = 0;
    uint64_t bytes = 0;
    for (int i = 0; i < s->model.count; i++) {
        const uint64_t more = saved_tensor_bytes(s, &s->model.list[i]);
        if (i == 0 || (bytes + more > s->most_shard_bytes && !s->adapters)) {
            first[shards++] = i;
            bytes = 0;
        }
        bytes += more;
    }
    first[shards] = s->model.count;
    return shards;
}

// Writes model.safetensors.index.json. first: save_divide's; names: the shards' files. Returns NULL, or an error.
static const char *save_index(struct save_tensors *s, const int *first, int shards, char (*names)[48]) {
    struct safetensors_index_entry *entries =
        (struct safetensors_index_entry *)calloc((size_t)s->model.count, sizeof *entries);
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = entries ? open_memstream(&text, &bytes) : NULL;
    uint64_t total = 0;
    for (int shard = 0; shard < shards && out; shard++)
        for (int i = first[shard]; i < first[shard + 1]; i++) {
            entries[i].tensor = s->model.list[i].name;
            entries[i].file = names[shard];
            total += saved_tensor_bytes(s, &s->model.list[i]);
        }
    if (out)
        safetensors_index_write(out, entries, s->model.count, total);
    const bool written = out && fclose(out) == 0;
    const char *problem = written ? checkpoint_write_file(&s->writer, "model.safetensors.index.json", text, bytes)
                                  : save_out_of_memory(s);
    free(text);
    free(entries);
    return problem;
}

// Does s->pass over the model's files, and then, except for SAVE_PART, writes their index if there are several.
// entries, first, names: scratch memory, each of an element a tensor and one more. Returns NULL, or an error.
static const char *save_shards(struct save_tensors *s, struct safetensors_tensor *entries, int *first,
                               char (*names)[48]) {
    static const struct safetensors_pair metadata[] = {{"format", "pt"}};
    const int shards = save_divide(s, first);
    const char *problem = NULL;
    for (int shard = 0; shard < shards && !problem; shard++) {
        snprintf(names[shard], sizeof names[shard],
                 s->adapters   ? PEFT_MODEL_NAME
                 : shards == 1 ? "model.safetensors"
                               : "model-%05d-of-%05d.safetensors",
                 shard + 1, shards);
        for (int i = first[shard]; i < first[shard + 1]; i++) {
            const struct huggingface_tensor *t = &s->model.list[i];
            entries[i].name = t->name;
            entries[i].dtype = s->bf16 ? SAFETENSORS_BF16 : SAFETENSORS_F32;
            entries[i].dims = t->cols ? 2 : 1;
            entries[i].shape[0] = (uint64_t)t->rows;
            entries[i].shape[1] = (uint64_t)t->cols;
            entries[i].id = i;
        }
        problem = save_file(s, names[shard], metadata, 1, save_model_entry, entries + first[shard],
                            first[shard + 1] - first[shard]);
    }
    return problem || shards == 1 || s->pass == SAVE_PART ? problem : save_index(s, first, shards, names);
}
// Does s->pass over the model's files, or the adapters' file, as save_shards does. Returns NULL, or an error.
static const char *save_model(struct save_tensors *s) {
    const size_t count = (size_t)s->model.count + 1;
    struct safetensors_tensor *entries = (struct safetensors_tensor *)calloc(count, sizeof *entries);
    int *first = (int *)calloc(count, sizeof *first);
    char(*names)[48] = (char(*)[48])calloc(count, sizeof *names);
    const char *problem = entries && first && names ? save_shards(s, entries, first, names) : save_out_of_memory(s);
    free(entries);
    free(first);
    free(names);
    return problem;
}

// ---- optimizer.safetensors ----

// Writes this rank's part of a state as stored: elements or, if `scales`, its blocks' scales. Returns NULL or an error.
static const char *save_state(struct save_tensors *s, const struct safetensors_tensor *entry, enum optimizer_state id,
                              const struct tensor *t, bool scales) {
    struct optimizer *o = &s->m->optimizer;
    const enum state_format format = optimizer_format(o, id, t);
    const int64_t visible = tensor_visible_elements(t), end = t->offset + state_blocks(visible) * STATE_BLOCK;
    const uint64_t width = safetensors_dtype_bytes(entry->dtype), begin = s->data_begin + entry->begin;
    const char *problem = NULL;
    int64_t at = t->offset, place, n;
    for (; !problem && (n = owned_range_next(o, &at, end, &place)) > 0; at += n) {
        n = n < SAVE_CHUNK ? n : SAVE_CHUNK;
        const int64_t first = at - t->offset, count = visible - first < n ? visible - first : n;
        const void *stored = optimizer_copy_read(&s->m->copy, o, id, at, n, s->stored[id]), *bytes = s->bytes;
        if (scales)
            state_extract_scales((float *)s->bytes, stored, state_blocks(count));
        else if (format_has_scales(format))
            state_extract_codes((unsigned char *)s->bytes, stored, count);
        else
            bytes = stored;
        problem = save_bytes(s, begin + (uint64_t)(scales ? first / STATE_BLOCK : first) * width, bytes,
                             (uint64_t)(scales ? state_blocks(count) : count) * width);
    }
    return problem;
}

// Writes this rank's part of an entry of optimizer.safetensors. entry->id: (state * tensors of the table + tensor) * 2,
// and 1 more for scales; from STATE_COUNT * tensors * 2 on, FP8's tensors. Returns NULL, or an error.
static const char *save_optimizer_entry(struct save_tensors *s, const struct safetensors_tensor *entry) {
    const int tensors = s->m->table.num_tensors, fp8 = entry->id - 2 * STATE_COUNT * tensors;
    if (fp8 >= 0) {
        const float *values = s->fp8 + fp8_tensor_begin(&s->m->fp8, (enum fp8_tensor)fp8);
        return s->first ? save_values(s, entry, 0, values, fp8_tensor_values(&s->m->fp8, (enum fp8_tensor)fp8)) : NULL;
    }
    const enum optimizer_state id = (enum optimizer_state)(entry->id / 2 / tensors);
    const struct tensor *t = &s->m->table.tensors[entry->id / 2 % tensors];
    switch (optimizer_state_rows[id].start) {
    case STATE_FROM_PARAMETERS:
        return save_range(s, entry, t->frozen, t->offset, t->offset + tensor_visible_elements(t));
    case STATE_COPY:
    case STATE_ZERO: break;
    }
    return save_state(s, entry, id, t, entry->id % 2 == 1);
}
// Does s->pass over optimizer.safetensors: its states, and FP8's delayed scales. Returns NULL, or an error.
static const char *save_optimizer(struct save_tensors *s) {
    const struct gpt *m = s->m;
    const int most = 2 * STATE_COUNT * m->table.num_tensors;
    struct safetensors_tensor *entries =
        (struct safetensors_tensor *)calloc((size_t)most + FP8_TENSORS, sizeof *entries);
    char(*names)[STATE_NAME] = (char(*)[STATE_NAME])calloc((size_t)most, sizeof *names);
    int count = 0;
    for (int i = 0; i < most && entries && names; i++) {
        const struct tensor *t = &m->table.tensors[i / 2 % m->table.num_tensors];
        const enum optimizer_state id = (enum optimizer_state)(i / 2 / m->table.num_tensors);
        if (!state_is_in_file(&m->optimizer, id, t, !s->bf16))
            continue;
        const enum state_format format = optimizer_state_rows[id].start == STATE_FROM_PARAMETERS
                                             ? FORMAT_FP32
                                             : optimizer_format(&m->optimizer, id, t);
        if (i % 2 == 0 || format_has_scales(format)) {
            entries[count] = state_tensor_entry(names[count], id, t, format, i % 2 == 1, i);
            count++;
        }
    }
    for (int t = 0; t < FP8_TENSORS && s->fp8 && entries; t++)
        if (fp8_tensor_values(&m->fp8, (enum fp8_tensor)t) > 0)
            entries[count++] = fp8_tensor_entry(&m->fp8, (enum fp8_tensor)t, most + t);
    const char *problem = entries && names
                              ? save_file(s, optimizer_file_name, NULL, 0, save_optimizer_entry, entries, count)
                              : save_out_of_memory(s);
    free(entries);
    free(names);
    return problem;
}

// Does a pass over all files of tensors. The writer, or for SAVE_PART the part, has begun. Returns NULL, or an error.
static const char *save_tensors_pass(struct save_tensors *s, enum save_pass pass) {
    s->pass = pass;
    const char *problem = save_model(s);
    return problem ? problem : save_optimizer(s);
}

// ---- memory ----

// Sets s->m and allocates the memory that all saves share. s->model is listed before; the pointers to set are NULL
// before. save_tensors_close frees it. Returns NULL, or an error.
static const char *save_tensors_open(struct save_tensors *s, struct gpt *m, struct error_text *error) {
    int64_t widest = SAVE_CHUNK, moved = 0;
    for (int i = 0; i < m->table.num_tensors + m->table.num_frozen; i++) {
        const struct tensor *t = &m->table.tensors[i];
        const int64_t row = t->rows > t->cols ? t->rows : t->cols; // transposed, its columns are rows
        widest = 4 * row > widest ? 4 * row : widest;              // repeated heads make rows wider
    }
    for (int i = 0; i < s->model.count; i++)
        if (s->model.list[i].ours && huggingface_is_rearranged(&s->model.list[i]) &&
            s->model.list[i].ours->count > moved)
            moved = s->model.list[i].ours->count;
    s->m = m;
    s->values = (float *)malloc((size_t)widest * sizeof *s->values);
    s->bytes = (char *)malloc((size_t)SAVE_CHUNK * sizeof(float));
    s->moved = moved > 0 ? (float *)malloc((size_t)moved * sizeof *s->moved) : NULL;
    const int64_t fp8_floats = fp8_state_floats(&m->fp8);
    s->fp8 = fp8_floats > 0 ? (float *)malloc((size_t)fp8_floats * sizeof *s->fp8) : NULL;
    for (int part = 0; part < STATE_PARTS && !m->copy.keeps; part++)
        if (part_is_stored(&m->optimizer, part))
            s->stored[part] = (char *)host_allocate((size_t)SAVE_CHUNK * sizeof(float), m->dev);
    if (s->values && s->bytes && (s->moved || moved == 0) && (s->fp8 || fp8_floats == 0))
        return NULL;
    return error_format(error, "out of memory for a checkpoint");
}
// Frees what save_tensors_open allocated, and the list s->model.
static void save_tensors_close(struct save_tensors *s) {
    free(s->values);
    free(s->bytes);
    free(s->moved);
    free(s->fp8);
    for (int part = 0; part < STATE_PARTS; part++)
        if (s->stored[part])
            host_free(s->stored[part]);
    huggingface_tensors_free(&s->model);
}
