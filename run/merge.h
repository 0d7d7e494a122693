// --lora-merge: writes the base model with its adapters added to the weights, W + s B A, as a Hugging Face folder, some
// rows at a time. A sum is made in fp32 and rounded once, to nearest, to the base tensor's type. GPT-2's weights are
// transposed, adapters never are. The last file is config.json: a folder without it is unfinished.
#pragma once
#include "config/finetune.h"         // config_lora_scale
#include "formats/huggingface.h"     // enum architecture
#include "run/carried_files.h"       // the files that are copied
#include "run/folder_check.h"        // folder_check_begin, folder_check_end
#include "run/model_folder.h"        // struct model_folder
#include "run/start.h"               // start_read_model
#include "runtime/files/file_read.h" // read_whole
#include "runtime/files/links.h"     // file_stays_in_folder
#include "runtime/machine/say.h"     // say
#include "runtime/text/json_parse.h" // json_show
#include <dirent.h>                  // opendir

static const uint64_t MERGE_CHUNK = 1 << 20; // elements

struct merge {
    const struct config *config;
    struct model_folder base, adapters;
    bool transposed;    // the base's weights are (inputs, outputs)
    bool *used;         // (adapters.files[0].count) tensors that were added
    unsigned char *raw; // (MERGE_CHUNK or a row) elements as a file has them
    float *values;      // these elements in fp32
    uint64_t room;      // elements that raw and values hold
    FILE *out;
    char out_path[PATH_MAX]; // of the file that is written
};

// ---- rounding ----

// Rounds a number to the nearest bf16, ties to even, and returns the bits. A NaN stays a NaN.
static inline uint16_t merge_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (isnan(value))
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
// Rounds a number to the nearest IEEE half, ties to even, and returns the bits. From 65520 on it is infinity.
static inline uint16_t merge_f16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    const float size = fabsf(value);
    if (isnan(value))
        return sign | 0x7e00;
    if (size >= 65520) // from here on the nearest is infinity
        return sign | 0x7c00;
    if (size < 0x1p-14f) // subnormal: a multiple of 2^-24
        return (uint16_t)(sign | (uint16_t)lrintf(size * 0x1p24f));
    const uint32_t kept = (bits & 0x7fffffff) + 0xfff + (bits >> 13 & 1);
    return (uint16_t)(sign | (uint16_t)((kept >> 13) - (112 << 10)));
}
// Writes n values, rounded to a file's type, to raw. Returns false, with raw not set, unless that is F32, BF16 or F16.
static inline bool merge_round(unsigned char *raw, const float *values, enum safetensors_dtype dtype, uint64_t n) {
    uint16_t *const halves = (uint16_t *)raw;
    if (dtype == SAFETENSORS_F32)
        memcpy(raw, values, n * sizeof *values);
    else if (dtype == SAFETENSORS_BF16)
        for (uint64_t i = 0; i < n; i++)
            halves[i] = merge_bf16(values[i]);
    else if (dtype == SAFETENSORS_F16)
        for (uint64_t i = 0; i < n; i++)
            halves[i] = merge_f16(values[i]);
    else
        return false;
    return true;
}

// ---- the adapters of a tensor ----

