// Loads parameters and optimizer state into the model: from a Hugging Face folder, as checkpoints are, or from llm.c's
// .bin. Parameters pass through the host in fp32, in which bf16 and fp16 are exact, so the model gets the saved bits.
#pragma once
#include "run/model.cuh"             // struct gpt
#include "config/layers.h"           // config_rotary_dims
#include "formats/huggingface.h"     // enum architecture
#include "formats/llmc.h"            // llmc_parse
#include "run/fp8_checkpoint.cuh"    // fp8_load
#include "runtime/files/file_read.h" // read_exactly
#include "formats/safetensors.h"     // safetensors_open, safetensors_read
#include "run/model_folder.h"        // struct model_folder
#include "run/optimizer_file.cuh"    // state_tensor_entry
#include "run/start.h"               // start_read_model
#include "run/tensor_names.cuh"      // which tensor holds which parameters
#include "runtime/machine/say.h"     // say
#include "runtime/text/json_parse.h" // json_show
#include <sys/stat.h>                // stat
#include <limits.h>                  // PATH_MAX

static const int64_t LOAD_CHUNK = 1 << 20; // elements

static const char *const head_names[] = {"lm_head.weight", "embed_out.weight"};

// Whether to ignore a file's tensor: a mask of GPT-2 or GPT-NeoX, a rotary table, or the head of a `tied` model.
static bool model_tensor_is_no_parameter(const char *name, bool tied) {
    static const char *const endings[] = {".attn.bias", ".attn.masked_bias", ".attention.bias",
                                          ".attention.masked_bias"};
    for (int i = 0; i < 4; i++)
        if (strlen(name) > strlen(endings[i]) && strcmp(name + strlen(name) - strlen(endings[i]), endings[i]) == 0)
            return true;
    return strstr(name, ".rotary_emb.") ||
           (tied && (strcmp(name, head_names[0]) == 0 || strcmp(name, head_names[1]) == 0));
}
// Refuses a folder with a tensor that the model lacks, or that two files have. Returns NULL, or what is wrong.
static const char *model_folder_check_names(const struct model_folder *folder,
                                            const struct huggingface_tensors *tensors, bool tied,
                                            struct error_text *error) {
    for (int f = 0; f < folder->count; f++)
        for (int i = 0; i < folder->files[f].count; i++) {
            const char *name = folder->files[f].tensors[i].name;
            bool known = model_tensor_is_no_parameter(name, tied);
            for (int t = 0; t < tensors->count && !known; t++) {
                const char *wanted = tensors->list[t].name;
                known = strcmp(name, wanted) == 0 ||
                        (strncmp(wanted, "transformer.", 12) == 0 && strcmp(name, wanted + 12) == 0);
            }
            if (!known)
                return error_format(error, "%s: has the tensor '%s', which this model has no place for",
                                    folder->names[f], json_show(name).text);
            int first;
            model_folder_find(folder, name, &first);
            if (first != f)
                return error_format(error, "%s: has the tensor '%s', which %s has too", folder->names[f],
                                    json_show(name).text, folder->names[first]);
        }
    return NULL;
}

// ---- Into the model ----

// Sets this rank's part of t's elements [first, first + n) to values (n), and waits. rounded: scratch (2 LOAD_CHUNK).
static void model_store(struct gpt *m, const struct tensor *t, int64_t first, const float *values, int64_t n,
                        floatX *rounded) {
    for (int64_t done = 0; done < n; done += LOAD_CHUNK) {
        const int64_t count = n - done < LOAD_CHUNK ? n - done : LOAD_CHUNK;
        gpt_set_parameters(m, t, first + done, values + done, count, rounded);
        device_synchronize(m->dev);
    }
}

// The buffers that tensors pass through on their way from a file to the model. The files are the caller's.
struct model_loader {
    struct gpt *m;
    unsigned char *raw;
    float *values;
    floatX *rounded;
    int64_t room; // capacity of raw and values, in elements
};

