// Ports for tests whose processes agree on a port before any of them listens there.
#pragma once
#include "runtime/net/sockets.h" // socket_listen
#include "test/testing.h"        // fail_msg
#include <unistd.h>              // close, getpid

// Finds a port of this host at which nobody listens. It lies below 32768, where Linux begins to hand out ports for
// connections: another test's connection could get a port above before the process under test listens.
static inline int test_free_port(void) {
    enum { FIRST = 10000, PROCESSES = 327, OF_A_PROCESS = 61 };
    static int next;
    for (int i = 0; i < OF_A_PROCESS; i++) {
        const int port = FIRST + (int)getpid() % PROCESSES * OF_A_PROCESS + next++ % OF_A_PROCESS;
        const int listener = socket_listen("127.0.0.1", port);
        if (listener >= 0) {
            close(listener);
            return port;
        }
    }
    fail_msg("no free port among %d from 10000 to 29946", OF_A_PROCESS);
    return -1;
}
