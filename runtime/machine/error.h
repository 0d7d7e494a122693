// Ends the program at a user's mistake: one message on stderr, exit status 2.
#pragma once
#include <sys/cdefs.h> // __BEGIN_DECLS

enum { EXIT_USAGE = 2 };

__BEGIN_DECLS
// Prints "train_gpt: " (of several ranks "train_gpt: rank R: ", half a second late unless R is 0), the message and a
// newline on stderr; calls exit(EXIT_USAGE). The message, without a full stop, says what is wrong and what to change.
void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
__END_DECLS