// Makes room for elements in loader->raw, 8 bytes each, and ->values. Their content is lost. Returns NULL, or an error.
static const char *model_loader_reserve(struct model_loader *loader, int64_t elements, struct error_text *error) {
    if (elements <= loader->room)
        return NULL;
    free(loader->raw);
    free(loader->values);
    loader->raw = (unsigned char *)malloc((size_t)elements * 8);
    loader->values = (float *)malloc((size_t)elements * sizeof *loader->values);
    loader->room = loader->raw && loader->values ? elements : 0;
    return loader->room ? NULL : error_format(error, "out of memory for %lld elements of a file", (long long)elements);
}
// Creates a loader with room for LOAD_CHUNK. Returns NULL, or an error; model_loader_free is needed after errors, too.
static const char *model_loader_create(struct model_loader *loader, struct gpt *m, struct error_text *error) {
    memset(loader, 0, sizeof *loader);
    loader->m = m;
    loader->rounded = (floatX *)host_allocate(2 * LOAD_CHUNK * sizeof *loader->rounded, m->dev);
    return model_loader_reserve(loader, LOAD_CHUNK, error);
}
static void model_loader_free(struct model_loader *loader) {
    free(loader->raw);
    free(loader->values);
    host_free(loader->rounded);
}

// Reads n elements of a file's tensor, from `first` on, into loader->values, which grows. Refuses types that aren't
// floating-point and, unless --check-weights is off, values that aren't finite. Returns NULL, or what is wrong.
static const char *model_read(struct model_loader *loader, const struct safetensors *file, const char *file_name,
                              const struct safetensors_tensor *tensor, int64_t first, int64_t n,
                              struct error_text *error) {
    const uint64_t width = safetensors_dtype_bytes(tensor->dtype);
    RETURN_PROBLEM(model_loader_reserve(loader, n, error));
    RETURN_PROBLEM(safetensors_read(file, tensor, (uint64_t)first * width, (uint64_t)n * width, loader->raw, error));
    if (!safetensors_to_floats(loader->values, loader->raw, tensor->dtype, (uint64_t)n))
        return error_format(error, "%s: tensor '%s' is of type %s; expected F32, BF16, F16 or F64", file_name,
                            json_show(tensor->name).text, safetensors_dtype_name(tensor->dtype));
    return loader->m->config.checkpoints.check_weights
               ? tensor_check_finite(loader->values, n, first, json_show(tensor->name).text, file_name, error)
               : NULL;
}

// Loads this rank's part of a tensor whose elements lie elsewhere than in our parameter (huggingface_is_rearranged).
// Needs host memory for the whole parameter. t->ours is not NULL. Returns NULL, or what is wrong.
static const char *model_load_moved(struct model_loader *loader, const struct huggingface_tensor *t,
                                    const struct safetensors *file, const char *file_name,
                                    const struct safetensors_tensor *tensor, struct error_text *error) {
    float *ours = (float *)calloc((size_t)t->ours->count, sizeof *ours);
    if (!ours)
        return error_format(error, "out of memory for %s", t->ours->name);
    const int cols = t->cols ? t->cols : 1, chunk_rows = (int)(LOAD_CHUNK / cols > 0 ? LOAD_CHUNK / cols : 1);
    const char *problem = NULL;
    for (int row = 0; row < t->rows && !problem; row += chunk_rows) {
        const int rows = t->rows - row < chunk_rows ? t->rows - row : chunk_rows;
        problem = model_read(loader, file, file_name, tensor, (int64_t)row * cols, (int64_t)rows * cols, error);
        if (!problem)
            huggingface_scatter(ours, t, loader->values, row, rows);
    }
    const int64_t first = (int64_t)t->first_row * t->ours->cols;
    if (!problem)
        model_store(loader->m, t->ours, first, ours + first, (int64_t)huggingface_rows_held(t) * t->ours->cols,
                    loader->rounded);
    free(ours);
    return problem;
}

