// Ends the program at a user's mistake: one message on stderr, exit status 2.
#pragma once
#include <sys/cdefs.h> // __BEGIN_DECLS

enum { EXIT_USAGE = 2 };

__BEGIN_DECLS
// Ends the program by exit(EXIT_USAGE), with a line on stderr: "train_gpt: " and the message, which says, without a
// full stop, what is wrong and what to change. Of several ranks: "train_gpt: rank R: ", 0.5 s late unless R is 0.
void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
__END_DECLS
