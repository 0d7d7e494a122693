#include "runtime/net/sockets.h"
#include <arpa/inet.h>   // inet_ntop
#include <errno.h>       // errno, EINPROGRESS
#include <ifaddrs.h>     // getifaddrs
#include <net/if.h>      // IFF_LOOPBACK
#include <netdb.h>       // getaddrinfo
#include <netinet/in.h>  // struct sockaddr_in6
#include <netinet/tcp.h> // TCP_NODELAY
#include <poll.h>        // poll
#include <stdio.h>       // snprintf
#include <string.h>      // memset, memcmp
#include <sys/socket.h>  // socket, accept4
#include <time.h>        // nanosleep
#include <unistd.h>      // close, gethostname

#include "runtime/machine/deadline.h" // deadline_clock_s

enum { ATTEMPT_S = 3 }; // timeout for one address to answer, so that time is left for the next

void socket_host_name(char host[SOCKET_HOST]) {
    if (gethostname(host, SOCKET_HOST) != 0)
        snprintf(host, SOCKET_HOST, "localhost");
    host[SOCKET_HOST - 1] = '\0';
}

// Sleeps. A signal that is handled ends the sleep early.
void socket_sleep_s(double seconds) {
    struct timespec time;
    time.tv_sec = (time_t)seconds;
    time.tv_nsec = (long)(1e9 * (seconds - (double)time.tv_sec));
    nanosleep(&time, NULL);
}

int socket_poll_ms(double until_s) {
    const double left_s = until_s - deadline_clock_s();
    return left_s <= 0 ? 0 : left_s > 1e6 ? 1000000000 : (int)(1e3 * left_s) + 1;
}

bool socket_wait_ready(int socket, short events, double until_s) {
    for (;;) {
        struct pollfd wanted = {socket, events, 0};
        const int ready = poll(&wanted, 1, socket_poll_ms(until_s));
        if (ready > 0)
            return true;
        if (ready == 0 && deadline_clock_s() >= until_s) {
            errno = ETIMEDOUT;
            return false;
        }
        if (ready < 0 && errno != EINTR)
            return false;
    }
}

// Opens a listening socket as socket_listen does, at an address of one family only: AF_INET6 or AF_INET.
static int socket_listen_family(int family, const char *numeric, int port) {
    char service[16];
    struct addrinfo hints, *found = NULL;
    memset(&hints, 0, sizeof hints);
    hints.ai_family = family;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_PASSIVE | AI_NUMERICHOST | AI_NUMERICSERV;
    snprintf(service, sizeof service, "%d", port);
    if (getaddrinfo(numeric, service, &hints, &found) != 0) {
        errno = EADDRNOTAVAIL;
        return -1;
    }
    const int yes = 1, no = 0;
    int listener = socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (listener >= 0) {
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes,
                   sizeof yes); // otherwise the port of an ended job can't be used for a while
        if (found->ai_family == AF_INET6)
            setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
        if (bind(listener, found->ai_addr, found->ai_addrlen) != 0 || listen(listener, SOMAXCONN) != 0) {
            const int why = errno;
            close(listener);
            listener = -1;
            errno = why;
        }
    }
    freeaddrinfo(found);
    return listener;
}

int socket_listen(const char *numeric, int port) {
    const int listener = socket_listen_family(AF_INET6, numeric, port); // takes IPv4 too
    if (listener >= 0 || errno == EADDRINUSE || errno == EACCES)
        return listener;
    return socket_listen_family(AF_INET, numeric, port);
}

int socket_port(int listener) {
    struct sockaddr_storage address;
    socklen_t bytes = sizeof address;
    if (getsockname(listener, (struct sockaddr *)&address, &bytes) != 0)
        return 0;
    return ntohs(address.ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)&address)->sin6_port
                                               : ((const struct sockaddr_in *)&address)->sin_port);
}

