// Catches what this process itself prints on stderr, between hear_stderr and end_hearing.
#pragma once
#include "test/testing.h" // cmocka
#include <stdio.h>        // fread
#include <unistd.h>       // dup, dup2

struct heard {
    FILE *file;
    int kept; // the descriptor of the former stderr
};
static inline void hear_stderr(struct heard *heard) {
    heard->file = test_file();
    heard->kept = dup(STDERR_FILENO);
    assert_true(heard->file && heard->kept >= 0);
    dup2(fileno(heard->file), STDERR_FILENO);
}
// Ends what hear_stderr began, and puts what was printed into text (text_bytes).
static inline void end_hearing(struct heard *heard, char *text, size_t text_bytes) {
    dup2(heard->kept, STDERR_FILENO);
    close(heard->kept);
    rewind(heard->file);
    text[fread(text, 1, text_bytes - 1, heard->file)] = '\0';
    fclose(heard->file);
}
