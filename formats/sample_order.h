// The order of the samples of a set of shards: one global sequence that depends only on the shards, the length of a
// sample and the seed. Each epoch has the shards in a shuffled order, and within each shard its windows in a shuffled
// order (without shuffling: file order). The permutations are computed, not stored, so that a shard of any size costs
// no memory. Shards added at the end of the list while a run is stopped are used from the next epoch on.
#pragma once
#include <stdbool.h>   // bool
#include <stdint.h>    // uint64_t
#include <sys/cdefs.h> // __BEGIN_DECLS

// From first_epoch on, the data is the first `files` shards.
struct data_change {
    uint64_t first_epoch;
    int files;
    uint64_t first_sample, samples_per_epoch; // derived by sample_order_set_changes
};

struct sample_order {
    const char *option;      // that named the files, for messages
    const uint64_t *windows; // (num_files) samples of each shard; the caller's
    int num_files;
    uint64_t seed;
    bool shuffle;
    uint64_t samples_per_epoch;  // of all shards
    struct data_change *changes; // (num_changes) by epoch; the first one is at epoch 0; owned
    int num_changes;
    // Of the epoch of the sample that was located last, used by sample_order_locate only:
    uint64_t epoch;  // UINT64_MAX before the first sample
    int files;       // of this epoch
    int *order;      // (files) the shards in this epoch's order; owned
    uint64_t *first; // (files + 1) sample of the epoch at which shard order[i] begins; owned
};

__BEGIN_DECLS
// Returns the key of a permutation of an epoch: of the windows of shard `stream` or, for UINT64_MAX, of the shards.
uint64_t order_key(uint64_t seed, uint64_t epoch, uint64_t stream);
// Returns where the permutation of 0..n-1 that `key` chooses takes `index`, which is below n.
uint64_t order_permute(uint64_t index, uint64_t n, uint64_t key);

// Fills the zeroed *order with all shards from epoch 0 on; sample_order_close frees it. windows (num_files): samples of
// each shard, not all 0. windows and `option` stay the caller's and must stay valid. Out of memory ends the program.
void sample_order_open(struct sample_order *order, const uint64_t *windows, int num_files, uint64_t seed, bool shuffle,
                       const char *option);
void sample_order_close(struct sample_order *order);
// Sets the changes of the data from `changes` (count > 0): first_epoch, rising from 0, and files. Derives the rest.
void sample_order_set_changes(struct sample_order *order, const struct data_change *changes, int count);
// Sets a run's changes as it resumes at `sample`, from which on new epochs use shards added since the last change.
void sample_order_resume(struct sample_order *order, const struct data_change *changes, int count, uint64_t sample);
// Finds a sample: *file = its shard's index, *window = its window there. Keeps the epoch's order for the next call.
void sample_order_locate(struct sample_order *order, uint64_t sample, int *file, uint64_t *window);
// Returns the epoch of a sample, from 0. *part (NULL: not wanted) = the share of the epoch before the sample, 0 to 1.
uint64_t sample_order_epoch(const struct sample_order *order, uint64_t sample, double *part);
__END_DECLS
