#include "formats/matmul_algorithms.h"
#include "runtime/text/json_parse.h" // json_show_bytes
#include <errno.h>                   // errno
#include <math.h>                    // isfinite
#include <stdio.h>                   // open_memstream
#include <stdlib.h>                  // strtoll, strtod
#include <string.h>                  // memcpy, memchr

#define MATMUL_ALGORITHMS_TITLE "train_gpt matmul algorithms 3"

char *matmul_algorithms_text(const struct matmul_algorithms *algorithms, const char *const *key_names, size_t *bytes) {
    char *text = NULL;
    FILE *const out = open_memstream(&text, bytes);
    if (!out)
        return NULL;
    fprintf(out, "%s\nlibrary=%lld multiprocessors=%d gpu=%s\n", MATMUL_ALGORITHMS_TITLE,
            (long long)algorithms->library, algorithms->multiprocessors, algorithms->gpu);
    for (int i = 0; i < algorithms->count; i++) {
        const struct matmul_algorithm *const row = &algorithms->rows[i];
        for (int k = 0; k < MATMUL_ALGORITHMS_KEY; k++)
            fprintf(out, "%s=%lld ", key_names[k], (long long)row->key[k]);
        fprintf(out, "fused=%d candidate=%d first_us=%.17g us=%.17g algorithm=", row->fused, row->candidate,
                row->first_us, row->us);
        for (size_t k = 0; k < sizeof row->bytes; k++)
            fprintf(out, "%02x", row->bytes[k]);
        fputc('\n', out);
    }
    if (fclose(out) == 0)
        return text;
    free(text);
    return NULL;
}

struct algorithms_line {
    const char *at, *end;
    int number; // from 1
    const char *name;
    struct error_text *error;
};
enum { ALGORITHMS_VALUE = 160 }; // bytes of the longest value, with a 0 after it

// Returns the text of an error, in line->error: what was expected, and how the line goes on instead.
static const char *algorithms_wrong(const struct algorithms_line *line, const char *expected) {
    const size_t left = (size_t)(line->end - line->at);
    return error_format(line->error, "%s: line %d: expected %s, not '%s'", line->name, line->number, expected,
                        json_show_bytes(line->at, left < 40 ? left : 40).text);
}
// Takes "key=", a text that is not empty, and the space after it or, with `last`, the line's end. value = the text.
static const char *algorithms_take(struct algorithms_line *line, const char *key, bool last,
                                   char value[ALGORITHMS_VALUE]) {
    const size_t key_bytes = strlen(key), left = (size_t)(line->end - line->at);
    char expected[96];
    if (left <= key_bytes || memcmp(line->at, key, key_bytes) != 0 || line->at[key_bytes] != '=') {
        snprintf(expected, sizeof expected, "%s=", key);
        return algorithms_wrong(line, expected);
    }
    const char *const begin = line->at + key_bytes + 1;
    const char *const space = last ? NULL : (const char *)memchr(begin, ' ', (size_t)(line->end - begin));
    const char *const end = space ? space : line->end;
    const bool has_nul = memchr(begin, 0, (size_t)(end - begin)) != NULL;
    if (end == begin || end - begin >= ALGORITHMS_VALUE || has_nul || (!space && !last)) {
        snprintf(expected, sizeof expected, "%s=VALUE%s", key, last ? "" : " and more");
        return algorithms_wrong(line, expected);
    }
    memcpy(value, begin, (size_t)(end - begin));
    value[end - begin] = 0;
    line->at = space ? space + 1 : end;
    return NULL;
}
// *result = the number after "key=", 0 to `most`; takes the space behind it too. Returns NULL or what is wrong.
static const char *algorithms_take_int(struct algorithms_line *line, const char *key, int64_t most, int64_t *result) {
    struct algorithms_line before = *line;
    char value[ALGORITHMS_VALUE], expected[96], *end;
    RETURN_PROBLEM(algorithms_take(line, key, false, value));
    errno = 0;
    *result = strtoll(value, &end, 10);
    const bool digits = value[0] >= '0' && value[0] <= '9';
    if (digits && !*end && !errno && *result <= most)
        return NULL;
    snprintf(expected, sizeof expected, "%s= and a number of 0 to %lld", key, (long long)most);
    return algorithms_wrong(&before, expected);
}
// *result = the microseconds after "key=", finite, 0 or more; takes the space too. Returns NULL or what is wrong.
static const char *algorithms_take_us(struct algorithms_line *line, const char *key, double *result) {
    struct algorithms_line before = *line;
    char value[ALGORITHMS_VALUE], expected[96], *end;
    RETURN_PROBLEM(algorithms_take(line, key, false, value));
    *result = strtod(value, &end);
    const bool digits = value[0] >= '0' && value[0] <= '9';
    if (digits && !*end && isfinite(*result))
        return NULL;
    snprintf(expected, sizeof expected, "%s= and microseconds", key);
    return algorithms_wrong(&before, expected);
}
// Returns the value of a hexadecimal digit in lower case; -1 if there is none.
static int algorithms_digit(char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}
// Takes "algorithm=" and 128 digits, to the line's end; bytes = their value. NULL, or the problem, in line->error.
static const char *algorithms_take_bytes(struct algorithms_line *line, unsigned char bytes[64]) {
    struct algorithms_line before = *line;
    char value[ALGORITHMS_VALUE];
    RETURN_PROBLEM(algorithms_take(line, "algorithm", true, value));
    bool good = strlen(value) == 128;
    for (int i = 0; i < 64 && good; i++) {
        const int high = algorithms_digit(value[2 * i]), low = algorithms_digit(value[2 * i + 1]);
        good = high >= 0 && low >= 0;
        bytes[i] = (unsigned char)(16 * high + low);
    }
    return good ? NULL : algorithms_wrong(&before, "algorithm= and 128 hexadecimal digits");
}

