#define _GNU_SOURCE
#include "auth.h"

#include <crypt.h>
#include <errno.h>
#include <gnutls/crypto.h>
#include <gnutls/gnutls.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SECOND_NS UINT64_C(1000000000)

static bool hash_password(const char *password, const char *hash, struct crypt_data *scratch, char *out, size_t size)
{
    const char *made = crypt_r(password, hash, scratch);
    bool good = made && made[0] != '*' && strlen(made) < size;
    if (good)
        memcpy(out, made, strlen(made) + 1);
    explicit_bzero(scratch, sizeof *scratch);
    return good;
}

vpmm_status auth_check_hash(const char *hash)
{
    static const char *const methods[] = {"$y$", "$7$", "$2b$", "$2y$", "$6$", "$5$"};
    char made[sizeof((struct auth *)NULL)->hash];
    bool known = false;
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        known |= !strncmp(hash, methods[i], strlen(methods[i]));
    if (!known || strlen(hash) >= sizeof made)
        return VPMM_ERROR_INVALID_VALUE;
    struct crypt_data *scratch = calloc(1, sizeof *scratch);
    errno = 0;
    /* A hash is as long as any other of its setting, and begins with that. */
    bool made_one = scratch && hash_password("", hash, scratch, made, sizeof made);
    bool good = made_one && strlen(made) == strlen(hash) && strrchr(made, '$') - made == strrchr(hash, '$') - hash;
    bool had_memory = scratch && (made_one || errno != ENOMEM);
    free(scratch);
    return good ? VPMM_SUCCESS : had_memory ? VPMM_ERROR_INVALID_VALUE : VPMM_ERROR_HOST_MEMORY;
}

bool auth_init(struct auth *auth, const char *user, const char *hash, unsigned each_second)
{
    *auth = (struct auth){.each_second = each_second};
    if (!user)
        return true;
    snprintf(auth->user, sizeof auth->user, "%s", user);
    snprintf(auth->hash, sizeof auth->hash, "%s", hash);
    auth->scratch = calloc(1, sizeof *auth->scratch);
    return auth->scratch && gnutls_rnd(GNUTLS_RND_KEY, auth->key, sizeof auth->key) == 0;
}

void auth_free(struct auth *auth)
{
    free(auth->scratch);
    explicit_bzero(auth, sizeof *auth);
}

static bool same(const void *one, const void *other, size_t bytes)
{
    return gnutls_memcmp(one, other, bytes) == 0; /* in constant time */
}

/* The lengths stand before the texts, so that no two pairs are written alike. */
static bool digest(const struct auth *auth, const char *user, const char *password, unsigned char *out)
{
    char text[AUTH_TEXT_BYTES];
    int count = snprintf(text, sizeof text, "%zu:%s:%s", strlen(user), user, password);
    bool good = count > 0 && (size_t)count < sizeof text &&
                gnutls_hmac_fast(GNUTLS_MAC_SHA256, auth->key, sizeof auth->key, text, (size_t)count, out) == 0;
    explicit_bzero(text, sizeof text);
    return good;
}

static bool may_hash(struct auth *auth, bool has_failed, uint64_t now_ns)
{
    unsigned kept = has_failed && auth->each_second > 1;
    if (now_ns / SECOND_NS != auth->second) {
        auth->second = now_ns / SECOND_NS;
        auth->left = auth->each_second;
    }
    bool rests = auth->slow_ns && now_ns < auth->hashed_ns + auth->slow_ns * (has_failed ? 3 : 1);
    if (rests || auth->left <= kept)
        return false;
    auth->left--;
    return true;
}

static uint64_t thread_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * SECOND_NS + (uint64_t)now.tv_nsec;
}

/*
 * That the setting can be hashed is known since the start, and so is that the password is short enough: what fails here
 * is libcrypt's memory, megabytes for yescrypt and scrypt. Its errno does not say so (of these two it is EINVAL).
 */
static enum auth_answer compare(struct auth *auth, const char *user, const char *password, uint64_t now_ns)
{
    char made[sizeof auth->hash] = "";
    uint64_t begun = thread_ns();
    bool hashed = hash_password(password, auth->hash, auth->scratch, made, sizeof made);
    uint64_t took = thread_ns() - begun;
    auth->hashed_ns = now_ns + took;
    /* Whether a second's hashes would take more than half of it. */
    auth->slow_ns = took > SECOND_NS / 2 / auth->each_second ? took : 0;
    if (!hashed)
        return AUTH_TOO_OFTEN;
    bool password_good = same(made, auth->hash, sizeof made);
    bool user_good = strlen(user) == strlen(auth->user) && same(user, auth->user, strlen(user));
    return (password_good & user_good) ? AUTH_PASSED : AUTH_REFUSED;
}

enum auth_answer auth_check(struct auth *auth, const char *user, const char *password, bool has_failed, uint64_t now_ns)
{
    unsigned char given[AUTH_DIGEST_BYTES];
    if (!auth->user[0])
        return AUTH_PASSED;
    if (!user || !password || !digest(auth, user, password, given))
        return AUTH_REFUSED;
    if (auth->knows && same(given, auth->known, sizeof given))
        return AUTH_PASSED;
    if (!may_hash(auth, has_failed, now_ns))
        return AUTH_TOO_OFTEN;
    enum auth_answer found = compare(auth, user, password, now_ns);
    if (found == AUTH_PASSED) {
        memcpy(auth->known, given, sizeof given);
        auth->knows = true;
    }
    return found;
}
