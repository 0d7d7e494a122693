// Lets two ends of a new connection prove to each other that they are of one job, before either believes what the other
// says or keeps anything of it for longer than a few seconds.
//   accepting end   challenge: 32 random bytes
//   joining end     reply: 32 random bytes, its hello, and the HMAC-SHA-256 by the key of all that was said so far
//   accepting end   answer: a verdict, its hello, and such an HMAC again
// An answer cannot be used again, since each end has given random bytes. What is said later is neither encrypted nor
// proven. A connection that says something wrong, or nothing for 5 s, or waits when too many others do, is closed.
#pragma once
#include "runtime/net/sha256.h"  // SHA256_BYTES
#include "runtime/net/sockets.h" // enum socket_answer

enum { HANDSHAKE_HELLO = 96 }; // most bytes of a hello

// All ranks of a job have this and nobody else; zeros: none, so that any process may join.
struct handshake_key {
    unsigned char job[SHA256_BYTES];    // made by rank 0, for one job, where its ranks have another way to get it
    unsigned char secret[SHA256_BYTES]; // of the user's secret
};

// The accepting end's connections that have proven nothing yet.
struct handshake_door;

__BEGIN_DECLS
// bytes (count, at most 256) = random bytes of the kernel. False, with errno, when it has none.
bool random_bytes_of_system(void *bytes, size_t count);
// *key (may be *from) = a key for a further purpose: `job` is a hash of *from and `shared` (bytes), `secret` is from's.
void handshake_derive(struct handshake_key *key, const struct handshake_key *from, const void *shared, size_t bytes);

// Says the hello (bytes, at most HANDSHAKE_HELLO) as the joining end. Returns what the other end is. answer (bytes) = a
// SOCKET_FRIEND's hello; else `error` says why. The socket stays open. An end that takes 10 s counts as a stranger.
enum socket_answer handshake_join(int socket, const struct handshake_key *key, const void *hello, void *answer,
                                  size_t bytes, double until_s, struct error_text *error);

// Opens the accepting end at a `listener` of sockets.h, with room for `ranks` + 256 unproven connections. rank: this
// one, for messages. key: copied. handshake_close frees the result. NULL when out of memory.
struct handshake_door *handshake_open(int listener, const struct handshake_key *key, int rank, int ranks);
// Waits for a peer that has proven its hello (bytes); the caller then admits or refuses it. False: none has by until_s.
bool handshake_next(struct handshake_door *d, void *hello, size_t bytes, double until_s);
// Sends this end's own hello (bytes) to the peer that handshake_next found, which has proven itself already.
// Returns the peer's socket, which the caller closes; -1: the peer has gone.
int handshake_welcome(struct handshake_door *d, const void *own_hello, size_t bytes);
// Refuses the peer that handshake_next found, and closes its connection. The caller prints why.
void handshake_refuse(struct handshake_door *d);
// Closes connections not admitted, prints how many beyond ten were turned away, and frees d. The listener stays open.
void handshake_close(struct handshake_door *d);
__END_DECLS