// Loads this rank's part of t->ours, not NULL, from the folder's tensor t->name, and waits. Returns NULL, or an error.
static const char *model_load_tensor(struct model_loader *loader, const struct model_folder *folder,
                                     const struct huggingface_tensor *t, struct error_text *error) {
    int f;
    const uint64_t shape[2] = {(uint64_t)t->rows, (uint64_t)t->cols};
    const struct safetensors_tensor *tensor = model_folder_find(folder, t->name, &f);
    if (!tensor)
        return error_format(error, "%s: has no tensor '%s'", folder->path, t->name);
    RETURN_PROBLEM(
        safetensors_get(&tensor, &folder->files[f], tensor->name, shape, t->cols ? 2 : 1, folder->names[f], error));
    if (huggingface_is_rearranged(t))
        return model_load_moved(loader, t, &folder->files[f], folder->names[f], tensor, error);
    const int64_t width = t->cols ? t->cols : 1, count = huggingface_elements(t);
    for (int64_t first = 0; first < count; first += LOAD_CHUNK) {
        const int64_t n = count - first < LOAD_CHUNK ? count - first : LOAD_CHUNK;
        if (!gpt_holds(loader->m, t->ours, t->first_row * width + first, n))
            continue;
        RETURN_PROBLEM(model_read(loader, &folder->files[f], folder->names[f], tensor, first, n, error));
        model_store(loader->m, t->ours, t->first_row * width + first, loader->values, n, loader->rounded);
    }
    return NULL;
}

// Refuses a tied model's folder in which the output layer's weight has other values than the embedding, `wte`: one of
// the two would be lost. Overwrites loader->values. Returns NULL, or what is wrong.
static const char *model_check_tied_head(struct model_loader *loader, const struct model_folder *folder,
                                         const struct huggingface_tensor *wte, struct error_text *error) {
    int at[2];
    const uint64_t shape[2] = {(uint64_t)wte->rows, (uint64_t)wte->cols};
    const struct safetensors_tensor *head = model_folder_find(folder, head_names[0], &at[0]),
                                    *embedding = model_folder_find(folder, wte->name, &at[1]);
    if (!head)
        head = model_folder_find(folder, head_names[1], &at[0]);
    if (!head || !embedding)
        return NULL;
    RETURN_PROBLEM(safetensors_get(&head, &folder->files[at[0]], head->name, shape, 2, folder->names[at[0]], error));
    float *kept = (float *)malloc((size_t)LOAD_CHUNK * sizeof *kept);
    const char *problem = kept ? NULL : error_format(error, "out of memory for a tensor's values");
    const int64_t count = huggingface_elements(wte);
    for (int64_t first = 0; first < count && !problem; first += LOAD_CHUNK) {
        const int64_t n = count - first < LOAD_CHUNK ? count - first : LOAD_CHUNK;
        problem = model_read(loader, &folder->files[at[0]], folder->names[at[0]], head, first, n, error);
        if (problem)
            break;
        memcpy(kept, loader->values, (size_t)n * sizeof *kept);
        problem = model_read(loader, &folder->files[at[1]], folder->names[at[1]], embedding, first, n, error);
        if (!problem && memcmp(kept, loader->values, (size_t)n * sizeof *kept) != 0)
            problem =
                error_format(error,
                             "%s: tensor '%s' has other values than '%s', though tie_word_embeddings is true; set "
                             "it to false in config.json, or remove the tensor",
                             folder->names[at[0]], head->name, wte->name);
    }
    free(kept);
    return problem;
}

