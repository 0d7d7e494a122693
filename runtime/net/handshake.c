#include "runtime/net/handshake.h"
#include <errno.h>      // errno
#include <netdb.h>      // getnameinfo
#include <poll.h>       // poll
#include <stdio.h>      // fprintf
#include <stdlib.h>     // calloc
#include <string.h>     // memcpy
#include <sys/random.h> // getrandom
#include <sys/socket.h> // recv, struct sockaddr_storage
#include <unistd.h>     // close

#include "runtime/machine/deadline.h" // deadline_clock_s

enum {
    HANDSHAKE_VERSION = 2, // of the handshake, the hellos and the frames after it
    REPLY_S = 5,           // timeout for a connection's reply
    // Connections besides the job's own that may wait. Where more come the oldest is closed, so that silent ones keep
    // none of the job's out: a rank replies within milliseconds, and connects again where it was closed.
    WAITING = 256,
    BATCH = 64,     // connections accepted before replies are read again
    MAX_LINES = 10, // for connections that were turned away
};
static const char HANDSHAKE_MAGIC[8] = {'t', 'r', 'a', 'i', 'n', 'g', 'p', 't'};

// The timeout for the accepting end's bytes. What takes longer is a stranger, or waits for this rank. Tests change it.
static double answer_s = 10;

enum handshake_verdict { VERDICT_WELCOME, VERDICT_OTHER_SECRET, VERDICT_REFUSED };

// The two ends say this, in this order and as these bytes. A proof is the HMAC of all bytes before it.
struct handshake_challenge {
    char magic[8];
    uint32_t version;
    unsigned char random[SHA256_BYTES];
};
struct handshake_reply {
    char magic[8];
    uint32_t version;
    unsigned char random[SHA256_BYTES], hello[HANDSHAKE_HELLO], proof[SHA256_BYTES];
};
struct handshake_answer {
    char magic[8];
    uint32_t verdict;
    unsigned char hello[HANDSHAKE_HELLO], proof[SHA256_BYTES];
};
struct handshake_talk {
    struct handshake_challenge challenge;
    struct handshake_reply reply;
    struct handshake_answer answer;
};

// A connection that has proven nothing yet.
struct handshake_guest {
    int socket; // -1: a free place
    struct sockaddr_storage from;
    double since_s;
    bool arrived; // something has, by the last poll
    size_t bytes; // of the reply, arrived
    struct handshake_talk talk;
};

struct handshake_door {
    int listener, rank, places;
    struct handshake_key key;
    struct handshake_guest *guests, *proven; // (places); proven: the one that handshake_next found
    struct pollfd *polls;                    // (1 + places): the listener, then the guests
    int turned_away;
};

bool random_bytes_of_system(void *bytes, size_t count) { return getrandom(bytes, count, 0) == (ssize_t)count; }

void handshake_derive(struct handshake_key *key, const struct handshake_key *from, const void *shared, size_t bytes) {
    struct handshake_key derived = *from;
    hmac_sha256(derived.job, from, sizeof *from, shared, bytes);
    *key = derived;
}

// Whether a part of a key is set, that is, not all zeros.
static bool handshake_has(const unsigned char part[SHA256_BYTES]) {
    static const unsigned char none[SHA256_BYTES] = {0};
    return !sha256_same(part, none);
}

// proof = the HMAC, by the key, of the first `bytes` of a talk.
static void handshake_prove(unsigned char proof[SHA256_BYTES], const struct handshake_key *key,
                            const struct handshake_talk *talk, size_t bytes) {
    hmac_sha256(proof, key, sizeof *key, talk, bytes);
}
// Computes the proof of talk->reply: the HMAC of all before it. The joining end sends it, the accepting end checks it.
static void handshake_prove_reply(unsigned char proof[SHA256_BYTES], const struct handshake_key *key,
                                  const struct handshake_talk *talk) {
    handshake_prove(proof, key, talk, offsetof(struct handshake_talk, reply) + offsetof(struct handshake_reply, proof));
}
// Computes the proof of talk->answer: the HMAC of all before it. The accepting end sends it, the joining end checks it.
static void handshake_prove_answer(unsigned char proof[SHA256_BYTES], const struct handshake_key *key,
                                   const struct handshake_talk *talk) {
    handshake_prove(proof, key, talk,
                    offsetof(struct handshake_talk, answer) + offsetof(struct handshake_answer, proof));
}

