#include "formats/mixture.h"
#include "formats/token_paths.h"      // paths_find_file
#include "runtime/machine/error.h"    // fail
#include "runtime/machine/text_add.h" // text_copy
#include <math.h>                     // isfinite, llround, pow
#include <stdio.h>                    // snprintf
#include <stdlib.h>                   // strtod, calloc
#include <string.h>                   // strchr, strspn
#include <unistd.h>                   // access

static const char SPACES[] = " \t\n\r\v\f";

// The number of bytes of the word at the start of a text, which ends at a space that no backslash escapes.
static size_t word_length(const char *text) {
    size_t n = 0;
    while (text[n] && !strchr(SPACES, text[n]))
        n += text[n] == '\\' && text[n + 1] ? 2 : 1;
    return n;
}
// Returns the next word, with its backslashes, and moves *text behind it. The caller frees it. NULL if no word is left.
static char *next_word(const char **text, const char *option) {
    const char *const begin = *text + strspn(*text, SPACES);
    const size_t length = word_length(begin);
    *text = begin + length;
    char *const word = length ? strndup(begin, length) : NULL;
    if (length && !word)
        fail("%s: out of memory", option);
    return word;
}
// Whether a whole word is a number as strtod reads it, which may be negative, infinite or NaN. Always sets *value.
static bool is_number(const char *word, double *value) {
    char *end;
    *value = strtod(word, &end);
    return end != word && *end == '\0';
}

bool text_is_mixture(const char *text) {
    const char *at = text;
    double value;
    if (!strchr(SPACES, text[strcspn(text, SPACES)]) || access(text, F_OK) == 0)
        return false;
    char *const first = next_word(&at, "");
    const bool number = first && is_number(first, &value);
    free(first);
    return number && at[strspn(at, SPACES)] != '\0';
}

enum { NAME = 256 }; // bytes of a name, with its zero

// Makes a name (size bytes) of a list of patterns as if the list were one path: its last `folders` + 1 components, up
// to a comma. Leaves out wildcards, a last .bin or .idx, and separators at the ends. Returns whether the path has more.
static bool short_name(char *name, size_t size, const char *pattern, int folders) {
    const char *begin = pattern + strlen(pattern);
    size_t length = 0;
    int slashes = 0;
    for (; begin > pattern && slashes <= folders; begin--)
        slashes += begin[-1] == '/';
    begin += slashes > folders;
    for (const char *at = begin; *at && *at != ',' && length + 1 < size; at++)
        if (!strchr("*?[]{}\\", *at))
            name[length++] = *at;
    name[length] = '\0';
    if (length >= 4 && (strcmp(name + length - 4, ".bin") == 0 || strcmp(name + length - 4, ".idx") == 0))
        name[length -= 4] = '\0';
    while (length > 0 && strchr("_-./", name[length - 1]))
        name[--length] = '\0';
    const size_t leading = strspn(name, "_-./");
    memmove(name, name + leading, length + 1 - leading);
    return slashes > folders;
}
// Whether a part before `part` has the name, or short_name can make it of any part but `part`, with some `folders`.
static bool is_taken(const struct mixture *mixture, int part, const char *name) {
    char other[NAME];
    for (int i = 0; i < mixture->count; i++) {
        if (i < part && strcmp(mixture->parts[i].name, name) == 0)
            return true;
        bool more = i != part;
        for (int folders = 0; more; folders++) {
            more = short_name(other, sizeof other, mixture->parts[i].pattern, folders);
            if (strcmp(other, name) == 0)
                return true;
        }
    }
    return false;
}
// Names each part by short_name with the fewest folders that make the name unique, else by its pattern, maybe numbered.
static void name_parts(struct mixture *mixture) {
    enum { LONGEST = 200 };
    char own[NAME];
    for (int i = 0; i < mixture->count; i++) {
        struct mixture_part *const part = &mixture->parts[i];
        bool unique = false, more = true;
        for (int folders = 0; more && !unique; folders++) {
            more = short_name(own, sizeof own, part->pattern, folders);
            unique = *own != '\0' && !is_taken(mixture, i, own);
        }
        bool same = strlen(part->pattern) > LONGEST || is_taken(mixture, i, part->pattern);
        for (int k = 0; k < mixture->count && !unique; k++)
            same |= k != i && strcmp(part->pattern, mixture->parts[k].pattern) == 0;
        if (!unique)
            snprintf(own, sizeof own, same ? "%.*s (%d)" : "%.*s", LONGEST, part->pattern, i + 1);
        part->name = text_copy(own);
    }
}

// Returns the largest number that divides a and b. Where one of them is 0, returns the other.
static uint64_t common_divisor(uint64_t a, uint64_t b) { return b ? common_divisor(b, a % b) : a; }

// Sets the parts' integer weights, in lowest terms, in the ratios of `weights` (count), whose sum is above 0. They are
// exact for decimals of few digits, else to a billionth of the sum. A weight above 0 stays above 0.
static void set_weights(struct mixture *mixture, const double *weights) {
    double sum = 0, scale = 1;
    bool exact = false;
    for (int i = 0; i < mixture->count; i++)
        sum += weights[i];
    for (int digits = 0; digits <= 9 && !exact; digits++) {
        scale = pow(10, digits);
        exact = sum * scale < (double)MIXTURE_WEIGHTS / 2;
        for (int i = 0; i < mixture->count && exact; i++) {
            const double scaled = weights[i] * scale;
            exact = fabs(scaled - round(scaled)) <= 1e-9 * fmax(1, scaled) && (round(scaled) > 0 || weights[i] <= 0);
        }
    }
    uint64_t divisor = 0;
    for (int i = 0; i < mixture->count; i++) {
        const long long rounded = llround(exact ? weights[i] * scale : weights[i] / sum * 1e9);
        mixture->parts[i].weight = rounded > 0 ? (uint64_t)rounded : weights[i] > 0;
        divisor = common_divisor(mixture->parts[i].weight, divisor);
    }
    for (int i = 0; i < mixture->count; i++)
        mixture->parts[i].weight /= divisor;
}

