// The standard files of a process that was started without some of them (<&- >&- 2>&-).
#pragma once
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Opens /dev/null as each of stdin, stdout and stderr that is closed: the next file that is opened would take its
// number, and what is printed would go into that file. To be called before any is opened. Ends the process with status
// 2 where /dev/null can't be opened.
void standard_files_open(void);
__END_DECLS