// Sets *a to the architecture of the model at `path`, a folder or an llm.c file. Returns NULL, or an error.
static const char *model_folder_architecture(enum architecture *a, const char *path, struct error_text *error) {
    struct huggingface_config h;
    RETURN_PROBLEM(start_read_model(&h, path, error));
    *a = h.architecture;
    huggingface_free(&h);
    return NULL;
}
// Loads this rank's part of `tensors`. Refuses other tensors, and a tied head that differs. Returns NULL, or an error.
static const char *model_load_tensors(struct model_loader *loader, const struct model_folder *folder,
                                      const struct huggingface_tensors *tensors, struct error_text *error) {
    const bool tied = loader->m->shape.tied;
    RETURN_PROBLEM(model_folder_check_names(folder, tensors, tied, error));
    for (int i = 0; i < tensors->count; i++) {
        const struct huggingface_tensor *t = &tensors->list[i];
        if (t->ours)
            RETURN_PROBLEM(model_load_tensor(loader, folder, t, error));
        if (tied && t->ours && t->ours->parameter == PARAM_WTE)
            RETURN_PROBLEM(model_check_tied_head(loader, folder, t, error));
    }
    return NULL;
}
// Loads this rank's part of the parameters from a folder, whose config.json names the architecture. *exact: whether all
// tensors in its files are fp32. Waits for the device. Returns NULL, or what is wrong.
static const char *model_load_folder(struct gpt *m, const char *path, bool *exact, struct error_text *error) {
    struct model_folder folder;
    struct model_loader loader;
    enum architecture a = ARCHITECTURE_OURS;
    RETURN_PROBLEM(model_folder_architecture(&a, path, error));
    struct huggingface_tensors tensors =
        huggingface_tensors_of(&m->table, &m->shape, a, config_rotary_dims(&m->config));
    const char *problem = model_loader_create(&loader, m, error);
    memset(&folder, 0, sizeof folder);
    if (!problem)
        problem = model_folder_open(&folder, path, error);
    if (!problem)
        problem = model_load_tensors(&loader, &folder, &tensors, error);
    *exact = true;
    for (int f = 0; f < folder.count; f++)
        for (int i = 0; i < folder.files[f].count; i++)
            *exact = *exact && folder.files[f].tensors[i].dtype == SAFETENSORS_F32;
    model_folder_close(&folder);
    model_loader_free(&loader);
    huggingface_tensors_free(&tensors);
    return problem;
}

// ---- The optimizer of a checkpoint ----

struct conversions {
    bool made[STATE_COUNT];
    enum state_format to[STATE_COUNT]; // of a layer's tensors, where one was converted
};

// Loads this rank's part of a trained tensor from a file's fp32 STATE_MASTER or STATE_AVERAGES. Either sets parameters,
// rounded, and master weights and moving averages, exactly, where the run has them. Returns NULL, or what is wrong.
static const char *model_load_exact(struct model_loader *loader, const struct safetensors *file, const char *file_name,
                                    enum optimizer_state id, const struct tensor *t, struct error_text *error) {
    struct gpt *m = loader->m;
    char name[STATE_NAME];
    const struct safetensors_tensor wanted = state_tensor_entry(name, id, t, FORMAT_FP32, false, 0), *tensor;
    RETURN_PROBLEM(safetensors_get(&tensor, file, name, wanted.shape, wanted.dims, file_name, error));
    if (tensor->dtype != SAFETENSORS_F32)
        return error_format(error, "%s: tensor '%s' is of type %s; expected F32", file_name, name,
                            safetensors_dtype_name(tensor->dtype));
    for (int64_t first = 0; first < tensor_visible_elements(t); first += LOAD_CHUNK) {
        const int64_t rest = tensor_visible_elements(t) - first, n = rest < LOAD_CHUNK ? rest : LOAD_CHUNK;
        if (!zero_holds_any(&m->zero, shards_parameters(&m->zero.shards), t->offset + first, n))
            continue;
        RETURN_PROBLEM(model_read(loader, file, file_name, tensor, first, n, error));
        model_store(m, t, first, loader->values, n, loader->rounded);
    }
    return NULL;
}

