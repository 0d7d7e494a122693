// TCP with deadlines: listening, connecting with retries, sending and receiving whole buffers. Every socket is
// non-blocking, closed on exec, and sends at once (TCP_NODELAY). `until_s` is a time of deadline_clock_s. No function
// here ends the process, and no write to a closed connection raises SIGPIPE. The caller closes sockets by close().
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
    // Addresses of the host's interfaces, for a host that can't resolve the name; "" ends them.
    char interfaces[SOCKET_INTERFACES][SOCKET_ADDRESS_TEXT];
    int32_t port;
};

// Says what a greeting finds at the other end, since a numeric address may mean another host here.
enum socket_answer { SOCKET_FRIEND, SOCKET_STRANGER, SOCKET_REFUSAL /* that a retry would not change */ };
typedef enum socket_answer socket_greeting(int socket, void *context, double until_s, struct error_text *error);

__BEGIN_DECLS
// host = this host's name, cut to SOCKET_HOST.
void socket_host_name(char host[SOCKET_HOST]);
void socket_sleep_s(double seconds);
// Returns the timeout for poll(), in ms, of a wait until until_s: 0 once that has passed, before that 1 to 10^9.
int socket_poll_ms(double until_s);
// Waits until the socket can be read (POLLIN) or written (POLLOUT), or has an error to report; false with errno.
bool socket_wait_ready(int socket, short events, double until_s);

// Opens a listening socket; -1 with errno. numeric: address in digits; NULL: all of this host. port 0: any free port.
int socket_listen(const char *numeric, int port);
// Returns the port that a listening socket was given; 0: it can't be found.
int socket_port(int listener);
// Returns the socket of an arrived connection; -1 with errno: there is none. *from (NULL: not wanted) = its other end.
int socket_accept(int listener, struct sockaddr_storage *from);
// *address = the address of a listening socket for other hosts: this host's name, its interfaces' addresses, the port
// (0 for listener -1).
void socket_address_own(struct socket_address *address, int listener);
// Ends the texts of an address with 0 bytes, which another process may have sent without them.
void socket_address_terminate(struct socket_address *address);
// Returns a socket connected to whichever name or address answers; -1 and a text after the deadline or a refusal. All
// are tried in turn, repeatedly, since the listener may start later. `greeting` (NULL: none) checks who answered.
int socket_connect(const struct socket_address *address, double until_s, socket_greeting *greeting, void *context,
                   struct error_text *error);

// Sends all bytes; false with errno where that fails, or is not done by until_s (ETIMEDOUT).
bool socket_send_all(int socket, const void *data, size_t bytes, double until_s);
// Receives all bytes; false with errno: ETIMEDOUT after until_s, ECONNRESET where the other end has closed.
bool socket_receive_all(int socket, void *data, size_t bytes, double until_s);
__END_DECLS
