// TCP with deadlines, `until_s`, by deadline_clock_s. Every socket is non-blocking, closed on exec, and sends at once
// (TCP_NODELAY). Nothing here ends the process or raises SIGPIPE. The caller closes sockets by close().
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <stdint.h>    // int32_t
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "runtime/machine/error_text.h" // struct error_text

enum {
    SOCKET_HOST = 256,        // bytes of a host's name
    SOCKET_ADDRESS_TEXT = 46, // bytes of an address in digits: INET6_ADDRSTRLEN
    SOCKET_INTERFACES = 4,    // most interfaces whose addresses are told to others
};

struct sockaddr_storage;

// The address at which a process listens, in bytes that can be sent to others.
struct socket_address {
    char host[SOCKET_HOST]; // a name, or an address in digits
    // Addresses of the host's interfaces, for a host that can't resolve the name; where they are fewer, "" ends them.
    char interfaces[SOCKET_INTERFACES][SOCKET_ADDRESS_TEXT];
    int32_t port;
};

// Says what a greeting finds at the other end. A stranger is no error: a numeric address may mean another host here.
enum socket_answer { SOCKET_FRIEND, SOCKET_STRANGER, SOCKET_REFUSAL /* that a retry would not change */ };
typedef enum socket_answer socket_greeting(int socket, void *context, double until_s, struct error_text *error);

__BEGIN_DECLS
// host = this host's name, cut to SOCKET_HOST; "localhost" where the name can't be found.
void socket_host_name(char host[SOCKET_HOST]);
void socket_sleep_s(double seconds);
// Returns the timeout, in ms, for a poll() until until_s: 1 to 10^9, or 0 once that has passed.
int socket_poll_ms(double until_s);
// Waits until a socket has one of `events` (POLLIN, POLLOUT) or has failed. False with errno, ETIMEDOUT after until_s.
bool socket_wait_ready(int socket, short events, double until_s);

// Returns a listening socket or -1 with errno. numeric: an IP address; NULL: all; a name: EADDRNOTAVAIL. port 0: any.
int socket_listen(const char *numeric, int port);
// Returns the port that a listening socket was given; 0: it can't be found.
int socket_port(int listener);
// Accepts a connection that has arrived, at once. Returns its socket; -1 with errno (EAGAIN: none). from: may be NULL.
int socket_accept(int listener, struct sockaddr_storage *from);
// *address = where other hosts reach a listening socket: this host's name, its addresses, the port (listener -1: 0).
void socket_address_own(struct socket_address *address, int listener);
// Ends an address's texts with 0 bytes, since another process may have sent them without.
void socket_address_terminate(struct socket_address *address);
// Returns a socket connected to the first name or address at which `greeting`, given `context`, finds a friend;
// greeting NULL: to the first that answers. Tries all again and again, since the listener may start later. At a refusal
// or the deadline returns -1, with a text in `error`. The look-up of a name may overrun the deadline.
int socket_connect(const struct socket_address *address, double until_s, socket_greeting *greeting, void *context,
                   struct error_text *error);

// Sends all bytes. False with errno, maybe after a part: sending fails, or would take beyond until_s (ETIMEDOUT).
bool socket_send_all(int socket, const void *data, size_t bytes, double until_s);
// Receives all bytes. False with errno: ECONNRESET if the other end has closed, ETIMEDOUT if they come after until_s.
bool socket_receive_all(int socket, void *data, size_t bytes, double until_s);
__END_DECLS
