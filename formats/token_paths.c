#include "formats/token_paths.h"
#include "formats/token_file.h"    // path_with_ending
#include "runtime/machine/error.h" // fail
#include <glob.h>                  // glob
#include <stdio.h>                 // snprintf
#include <stdlib.h>                // calloc, qsort
#include <string.h>                // strdup, strcmp
#include <unistd.h>                // access

// Adds the file whose name this is, wildcards and all: a shell completes names with brackets. Returns glob's status.
static int glob_literal(glob_t *found, const char *name, int flags) {
    char *const escaped = (char *)malloc(2 * strlen(name) + 1), *end = escaped;
    if (!escaped)
        return GLOB_NOSPACE;
    for (const char *p = name; *p; *end++ = *p++)
        if (strchr("*?[]\\", *p))
            *end++ = '\\';
    *end = '\0';
    const int status = glob(escaped, flags & ~(GLOB_BRACE | GLOB_TILDE), NULL, found);
    free(escaped);
    return status;
}
// Adds the files that match a pattern or, where none does, the file of that name. Returns glob's status. flags: glob's.
static int glob_pattern(glob_t *found, const char *pattern, int flags) {
    const int status = glob(pattern, flags | GLOB_BRACE | GLOB_TILDE, NULL, found);
    return status == GLOB_NOMATCH ? glob_literal(found, pattern, flags) : status;
}
// Whether a list of patterns is the name of one file, which has commas in it.
static bool is_name(const char *patterns) { return strchr(patterns, ',') && access(patterns, F_OK) == 0; }

// Adds the files that match one pattern; none ends the program.
static void glob_add(glob_t *found, const char *pattern, const char *option) {
    const int status = glob_pattern(found, pattern, GLOB_NOSORT | (found->gl_pathc > 0 ? GLOB_APPEND : 0));
    if (status == GLOB_NOMATCH)
        fail("%s: no file matches '%s'; expected token shards there: make them with scripts/prepare_data.py; a "
             "comma separates patterns, \\, is one in a name",
             option, pattern);
    if (status != 0)
        fail("%s: '%s' can't be searched: %s", option, pattern,
             status == GLOB_NOSPACE ? "out of memory" : "read error");
}

// Returns the first pattern's length, up to a comma outside {a,b} with no backslash. A file's name is one pattern.
static size_t pattern_length(const char *patterns) {
    size_t n = 0;
    if (is_name(patterns))
        return strlen(patterns);
    for (int depth = 0; patterns[n] && (depth > 0 || patterns[n] != ','); n++) {
        depth += (patterns[n] == '{') - (patterns[n] == '}' && depth > 0);
        n += patterns[n] == '\\' && patterns[n + 1];
    }
    return n;
}

// Adds each pattern's files, unsorted, to `found`, zeroed at first. An empty or unmatched pattern ends the program.
static void glob_add_all(glob_t *found, const char *patterns, const char *option) {
    for (const char *at = patterns;; at++) {
        const size_t length = pattern_length(at);
        char *const pattern = strndup(at, length);
        if (!pattern)
            fail("%s: out of memory", option);
        if (!*pattern)
            fail(
                "%s: '%s' has an empty pattern; expected file patterns separated by commas, as in 'data/*_train_*.bin'",
                option, patterns);
        glob_add(found, pattern, option);
        free(pattern);
        at += length;
        if (!*at)
            break;
    }
}

bool paths_find_file(const char *patterns, char *path, size_t size) {
    for (const char *at = patterns; *at;) {
        const size_t length = pattern_length(at);
        char pattern[4096];
        glob_t found;
        memset(&found, 0, sizeof found);
        bool any = length < sizeof pattern && snprintf(pattern, sizeof pattern, "%.*s", (int)length, at) > 0 &&
                   glob_pattern(&found, pattern, 0) == 0 && found.gl_pathc > 0;
        any = any && (size_t)snprintf(path, size, "%s", found.gl_pathv[0]) < size;
        globfree(&found);
        if (any)
            return true;
        at += length + (at[length] == ',');
    }
    return false;
}

static int compare_paths(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

char **paths_find(const char *patterns, const char *option, int *count) {
    glob_t found;
    memset(&found, 0, sizeof found);
    glob_add_all(&found, patterns, option);
    char **paths = (char **)calloc(found.gl_pathc + 1, sizeof *paths);
    if (!paths)
        fail("%s: out of memory", option);
    for (size_t i = 0; i < found.gl_pathc; i++) {
        char *bin = path_with_ending(found.gl_pathv[i], ".idx", ".bin");
        paths[i] = bin ? bin : strdup(found.gl_pathv[i]);
        if (!paths[i])
            fail("%s: out of memory", option);
    }
    qsort(paths, found.gl_pathc, sizeof *paths, compare_paths);
    int unique = 0;
    for (size_t i = 0; i < found.gl_pathc; i++) {
        if (unique > 0 && strcmp(paths[unique - 1], paths[i]) == 0)
            free(paths[i]);
        else
            paths[unique++] = paths[i];
    }
    globfree(&found);
    *count = unique;
    return paths;
}
