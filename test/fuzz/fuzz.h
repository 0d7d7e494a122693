// The main program of a fuzz target: a file test/fuzz/fuzz_NAME.c that includes this header and defines fuzz_parse. The
// Makefile finds it, and builds it twice:
//   make fuzz     with clang's libFuzzer and sanitizers, for FUZZ_SECONDS on inputs that grow from corpus/NAME/
//   make test     with a plain main, which runs only corpus/NAME/: each file must be accepted, or refused in the words
//                 that corpus/NAME.expected has for it; each file cut at every byte, and a long one near its ends and at
//                 every seventh byte, must do no harm
// NAME.expected has a line 'FILE: words' or 'FILE: accepted' for each file of the folder.
#pragma once
#include <dirent.h>  // opendir
#include <stdbool.h> // bool
#include <stdint.h>  // uint8_t
#include <stdio.h>   // printf
#include <stdlib.h>  // malloc, abort
#include <string.h>  // memcpy, strstr

#include "runtime/machine/error_text.h" // struct error_text
#include "runtime/files/file_read.h"    // read_whole

// Parses data (bytes) and, if the parser accepts them, uses the result in every way there is. Returns what the parser
// returned: NULL, or *error's text.
static const char *fuzz_parse(const unsigned char *data, size_t bytes, struct error_text *error);

// Ends the program unless a condition holds that everything accepted must meet.
#define fuzz_require(condition)                                                                                        \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);                             \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

#ifndef FUZZ_CORPUS
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct error_text error;
    const char *problem = fuzz_parse(data, bytes, &error);
    fuzz_require(!problem || memchr(problem, 0, sizeof error.text));
    return 0;
}
#else
// Parses a copy of data (bytes) that ends where the data end, so that a sanitizer sees a read beyond them.
static const char *replay_part(const unsigned char *data, size_t bytes, struct error_text *error) {
    unsigned char *copy = (unsigned char *)malloc(bytes ? bytes : 1);
    fuzz_require(copy);
    memcpy(copy, data, bytes);
    const char *problem = fuzz_parse(copy, bytes, error);
    free(copy);
    return problem;
}
// A long file repeats its rows: between its first and last bytes it is cut at some only.
enum { EVERY_BYTE = 2048, STEP = 7 };
static bool replay_file(int number, const char *file, const char *words) {
    char path[2048];
    unsigned char *data;
    uint64_t bytes;
    struct error_text error;
    snprintf(path, sizeof path, FUZZ_CORPUS "/%s", file);
    const char *said = read_whole(&data, &bytes, 1 << 20, path, "a file of the corpus", &error);
    if (!said) {
        for (size_t count = 0; count < bytes; count += count < EVERY_BYTE || bytes - count <= EVERY_BYTE ? 1 : STEP)
            replay_part(data, count, &error);
        said = replay_part(data, bytes, &error);
        free(data);
    }
    const bool ok = strcmp(words, "accepted") == 0 ? !said : said && strstr(said, words);
    printf("%sok %d - %s\n", ok ? "" : "not ", number, file);
    if (!ok)
        printf("# expected: %s\n# got: %s\n", words, said ? said : "accepted");
    return ok;
}
static int files_in_corpus(void) {
    int count = 0;
    DIR *folder = opendir(FUZZ_CORPUS);
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        count += entry->d_name[0] != '.';
    if (folder)
        closedir(folder);
    return count;
}

int main(void) {
    char line[1024];
    int listed = 0, failed = 0;
    FILE *expected = fopen(FUZZ_CORPUS ".expected", "r");
    while (expected && fgets(line, sizeof line, expected)) {
        char *words = strstr(line, ": ");
        line[strcspn(line, "\n")] = '\0';
        fuzz_require(words && words[2]); // "" would fit whatever is said
        *words = '\0';
        failed += !replay_file(++listed, line, words + 2);
    }
    if (expected)
        fclose(expected);
    if (listed == 0 || listed != files_in_corpus()) {
        failed++;
        printf("not ok %d - " FUZZ_CORPUS ".expected lists each file of the folder\n", listed + 1);
    }
    return failed > 0;
}
#endif