static void socket_set_no_delay(int socket) {
    const int yes = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

int socket_accept(int listener, struct sockaddr_storage *from) {
    socklen_t bytes = sizeof *from;
    const int accepted = accept4(listener, (struct sockaddr *)from, from ? &bytes : NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (accepted >= 0)
        socket_set_no_delay(accepted);
    return accepted;
}

void socket_address_own(struct socket_address *address, int listener) {
    struct ifaddrs *all = NULL;
    memset(address, 0, sizeof *address);
    socket_host_name(address->host);
    address->port = socket_port(listener);
    if (getifaddrs(&all) != 0)
        return;
    int interfaces = 0;
    for (const struct ifaddrs *one = all; one && interfaces < SOCKET_INTERFACES; one = one->ifa_next) {
        if (!one->ifa_addr || !(one->ifa_flags & IFF_UP) || one->ifa_flags & IFF_LOOPBACK)
            continue;
        const struct sockaddr_in *const v4 = (const struct sockaddr_in *)one->ifa_addr;
        const struct sockaddr_in6 *const v6 = (const struct sockaddr_in6 *)one->ifa_addr;
        const bool is_v4 = one->ifa_addr->sa_family == AF_INET;
        const bool is_v6 = one->ifa_addr->sa_family == AF_INET6 && !IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr);
        if (is_v4 || is_v6) // a link-local address needs the interface's name, which differs between hosts
            inet_ntop(one->ifa_addr->sa_family, is_v4 ? (const void *)&v4->sin_addr : (const void *)&v6->sin6_addr,
                      address->interfaces[interfaces++], SOCKET_ADDRESS_TEXT);
    }
    freeifaddrs(all);
}

void socket_address_terminate(struct socket_address *address) {
    address->host[SOCKET_HOST - 1] = '\0';
    for (int i = 0; i < SOCKET_INTERFACES; i++)
        address->interfaces[i][SOCKET_ADDRESS_TEXT - 1] = '\0';
}

// Whether a socket is connected to itself. If nobody listens at a port here, the kernel may give that port to this end.
static bool socket_is_its_own_peer(int socket) {
    struct sockaddr_storage own, peer;
    socklen_t own_bytes = sizeof own, peer_bytes = sizeof peer;
    memset(&own, 0, sizeof own);
    memset(&peer, 0, sizeof peer);
    return getsockname(socket, (struct sockaddr *)&own, &own_bytes) == 0 &&
           getpeername(socket, (struct sockaddr *)&peer, &peer_bytes) == 0 && own_bytes == peer_bytes &&
           memcmp(&own, &peer, own_bytes) == 0;
}

// Waits for a connect() that is in progress. Returns 0, or the errno that it ended with.
static int socket_finish_connecting(int socket, double until_s) {
    int why = 0;
    socklen_t bytes = sizeof why;
    if (!socket_wait_ready(socket, POLLOUT, until_s))
        return errno;
    if (getsockopt(socket, SOL_SOCKET, SO_ERROR, &why, &bytes) != 0)
        return errno;
    return why;
}

// Tries once to connect to an address. Returns the socket; -1 with errno, ETIMEDOUT if until_s has passed.
static int socket_connect_to(const struct addrinfo *to, double until_s) {
    const int connected = socket(to->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int why = 0;
    if (connected < 0)
        return -1;
    if (connect(connected, to->ai_addr, to->ai_addrlen) != 0)
        why = errno == EINPROGRESS ? socket_finish_connecting(connected, until_s) : errno;
    if (!why && socket_is_its_own_peer(connected))
        why = ECONNREFUSED;
    if (!why) {
        socket_set_no_delay(connected);
        return connected;
    }
    close(connected);
    errno = why;
    return -1;
}

// Tries a name's addresses, each once for ATTEMPT_S, until one connects. Returns its socket; -1 with a text in `error`.
static int socket_connect_once(const char *host, int port, double until_s, struct error_text *error) {
    char service[16];
    struct addrinfo hints, *found = NULL;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    snprintf(service, sizeof service, "%d", port);
    const int problem = getaddrinfo(host, service, &hints, &found);
    if (problem != 0) {
        error_format(error, "%s: %s", host, gai_strerror(problem));
        return -1;
    }
    int connected = -1;
    for (const struct addrinfo *to = found; to && connected < 0; to = to->ai_next) {
        const double attempt_s = deadline_clock_s() + ATTEMPT_S;
        connected = socket_connect_to(to, attempt_s < until_s ? attempt_s : until_s);
        if (connected < 0)
            error_format(error, "%s, port %d: %s", host, port, strerror(errno));
    }
    freeaddrinfo(found);
    return connected;
}

// Whether two addresses' lists of interfaces are equal, or one is empty. Names can't tell: containers often share one.
static bool socket_same_interfaces(const struct socket_address *address, const struct socket_address *own) {
    for (int i = 0; i < SOCKET_INTERFACES; i++)
        if (strcmp(own->interfaces[i], address->interfaces[i]) != 0)
            return !address->interfaces[0][0] || !own->interfaces[0][0];
    return true;
}

// Returns the ith name or numeric address to try for an address; NULL after the last. own: this host's. If the address
// is of this host, the loopback comes first, which works whatever the name means. If another host has this host's name,
// the name is left out: here it means this host, where another rank may listen at that port.
static const char *socket_candidate(const struct socket_address *address, const struct socket_address *own, int i) {
    const bool same_name = strcmp(own->host, address->host) == 0;
    const bool here = same_name && socket_same_interfaces(address, own);
    if (here && i == 0)
        return "127.0.0.1";
    if (here)
        i--;
    else if (same_name)
        i++; // leaves the name out
    if (i == 0)
        return address->host;
    return i <= SOCKET_INTERFACES && address->interfaces[i - 1][0] ? address->interfaces[i - 1] : NULL;
}

int socket_connect(const struct socket_address *address, double until_s, socket_greeting *greeting, void *context,
                   struct error_text *error) {
    struct socket_address own;
    double pause_s = 0.02;
    socket_address_own(&own, -1);
    for (;;) {
        const char *host;
        for (int i = 0; (host = socket_candidate(address, &own, i)) != NULL; i++) {
            const int connected = socket_connect_once(host, address->port, until_s, error);
            if (connected < 0)
                continue;
            const enum socket_answer answer = greeting ? greeting(connected, context, until_s, error) : SOCKET_FRIEND;
            if (answer == SOCKET_FRIEND)
                return connected;
            close(connected);
            if (answer == SOCKET_REFUSAL)
                return -1;
        }
        if (deadline_clock_s() + pause_s >= until_s)
            return -1;
        socket_sleep_s(pause_s);
        pause_s = pause_s < 0.25 ? 2 * pause_s : 0.5;
    }
}

bool socket_send_all(int socket, const void *data, size_t bytes, double until_s) {
    for (size_t sent = 0; sent < bytes;) {
        const ssize_t now = send(socket, (const char *)data + sent, bytes - sent, MSG_NOSIGNAL);
        if (now > 0)
            sent += (size_t)now;
        else if (now < 0 && errno != EAGAIN && errno != EINTR)
            return false;
        else if (!socket_wait_ready(socket, POLLOUT, until_s))
            return false;
    }
    return true;
}

bool socket_receive_all(int socket, void *data, size_t bytes, double until_s) {
    for (size_t received = 0; received < bytes;) {
        const ssize_t now = recv(socket, (char *)data + received, bytes - received, 0);
        if (now > 0) {
            received += (size_t)now;
            continue;
        }
        if (now == 0)
            errno = ECONNRESET;
        if (now == 0 || (errno != EAGAIN && errno != EINTR) || !socket_wait_ready(socket, POLLIN, until_s))
            return false;
    }
    return true;
}
