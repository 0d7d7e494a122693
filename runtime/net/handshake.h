// Lets two ends of a new connection prove to each other that they are of one job, before either believes what the other
// says or keeps anything of it for longer than a few seconds.
//   accepting end   challenge: 32 random bytes
//   joining end     reply: 32 random bytes, its hello, and the HMAC-SHA-256 by the key of all that was said so far
//   accepting end   answer: a verdict, its hello, and such an HMAC again
// An answer cannot be used again, since each end has given random bytes. What is said later is neither encrypted nor
// proven. A connection that says something wrong, or nothing for 5 s, or that waits when too many others do, is closed;
// the first ten are printed, then their number.
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
// bytes (count, at most 256) = random bytes of the kernel; false with errno.
bool random_bytes_of_system(void *bytes, size_t count);
// Derives *key, which may be *from, for a further purpose: key->job from *from and `shared` (bytes). The secret stays.
void handshake_derive(struct handshake_key *key, const struct handshake_key *from, const void *shared, size_t bytes);

// Says the hello (bytes, at most HANDSHAKE_HELLO), as the joining end; answer (bytes) = the accepting end's hello, of a
// SOCKET_FRIEND. Another result has its reason in `error`. The socket stays open. An end that takes 10 s is a stranger:
// two ranks must not wait for each other where an address means another rank here.
enum socket_answer handshake_join(int socket, const struct handshake_key *key, const void *hello, void *answer,
                                  size_t bytes, double until_s, struct error_text *error);

// Opens the accepting end at a `listener` of sockets.h; `ranks` + 256 connections may wait unproven. rank: this one,
// for messages. key: copied. handshake_close frees what is returned. NULL: no memory.
struct handshake_door *handshake_open(int listener, const struct handshake_key *key, int rank, int ranks);
// Waits for a connection that has proven its hello (bytes), to be admitted or refused next. False: none has by until_s.
bool handshake_next(struct handshake_door *d, void *hello, size_t bytes, double until_s);
// Answers handshake_next's connection with a hello. Returns its socket, which the caller closes; -1: it has gone.
int handshake_admit(struct handshake_door *d, const void *answer, size_t bytes);
// Refuses handshake_next's connection, and closes it; the caller prints why.
void handshake_refuse(struct handshake_door *d);
// Closes what was not admitted, prints how many beyond ten were turned away, and frees d; the listener stays open.
void handshake_close(struct handshake_door *d);
__END_DECLS