static void set_single_part(struct mixture *mixture, const char *patterns) {
    mixture->parts[0].pattern = text_copy(patterns);
    mixture->parts[0].weight = 1;
    mixture->count = 1;
}
void mixture_parse(struct mixture *mixture, const char *text, const char *option) {
    static const char example[] = "as '0.7 web_*.bin 0.3 code_*.bin'";
    double weights[MIXTURE_PARTS], sum = 0;
    memset(mixture, 0, sizeof *mixture);
    mixture->parts = (struct mixture_part *)calloc(MIXTURE_PARTS, sizeof *mixture->parts);
    if (!mixture->parts)
        fail("%s: out of memory", option);
    const char *at = text;
    char *word = text_is_mixture(text) ? next_word(&at, option) : NULL;
    if (!word)
        set_single_part(mixture, text);
    for (; word; word = next_word(&at, option)) {
        if (mixture->count == MIXTURE_PARTS)
            fail("%s: '%s' mixes more than %d sets; list files of equal weight in one pattern, with commas", option,
                 text, MIXTURE_PARTS);
        double *const weight = &weights[mixture->count];
        char *const pattern = next_word(&at, option);
        if (!is_number(word, weight) || !pattern)
            fail("%s: '%s': expected a weight before each pattern, %s, but found '%s'%s; a \\ keeps a space in a name",
                 option, text, example, word, pattern ? "" : " and nothing behind it");
        if (!isfinite(*weight) || *weight < 0)
            fail("%s: '%s': the weight of %s is %s; expected 0 or more, %s", option, text, pattern, word, example);
        sum += *weight;
        free(word);
        mixture->parts[mixture->count++].pattern = pattern;
    }
    if (mixture->count > 1 || text_is_mixture(text)) {
        if (!(sum > 0 && isfinite(sum)))
            fail("%s: '%s': the weights' sum is %g; expected one weight above 0 at least, %s", option, text, sum,
                 example);
        set_weights(mixture, weights);
    }
    name_parts(mixture);
}
void mixture_close(struct mixture *mixture) {
    for (int i = 0; i < mixture->count; i++) {
        free(mixture->parts[i].pattern);
        free(mixture->parts[i].name);
    }
    free(mixture->parts);
    memset(mixture, 0, sizeof *mixture);
}

bool mixture_find_file(const char *text, const char *option, char *path, size_t size) {
    struct mixture mixture;
    bool found = false;
    mixture_parse(&mixture, text, option);
    for (int i = 0; i < mixture.count && !found; i++)
        found = paths_find_file(mixture.parts[i].pattern, path, size);
    mixture_close(&mixture);
    return found;
}

static uint64_t weights_sum(const struct mixture *mixture) {
    uint64_t sum = 0;
    for (int i = 0; i < mixture->count; i++)
        sum += mixture->parts[i].weight;
    return sum;
}
// Returns the next sample's part, after taken[i] < 2^31 of part i: the first with the least (2 taken + 1) / weight.
static int next_part(const struct mixture *mixture, const uint64_t *taken) {
    int best = -1;
    for (int i = 0; i < mixture->count; i++) {
        const uint64_t weight = mixture->parts[i].weight;
        if (weight > 0 &&
            (best < 0 || (2 * taken[i] + 1) * mixture->parts[best].weight < (2 * taken[best] + 1) * weight))
            best = i;
    }
    return best;
}
// Counts each part's samples among the mixture's first n. A round has `weight` samples of each part. Sets *cycles to
// the number of whole rounds, and taken (count) to each part's samples after these. Returns the part of sample n.
static int count_taken(const struct mixture *mixture, uint64_t n, uint64_t taken[MIXTURE_PARTS], uint64_t *cycles) {
    const uint64_t all = weights_sum(mixture), rest = n % all, parts = (uint64_t)mixture->count;
    // Below the key 2 near / all there are at most near + parts / 2 samples: all of them are taken.
    const uint64_t near = rest > parts ? rest - parts : 0;
    uint64_t left = rest;
    *cycles = n / all;
    for (int i = 0; i < mixture->count; i++) {
        taken[i] = (2 * near * mixture->parts[i].weight + all - 1) / (2 * all);
        left -= taken[i];
    }
    for (; left > 0; left--)
        taken[next_part(mixture, taken)]++;
    return next_part(mixture, taken);
}

struct mixture_place mixture_place(const struct mixture *mixture, uint64_t sample) {
    uint64_t taken[MIXTURE_PARTS], cycles;
    struct mixture_place place = {0, sample - mixture->first_sample + mixture->parts[0].before};
    if (mixture->count == 1)
        return place;
    place.part = count_taken(mixture, sample - mixture->first_sample, taken, &cycles);
    const struct mixture_part *part = &mixture->parts[place.part];
    place.sample = part->before + cycles * part->weight + taken[place.part];
    return place;
}
// The number of a part's samples, `before` included, that precede `sample` of the run, which is first_sample or later.
uint64_t mixture_taken(const struct mixture *mixture, int part, uint64_t sample) {
    uint64_t taken[MIXTURE_PARTS], cycles;
    count_taken(mixture, sample - mixture->first_sample, taken, &cycles);
    return mixture->parts[part].before + cycles * mixture->parts[part].weight + taken[part];
}
double mixture_share(const struct mixture *mixture, int part) {
    return (double)mixture->parts[part].weight / (double)weights_sum(mixture);
}