// Appends the product that a line has. Refuses more than MATMUL_ALGORITHMS_ROWS products, and a key of an earlier line.
static const char *algorithms_read_row(struct matmul_algorithms *x, struct algorithms_line *line,
                                       const char *const *key_names) {
    struct matmul_algorithm *const row = &x->rows[x->count];
    int64_t fused, candidate;
    if (x->count == MATMUL_ALGORITHMS_ROWS)
        return error_format(line->error, "%s: line %d: more than %d products", line->name, line->number,
                            MATMUL_ALGORITHMS_ROWS);
    for (int k = 0; k < MATMUL_ALGORITHMS_KEY; k++)
        RETURN_PROBLEM(algorithms_take_int(line, key_names[k], (int64_t)1 << 50, &row->key[k]));
    RETURN_PROBLEM(algorithms_take_int(line, "fused", 1, &fused));
    RETURN_PROBLEM(algorithms_take_int(line, "candidate", 1000, &candidate));
    RETURN_PROBLEM(algorithms_take_us(line, "first_us", &row->first_us));
    RETURN_PROBLEM(algorithms_take_us(line, "us", &row->us));
    RETURN_PROBLEM(algorithms_take_bytes(line, row->bytes));
    row->fused = fused != 0;
    row->candidate = (int)candidate;
    for (int i = 0; i < x->count; i++)
        if (memcmp(x->rows[i].key, row->key, sizeof row->key) == 0)
            return error_format(line->error, "%s: line %d: the product of line %d again", line->name, line->number,
                                i + 3);
    x->count++;
    return NULL;
}
// Reads a whole line: the first is the title, the second the device, the others are products. NULL or the problem.
static const char *algorithms_read_line(struct matmul_algorithms *x, struct algorithms_line *line,
                                        const char *const *key_names) {
    int64_t multiprocessors;
    const size_t bytes = (size_t)(line->end - line->at), title = strlen(MATMUL_ALGORITHMS_TITLE);
    if (line->number == 1)
        return bytes == title && memcmp(line->at, MATMUL_ALGORITHMS_TITLE, title) == 0
                   ? NULL
                   : algorithms_wrong(line, "'" MATMUL_ALGORITHMS_TITLE "'");
    if (line->number > 2)
        return algorithms_read_row(x, line, key_names);
    RETURN_PROBLEM(algorithms_take_int(line, "library", INT32_MAX, &x->library));
    RETURN_PROBLEM(algorithms_take_int(line, "multiprocessors", 1 << 20, &multiprocessors));
    x->multiprocessors = (int)multiprocessors;
    return algorithms_take(line, "gpu", true, x->gpu);
}

const char *matmul_algorithms_parse(struct matmul_algorithms *algorithms, const char *const *key_names,
                                    const unsigned char *data, uint64_t bytes, const char *name,
                                    struct error_text *error) {
    const char *const text = (const char *)data, *const text_end = text + bytes;
    struct algorithms_line line = {text, text, 0, name, error};
    memset(algorithms, 0, sizeof *algorithms);
    for (const char *at = text; at < text_end; at = line.end + 1) {
        line.at = at;
        line.number++;
        line.end = (const char *)memchr(at, '\n', (size_t)(text_end - at));
        if (!line.end)
            return error_format(error, "%s: line %d: does not end: the file is cut", name, line.number);
        RETURN_PROBLEM(algorithms_read_line(algorithms, &line, key_names));
    }
    return line.number >= 2 ? NULL
                            : error_format(error, "%s: line %d: expected 2 lines and more", name, line.number + 1);
}
