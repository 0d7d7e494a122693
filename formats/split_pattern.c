#include "formats/split_pattern.h"

#ifndef PCRE2_CODE_UNIT_WIDTH
#define PCRE2_CODE_UNIT_WIDTH 8
#endif
#include <pcre2.h>
#include <stdint.h> // uint32_t
#include <stdio.h>  // snprintf
#include <stdlib.h> // malloc, free
#include <string.h> // memcpy, strchr

#include "formats/unicode_tables.h" // unicode_newer_categories

enum {
    SPLIT_PATTERN_LONGEST = 4096,           // bytes; the longest in use has 300
    SPLIT_PATTERN_REWRITTEN_LONGEST = 65536 // bytes; \p{L} grows to 800
};
// The limit of steps of one search, some 0.1 s: a pattern such as (a|aa)*b takes 2^n.
static const uint32_t SPLIT_PATTERN_STEPS = 10000000;

struct split_pattern {
    pcre2_code *code;
};
struct split_search {
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

// ---- from Oniguruma's language to PCRE2's ----

struct split_rewrite {
    const char *in, *end;
    char *out; // SPLIT_PATTERN_REWRITTEN_LONGEST bytes
    size_t length;
    bool in_class;
    bool spell_out;  // characters newer than PCRE2's Unicode are listed
    bool full;       // the pattern did not fit `out`
    char group[256]; // for each open group: 'i' where case is ignored, else ' '
    int depth;
    const char *problem; // what is refused, for the message; NULL: nothing
};

// Appends bytes to `out`. Where they do not fit, sets `full` and appends nothing.
static void split_append(struct split_rewrite *r, const char *text, size_t bytes) {
    if (bytes > SPLIT_PATTERN_REWRITTEN_LONGEST - r->length) {
        r->full = true;
        return;
    }
    memcpy(r->out + r->length, text, bytes);
    r->length += bytes;
}
static void split_append_text(struct split_rewrite *r, const char *text) { split_append(r, text, strlen(text)); }

// Writes ranges of characters. Within a class it writes them as they are, else as [...] or, with `negated`, as [^...].
static void split_put_class(struct split_rewrite *r, const char *ranges, bool negated) {
    split_append_text(r, r->in_class ? "" : negated ? "[^" : "[");
    split_append_text(r, ranges);
    split_append_text(r, r->in_class ? "" : "]");
}

// Writes white space or, with `negated`, all else: PCRE2's \s without U+180E, which is no space since Unicode 6.3.
static void split_put_space(struct split_rewrite *r, bool negated) {
    static const char space[] = "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}"
                                "\\x{202f}\\x{205f}\\x{3000}";
    static const char other[] = "\\x{0}-\\x{8}\\x{e}-\\x{1f}\\x{21}-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}"
                                "\\x{1681}-\\x{1fff}\\x{200b}-\\x{2027}\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}"
                                "\\x{2060}-\\x{2fff}\\x{3001}-\\x{d7ff}\\x{e000}-\\x{10ffff}";
    split_put_class(r, negated && r->in_class ? other : space, negated);
}

// Writes the category named by the first `letters` letters of `category`, or with `negated` all other characters. If
// PCRE2's Unicode is older than the `tokenizers` package's, lists newer characters; these can't be negated in a class.
static void split_put_category(struct split_rewrite *r, const char *category, size_t letters, bool negated) {
    char text[64];
    bool is_newer = false;
    const size_t count = unicode_newer_categories_count;
    for (size_t i = 0; i < count && r->spell_out; i++)
        is_newer = is_newer || memcmp(unicode_newer_categories[i].category, category, letters) == 0;
    if (is_newer && negated && r->in_class) {
        r->problem = "\\P{...} in a class";
        return;
    }
    snprintf(text, sizeof text, "\\%c{%.*s}", negated && !is_newer ? 'P' : 'p', (int)letters, category);
    if (!is_newer) {
        split_append_text(r, text);
        return;
    }
    split_append_text(r, r->in_class ? "" : negated ? "[^" : "[");
    split_append_text(r, text);
    for (size_t i = 0; i < count; i++) {
        const struct unicode_category *newer = &unicode_newer_categories[i];
        if (memcmp(newer->category, category, letters) != 0)
            continue;
        snprintf(text, sizeof text, newer->first == newer->last ? "\\x{%x}" : "\\x{%x}-\\x{%x}", (unsigned)newer->first,
                 (unsigned)newer->last);
        split_append_text(r, text);
    }
    split_append_text(r, r->in_class ? "" : "]");
}

// The number of the pattern's next bytes that are in `of`.
static size_t split_span(const struct split_rewrite *r, const char *of) {
    const char *c = r->in;
    while (c < r->end && *c && strchr(of, *c))
        c++;
    return (size_t)(c - r->in);
}

// Copies the category in braces that follows \p or \P, by split_put_category. Sets r->problem for anything else.
static void split_copy_category(struct split_rewrite *r, bool negated) {
    static const char *const known[] = {"L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",
                                        "Nd", "Nl", "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po",
                                        "S",  "Sm", "Sc", "Sk", "So", "Z",  "Zs", "Zl", "Zp"};
    const char *name = r->in + 1;
    const char *close =
        r->in < r->end && *r->in == '{' ? (const char *)memchr(r->in, '}', (size_t)(r->end - r->in)) : NULL;
    for (size_t i = 0; close && i < sizeof known / sizeof *known; i++)
        if (strlen(known[i]) == (size_t)(close - name) && memcmp(known[i], name, (size_t)(close - name)) == 0) {
            r->in = close + 1;
            split_put_category(r, known[i], strlen(known[i]), negated);
            return;
        }
    r->problem = "a property that is not a general category (\\p{L}, \\p{Nd})";
}

// Copies the code point at r->in, 4 hex digits or, with `braces`, {1 to 6}, as \x{...}. Sets r->problem for others.
static void split_copy_code_point(struct split_rewrite *r, bool braces) {
    static const char digits[] = "0123456789abcdefABCDEF";
    r->in += braces && r->in < r->end && *r->in == '{';
    const char *number = r->in;
    const size_t span = split_span(r, digits), length = braces ? span : span < 4 ? span : 4;
    r->in += length;
    if (braces ? number[-1] != '{' || r->in == r->end || *r->in != '}' || length < 1 || length > 6 : length < 4) {
        r->problem = braces ? "\\x without {...}" : "\\u without four digits";
        return;
    }
    r->in += braces;
    split_append_text(r, "\\x{");
    split_append(r, number, length);
    split_append_text(r, "}");
}

// Whether the escape from `escape` to r->in, within a class, begins or ends a range: a hyphen stands beside it.
static bool split_is_range_end(const struct split_rewrite *r, const char *escape) {
    const bool before = escape[-1] == '-' && escape[-2] != '[' && escape[-2] != '^' && escape[-2] != '\\';
    return before || (r->end - r->in > 1 && r->in[0] == '-' && r->in[1] != ']');
}

// Copies or replaces the escape at r->in, within a class or outside. Sets r->problem for an escape that is refused.
static void split_escape(struct split_rewrite *r) {
    static const char punctuation[] = "!\"#$%&'()*+,-./:;=?@[\\]^_{|}~ ";
    const char *escape = r->in++;
    const char c = r->in < r->end ? *r->in++ : '\0';
    if (c == 's' || c == 'S')
        split_put_space(r, c == 'S');
    else if (c == 'd' || c == 'D')
        split_put_category(r, "Nd", 2, c == 'D');
    else if (c == 'p' || c == 'P')
        split_copy_category(r, c == 'P');
    else if (c == 'x' || c == 'u')
        split_copy_code_point(r, c == 'x');
    else if (c && strchr("rntf", c))
        split_append(r, escape, 2);
    else if (c && strchr(punctuation, c))
        split_append(r, escape, 2);
    else
        r->problem = "an escape but \\s \\d \\p{..} \\x{..} \\u.... \\r \\n \\t \\f and those of punctuation";
    if (!r->problem && r->in_class && c && strchr("sSdDpP", c) && split_is_range_end(r, escape))
        r->problem = "a range that begins or ends in an escape for many characters";
}

// Copies the beginning of the group at r->in, such as "(" or "(?i:". Sets r->problem for a group that is refused.
static void split_group(struct split_rewrite *r) {
    static const char *const kinds[] = {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"};
    const size_t left = (size_t)(r->end - r->in);
    size_t length = left > 1 && (r->in[1] == '?' || r->in[1] == '*') ? 0 : 1;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (left >= strlen(kinds[i]) && memcmp(r->in, kinds[i], strlen(kinds[i])) == 0)
            length = strlen(kinds[i]);
    if (length == 0)
        r->problem = "a group but (...) (?:...) (?i:...) (?=...) (?!...) (?<=...) (?<!...) (?>...)";
    else if (r->depth == (int)sizeof r->group)
        r->problem = "groups more than 256 deep";
    if (r->problem)
        return;
    r->group[r->depth] = length == 4 && r->in[2] == 'i' ? 'i' : r->depth ? r->group[r->depth - 1] : ' ';
    r->depth++;
    split_append(r, r->in, length);
    r->in += length;
}

// Copies {3}, {1,} or {1,3}. Refuses other braces, and +, ?, * or { behind any: Oniguruma reads these differently.
static void split_repetition(struct split_rewrite *r) {
    static const char digits[] = "0123456789";
    const char *begin = r->in++;
    const size_t least = split_span(r, digits);
    r->in += least;
    if (r->in < r->end && *r->in == ',') {
        r->in++;
        r->in += split_span(r, digits);
    }
    const bool closed = r->in < r->end && *r->in == '}';
    r->in += closed;
    if (!least || !closed || (r->in < r->end && strchr("+?*{", *r->in)))
        r->problem = "braces but {n}, {n,} and {n,m} with nothing behind them";
    split_append(r, begin, (size_t)(r->in - begin));
}

// Copies what comes next within a class: an escape, a character, or the ] that ends the class. Refuses [ and &&.
static void split_in_class(struct split_rewrite *r) {
    const bool pair = r->end - r->in > 1 && r->in[0] == '&' && r->in[1] == '&';
    if (*r->in == '[' || pair) {
        r->problem = "a class within a class";
        return;
    }
    if (*r->in == '\\') {
        split_escape(r);
        return;
    }
    r->in_class = *r->in != ']';
    split_append(r, r->in++, 1);
}

static void split_begin_class(struct split_rewrite *r) {
    split_append(r, r->in++, 1);
    if (r->in < r->end && *r->in == '^')
        split_append(r, r->in++, 1);
    if (r->in < r->end && *r->in == ']')
        r->problem = "an empty class";
    r->in_class = true;
}

// Copies what comes next outside of classes, or sets r->problem where PCRE2 would read it otherwise than Oniguruma.
static void split_outside_class(struct split_rewrite *r) {
    const char c = *r->in;
    if (strchr("\\[", c) && r->depth && r->group[r->depth - 1] == 'i')
        r->problem = "a class or an escape without regard to case"; // Oniguruma and PCRE2 fold case differently here
    else if (c == '\\')
        split_escape(r);
    else if (c == '[')
        split_begin_class(r);
    else if (c == '(')
        split_group(r);
    else if (c == '{')
        split_repetition(r);
    else if (c == '^' || c == '$')
        r->problem = "an anchor (^ or $)"; // Oniguruma's anchors are a line's, PCRE2's the text's
    else {
        r->depth -= c == ')' && r->depth > 0;
        split_append(r, r->in++, 1);
    }
}

// Whether the linked PCRE2 has a Unicode older than 16.
static bool split_pcre2_is_old(void) {
    char version[64] = "";
    return pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, NULL) > (int)sizeof version ||
           pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, version) < 0 || atoi(version) < 16;
}