// Returns what a rank of another job is: a stranger if key->job is set, as jobs may share an address, else a refusal.
static enum socket_answer handshake_other_job(const struct handshake_key *key) {
    return handshake_has(key->job) ? SOCKET_STRANGER : SOCKET_REFUSAL;
}

enum socket_answer handshake_join(int socket, const struct handshake_key *key, const void *hello, void *answer,
                                  size_t bytes, double until_s, struct error_text *error) {
    const double patience_s = deadline_clock_s() + answer_s;
    struct handshake_talk talk;
    unsigned char proof[SHA256_BYTES];
    if (patience_s < until_s)
        until_s = patience_s;
    memset(&talk, 0, sizeof talk);
    memcpy(talk.reply.magic, HANDSHAKE_MAGIC, sizeof talk.reply.magic);
    memcpy(talk.reply.hello, hello, bytes);
    talk.reply.version = HANDSHAKE_VERSION;
    error_format(error, "what listens there is no rank of this job");
    if (!socket_receive_all(socket, &talk.challenge, sizeof talk.challenge, until_s) ||
        memcmp(talk.challenge.magic, HANDSHAKE_MAGIC, sizeof talk.challenge.magic) != 0 ||
        !random_bytes_of_system(talk.reply.random, sizeof talk.reply.random))
        return SOCKET_STRANGER;
    if (talk.challenge.version != HANDSHAKE_VERSION) {
        error_format(error, "it is of another version of this program; start all ranks from the same build");
        return handshake_other_job(key);
    }
    handshake_prove_reply(talk.reply.proof, key, &talk);
    if (!socket_send_all(socket, &talk.reply, sizeof talk.reply, until_s) ||
        !socket_receive_all(socket, &talk.answer, sizeof talk.answer, until_s) ||
        memcmp(talk.answer.magic, HANDSHAKE_MAGIC, sizeof talk.answer.magic) != 0)
        return SOCKET_STRANGER;
    handshake_prove_answer(proof, key, &talk);
    const bool proven = sha256_same(proof, talk.answer.proof);
    if (proven && talk.answer.verdict == VERDICT_WELCOME) {
        memcpy(answer, talk.answer.hello, bytes);
        return SOCKET_FRIEND;
    }
    if (proven) {
        error_format(error, "it refuses this process, and says why");
        return SOCKET_REFUSAL;
    }
    if (talk.answer.verdict != VERDICT_OTHER_SECRET)
        return SOCKET_STRANGER;
    error_format(error, "%s; give all ranks the same by --rendezvous-secret",
                 handshake_has(key->secret) ? "it has another secret than this process, or none"
                                            : "it has a secret, and this process has none");
    return handshake_other_job(key);
}

struct handshake_door *handshake_open(int listener, const struct handshake_key *key, int rank, int ranks) {
    struct handshake_door *const d = (struct handshake_door *)calloc(1, sizeof *d);
    if (!d)
        return NULL;
    d->listener = listener;
    d->key = *key;
    d->rank = rank;
    d->places = ranks + WAITING;
    d->guests = (struct handshake_guest *)calloc((size_t)d->places, sizeof *d->guests);
    d->polls = (struct pollfd *)calloc((size_t)d->places + 1, sizeof *d->polls);
    for (int i = 0; i < d->places && d->guests; i++)
        d->guests[i].socket = -1;
    if (d->guests && d->polls)
        return d;
    handshake_close(d);
    return NULL;
}

static void handshake_print_refusal(const struct handshake_door *d, const struct sockaddr_storage *from,
                                    const char *why) {
    static const char v4_in_v6[] = "::ffff:";
    char host[SOCKET_ADDRESS_TEXT + SOCKET_HOST] = "?", port[8] = "?";
    getnameinfo((const struct sockaddr *)from, sizeof *from, host, sizeof host, port, sizeof port,
                NI_NUMERICHOST | NI_NUMERICSERV);
    fprintf(stderr, "train_gpt: rank %d turns away a connection from %s, port %s: %s\n", d->rank,
            strncmp(host, v4_in_v6, strlen(v4_in_v6)) == 0 ? host + strlen(v4_in_v6) : host, port, why);
}

