// The training data of a run that goes on: whether they are the checkpoint's, and where each of their sets begins.
#pragma once
#include "dataloader.h"              // struct dataloader
#include "formats/trainer_state.h"   // struct trainer_state
#include "runtime/text/json_parse.h" // json_show
#include <string.h>                  // strcmp

// Returns the digest of shard i, computed only once, or 0 if the file can't be read now.
static uint64_t digest_of_shard(const struct dataloader *loader, int i) {
    struct token_file *const file = &loader->files[i];
    struct error_text error;
    if (!file->digest && token_file_digest(&file->digest, file, &error))
        file->digest = 0;
    return file->digest;
}

static const struct trainer_file *files_of_part(const struct trainer_state *state, int q) {
    const struct trainer_file *files = state->files;
    for (int i = 0; i < q; i++)
        files += state->parts[i].num_files;
    return files;
}

// Returns NULL if the loader's part p begins with the files of the checkpoint's part q, else what differs.
static const char *part_refusal(const struct dataloader *loader, int p, const struct trainer_state *state, int q,
                                const char *checkpoint, struct error_text *error) {
    const struct trainer_file *files = files_of_part(state, q);
    const int first = loader->parts[p].first_file, now = loader->parts[p].order.num_files;
    for (int i = 0; i < state->parts[q].num_files; i++) {
        const char *name = i < now ? dataloader_name(loader, first + i) : "none";
        const uint64_t tokens = i < now ? loader->files[first + i].tokens : 0;
        if (i >= now || strcmp(name, files[i].name) != 0 || tokens != files[i].tokens)
            return error_format(error,
                                "--train-data: file %d%s%s is %s with %llu tokens, but it was %s with %llu in %s; the "
                                "data may only grow, by files whose names sort last; or go on with other data by "
                                "--new-data",
                                i + 1, loader->mixture.count > 1 ? " of " : "",
                                loader->mixture.count > 1 ? loader->mixture.parts[p].name : "", name,
                                (unsigned long long)tokens, json_show(files[i].name).text,
                                (unsigned long long)files[i].tokens, checkpoint);
        if (files[i].digest && files[i].digest != digest_of_shard(loader, first + i))
            return error_format(error,
                                "--train-data: %s has other tokens than when %s was saved; put the former file back, "
                                "or begin another run with --init-from",
                                loader->files[first + i].path, checkpoint);
    }
    return NULL;
}

// Returns NULL if the loader's files, sets and weights are the checkpoint's, or sets have grown, else what differs.
static const char *data_refusal(const struct dataloader *loader, const struct trainer_state *state,
                                const char *checkpoint, struct error_text *error) {
    const struct mixture *mixture = &loader->mixture;
    if (mixture->count != state->num_parts)
        return error_format(error,
                            "--train-data: mixes %d sets of files, but it was %d in %s; give the former data, or go on "
                            "with other data by --new-data",
                            mixture->count, state->num_parts, checkpoint);
    for (int p = 0; p < mixture->count; p++)
        if (mixture->parts[p].weight != state->parts[p].weight)
            return error_format(error,
                                "--train-data: the weight of %s is %llu, in integers, but it was %llu in %s; give the "
                                "former weights, or go on with other data by --new-data",
                                mixture->parts[p].name, (unsigned long long)mixture->parts[p].weight,
                                (unsigned long long)state->parts[p].weight, checkpoint);
    for (int p = 0; p < mixture->count; p++) {
        const char *problem = part_refusal(loader, p, state, p, checkpoint, error);
        if (problem)
            return problem;
    }
    return NULL;
}

// The number of samples that the checkpoint's run has taken of its part q in all, also before its last mixture began.
static uint64_t taken_of_part(const struct trainer_state *state, int q) {
    struct mixture_part parts[MIXTURE_PARTS];
    const struct mixture former = {parts, state->num_parts, state->data_start};
    memset(parts, 0, sizeof parts);
    for (int i = 0; i < state->num_parts; i++) {
        parts[i].weight = state->parts[i].weight;
        parts[i].before = state->parts[i].before;
    }
    return mixture_taken(&former, q, state->samples);
}

// Moves a loader, accepted by data_refusal, to the state's position. Added shards begin with their set's next epoch.
static void resume_same_data(struct dataloader *loader, const struct trainer_state *state) {
    struct part_start starts[MIXTURE_PARTS];
    for (int p = 0; p < state->num_parts; p++) {
        starts[p].before = state->parts[p].before;
        starts[p].changes = state->parts[p].changes;
        starts[p].num_changes = state->parts[p].num_changes;
    }
    dataloader_resume(loader, state->data_start, starts, state->samples);
}
// Moves a loader of other data to the checkpoint's position, at which the new mixture begins. A set that the checkpoint
// has, too, goes on where its run left it; other sets begin with their first epoch.
static void resume_new_data(struct dataloader *loader, const struct trainer_state *state) {
    struct part_start starts[MIXTURE_PARTS];
    struct data_change whole[MIXTURE_PARTS];
    bool used[MIXTURE_PARTS] = {false};
    struct error_text unused;
    for (int p = 0; p < loader->mixture.count; p++) {
        int q = 0;
        while (q < state->num_parts && (used[q] || part_refusal(loader, p, state, q, "", &unused)))
            q++;
        memset(&whole[p], 0, sizeof whole[p]);
        whole[p].files = loader->parts[p].order.num_files;
        const bool known = q < state->num_parts;
        starts[p].before = known ? taken_of_part(state, q) : 0;
        starts[p].changes = known ? state->parts[q].changes : &whole[p];
        starts[p].num_changes = known ? state->parts[q].num_changes : 1;
        if (known)
            used[q] = true;
    }
    dataloader_resume(loader, state->samples, starts, state->samples);
}

// Sets a state's files, parts and data_start to the loader's, for data_state_free. The loader owns texts and changes.
static void data_state(struct trainer_state *state, const struct dataloader *loader) {
    state->num_files = dataloader_num_files(loader);
    state->num_parts = loader->mixture.count;
    state->data_start = loader->mixture.first_sample;
    state->files = (struct trainer_file *)calloc((size_t)state->num_files, sizeof *state->files);
    state->parts = (struct trainer_part *)calloc((size_t)state->num_parts, sizeof *state->parts);
    if (!state->files || !state->parts)
        fail("out of memory for a checkpoint");
    for (int i = 0; i < state->num_files; i++) {
        state->files[i].name = dataloader_name(loader, i);
        state->files[i].tokens = loader->files[i].tokens;
        state->files[i].digest = digest_of_shard(loader, i);
    }
    for (int p = 0; p < state->num_parts; p++) {
        const struct sample_order *order = &loader->parts[p].order;
        state->parts[p].name = loader->mixture.parts[p].name;
        state->parts[p].weight = loader->mixture.parts[p].weight;
        state->parts[p].before = loader->mixture.parts[p].before;
        state->parts[p].num_files = order->num_files;
        state->parts[p].changes = order->changes;
        state->parts[p].num_changes = order->num_changes;
    }
}
static void data_state_free(struct trainer_state *state) {
    free(state->files);
    free(state->parts);
}