// An adapter as the rows of the weight need it: row i of the weight gains scale * sum_r left[i, r] right[r, :].
struct merge_pair {
    float *left, *right; // (rows, rank), (rank, cols); owned
};
static inline void merge_pair_free(struct merge_pair *pair) {
    free(pair->left);
    free(pair->right);
    memset(pair, 0, sizeof *pair);
}
// Reads tensor t of the adapters, which must be (rows, cols), as fp32 into a new *out. If `transposed`, *out is (cols,
// rows). The caller frees *out, which is NULL before, after an error, too. Returns NULL, or what is wrong.
static inline const char *merge_read(struct merge *m, float **out, const struct safetensors_tensor *t, uint64_t rows,
                                     uint64_t cols, bool transposed, struct error_text *error) {
    const struct safetensors *file = &m->adapters.files[0];
    const uint64_t shape[2] = {rows, cols}, n = rows * cols;
    const struct safetensors_tensor *tensor;
    RETURN_PROBLEM(safetensors_get(&tensor, file, t->name, shape, 2, m->adapters.names[0], error));
    unsigned char *raw = (unsigned char *)malloc(tensor->bytes);
    float *values = (float *)malloc(n * sizeof *values);
    *out = (float *)malloc(n * sizeof **out);
    if (!raw || !values || !*out)
        fail("out of memory for the adapters of a module");
    const char *problem = safetensors_read(file, tensor, 0, tensor->bytes, raw, error);
    if (!problem && !safetensors_to_floats(values, raw, tensor->dtype, n))
        problem = error_format(error, "%s: tensor '%s' is of type %s; expected F32, BF16 or F16", m->adapters.names[0],
                               json_show(tensor->name).text, safetensors_dtype_name(tensor->dtype));
    for (uint64_t i = 0; i < n && !problem; i++)
        (*out)[transposed ? i % cols * rows + i / cols : i] = values[i];
    if (!problem && m->config->checkpoints.check_weights)
        problem = tensor_check_finite(values, (int64_t)n, 0, json_show(tensor->name).text, m->adapters.names[0], error);
    free(raw);
    free(values);
    return problem;
}
// Returns a weight's lora_A or lora_B (ending), and marks it in m->used, or returns NULL if there is none.
static inline const struct safetensors_tensor *merge_find(struct merge *m, const char *weight, const char *ending) {
    static const char *const prefixes[] = {"base_model.model.", "base_model.model.transformer."}; // [1]: older GPT-2
    const size_t length = strlen(weight), tail = strlen(".weight");
    char name[1024];
    if (length <= tail || strcmp(weight + length - tail, ".weight") != 0)
        return NULL;
    for (int i = 0; i < 2; i++) {
        const int printed =
            snprintf(name, sizeof name, "%s%.*s.%s.weight", prefixes[i], (int)(length - tail), weight, ending);
        const struct safetensors_tensor *t =
            printed > 0 && (size_t)printed < sizeof name ? safetensors_find(&m->adapters.files[0], name) : NULL;
        if (t) {
            m->used[t - m->adapters.files[0].tensors] = true;
            return t;
        }
    }
    return NULL;
}
// Reads the adapter of a base's tensor into *pair; *has: whether it has one. merge_pair_free frees the pair, after an
// error, too. base_file: for messages. Returns NULL, or what is wrong.
static inline const char *merge_pair_of(struct merge *m, struct merge_pair *pair, bool *has,
                                        const struct safetensors_tensor *base, const char *base_file,
                                        struct error_text *error) {
    const struct safetensors_tensor *a = merge_find(m, base->name, "lora_A"), *b = merge_find(m, base->name, "lora_B");
    memset(pair, 0, sizeof *pair);
    *has = a || b;
    if (!a && !b)
        return NULL;
    if (!a || !b)
        return error_format(error, "%s: has '%s' without its lora_%s", m->adapters.names[0],
                            json_show((a ? a : b)->name).text, a ? "B" : "A");
    if (base->dims != 2)
        return error_format(error, "%s: tensor '%s' has %d dimensions; expected the 2 of a linear layer's weight",
                            base_file, json_show(base->name).text, base->dims);
    const uint64_t outputs = base->shape[m->transposed ? 1 : 0], inputs = base->shape[m->transposed ? 0 : 1],
                   rank = (uint64_t)m->config->finetuning.lora_rank;
    RETURN_PROBLEM(merge_read(m, m->transposed ? &pair->left : &pair->right, a, rank, inputs, m->transposed, error));
    return merge_read(m, m->transposed ? &pair->right : &pair->left, b, outputs, rank, m->transposed, error);
}
// values (n, cols) += `scale` times the adapter's product for rows [first, first + n) of the weight.
static inline void merge_add(float *values, const struct merge_pair *pair, uint64_t first, uint64_t n, uint64_t cols,
                             uint64_t rank, float scale) {
#pragma omp parallel
    {
        float *sum = (float *)malloc(cols * sizeof *sum);
        if (!sum)
            fail("out of memory for a row of a weight");
#pragma omp for
        for (uint64_t i = 0; i < n; i++) {
            memset(sum, 0, cols * sizeof *sum);
            for (uint64_t r = 0; r < rank; r++) {
                const float left = pair->left[(first + i) * rank + r];
                const float *right = pair->right + r * cols;
                for (uint64_t j = 0; j < cols; j++)
                    sum[j] += left * right[j];
            }
            for (uint64_t j = 0; j < cols; j++)
                values[i * cols + j] += scale * sum[j];
        }
        free(sum);
    }
}