struct stored_tensor {
    const struct safetensors *file;
    const char *file_name;
    const struct safetensors_tensor *values, *scales; // scales NULL: the format has none
    enum state_format format;
};
// Finds state `id` of t in s->file: sets s->values, ->scales and ->format. Returns NULL, or an error, also if missing.
static const char *stored_tensor_find(struct stored_tensor *s, enum optimizer_state id, const struct tensor *t,
                                      struct error_text *error) {
    char name[STATE_NAME];
    struct safetensors_tensor wanted = state_tensor_entry(name, id, t, FORMAT_FP32, false, 0);
    s->scales = NULL;
    RETURN_PROBLEM(safetensors_get(&s->values, s->file, name, wanted.shape, wanted.dims, s->file_name, error));
    if (!format_of_dtype(&s->format, id, s->values->dtype))
        return error_format(error, "%s: tensor '%s' is of type %s; expected F32, BF16 or U8", s->file_name, name,
                            safetensors_dtype_name(s->values->dtype));
    if (!format_has_scales(s->format))
        return NULL;
    wanted = state_tensor_entry(name, id, t, s->format, true, 0);
    RETURN_PROBLEM(safetensors_get(&s->scales, s->file, name, wanted.shape, wanted.dims, s->file_name, error));
    if (s->scales->dtype != SAFETENSORS_F32)
        return error_format(error, "%s: tensor '%s' is of type %s; expected F32", s->file_name, name,
                            safetensors_dtype_name(s->scales->dtype));
    return NULL;
}
// Memory for a chunk of a state: a file's bytes and scales, and the blocks as the file and as the run stores them.
struct state_room {
    unsigned char *bytes, *from, *to;
    float *scales;
};
// Reads n elements (<= LOAD_CHUNK) into room->from, in s->format; `first` begins a block. Returns NULL, or an error.
static const char *stored_tensor_read(struct state_room *room, const struct stored_tensor *s, int64_t first, int64_t n,
                                      struct error_text *error) {
    const uint64_t width = safetensors_dtype_bytes(s->values->dtype), blocks = (uint64_t)state_blocks(n);
    RETURN_PROBLEM(
        safetensors_read(s->file, s->values, (uint64_t)first * width, (uint64_t)n * width, room->bytes, error));
    if (s->scales)
        RETURN_PROBLEM(safetensors_read(s->file, s->scales, (uint64_t)first / STATE_BLOCK * sizeof(float),
                                        blocks * sizeof(float), room->scales, error));
    for (uint64_t b = 0; b < blocks && s->scales; b++)
        if (!(room->scales[b] >= 0 && isfinite(room->scales[b])))
            return error_format(error, "%s: tensor '%s' has the scale %g; expected finite ones of at least 0",
                                s->file_name, s->scales->name, (double)room->scales[b]);
    state_from_file(room->from, room->bytes, room->scales, s->format, n);
    return NULL;
}
// Loads this rank's part of a parameter's moment or averages (`id`), in the format that the run stores; *conversions
// notes where they were converted. Does nothing if the run has no such state. Returns NULL, or what is wrong.
static const char *model_load_state(struct gpt *m, struct state_room *room, const struct safetensors *file,
                                    const char *file_name, enum optimizer_state id, const struct tensor *t,
                                    struct conversions *conversions, struct error_text *error) {
    struct optimizer *o = &m->optimizer;
    struct stored_tensor s = {file, file_name, NULL, NULL, FORMAT_FP32};
    const enum state_format format = optimizer_format(o, id, t);
    if (format == FORMAT_NONE)
        return NULL;
    RETURN_PROBLEM(stored_tensor_find(&s, id, t, error));
    const int64_t visible = tensor_visible_elements(t), end = t->offset + state_blocks(visible) * STATE_BLOCK;
    float *values = (float *)room->bytes;
    int64_t at = t->offset, place, n;
    for (; (n = shards_next(&m->zero.shards, optimizer_is_sharded(o), &at, end, &place)) > 0; at += n) {
        n = n < LOAD_CHUNK ? n : LOAD_CHUNK;
        const int64_t first = at - t->offset, count = visible - first < n ? visible - first : n;
        RETURN_PROBLEM(stored_tensor_read(room, &s, first, count, error));
        if (format != s.format) {
            state_decode(values, room->from, s.format, n);
            state_encode(room->to, values, format, n);
            if (!conversions->made[id] || t->layer >= 0)
                conversions->to[id] = format;
            conversions->made[id] = true;
        }
        optimizer_upload(o, id, at, n, format == s.format ? room->from : room->to);
    }
    return NULL;
}
// Whether model_load_states loads state `id`: not master weights, nor averages that the file lacks.
static bool state_comes_from_file(const struct gpt *m, const struct safetensors *file, enum optimizer_state id) {
    char name[STATE_NAME];
    switch (optimizer_state_rows[id].start) {
    case STATE_FROM_PARAMETERS: return false;
    case STATE_COPY:
        state_tensor_entry(name, id, &m->table.tensors[0], FORMAT_FP32, false, 0);
        return safetensors_find(file, name) != NULL;
    case STATE_ZERO: return true;
    }
    return false;
}
// Loads this rank's part of all states for which state_comes_from_file. Notes in *conversions, which the caller has
// zeroed, which of them were converted. Returns NULL, or what is wrong.
static const char *model_load_states(struct gpt *m, const struct safetensors *file, const char *file_name,
                                     struct conversions *conversions, struct error_text *error) {
    const size_t bytes = (size_t)LOAD_CHUNK * sizeof(float);
    struct state_room room = {(unsigned char *)malloc(bytes), (unsigned char *)host_allocate(bytes, m->dev),
                              (unsigned char *)host_allocate(bytes, m->dev), (float *)malloc(bytes / STATE_BLOCK)};
    const char *problem = room.bytes && room.scales ? NULL : error_format(error, "out of memory for the moments");
    for (int id = 0; id < STATE_COUNT; id++)
        for (int i = 0;
             i < m->table.num_tensors && !problem && state_comes_from_file(m, file, (enum optimizer_state)id); i++)
            problem = model_load_state(m, &room, file, file_name, (enum optimizer_state)id, &m->table.tensors[i],
                                       conversions, error);
    free(room.bytes);
    free(room.scales);
    host_free(room.from);
    host_free(room.to);
    return problem;
}

