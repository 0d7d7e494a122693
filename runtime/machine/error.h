// How a user's mistake ends the program: one message on stderr, exit status 2.
#pragma once
#include <sys/cdefs.h> // __BEGIN_DECLS

enum { EXIT_USAGE = 2 };

__BEGIN_DECLS
// Prints "train_gpt: " ("train_gpt: rank R: " where there are several ranks), the message and a newline, and exits. The
// message is one line without a full stop: what is wrong, in which file or option, what was expected, what to change.
void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
__END_DECLS
