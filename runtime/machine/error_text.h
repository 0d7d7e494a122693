// The text of an error, from a parser or another call that can fail. Such a function returns NULL on success, otherwise
// the problem, a text in the caller's struct error_text. The caller decides whether the process ends.
#pragma once
#include <sys/cdefs.h> // __BEGIN_DECLS

struct error_text {
    char text[1024];
};

__BEGIN_DECLS
// Formats error->text as printf does, cut to its size, and returns that text. No argument may overlap it.
const char *error_format(struct error_text *error, const char *format, ...)
    __attribute__((format(printf, 2, 3), returns_nonnull));
__END_DECLS

// Returns from the function with the problem that a call found, if any.
#define RETURN_PROBLEM(call)                                                                                           \
    do {                                                                                                               \
        const char *const problem_ = (call);                                                                           \
        if (problem_)                                                                                                  \
            return problem_;                                                                                           \
    } while (0)