// Loads the file's master weights, unless the run has no fp32 weights or the model's files have them (model_is_exact).
// *converted = the conversion, if only the run or only the file has fp32 weights, or NULL. Returns NULL, or an error.
static const char *model_load_all_masters(struct gpt *m, const struct safetensors *file, const char *file_name,
                                          bool model_is_exact, const char **converted, struct error_text *error) {
    struct model_loader loader;
    bool any = false;
    for (int i = 0; i < m->table.num_tensors; i++) {
        char name[STATE_NAME];
        state_tensor_entry(name, STATE_MASTER, &m->table.tensors[i], FORMAT_FP32, false, 0);
        any = any || safetensors_find(file, name);
    }
    const bool wanted = has_exact_weights(&m->optimizer) && !model_is_exact;
    *converted = wanted && !any   ? "master weights from bf16 parameters"
                 : any && !wanted ? "master weights to bf16 parameters"
                                  : NULL;
    if (!wanted || !any)
        return NULL;
    const char *problem = model_loader_create(&loader, m, error);
    for (int i = 0; i < m->table.num_tensors && !problem; i++)
        problem = model_load_exact(&loader, file, file_name, STATE_MASTER, &m->table.tensors[i], error);
    model_loader_free(&loader);
    return problem;
}

// Says in one line, on rank 0, which states were converted, if any. masters: model_load_all_masters' words, or NULL.
static void report_conversions(const struct gpt *m, const char *folder, const struct conversions *conversions,
                               const char *masters) {
    bool any = masters != NULL;
    for (int id = 0; id < STATE_COUNT; id++)
        any = any || conversions->made[id];
    if (!any || m->zero.shards.rank > 0)
        return;
    const char *between = "";
    say(stdout, "%s stores its states in other formats than this run, which goes on from the nearest values:", folder);
    for (int id = 0; id < STATE_COUNT; id++)
        if (conversions->made[id]) {
            printf("%s %s to %s", between, optimizer_state_rows[id].name, format_name(conversions->to[id]));
            between = ",";
        }
    if (masters)
        printf("%s %s", between, masters);
    printf("\n");
}

