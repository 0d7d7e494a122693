// A mixture of sets of token shards, as '0.7 web_*.bin 0.3 code_*.bin' names it: which set a sample of the run is of.
// Weights count samples. They become integers, and the order follows only from these: the samples j = 0, 1, ... of set
// i are put in order by (2j + 1) / weight_i, ties by i. So after n samples of the run a set with the share w of the
// weights has given w n samples, give or take one or two. No state is kept: a sample's place is computed, by integers
// that are exact on each machine. Each set has its order and epochs (sample_order.h) as if it were the only set.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <stdint.h>    // uint64_t
#include <sys/cdefs.h> // __BEGIN_DECLS

enum { MIXTURE_PARTS = 64 };                               // the most sets of a mixture
static const uint64_t MIXTURE_WEIGHTS = (uint64_t)1 << 31; // the sum of weights stays below this

struct mixture_part {
    char *pattern;   // of its files; owned
    char *name;      // short, and no other part's; owned
    uint64_t weight; // 0: its samples are not taken
    uint64_t before; // samples of the part that were taken before the mixture's first sample
};
struct mixture {
    struct mixture_part *parts; // (count) owned
    int count;                  // 1: there is nothing to mix
    uint64_t first_sample;      // of the run, at which the mixture begins
};
// The place of a sample of the run: a sample of a part's own order.
struct mixture_place {
    int part;
    uint64_t sample;
};

__BEGIN_DECLS
// Whether a text describes a mixture: it has several words, the first one a number, and is not the name of a file.
bool text_is_mixture(const char *text);
// Fills *mixture, for mixture_close, from the text of a mixture (text_is_mixture), or from one set's list of patterns.
// A \ keeps a space in a mixture's pattern. first_sample and each `before` are 0. A bad text ends the program.
void mixture_parse(struct mixture *mixture, const char *text, const char *option);
void mixture_close(struct mixture *mixture);
// path (size bytes) = a file that any set's patterns match. False: none, or no room. A bad text ends the program.
bool mixture_find_file(const char *text, const char *option, char *path, size_t size);

// Returns the part, and the sample in its order, of a sample >= first_sample. Reads only the parts' weight and before.
struct mixture_place mixture_place(const struct mixture *mixture, uint64_t sample);
// The number of a part's samples that were taken before `sample` of the run (first_sample or later), with its `before`.
uint64_t mixture_taken(const struct mixture *mixture, int part, uint64_t sample);
double mixture_share(const struct mixture *mixture, int part);
__END_DECLS