// ---- files ----

// Creates the new folder's file `name` as m->out, for merge_out_end. Returns NULL, or an error, also if it is there.
static inline const char *merge_out_begin(struct merge *m, const char *name, struct error_text *error) {
    if ((size_t)snprintf(m->out_path, sizeof m->out_path, "%s/%s", m->config->finetuning.lora_merge, name) >=
        sizeof m->out_path)
        return error_format(error, "%.500s: the name is too long", m->config->finetuning.lora_merge);
    m->out = fopen(m->out_path, "wbx"); // the folder was empty: a file that is there now is of another run
    return m->out ? NULL : error_format(error, "%s: cannot be written: %s", m->out_path, strerror(errno));
}
static inline const char *merge_write(struct merge *m, const void *bytes, uint64_t count, struct error_text *error) {
    return fwrite(bytes, 1, count, m->out) == count
               ? NULL
               : error_format(error, "%s: cannot be written: %s", m->out_path, strerror(errno));
}
// Closes m->out, if it is open, once it is on disk. Returns `problem` or, without one, what went wrong here.
static inline const char *merge_out_end(struct merge *m, const char *problem, struct error_text *error) {
    if (!m->out)
        return problem;
    int reason = fflush(m->out) == 0 && fsync(fileno(m->out)) == 0 ? 0 : errno;
    if (fclose(m->out) != 0 && !reason)
        reason = errno;
    m->out = NULL;
    return problem  ? problem
           : reason ? error_format(error, "%s: cannot be written: %s", m->out_path, strerror(reason))
                    : NULL;
}
// Copies the base's file `name`, if any, to the new folder. Refuses links to elsewhere. Returns NULL, or an error.
static inline const char *merge_copy(struct merge *m, const char *name, struct error_text *error) {
    enum { MAX_BYTES = 1 << 30 };
    char path[PATH_MAX];
    unsigned char *data = NULL;
    uint64_t bytes;
    if ((size_t)snprintf(path, sizeof path, "%s/%s", m->config->checkpoints.init_from, name) >= sizeof path)
        return error_format(error, "%.500s: the name is too long", m->config->checkpoints.init_from);
    if (access(path, F_OK) != 0)
        return NULL;
    if (!file_stays_in_folder(path))
        return error_format(error, "%s: is a link to a file elsewhere; put the file itself there, or remove the link",
                            path);
    RETURN_PROBLEM(read_whole(&data, &bytes, MAX_BYTES, path, "a file of the model", error));
    const char *problem = merge_out_begin(m, name, error);
    if (!problem)
        problem = merge_write(m, data, bytes, error);
    free(data);
    return merge_out_end(m, problem, error);
}