// Closes a guest's connection, which frees its place in `guests`, and counts it. Prints why, for the first MAX_LINES.
static void handshake_turn_away(struct handshake_door *d, struct handshake_guest *guest, const char *why) {
    if (d->turned_away++ < MAX_LINES)
        handshake_print_refusal(d, &guest->from, why);
    close(guest->socket);
    guest->socket = -1;
}

// Sends a guest the answer without waiting: a socket has room. False: the guest has gone. bytes 0: hello may be NULL.
static bool handshake_send_answer(const struct handshake_door *d, struct handshake_guest *guest,
                                  enum handshake_verdict verdict, const void *hello, size_t bytes) {
    struct handshake_answer *const answer = &guest->talk.answer;
    memset(answer, 0, sizeof *answer);
    memcpy(answer->magic, HANDSHAKE_MAGIC, sizeof answer->magic);
    answer->verdict = (uint32_t)verdict;
    if (bytes > 0)
        memcpy(answer->hello, hello, bytes);
    if (verdict == VERDICT_WELCOME || verdict == VERDICT_REFUSED) // others have no key in common
        handshake_prove_answer(answer->proof, &d->key, &guest->talk);
    return socket_send_all(guest->socket, answer, sizeof *answer, 0);
}

// Whether a guest's whole reply proves its hello. If not, tells the guest that the secrets differ and turns it away.
static bool handshake_judge(struct handshake_door *d, struct handshake_guest *guest) {
    unsigned char proof[SHA256_BYTES];
    handshake_prove_reply(proof, &d->key, &guest->talk);
    if (sha256_same(proof, guest->talk.reply.proof))
        return true;
    handshake_send_answer(d, guest, VERDICT_OTHER_SECRET, NULL, 0);
    handshake_turn_away(d, guest,
                        handshake_has(d->key.secret)
                            ? "it does not have this rank's secret; give all ranks the same by --rendezvous-secret"
                            : "it has a secret or is of another job, and this rank has no secret; give all ranks the "
                              "same by --rendezvous-secret");
    return false;
}

// Receives what there is of a guest's reply. True: it is whole and proven. Turns away a guest that errs or has ended.
static bool handshake_receive(struct handshake_door *d, struct handshake_guest *guest) {
    struct handshake_reply *const reply = &guest->talk.reply;
    ssize_t received;
    do
        received = recv(guest->socket, (char *)reply + guest->bytes, sizeof *reply - guest->bytes, 0);
    while (received < 0 && errno == EINTR);
    if (received < 0 && errno == EAGAIN)
        return false;
    guest->bytes += received > 0 ? (size_t)received : 0;
    const size_t magic = guest->bytes < sizeof reply->magic ? guest->bytes : sizeof reply->magic;
    if (memcmp(reply->magic, HANDSHAKE_MAGIC, magic) != 0)
        handshake_turn_away(d, guest, "what it sends is not of this program");
    else if (guest->bytes >= offsetof(struct handshake_reply, random) && reply->version != HANDSHAKE_VERSION)
        handshake_turn_away(d, guest, "it is of another version of this program; start all ranks from the same build");
    else if (received <= 0)
        handshake_turn_away(d, guest, "it has ended without the reply of a rank");
    else
        return guest->bytes == sizeof *reply && handshake_judge(d, guest);
    return false;
}

// Turns away the guest that has waited longest, to make room. Returns its place; NULL: there is no guest.
static struct handshake_guest *handshake_drop_oldest(struct handshake_door *d) {
    struct handshake_guest *oldest = NULL;
    for (int i = 0; i < d->places; i++)
        if (d->guests[i].socket >= 0 && (!oldest || d->guests[i].since_s < oldest->since_s))
            oldest = &d->guests[i];
    if (oldest)
        handshake_turn_away(d, oldest, "it has not replied, and others wait");
    return oldest;
}

// Returns a place for one more guest: a free one, else the place of the oldest guest, who is turned away.
static struct handshake_guest *handshake_place(struct handshake_door *d) {
    for (int i = 0; i < d->places; i++)
        if (d->guests[i].socket < 0)
            return &d->guests[i];
    return handshake_drop_oldest(d);
}

