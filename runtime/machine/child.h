// Runs this program anew as a child, so that what may crash or hang does so there.
#pragma once
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

enum child_end { CHILD_EXITED, CHILD_KILLED, CHILD_LATE, CHILD_NOT_STARTED };
struct child_result {
    enum child_end end;
    int status; // EXITED: the exit status; KILLED: the signal; NOT_STARTED: errno; LATE: has no meaning
    int left;   // the process that was killed and has not ended in time; 0: there is none
};

__BEGIN_DECLS
// Runs this program as a child until it ends. arguments: [0] is its name, NULL the end. Kills the child after `seconds`
// (0: never), counted anew once `anew` (NULL: nothing) is printed. A child that was killed or has closed its output
// gets 10 s to end; `left` names one that has not. output (size bytes) = stdout and stderr, cut in the middle.
struct child_result child_run(char *output, size_t size, char *const arguments[], double seconds, const char *anew);
// Makes SIGKILL end the calling child when the thread that started it ends. Exits at once if `parent` is not getppid().
void child_follow_parent(int parent);
__END_DECLS
