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
// Runs this program with the arguments (NULL behind the last) and this process's environment, and waits for its end, at
// most `seconds`: then it is killed, and given 10 s to be gone. The seconds begin anew when `anew` is in the output;
// NULL: never. output (size bytes) = what it wrote to stdout and stderr; of a longer text the beginning and the end.
struct child_result child_run(char *output, size_t size, char *const arguments[], double seconds, const char *anew);
// Ties the calling child to its parent: it ends when the parent dies, or now where it has died. parent: its getpid().
void child_follow_parent(int parent);
__END_DECLS