// Loads this rank's part of a checkpoint's optimizer state, and FP8's. Prints what was converted, and whether averages
// or FP8's histories are missing. model_is_exact: *exact of model_load_folder. Returns NULL, or an error.
static const char *model_load_optimizer(struct gpt *m, const char *folder, bool model_is_exact,
                                        struct error_text *error) {
    char path[PATH_MAX];
    struct safetensors file;
    struct conversions conversions;
    const char *masters = NULL;
    bool has_histories = false;
    memset(&conversions, 0, sizeof conversions);
    if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, optimizer_file_name) >= sizeof path)
        return error_format(error, "%.500s: the name is too long", folder);
    RETURN_PROBLEM(safetensors_open(&file, path, error));
    const char *problem = model_load_all_masters(m, &file, path, model_is_exact, &masters, error);
    if (!problem)
        problem = model_load_states(m, &file, path, &conversions, error);
    if (!problem)
        problem = fp8_load(&m->fp8, &has_histories, &file, path, m->dev, error);
    if (!problem)
        report_conversions(m, folder, &conversions, masters);
    if (!problem && optimizer_holds(&m->optimizer, STATE_AVERAGES) && !state_comes_from_file(m, &file, STATE_AVERAGES))
        say(stdout, "%s has no moving averages: they begin as its parameters\n", folder);
    if (!problem && fp8_state_floats(&m->fp8) > 0 && !has_histories)
        say(stdout,
            "%s has no histories of some of FP8's amaxes: these begin empty, and the first step casts by its own amaxes\n",
            folder);
    safetensors_close(&file);
    return problem;
}

// Loads a checkpoint's averages as parameters, masters and averages. Returns NULL, or an error, also if it has none.
static const char *model_load_averages(struct gpt *m, const char *folder, struct error_text *error) {
    char path[PATH_MAX], name[STATE_NAME];
    struct safetensors file;
    struct model_loader loader;
    if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, optimizer_file_name) >= sizeof path)
        return error_format(error, "%.500s: the name is too long", folder);
    RETURN_PROBLEM(safetensors_open(&file, path, error));
    state_tensor_entry(name, STATE_AVERAGES, &m->table.tensors[0], FORMAT_FP32, false, 0);
    if (!safetensors_find(&file, name)) {
        safetensors_close(&file);
        return error_format(error,
                            "%s: has no moving averages: --init-from-ema needs a checkpoint of a run with --ema-decay; "
                            "leave the option out to take the parameters",
                            path);
    }
    const char *problem = model_loader_create(&loader, m, error);
    for (int i = 0; i < m->table.num_tensors && !problem; i++)
        problem = model_load_exact(&loader, &file, path, STATE_AVERAGES, &m->table.tensors[i], error);
    model_loader_free(&loader);
    safetensors_close(&file);
    return problem;
}

// Loads this rank's part of a checkpoint, not one of adapters: parameters, optimizer, FP8. Returns NULL, or an error.
static const char *model_load_checkpoint(struct gpt *m, const char *folder, struct error_text *error) {
    bool exact;
    RETURN_PROBLEM(model_load_folder(m, folder, &exact, error));
    return model_load_optimizer(m, folder, exact, error);
}

// ---- llm.c ----