// ---- compiling and searching ----

void split_pattern_free(struct split_pattern *pattern) {
    if (pattern)
        pcre2_code_free(pattern->code);
    free(pattern);
}

static const char *split_compile(struct split_pattern *pattern, const char *regex, size_t bytes, const char *name,
                                 struct error_text *error) {
    int problem = 0;
    PCRE2_SIZE place = 0;
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (!context)
        return error_format(error, "%s: out of memory for its split pattern", name);
    pcre2_set_newline(context, PCRE2_NEWLINE_LF); // what . does not match, whatever the library's default
    pattern->code = pcre2_compile((PCRE2_SPTR)regex, bytes, PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &problem,
                                  &place, context);
    pcre2_compile_context_free(context);
    if (!pattern->code) {
        char text[256] = "";
        pcre2_get_error_message(problem, (PCRE2_UCHAR *)text, sizeof text);
        return error_format(error, "%s: its split pattern is not one that can be used: %s", name, text);
    }
    pcre2_jit_compile(pattern->code, PCRE2_JIT_COMPLETE); // where this fails, the interpreter runs
    return NULL;
}

// *rewritten = the pattern in PCRE2's language, *rewritten_bytes long. The caller frees it, even after an error.
static const char *split_translate(const char *regex, size_t bytes, char **rewritten, size_t *rewritten_bytes,
                                   const char *name, struct error_text *error) {
    struct split_rewrite rewrite;
    memset(&rewrite, 0, sizeof rewrite);
    rewrite.in = regex;
    rewrite.end = regex + bytes;
    rewrite.spell_out = split_pcre2_is_old();
    rewrite.out = *rewritten = (char *)malloc(SPLIT_PATTERN_REWRITTEN_LONGEST);
    if (!rewrite.out)
        return error_format(error, "%s: out of memory for its split pattern", name);
    while (rewrite.in < rewrite.end && !rewrite.problem)
        if (rewrite.in_class)
            split_in_class(&rewrite);
        else
            split_outside_class(&rewrite);
    if (rewrite.full)
        rewrite.problem = "more properties than there is room for";
    *rewritten_bytes = rewrite.length;
    return rewrite.problem
               ? error_format(error, "%s: its split pattern has %s, which is not supported (at byte %zu of %.200s)",
                              name, rewrite.problem, (size_t)(rewrite.in - regex), regex)
               : NULL;
}

