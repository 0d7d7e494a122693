// The regular expression by which a tokenizer splits text, run by PCRE2.
//
// tokenizer.json's patterns are written for Oniguruma. Only what both read the same way is taken, and what differs is
// rewritten (white space; characters newer than the linked PCRE2) or refused by name, so that no pattern is silently
// another one: anchors, \w, \b, \h, nested classes, options but (?i:...), {n}+ and so on.
#pragma once
#ifndef PCRE2_CODE_UNIT_WIDTH
#define PCRE2_CODE_UNIT_WIDTH 8
#endif
#include <pcre2.h>
#include <stdbool.h> // bool
#include <stdint.h>  // uint32_t
#include <stdio.h>   // snprintf
#include <stdlib.h>  // malloc, free
#include <string.h>  // memcpy, strchr

#include "runtime/machine/error_text.h" // struct error_text
#include "formats/unicode_tables.h"     // unicode_newer_categories

enum {
    SPLIT_PATTERN_LONGEST = 4096,           // of those known the longest has 300
    SPLIT_PATTERN_REWRITTEN_LONGEST = 65536 // \p{L} grows to 800 bytes
};
// Steps in one search before it is given up: 0.1 s. A pattern such as (a|aa)*b takes 2^n.
static const uint32_t SPLIT_PATTERN_STEPS = 10000000;

struct split_pattern {
    pcre2_code *code;
};
// What one thread needs to search by a pattern.
struct split_search {
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

// ---------------------------------------------------------------------------------------------------------------------
// From Oniguruma's language to PCRE2's.

struct split_rewrite {
    const char *in, *end;
    char *out; // SPLIT_PATTERN_REWRITTEN_LONGEST bytes
    size_t length;
    bool in_class, newer, full;
    char group[256]; // kinds of the open groups: 'i' for those without regard to case
    int depth;
    const char *problem; // what is refused, in words; NULL so far
};

static void split_put(struct split_rewrite *r, const char *text, size_t bytes) {
    if (bytes > SPLIT_PATTERN_REWRITTEN_LONGEST - r->length) {
        r->full = true;
        return;
    }
    memcpy(r->out + r->length, text, bytes);
    r->length += bytes;
}
static void split_puts(struct split_rewrite *r, const char *text) { split_put(r, text, strlen(text)); }

// Ranges of characters as they stand in a class, in one or not yet.
static void split_put_class(struct split_rewrite *r, const char *ranges, bool negated) {
    split_puts(r, r->in_class ? "" : negated ? "[^" : "[");
    split_puts(r, ranges);
    split_puts(r, r->in_class ? "" : "]");
}

// PCRE2's \s has U+180E, which stopped being white space in Unicode 6.3.
static void split_put_space(struct split_rewrite *r, bool negated) {
    static const char space[] = "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}"
                                "\\x{202f}\\x{205f}\\x{3000}";
    static const char other[] = "\\x{0}-\\x{8}\\x{e}-\\x{1f}\\x{21}-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}"
                                "\\x{1681}-\\x{1fff}\\x{200b}-\\x{2027}\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}"
                                "\\x{2060}-\\x{2fff}\\x{3001}-\\x{d7ff}\\x{e000}-\\x{10ffff}";
    split_put_class(r, negated && r->in_class ? other : space, negated);
}

// A general category. Where PCRE2 is of an older Unicode than the `tokenizers` package, what has come since is spelled
// out.
static void split_put_category(struct split_rewrite *r, const char *category, size_t letters, bool negated) {
    char text[64];
    bool is_newer = false;
    const size_t count = sizeof unicode_newer_categories / sizeof *unicode_newer_categories;
    for (size_t i = 0; i < count && r->newer; i++)
        is_newer = is_newer || memcmp(unicode_newer_categories[i].category, category, letters) == 0;
    if (is_newer && negated && r->in_class) {
        r->problem = "\\P{...} in a class";
        return;
    }
    snprintf(text, sizeof text, "\\%c{%.*s}", negated && !is_newer ? 'P' : 'p', (int)letters, category);
    if (!is_newer) {
        split_puts(r, text);
        return;
    }
    split_puts(r, r->in_class ? "" : negated ? "[^" : "[");
    split_puts(r, text);
    for (size_t i = 0; i < count; i++) {
        const struct unicode_category *newer = &unicode_newer_categories[i];
        if (memcmp(newer->category, category, letters) != 0)
            continue;
        snprintf(text, sizeof text, newer->first == newer->last ? "\\x{%x}" : "\\x{%x}-\\x{%x}", (unsigned)newer->first,
                 (unsigned)newer->last);
        split_puts(r, text);
    }
    split_puts(r, r->in_class ? "" : "]");
}

static size_t split_span(const struct split_rewrite *r, const char *of) {
    const char *c = r->in;
    while (c < r->end && strchr(of, *c))
        c++;
    return (size_t)(c - r->in);
}

// \p{L}, \P{Lu}: what stands after the p.
static void split_category(struct split_rewrite *r, bool negated) {
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

// \x{41} and \u0041: what stands after the letter.
static void split_code_point(struct split_rewrite *r, bool braces) {
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
    split_puts(r, "\\x{");
    split_put(r, number, length);
    split_puts(r, "}");
}

// Whether r->in, in a class, stands beside a hyphen that would make a range of it.
static bool split_is_range_end(const struct split_rewrite *r, const char *escape) {
    const bool before = escape[-1] == '-' && escape[-2] != '[' && escape[-2] != '^' && escape[-2] != '\\';
    return before || (r->end - r->in > 1 && r->in[0] == '-' && r->in[1] != ']');
}

static void split_escape(struct split_rewrite *r) {
    static const char punctuation[] = "!\"#$%&'()*+,-./:;=?@[\\]^_{|}~ ";
    const char *escape = r->in++;
    const char c = r->in < r->end ? *r->in++ : '\0';
    if (c == 's' || c == 'S')
        split_put_space(r, c == 'S');
    else if (c == 'd' || c == 'D')
        split_put_category(r, "Nd", 2, c == 'D');
    else if (c == 'p' || c == 'P')
        split_category(r, c == 'P');
    else if (c == 'x' || c == 'u')
        split_code_point(r, c == 'x');
    else if (c && strchr("rntf", c))
        split_put(r, escape, 2);
    else if (c && strchr(punctuation, c))
        split_put(r, escape, 2);
    else
        r->problem = "an escape but \\s \\d \\p{..} \\x{..} \\u.... \\r \\n \\t \\f and those of punctuation";
    if (!r->problem && r->in_class && c && strchr("sSdDpP", c) && split_is_range_end(r, escape))
        r->problem = "a range that begins or ends in an escape for many characters";
}

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
    split_put(r, r->in, length);
    r->in += length;
}

// {3}, {1,} and {1,3}. Oniguruma takes a + behind it for another repetition, and {,3} for {0,3}.
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
    split_put(r, begin, (size_t)(r->in - begin));
}

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
    split_put(r, r->in++, 1);
}

