// This program, run anew as a child: what may crash or hang does so there.
#pragma once
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

enum child_end { CHILD_EXITED, CHILD_KILLED, CHILD_LATE, CHILD_NOT_STARTED };
struct child_result {
    enum child_end end;
    int status; // EXITED: the exit status; KILLED: the signal; NOT_STARTED: errno
    int left;   // the process that was killed and is still there; 0: it is gone
};

__BEGIN_DECLS
// Runs this program with the arguments ([0]: its name; NULL after the last) in this process's environment. Waits for
// the child's end, at most `seconds`, which begin anew once `anew` (NULL: never) is in the output, then kills it and
// gives it 10 s. output (size bytes) = what it wrote to stdout and stderr; of a longer text the beginning and the end.
struct child_result child_run(char *output, size_t size, char *const arguments[], double seconds, const char *anew);
// Makes the calling child end when its parent dies, or now where the parent has died. parent: the parent's getpid().
void child_follow_parent(int parent);
__END_DECLS
