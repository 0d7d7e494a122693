#include "formats/sample_order.h"
#include "runtime/machine/error.h" // fail
#include <math.h>                  // sqrt
#include <stdlib.h>                // calloc, free
#include <string.h>                // memcpy, memset

// Hashes x so that every output bit depends on every input bit: the finalizer of splitmix64 (Steele, Lea, Flood 2014).
static uint64_t order_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
uint64_t order_key(uint64_t seed, uint64_t epoch, uint64_t stream) {
    return order_mix(order_mix(order_mix(seed) + epoch) + stream);
}

// Computes a permutation of 0..n-1 by the generalized Feistel network of Black and Rogaway (Ciphers with arbitrary
// finite domains, CT-RSA 2002). An index is a pair in a x b, with a*b >= n and a, b about sqrt(n). Each round adds a
// keyed function of one half to the other, modulo its range, which is invertible. A result of n or more, rare since a*b
// < n + a, is permuted again, which keeps the whole a permutation.
uint64_t order_permute(uint64_t index, uint64_t n, uint64_t key) {
    enum { ROUNDS = 4 }; // of both halves; the test sees every permutation of small n about equally often
    uint64_t a = (uint64_t)sqrt((double)n);
    while (a * a < n) // sqrt rounds, and above 2^53 the conversion does
        a++;
    const uint64_t b = (n + a - 1) / a;
    do {
        uint64_t left = index % a, right = index / a;
        for (uint64_t round = 0; round < ROUNDS; round++) {
            left = (left + order_mix(key + 2 * round + order_mix(right)) % a) % a;
            right = (right + order_mix(key + 2 * round + 1 + order_mix(left)) % b) % b;
        }
        index = left + a * right;
    } while (index >= n);
    return index;
}

// Allocates zeroed memory, which the caller frees; out of memory ends the program.
static void *order_alloc(const struct sample_order *order, size_t count, size_t bytes) {
    void *const memory = calloc(count, bytes);
    if (!memory)
        fail("%s: out of memory for %zu x %zu bytes of the data's order", order->option, count, bytes);
    return memory;
}

void sample_order_open(struct sample_order *order, const uint64_t *windows, int num_files, uint64_t seed, bool shuffle,
                       const char *option) {
    const struct data_change all = {0, num_files, 0, 0};
    order->option = option;
    order->windows = windows;
    order->num_files = num_files;
    order->seed = seed;
    order->shuffle = shuffle;
    for (int i = 0; i < num_files; i++)
        order->samples_per_epoch += windows[i];
    order->order = (int *)order_alloc(order, (size_t)num_files + 1, sizeof *order->order);
    order->first = (uint64_t *)order_alloc(order, (size_t)num_files + 1, sizeof *order->first);
    sample_order_set_changes(order, &all, 1);
}
void sample_order_close(struct sample_order *order) {
    free(order->changes);
    free(order->order);
    free(order->first);
    memset(order, 0, sizeof *order);
}

void sample_order_set_changes(struct sample_order *order, const struct data_change *changes, int count) {
    struct data_change *const own = (struct data_change *)order_alloc(order, (size_t)count, sizeof *own);
    memcpy(own, changes, (size_t)count * sizeof *own);
    free(order->changes);
    order->changes = own;
    order->num_changes = count;
    order->epoch = UINT64_MAX;
    for (int i = 0; i < count; i++) {
        struct data_change *change = &own[i];
        change->samples_per_epoch = 0;
        for (int f = 0; f < change->files; f++)
            change->samples_per_epoch += order->windows[f];
        change->first_sample = i == 0 ? 0
                                      : change[-1].first_sample + (change->first_epoch - change[-1].first_epoch) *
                                                                      change[-1].samples_per_epoch;
    }
}

void sample_order_resume(struct sample_order *order, const struct data_change *changes, int count, uint64_t sample) {
    sample_order_set_changes(order, changes, count);
    const struct data_change last = order->changes[count - 1];
    if (last.files >= order->num_files)
        return;
    const uint64_t since = sample > last.first_sample ? sample - last.first_sample : 0;
    const uint64_t epoch = last.first_epoch + (since + last.samples_per_epoch - 1) / last.samples_per_epoch;
    struct data_change *const all = (struct data_change *)order_alloc(order, (size_t)count + 1, sizeof *all);
    memcpy(all, changes, (size_t)count * sizeof *all);
    const int now = epoch > last.first_epoch ? count : count - 1; // the new change, or the last one, which then grows
    all[now].first_epoch = epoch;
    all[now].files = order->num_files;
    sample_order_set_changes(order, all, now + 1);
    free(all);
}

// Returns the last change of the data that begins at or before a sample; never NULL.
static const struct data_change *change_at(const struct sample_order *order, uint64_t sample) {
    int i = order->num_changes - 1;
    while (i > 0 && order->changes[i].first_sample > sample)
        i--;
    return &order->changes[i];
}

// Orders the first `files` shards for an epoch: sets order->order, first, epoch and files.
static void begin_epoch(struct sample_order *order, uint64_t epoch, int files) {
    const uint64_t shards = (uint64_t)files;
    const uint64_t key = order_key(order->seed, epoch, UINT64_MAX); // a stream that no shard has
    order->first[0] = 0;
    for (uint64_t i = 0; i < shards; i++) {
        order->order[i] = (int)(order->shuffle ? order_permute(i, shards, key) : i);
        order->first[i + 1] = order->first[i] + order->windows[order->order[i]];
    }
    order->epoch = epoch;
    order->files = files;
}

void sample_order_locate(struct sample_order *order, uint64_t sample, int *file, uint64_t *window) {
    const struct data_change *change = change_at(order, sample);
    const uint64_t since = sample - change->first_sample;
    const uint64_t epoch = change->first_epoch + since / change->samples_per_epoch,
                   rest = since % change->samples_per_epoch;
    if (order->epoch != epoch)
        begin_epoch(order, epoch, change->files);
    int low = 0, high = order->files; // first[low] <= rest < first[high]
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (order->first[middle] <= rest)
            low = middle;
        else
            high = middle;
    }
    *file = order->order[low];
    *window = rest - order->first[low];
    if (order->shuffle)
        *window = order_permute(*window, order->windows[*file], order_key(order->seed, epoch, (uint64_t)*file));
}

uint64_t sample_order_epoch(const struct sample_order *order, uint64_t sample, double *part) {
    const struct data_change *change = change_at(order, sample);
    const uint64_t since = sample - change->first_sample;
    if (part)
        *part = (double)(since % change->samples_per_epoch) / (double)change->samples_per_epoch;
    return change->first_epoch + since / change->samples_per_epoch;
}