// Makes room for elements in m->raw, 8 bytes each, and m->values, or ends the program. Their content is lost.
static inline void merge_reserve(struct merge *m, uint64_t elements) {
    if (elements <= m->room)
        return;
    free(m->raw);
    free(m->values);
    m->raw = (unsigned char *)malloc(elements * 8);
    m->values = (float *)malloc(elements * sizeof *m->values);
    m->room = elements;
    if (!m->raw || !m->values)
        fail("out of memory for %llu elements of a file", (unsigned long long)elements);
}
// Copies a tensor, which has no adapter, unchanged to m->out. Returns NULL, or an error.
static inline const char *merge_copy_tensor(struct merge *m, const struct safetensors *file,
                                            const struct safetensors_tensor *t, struct error_text *error) {
    merge_reserve(m, MERGE_CHUNK);
    for (uint64_t at = 0; at < t->bytes; at += MERGE_CHUNK) {
        const uint64_t n = t->bytes - at < MERGE_CHUNK ? t->bytes - at : MERGE_CHUNK;
        RETURN_PROBLEM(safetensors_read(file, t, at, n, m->raw, error));
        RETURN_PROBLEM(merge_write(m, m->raw, n, error));
    }
    return NULL;
}
static inline const char *merge_write_sum(struct merge *m, const struct safetensors *file, const char *file_name,
                                          const struct safetensors_tensor *t, const struct merge_pair *pair,
                                          struct error_text *error) {
    const uint64_t rows = t->shape[0], cols = t->shape[1], width = safetensors_dtype_bytes(t->dtype);
    const uint64_t step = MERGE_CHUNK / (cols > 0 ? cols : 1) > 0 ? MERGE_CHUNK / (cols > 0 ? cols : 1) : 1;
    const float scale = (float)config_lora_scale(m->config);
    merge_reserve(m, step * cols);
    for (uint64_t row = 0; row < rows; row += step) {
        const uint64_t n = rows - row < step ? rows - row : step;
        RETURN_PROBLEM(safetensors_read(file, t, row * cols * width, n * cols * width, m->raw, error));
        const bool known = safetensors_to_floats(m->values, m->raw, t->dtype, n * cols);
        if (known)
            merge_add(m->values, pair, row, n, cols, (uint64_t)m->config->finetuning.lora_rank, scale);
        if (known && m->config->checkpoints.check_weights)
            RETURN_PROBLEM(tensor_check_finite(m->values, (int64_t)(n * cols), (int64_t)(row * cols),
                                               json_show(t->name).text, file_name, error));
        if (!known || !merge_round(m->raw, m->values, t->dtype, n * cols))
            return error_format(error, "%s: tensor '%s' is of type %s; expected F32, BF16 or F16", file_name,
                                json_show(t->name).text, safetensors_dtype_name(t->dtype));
        RETURN_PROBLEM(merge_write(m, m->raw, n * cols * width, error));
    }
    return NULL;
}
// Writes the tensors of the base's file f, with adapters added where there are any, to m->out, behind the header.
// entries: the file's tensors in the new order; id: the index in the base's file. Returns NULL, or an error.
static inline const char *merge_tensors(struct merge *m, int f, const struct safetensors_tensor *entries,
                                        struct error_text *error) {
    const struct safetensors *file = &m->base.files[f];
    const char *problem = NULL;
    for (int i = 0; i < file->count && !problem; i++) {
        const struct safetensors_tensor *t = &file->tensors[entries[i].id];
        struct merge_pair pair;
        bool has = false;
        problem = merge_pair_of(m, &pair, &has, t, m->base.names[f], error);
        if (!problem)
            problem = has ? merge_write_sum(m, file, m->base.names[f], t, &pair, error)
                          : merge_copy_tensor(m, file, t, error);
        merge_pair_free(&pair);
    }
    return problem;
}
// Writes the base's file f, with adapters added, into the new folder. Returns NULL, or what went wrong.
static inline const char *merge_file(struct merge *m, int f, struct error_text *error) {
    static const struct safetensors_pair metadata[] = {{"format", "pt"}};
    const struct safetensors *file = &m->base.files[f];
    const char *slash = strrchr(m->base.names[f], '/');
    struct safetensors_layout layout;
    struct safetensors_tensor *entries =
        (struct safetensors_tensor *)malloc((size_t)(file->count + 1) * sizeof *entries);
    if (!entries)
        fail("out of memory for the table of parameters");
    memcpy(entries, file->tensors, (size_t)file->count * sizeof *entries);
    for (int i = 0; i < file->count; i++)
        entries[i].id = i;
    const char *problem = safetensors_lay_out(&layout, entries, file->count, metadata, 1, m->base.names[f], error);
    if (!problem) {
        problem = merge_out_begin(m, slash ? slash + 1 : m->base.names[f], error);
        if (!problem)
            problem = merge_write(m, layout.header, layout.header_bytes, error);
        if (!problem)
            problem = merge_tensors(m, f, entries, error);
        problem = merge_out_end(m, problem, error);
        free(layout.header);
    }
    free(entries);
    return problem;
}

// ---- the run ----

