/*
 * auth.h - basic authentication against a hash of crypt(5).
 *
 * Such hashes are slow by design, so the credentials that passed last are known again by a keyed digest of them: each
 * scrape costs microseconds, and no password is kept. Others are hashed, at most so many in each second of the clock
 * that guessing keeps the exporter's one thread from nobody; a wrong user costs the same time as a wrong password.
 * Where hashes are so slow that these would take more than half of the time, it rests after each as long again. Where
 * one second ends and the next begins twice as many hashes may follow each other.
 *
 * Whose password has passed needs no hash, so that these limits never keep it out. All others share the hashes with who
 * guesses: the last of a second's, and the first after a rest, are for addresses whose latest password was not wrong.
 * That holds against who guesses from one address. Who has many (a local user has all of 127.0.0.0/8) can take every
 * hash, and keep out who comes with a password that has not passed yet: a new one, or any as the exporter has started.
 *
 * Threads: auth_check_hash any; the rest the exporter's thread alone.
 */
#ifndef VPMM_EXPORTER_AUTH_H
#define VPMM_EXPORTER_AUTH_H

#include <stdbool.h>
#include <stdint.h>

#include <vpmm/vpmm.h>

#define AUTH_METHODS "yescrypt ($y$), scrypt ($7$), bcrypt ($2b$), SHA-512 ($6$) and SHA-256 ($5$)"

/* AUTH_TOO_OFTEN: nothing is known of the password, for there are too many, or there is no host memory to hash it. */
enum auth_answer { AUTH_PASSED, AUTH_REFUSED, AUTH_TOO_OFTEN };

enum { AUTH_DIGEST_BYTES = 32, AUTH_TEXT_BYTES = 512 };

struct crypt_data;

struct auth {
    char user[128], hash[256];  /* constant; user "": everyone passes */
    struct crypt_data *scratch; /* crypt_r's */
    unsigned char key[AUTH_DIGEST_BYTES], known[AUTH_DIGEST_BYTES];
    bool knows;                 /* known is the digest of credentials that passed */
    unsigned each_second, left; /* hashes that may be made, and still may in this second */
    uint64_t second;
    uint64_t hashed_ns, slow_ns; /* when the latest hash was made, and how long it took if that was too long */
};

/*
 * Whether the text is a whole hash, of a method that AUTH_METHODS names. INVALID_VALUE, HOST_MEMORY: without a message.
 */
vpmm_status auth_check_hash(const char *hash);

/* user NULL: none is asked for. false: no host memory, or no random numbers. */
bool auth_init(struct auth *, const char *user, const char *hash, unsigned each_second);
void auth_free(struct auth *);

/* user or password NULL: the request had none. has_failed: the latest password from its address was wrong. */
enum auth_answer auth_check(struct auth *, const char *user, const char *password, bool has_failed, uint64_t now_ns);

#endif
