// Ends the program at a user's mistake: one message on stderr, exit status 2.
#pragma once
#include <sys/cdefs.h> // __BEGIN_DECLS

enum { EXIT_USAGE = 2 };

__BEGIN_DECLS
// Ends the program by exit(EXIT_USAGE), with a line on stderr: "train_gpt: " and the message, which says, without a
// full stop, what is wrong and what to change. With several ranks the line begins "train_gpt: rank R: ". Ranks other
// than 0 wait 0.5 s: mostly rank 0 prints the same, and its end ends them before they do.
void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
__END_DECLS
