#include "runtime/machine/standard_files.h"
#include "runtime/machine/error.h" // fail
#include <errno.h>                 // errno
#include <fcntl.h>                 // open, fcntl
#include <string.h>                // strerror
#include <unistd.h>                // STDIN_FILENO

void standard_files_open(void) {
    for (int number = STDIN_FILENO; number <= STDERR_FILENO; number++) {
        if (fcntl(number, F_GETFD) >= 0)
            continue;
        // The lowest number that is free, which is this one.
        if (open("/dev/null", number == STDIN_FILENO ? O_RDONLY : O_WRONLY) != number)
            fail("/dev/null: cannot be opened in place of a standard file that is closed: %s", strerror(errno));
    }
}