static void split_begin_class(struct split_rewrite *r) {
    split_put(r, r->in++, 1);
    if (r->in < r->end && *r->in == '^')
        split_put(r, r->in++, 1);
    if (r->in < r->end && *r->in == ']')
        r->problem = "an empty class";
    r->in_class = true;
}

static void split_outside_class(struct split_rewrite *r) {
    const char c = *r->in;
    if (strchr("\\[", c) && r->depth && r->group[r->depth - 1] == 'i')
        r->problem = "a class or an escape without regard to case"; // on which the two don't agree
    else if (c == '\\')
        split_escape(r);
    else if (c == '[')
        split_begin_class(r);
    else if (c == '(')
        split_group(r);
    else if (c == '{')
        split_repetition(r);
    else if (c == '^' || c == '$')
        r->problem = "an anchor (^ or $)"; // of a line to one, of the text to the other
    else {
        r->depth -= c == ')' && r->depth > 0;
        split_put(r, r->in++, 1);
    }
}

// Whether the linked PCRE2 knows the characters of Unicode 16.
static bool split_pcre2_is_old(void) {
    char version[64] = "";
    return pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, NULL) > (int)sizeof version ||
           pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, version) < 0 || atoi(version) < 16;
}

// ---------------------------------------------------------------------------------------------------------------------

static void split_pattern_free(struct split_pattern *pattern) {
    pcre2_code_free(pattern->code);
    pattern->code = NULL;
}

