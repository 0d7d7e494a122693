// Ports for tests whose processes meet at one that is chosen before any of them listens there.
#pragma once
#include "runtime/net/sockets.h" // socket_listen
#include "test/testing.h"        // fail_msg
#include <unistd.h>              // close, getpid

// A port of this host at which nobody listens. It is below those that systems give to connections (from 32768 on), one
// of which may be any test's before the process that was to listen does. Tests that run together begin elsewhere.
static inline int test_free_port(void) {
    enum { FIRST = 10000, PORTS = 20000, STEP = 7, OF_A_PROCESS = 61 };
    static unsigned next;
    for (int i = 0; i < 100; i++) {
        const int port = FIRST + (int)(((unsigned)getpid() * OF_A_PROCESS + STEP * next++) % PORTS);
        const int listener = socket_listen("127.0.0.1", port);
        if (listener >= 0) {
            close(listener);
            return port;
        }
    }
    fail_msg("no free port below 32768");
    return -1;
}