// llm.c's tensors in the order of the file, where each has all of its layers before the next tensor begins.
static const enum parameter llmc_order[] = {PARAM_WTE,      PARAM_WPE,      PARAM_LN1_W,     PARAM_LN1_B,
                                            PARAM_QKV_W,    PARAM_QKV_B,    PARAM_ATTPROJ_W, PARAM_ATTPROJ_B,
                                            PARAM_LN2_W,    PARAM_LN2_B,    PARAM_FC_W,      PARAM_FC_B,
                                            PARAM_FCPROJ_W, PARAM_FCPROJ_B, PARAM_LNF_W,     PARAM_LNF_B};

// Loads a tensor at byte *at of the file, and moves *at past it. The file has stored_rows rows; only the first
// t->visible_rows are loaded. bf16: the file's type, else fp32. Returns NULL, or what is wrong.
static const char *model_load_llmc_tensor(struct model_loader *loader, int fd, const char *path, uint64_t *at,
                                          const struct tensor *t, int64_t stored_rows, bool bf16,
                                          struct error_text *error) {
    const uint64_t width = bf16 ? 2 : 4;
    const int64_t count = (int64_t)t->visible_rows * t->cols;
    for (int64_t first = 0; first < count; first += LOAD_CHUNK) {
        const int64_t n = count - first < LOAD_CHUNK ? count - first : LOAD_CHUNK;
        RETURN_PROBLEM(read_exactly(fd, loader->raw, (uint64_t)n * width, *at + (uint64_t)first * width, path, error));
        safetensors_to_floats(loader->values, loader->raw, bf16 ? SAFETENSORS_BF16 : SAFETENSORS_F32, (uint64_t)n);
        if (loader->m->config.checkpoints.check_weights)
            RETURN_PROBLEM(tensor_check_finite(loader->values, n, first, t->name, path, error));
        model_store(loader->m, t, first, loader->values, n, loader->rounded);
    }
    *at += (uint64_t)stored_rows * (uint64_t)t->cols * width;
    return NULL;
}

static const char *model_load_llmc(struct gpt *m, const char *path, struct error_text *error) {
    struct llmc_header header;
    unsigned char bytes[LLMC_MODEL_HEADER];
    struct model_loader loader;
    int fd;
    uint64_t file_bytes, at = sizeof bytes;
    memset(&header, 0, sizeof header);
    RETURN_PROBLEM(open_regular(&fd, &file_bytes, path, "an llm.c checkpoint", error));
    const char *problem =
        read_exactly(fd, bytes, file_bytes < sizeof bytes ? file_bytes : sizeof bytes, 0, path, error);
    if (!problem)
        problem =
            llmc_parse(&header, bytes, file_bytes < sizeof bytes ? file_bytes : sizeof bytes, file_bytes, path, error);
    const char *no_room = model_loader_create(&loader, m, error);
    if (!problem)
        problem = no_room;
    int loaded = 0;
    for (size_t i = 0; i < sizeof llmc_order / sizeof *llmc_order && !problem; i++) {
        const bool per_layer = parameters_find(&m->table, 0, llmc_order[i]) != NULL;
        for (int l = 0; l < (per_layer ? m->shape.L : 1) && !problem; l++) {
            const struct tensor *t = parameters_find(&m->table, per_layer ? l : -1, llmc_order[i]);
            const int64_t rows = llmc_order[i] == PARAM_WTE ? header.padded_vocab_size : t->visible_rows;
            problem = model_load_llmc_tensor(&loader, fd, path, &at, t, rows, header.bf16, error);
            loaded++;
        }
    }
    int wanted = 0;
    for (int i = 0; i < m->table.num_tensors + m->table.num_frozen; i++)
        wanted += !parameter_is_adapter(m->table.tensors[i].parameter);
    if (!problem && loaded != wanted)
        problem =
            error_format(error, "%s: llm.c's checkpoints have %d of this model's %d tensors", path, loaded, wanted);
    model_loader_free(&loader);
    close(fd);
    return problem;
}