static const char *split_compile(struct split_pattern *pattern, const char *regex, size_t bytes, const char *name,
                                 struct error_text *error) {
    int problem = 0;
    PCRE2_SIZE place = 0;
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (!context)
        return error_format(error, "%s: out of memory for its split pattern", name);
    pcre2_set_newline(context, PCRE2_NEWLINE_LF); // what . leaves out, whatever the library was built with
    pattern->code = pcre2_compile((PCRE2_SPTR)regex, bytes, PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &problem,
                                  &place, context);
    pcre2_compile_context_free(context);
    if (!pattern->code) {
        char text[256] = "";
        pcre2_get_error_message(problem, (PCRE2_UCHAR *)text, sizeof text);
        return error_format(error, "%s: its split pattern is not one that can be used: %s", name, text);
    }
    pcre2_jit_compile(pattern->code, PCRE2_JIT_COMPLETE); // where it can't, the interpreter runs
    return NULL;
}

// `regex` is well-formed UTF-8.
static const char *split_pattern_compile(struct split_pattern *pattern, const char *regex, size_t bytes,
                                         const char *name, struct error_text *error) {
    pattern->code = NULL;
    if (bytes < 1 || bytes > SPLIT_PATTERN_LONGEST)
        return error_format(error, "%s: its split pattern has %zu bytes; expected 1 to %d", name, bytes,
                            SPLIT_PATTERN_LONGEST);
    struct split_rewrite rewrite;
    memset(&rewrite, 0, sizeof rewrite);
    rewrite.in = regex;
    rewrite.end = regex + bytes;
    rewrite.newer = split_pcre2_is_old();
    rewrite.out = (char *)malloc(SPLIT_PATTERN_REWRITTEN_LONGEST);
    if (!rewrite.out)
        return error_format(error, "%s: out of memory for its split pattern", name);
    while (rewrite.in < rewrite.end && !rewrite.problem)
        if (rewrite.in_class)
            split_in_class(&rewrite);
        else
            split_outside_class(&rewrite);
    if (rewrite.full)
        rewrite.problem = "more properties than there is room for";
    const char *problem = NULL;
    if (rewrite.problem)
        problem = error_format(error, "%s: its split pattern has %s, which is not supported (at byte %zu of %.200s)",
                               name, rewrite.problem, (size_t)(rewrite.in - regex), regex);
    else
        problem = split_compile(pattern, rewrite.out, rewrite.length, name, error);
    free(rewrite.out);
    return problem;
}

static void split_search_end(struct split_search *search) {
    pcre2_match_data_free(search->match);
    pcre2_match_context_free(search->context);
    pcre2_jit_stack_free(search->stack);
    memset(search, 0, sizeof *search);
}

// `longest`: bytes of the longest text that will be searched. False when out of memory.
static bool split_search_begin(struct split_search *search, size_t longest) {
    enum { JIT_STACK_LEAST_BYTES = 32 << 10, JIT_STACK_MOST_BYTES = 1 << 20, HEAP_KIB = 64 << 10 };
    memset(search, 0, sizeof *search);
    search->match = pcre2_match_data_create(1, NULL);
    search->context = pcre2_match_context_create(NULL);
    search->stack = pcre2_jit_stack_create(JIT_STACK_LEAST_BYTES, JIT_STACK_MOST_BYTES, NULL);
    if (!search->match || !search->context) {
        split_search_end(search);
        return false;
    }
    // Stepping back over a long run of spaces, one by one, is honest work.
    const uint32_t more = longest > UINT32_MAX / 8 ? UINT32_MAX / 2 : (uint32_t)longest * 4;
    pcre2_set_match_limit(search->context, SPLIT_PATTERN_STEPS + more);
    pcre2_set_heap_limit(search->context, HEAP_KIB);
    pcre2_jit_stack_assign(search->context, NULL, search->stack);
    return true;
}

// The first match in well-formed `text` from byte `from` on: 1 and its range, 0 when there is none, and below 0 when
// the search was given up.
static int split_pattern_find(const struct split_pattern *pattern, const struct split_search *search,
                              const unsigned char *text, size_t bytes, size_t from, size_t *begin, size_t *end) {
    // NO_UTF_CHECK: otherwise PCRE2 would read all of the text anew for each piece of it.
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
