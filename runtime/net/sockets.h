// TCP with deadlines: listening, connecting with retries, sending and receiving all of something.
//
// Every socket is non-blocking, closed on exec, and sends at once (TCP_NODELAY). `until_s` is a time of
// deadline_clock_s. Nothing here ends the process, and no write to a connection that has gone raises SIGPIPE. The
// caller closes what it is given by close().
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <stdint.h>    // int32_t
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "runtime/machine/error_text.h" // struct error_text

enum {
    SOCKET_HOST = 256,        // bytes of a host's name
    SOCKET_ADDRESS_TEXT = 46, // bytes of an address in digits: INET6_ADDRSTRLEN
    SOCKET_INTERFACES = 4,    // whose addresses are told to others
};

// Where a process listens, in bytes that can be sent to others.
struct socket_address {
    char host[SOCKET_HOST]; // a name, or an address in digits
    // Of its interfaces, for a host that does not know the name; "" from the last on.
    char interfaces[SOCKET_INTERFACES][SOCKET_ADDRESS_TEXT];
    int32_t port;
};

// What the caller of socket_connect finds at the other end: an address in digits may mean another host here.
enum socket_answer { SOCKET_FRIEND, SOCKET_STRANGER, SOCKET_REFUSAL /* that a retry would not change */ };
typedef enum socket_answer socket_greeting(int socket, void *context, double until_s, struct error_text *error);

__BEGIN_DECLS
// Cut to SOCKET_HOST.
void socket_host_name(char host[SOCKET_HOST]);
void socket_sleep_s(double seconds);
// The timeout to give poll() for a wait until then.
int socket_poll_ms(double until_s);
// Waits until the socket can be read (POLLIN) or written (POLLOUT), or has an error to report; false with errno.
bool socket_ready(int socket, short events, double until_s);

// A listening socket; -1 with errno. `numeric`: an address in digits; NULL: all of this host's. Port 0: any that is
// free.
int socket_listen(const char *numeric, int port);
// The port that a listening socket was given.
int socket_port(int listener);
// A connection that has arrived; -1 where none has.
int socket_accept(int listener);
// Under which names other hosts may reach what listens here: the host's own name, and its interfaces' addresses.
void socket_address_own(struct socket_address *address, int listener);
// A connection to whichever of the addresses answers; -1 and a text after the deadline, or after a refusal. All are
// tried in turn, again and again: who listens may start later. `greeting` (NULL: none) says who answered.
int socket_connect(const struct socket_address *address, double until_s, socket_greeting *greeting, void *context,
                   struct error_text *error);

// False with errno where not all could be moved before the deadline; ECONNRESET where the other end closed.
bool socket_send_all(int socket, const void *data, size_t bytes, double until_s);
bool socket_receive_all(int socket, void *data, size_t bytes, double until_s);
__END_DECLS