const char *split_pattern_compile(struct split_pattern **pattern, const char *regex, size_t bytes, const char *name,
                                  struct error_text *error) {
    char *rewritten = NULL;
    size_t rewritten_bytes = 0;
    *pattern = NULL;
    if (bytes < 1 || bytes > SPLIT_PATTERN_LONGEST)
        return error_format(error, "%s: its split pattern has %zu bytes; expected 1 to %d", name, bytes,
                            SPLIT_PATTERN_LONGEST);
    const char *problem = split_translate(regex, bytes, &rewritten, &rewritten_bytes, name, error);
    if (!problem && !(*pattern = (struct split_pattern *)calloc(1, sizeof **pattern)))
        problem = error_format(error, "%s: out of memory for its split pattern", name);
    if (!problem)
        problem = split_compile(*pattern, rewritten, rewritten_bytes, name, error);
    free(rewritten);
    if (problem) {
        split_pattern_free(*pattern);
        *pattern = NULL;
    }
    return problem;
}

void split_search_free(struct split_search *search) {
    if (!search)
        return;
    pcre2_match_data_free(search->match);
    pcre2_match_context_free(search->context);
    pcre2_jit_stack_free(search->stack);
    free(search);
}

struct split_search *split_search_create(size_t longest) {
    enum { JIT_STACK_LEAST_BYTES = 32 << 10, JIT_STACK_MAX_BYTES = 1 << 20, HEAP_KIB = 64 << 10 };
    struct split_search *search = (struct split_search *)calloc(1, sizeof *search);
    if (!search)
        return NULL;
    search->match = pcre2_match_data_create(1, NULL);
    search->context = pcre2_match_context_create(NULL);
    search->stack = pcre2_jit_stack_create(JIT_STACK_LEAST_BYTES, JIT_STACK_MAX_BYTES, NULL);
    if (!search->match || !search->context) {
        split_search_free(search);
        return NULL;
    }
    // Backtracking over a long run of spaces takes a few steps per byte, which is allowed.
    const uint32_t more = longest > UINT32_MAX / 8 ? UINT32_MAX / 2 : (uint32_t)longest * 4;
    pcre2_set_match_limit(search->context, SPLIT_PATTERN_STEPS + more);
    pcre2_set_heap_limit(search->context, HEAP_KIB);
    pcre2_jit_stack_assign(search->context, NULL, search->stack);
    return search;
}

int split_pattern_find(const struct split_pattern *pattern, const struct split_search *search,
                       const unsigned char *text, size_t bytes, size_t from, size_t *begin, size_t *end) {
    // NO_UTF_CHECK: otherwise each search would validate the whole text again.
    const int found = pcre2_match(pattern->code, text, bytes, from, PCRE2_NO_UTF_CHECK, search->match, search->context);
    if (found == PCRE2_ERROR_NOMATCH)
        return 0;
    if (found < 0)
        return found;
    const PCRE2_SIZE *range = pcre2_get_ovector_pointer(search->match);
    *begin = range[0];
    *end = range[1];
    return 1;
}