// Creates the folder, which must be a new one, or empty. Returns NULL, or what is wrong.
static inline const char *merge_make_folder(const char *path, struct error_text *error) {
    if (mkdir(path, 0777) == 0)
        return NULL;
    if (errno != EEXIST)
        return error_format(error, "--lora-merge %s: cannot be made: %s", path, strerror(errno));
    DIR *folder = opendir(path);
    int names = 0;
    while (folder && readdir(folder))
        names++;
    if (folder)
        closedir(folder);
    return folder && names <= 2 ? NULL
                                : error_format(error, "--lora-merge %s: is there already; name a new folder", path);
}
// Whether the weight is of a module that --lora-target-modules lists by a name.
static inline bool merge_is_target(const struct merge *m, const char *weight) {
    char module[1024];
    const size_t length = strlen(weight), tail = strlen(".weight");
    if (length <= tail || length >= sizeof module || strcmp(weight + length - tail, ".weight") != 0)
        return false;
    snprintf(module, sizeof module, "%.*s", (int)(length - tail), weight);
    for (const char *at = m->config->finetuning.lora_target_modules; *at;) {
        const size_t name = strcspn(at, ",");
        if (peft_name_matches(at, name, module))
            return true;
        at += name + (at[name] == ',');
    }
    return false;
}
// Refuses adapters that fit no weight, listed modules without adapters, and an empty file. Returns NULL, or an error.
static inline const char *merge_check_adapters(struct merge *m, struct error_text *error) {
    for (int f = 0; f < m->base.count; f++)
        for (int i = 0; i < m->base.files[f].count; i++) {
            const struct safetensors_tensor *t = &m->base.files[f].tensors[i];
            struct merge_pair pair;
            bool has = false;
            const char *problem = merge_pair_of(m, &pair, &has, t, m->base.names[f], error);
            merge_pair_free(&pair);
            RETURN_PROBLEM(problem);
            if (!has && merge_is_target(m, t->name))
                return error_format(error, "%s: has no adapter of '%s', though target_modules names it",
                                    m->adapters.names[0], json_show(t->name).text);
        }
    for (int i = 0; i < m->adapters.files[0].count; i++)
        if (!m->used[i])
            return error_format(error, "%s: has the tensor '%s', which is no adapter of a weight in %s",
                                m->adapters.names[0], json_show(m->adapters.files[0].tensors[i].name).text,
                                m->config->checkpoints.init_from);
    return m->adapters.files[0].count > 0 ? NULL : error_format(error, "%s: has no tensors", m->adapters.names[0]);
}
// Checks that the adapters fit the base, and writes the folder of --lora-merge. The caller closes m->base and
// m->adapters, and frees m's arrays, after an error, too. Returns NULL, or what went wrong.
static inline const char *merge_write_all(struct merge *m, struct error_text *error) {
    struct huggingface_config model;
    RETURN_PROBLEM(start_read_model(&model, m->config->checkpoints.init_from, error));
    m->transposed = model.architecture == ARCHITECTURE_GPT2;
    huggingface_free(&model);
    RETURN_PROBLEM(model_folder_open(&m->base, m->config->checkpoints.init_from, error));
    RETURN_PROBLEM(adapter_folder_open(&m->adapters, m->config->finetuning.lora_adapter, error));
    m->used = (bool *)calloc((size_t)m->adapters.files[0].count + 1, sizeof *m->used);
    if (!m->used)
        fail("out of memory for the table of adapters");
    RETURN_PROBLEM(merge_check_adapters(m, error));
    RETURN_PROBLEM(merge_make_folder(m->config->finetuning.lora_merge, error));
    for (int f = 0; f < m->base.count; f++)
        RETURN_PROBLEM(merge_file(m, f, error));
    if (m->base.count > 1)
        RETURN_PROBLEM(merge_copy(m, "model.safetensors.index.json", error));
    for (int i = 0; i < CARRIED_FILES; i++)
        RETURN_PROBLEM(merge_copy(m, carried_files[i], error));
    return merge_copy(m, "config.json", error);
}
// Runs --lora-merge and prints what was merged. Returns the exit status; ends the program for several ranks or errors.
static inline int merge_adapters(const struct config *config) {
    struct merge m;
    struct error_text error;
    memset(&m, 0, sizeof m);
    m.config = config;
    if (config->ranks > 1)
        fail("--lora-merge is a run of one process; start it without mpirun or srun");
    struct folder_check base, adapters;
    folder_check_begin(&base, config->checkpoints.check_weights ? config->checkpoints.init_from : NULL, false);
    folder_check_begin(&adapters, config->checkpoints.check_weights ? config->finetuning.lora_adapter : NULL, false);
    const char *problem = folder_check_end(&adapters, NULL, &error);
    problem = folder_check_end(&base, problem, &error);
    if (!problem)
        problem = merge_write_all(&m, &error);
    if (problem)
        fail("%s", problem);
    say(stdout, "%s: %s with the adapters of %s, %d tensors merged\n", config->finetuning.lora_merge,
        config->checkpoints.init_from, config->finetuning.lora_adapter, m.adapters.files[0].count / 2);
    model_folder_close(&m.base);
    model_folder_close(&m.adapters);
    free(m.used);
    free(m.raw);
    free(m.values);
    return EXIT_SUCCESS;
}