// Takes some of the connections that have arrived, and sends each a challenge.
static void handshake_accept(struct handshake_door *d) {
    for (int n = 0; n < BATCH; n++) {
        struct sockaddr_storage from;
        memset(&from, 0, sizeof from);
        int accepted = socket_accept(d->listener, &from);
        if (accepted < 0 && (errno == EMFILE || errno == ENFILE) && handshake_drop_oldest(d))
            accepted = socket_accept(d->listener, &from);
        if (accepted < 0)
            return;
        struct handshake_guest *const guest = handshake_place(d);
        struct handshake_challenge *const challenge = &guest->talk.challenge;
        guest->socket = accepted;
        guest->from = from;
        guest->since_s = deadline_clock_s();
        guest->bytes = 0;
        memcpy(challenge->magic, HANDSHAKE_MAGIC, sizeof challenge->magic);
        challenge->version = HANDSHAKE_VERSION;
        if (!random_bytes_of_system(challenge->random, sizeof challenge->random))
            handshake_turn_away(d, guest, "there are no random numbers for a challenge");
        else if (!socket_send_all(accepted, challenge, sizeof *challenge, 0))
            handshake_turn_away(d, guest, "it has ended without the reply of a rank");
    }
}

// Waits until something arrives, or a guest's or the caller's time is up. Sets each guest's `arrived`, and returns
// whether new connections came. Leaves free places out: poll() takes no more than the process may have descriptors.
static bool handshake_wait(struct handshake_door *d, double until_s) {
    nfds_t n = 0;
    d->polls[n].fd = d->listener;
    d->polls[n++].events = POLLIN;
    for (int i = 0; i < d->places; i++) {
        const struct handshake_guest *const guest = &d->guests[i];
        if (guest->socket < 0)
            continue;
        d->polls[n].fd = guest->socket;
        d->polls[n++].events = POLLIN;
        if (guest->since_s + REPLY_S < until_s)
            until_s = guest->since_s + REPLY_S;
    }
    const bool any = poll(d->polls, n, socket_poll_ms(until_s)) > 0;
    n = 1;
    for (int i = 0; i < d->places; i++)
        d->guests[i].arrived = d->guests[i].socket >= 0 && d->polls[n++].revents && any;
    return any && d->polls[0].revents;
}

bool handshake_next(struct handshake_door *d, void *hello, size_t bytes, double until_s) {
    while (deadline_clock_s() < until_s) {
        const bool more = handshake_wait(d, until_s);
        const double now_s = deadline_clock_s();
        for (int i = 0; i < d->places; i++) {
            struct handshake_guest *const guest = &d->guests[i];
            if (guest->socket >= 0 && guest->arrived && handshake_receive(d, guest)) {
                d->proven = guest;
                memcpy(hello, guest->talk.reply.hello, bytes);
                return true;
            }
            if (guest->socket >= 0 && now_s >= guest->since_s + REPLY_S)
                handshake_turn_away(d, guest, "it has not replied within 5 s");
        }
        if (more)
            handshake_accept(d);
    }
    return false;
}

int handshake_welcome(struct handshake_door *d, const void *own_hello, size_t bytes) {
    struct handshake_guest *const guest = d->proven;
    const bool sent = handshake_send_answer(d, guest, VERDICT_WELCOME, own_hello, bytes);
    const int socket = guest->socket;
    guest->socket = -1;
    if (!sent)
        close(socket);
    return sent ? socket : -1;
}

void handshake_refuse(struct handshake_door *d) {
    handshake_send_answer(d, d->proven, VERDICT_REFUSED, NULL, 0);
    close(d->proven->socket);
    d->proven->socket = -1;
}

void handshake_close(struct handshake_door *d) {
    for (int i = 0; i < d->places && d->guests; i++)
        if (d->guests[i].socket >= 0)
            close(d->guests[i].socket);
    if (d->turned_away > MAX_LINES)
        fprintf(stderr, "train_gpt: rank %d turned away %d more connections\n", d->rank, d->turned_away - MAX_LINES);
    free(d->guests);
    free(d->polls);
    free(d);
}
